"""A folder that torch.distributed.checkpoint wrote is sealed, and then every byte that changes is named."""

import json
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from shardwright import fully_shard
from shardwright.checkpoint import load, save, seal
from shardwright.checkpoint.seal import SEAL, UNNAMED
from shardwright.checkpoint.tools import Format, convert, verify
from shardwright.checkpoint.tools import seal as seal_folder
from shardwright.cli import main
from shardwright.errors import CheckpointError, InputError
from tests.ranks.pool import run_ranks

PART_NBYTES = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(seal, "CHUNK_NBYTES", PART_NBYTES)


def net(fill: float = 1.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7))
    for p in model.parameters():
        nn.init.constant_(p, fill)
    return model


def write(rank: int, world: int, path: str) -> None:
    model = fully_shard(net())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    dcp.save({"model": model.state_dict(), "optimizer": state, "step": 3}, checkpoint_id=path)


def read(rank: int, world: int, path: str) -> bool:
    """Whether torch and we load the weights that were saved, from a sealed folder."""
    model = fully_shard(net(0.0))
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    loaded = {name: p.full_tensor() for name, p in model.named_parameters()}
    load(path, model=(again := net(0.0)))
    return all(torch.equal(loaded[name], p) and p.any() for name, p in again.named_parameters())


@pytest.fixture(params=[2])
def folder(tmp_path: Path, request) -> Path:
    run_ranks(request.param, write, str(tmp_path / "dcp"))
    return tmp_path / "dcp"


both = pytest.mark.parametrize("folder", [1, 2], indirect=True)


def names_by_torch(folder: Path) -> dict[str, list[tuple[int, int, str]]]:
    """What torch's own reader says of the bytes of each file."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        found.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length, index.fqn))
    return found


def flip(file: Path, at: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


@both
def test_each_flipped_bit_of_a_sealed_folder_is_named_by_file_tensor_and_bytes(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert (verify(folder).exit_code, verify(folder).num_unchecked > 0) == (0, True)
    assert (seal_folder(folder), seal_folder(folder), verify(folder).faults) == (True, False, ())
    assert verify(folder).nbytes == sum(map(len, before.values())) and not verify(folder).num_unchecked
    rng, names, seen = random.Random(0), names_by_torch(folder), set()
    for _ in range(300):
        file = rng.choice(sorted(before))
        at = rng.randrange(len(before[file]))
        flip(folder / file, at, rng.randrange(8))
        (fault,) = verify(folder).faults
        said = re.fullmatch(r"(.*): (.*) is damaged \(bytes (\d+) to (\d+)\)", fault)
        name = next((name for start, end, name in names.get(file, ()) if start <= at < end), UNNAMED)
        assert said is not None and said.groups()[:2] == (file, name)
        assert int(said[3]) <= at < int(said[4]) <= int(said[3]) + PART_NBYTES
        (folder / file).write_bytes(before[file])
        seen.add(name)
    assert {"model.0.weight", "optimizer.1.bias.exp_avg", "step", UNNAMED} <= seen
    assert verify(folder).faults == ()


def swap(folder: Path) -> None:
    (folder / ".metadata").rename(folder / "x")
    (folder / "__0_0.distcp").rename(folder / ".metadata")
    (folder / "x").rename(folder / "__0_0.distcp")


def other_metadata(folder: Path) -> None:
    state = {f"other {number}": torch.ones(2) for number in range(9)}
    dcp.save(state, checkpoint_id=folder.parent / "other", no_dist=True)
    shutil.copy(folder.parent / "other" / ".metadata", folder)


def fifo(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


def link_to_nothing(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").symlink_to("nothing")


ALL_OF_IT = "optimizer.0.weight.exp_avg"
CHANGES: dict[Callable[[Path], object], tuple[str, ...]] = {
    lambda folder: (folder / "__0_0.distcp").unlink(): (
        "__0_0.distcp is missing (it holds model.",
        ALL_OF_IT,
    ),
    lambda folder: (folder / "new").touch(): ("new was added after the folder was sealed",),
    lambda folder: (folder / "new").mkdir(): ("new was added after",),
    lambda folder: os.truncate(folder / "__0_0.distcp", 5000): (
        "has 5000 bytes, expected",
        "ends at byte 5000",
    ),
    lambda folder: os.truncate(folder / "__0_0.distcp", 99_999): ("has 99999 bytes, expected",),
    lambda folder: (folder / "__0_0.distcp").rename(folder / "x"): ("__0_0.distcp is missing", "x was added"),
    swap: (".metadata has", "__0_0.distcp has", "__0_0.distcp: model.0.weight is damaged (bytes "),
    other_metadata: (".metadata has", f".metadata: {UNNAMED} is damaged (bytes 0 to "),
    fifo: ("__0_0.distcp is missing", "it is a FIFO, expected a regular file", ALL_OF_IT),
    link_to_nothing: ("__0_0.distcp is missing", "No such file or directory", ALL_OF_IT),
}


def test_what_is_removed_added_cut_renamed_swapped_or_replaced_is_named(folder, tmp_path):
    seal_folder(folder)
    for number, (change, said) in enumerate(CHANGES.items()):
        copy = shutil.copytree(folder, tmp_path / str(number))
        change(copy)
        faults = "\n".join(verify(copy).faults)
        assert verify(copy).exit_code == 1 and all(text in faults for text in said), faults
        with pytest.raises(
            CheckpointError, match=rf"(?s)has changed since .* remove its {SEAL} .* seal it again"
        ):
            seal_folder(copy)


def test_a_damaged_seal_is_refused_wherever_it_is_damaged(folder):
    seal_folder(folder)
    whole, rng = (folder / SEAL).read_bytes(), random.Random(0)
    for _ in range(50):
        flip(folder / SEAL, rng.randrange(len(whole) - 1), rng.randrange(8))
        with pytest.raises(CheckpointError, match=SEAL):
            verify(folder)
        (folder / SEAL).write_bytes(whole)
    for text in (b"", whole[:-100], b"{}"):
        (folder / SEAL).write_bytes(text)
        with pytest.raises(CheckpointError, match=SEAL):
            verify(folder)
    (folder / SEAL).unlink()
    os.mkfifo(folder / SEAL)
    with pytest.raises(CheckpointError, match=f"{SEAL}: can't be read: it is a FIFO"):
        seal_folder(folder)


def test_what_a_seal_would_be_wrong_of_is_refused_and_nothing_is_left(folder):
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    refusals: dict[str, Callable[[], object]] = {
        "inner is no file": (folder / "inner").mkdir,
        "pipe is no file": lambda: os.mkfifo(folder / "pipe"),
        "link is no file": lambda: (folder / "link").symlink_to("nothing"),
        "its save didn't end": (folder / ".metadata").unlink,
        "ends at byte 5000, ": lambda: os.truncate(folder / "__0_0.distcp", 5000),
        "__0_0.distcp: can't be read: No such file": (folder / "__0_0.distcp").unlink,
    }
    for said, change in refusals.items():
        change()
        left = sorted(folder.iterdir())
        with pytest.raises(CheckpointError, match=said):
            seal_folder(folder)
        assert sorted(folder.iterdir()) == left
        shutil.rmtree(folder)
        folder.mkdir()
        for name, data in whole.items():
            (folder / name).write_bytes(data)
    save(folder.parent / "ours", model=net(), step=1)
    with pytest.raises(CheckpointError, match="has checksums of its own"):
        seal_folder(folder.parent / "ours" / "step-000001")
    for path in (folder / "nothing", folder / ".metadata"):
        with pytest.raises(CheckpointError, match=f"{path.name}: can't be read"):
            seal_folder(path)
    with pytest.raises(InputError, match="a seal is written into a local folder"):
        seal_folder("s3://bucket/folder")


def test_a_folder_that_changes_while_it_is_sealed_has_no_seal(folder):
    with pytest.raises(CheckpointError, match="has changed while it was sealed"):
        seal_folder(folder, progress=lambda *_: (folder / "new").touch())
    assert not (folder / SEAL).exists()


def test_metadata_that_names_what_is_unknown_gives_a_seal_of_bytes_with_a_warning(folder):
    (folder / ".metadata").write_bytes(b"not a pickle")
    with pytest.warns(UserWarning, match=r"\.metadata: not metadata of .* names no tensors"):
        seal_folder(folder)
    flip(folder / "__0_0.distcp", 1500, 0)
    assert verify(folder).faults == (f"__0_0.distcp: {UNNAMED} is damaged (bytes 1000 to 2000)",)


def killed_at_its_sync(rank: int, world: int, path: str) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    seal_folder(path)


def without_room(rank: int, world: int, path: str) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        seal_folder(path)
    return str(caught.value)


def test_a_kill_or_a_full_disk_leaves_no_seal_and_the_next_call_seals(folder):
    files = sorted(folder.iterdir())
    assert f"can't write {folder / SEAL}: File too large" in run_ranks(1, without_room, str(folder))[0]
    assert sorted(folder.iterdir()) == files
    with pytest.raises(AssertionError, match="died without a report"):
        run_ranks(1, killed_at_its_sync, str(folder))
    assert len(list(folder.iterdir())) == len(files) + 1 and not (folder / SEAL).exists()
    assert seal_folder(folder)
    assert sorted(folder.iterdir()) == sorted([*files, folder / SEAL]) and verify(folder).faults == ()


@both
def test_a_sealed_folder_is_loaded_and_converted_as_before(folder, tmp_path):
    before = {file: file.read_bytes() for file in folder.iterdir()}
    seal_folder(folder)
    assert all(file.read_bytes() == data for file, data in before.items())
    assert run_ranks(2, read, str(folder)) == [True, True]
    convert(folder, tmp_path / "plain", Format.SAFETENSORS)
    seal_folder(tmp_path / "plain")
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    state = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "plain")), no_dist=True)
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    save_file(weights, tmp_path / "plain" / "model.safetensors", {"x": "y"})
    assert verify(tmp_path / "plain").faults[0].startswith(f"{tmp_path}/plain/model.safetensors has ")


def test_the_command_seals_verifies_and_says_how_to_get_sums(folder, capsys):
    def said(*words: str, code: int) -> str:
        assert main(["checkpoint", *words, str(folder)]) == code
        return "".join(capsys.readouterr())

    assert "have no checksum (shardwright checkpoint seal writes them)" in said("verify", code=0)
    assert said("seal", code=0) == f"{folder}: sealed\n"
    assert said("seal", code=0) == f"{folder}: sealed before, nothing has changed\n"
    assert re.fullmatch(r".*/dcp: \d+ tensors, [\d,]+ bytes, 0 fault\(s\)\n", said("verify", code=0))
    flip(folder / "__0_0.distcp", 10, 0)
    assert "__0_0.distcp: " in said("verify", code=1) and "is damaged (bytes 0 to " in said("verify", code=1)
    assert len(json.loads(said("verify", "--json", code=1))["faults"]) == 1
    assert "has changed since it was sealed" in said("seal", code=1)
