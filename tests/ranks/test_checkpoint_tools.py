"""The tools see what is there, find what is damaged, and export what plain PyTorch computes the same with."""

import re
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import load, save
from shardwright.checkpoint.folder import read_manifest
from shardwright.checkpoint.tools import PER_RANK, Format, consolidate, convert, diff, inspect, verify
from shardwright.errors import CheckpointError, InputError
from tests.ranks.pool import run_ranks

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint.md"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6).double()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(x)).double()).float())


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def write(rank: int, world: int, path: str, seeds: tuple[int, ...]) -> None:
    for step, seed in enumerate(seeds, 1):
        model = fully_shard(net(seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        model(torch.arange(11)).sum().backward()
        optimizer.step()
        save(path, model=model, optimizer=optimizer, extra={"tokens": step}, step=step)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_ranks(2, write, str(tmp_path), (1, 2))
    return tmp_path


def flip(folder: Path, key: str) -> str:
    piece = read_manifest(folder).tensors[key].pieces[-1]
    data = bytearray((folder / piece.file).read_bytes())
    data[piece.start] ^= 1
    (folder / piece.file).write_bytes(data)
    return piece.file


def test_inspect_lists_tensors_and_finds_nan_and_constant_ones(folder):
    seen = inspect(folder)
    assert (seen.step, seen.exit_code, seen.suspicious) == (2, 0, ())
    by_key = {t.key: t for t in seen.tensors}
    embed = by_key["model/embed.weight"]
    assert (embed.shape, embed.num_pieces, embed.aliases) == ((11, 6), 2, ("model/head.weight",))
    assert by_key["optimizer/up.bias/step"].shape == ()
    bad = net(1)
    with torch.no_grad():
        bad.up.weight.zero_()
        bad.down.weight.fill_(3.0)
        bad.up.bias.fill_(3.0)  # vectors may be meant so: biases, scales of a norm
        bad.down.bias[2] = torch.nan
    save(folder / "bad", model=bad, step=1)
    seen = inspect(folder / "bad")
    alike = ("model/down.weight: all elements are 3.0", "model/up.weight: all elements are 0.0")
    assert seen.suspicious == ("model/down.bias: 1 NaN", *alike)
    assert seen.exit_code == 1


def test_verify_names_all_damage(folder):
    assert (verify(folder).exit_code, verify(folder).num_unchecked) == (0, 0)
    latest = folder / "step-000002"
    files = [flip(latest, key) for key in ("model/up.weight", "optimizer/down.bias/exp_avg")]
    found = verify(folder)
    assert found.exit_code == 1
    for fault, file, key in zip(found.faults, files, ("model/up.weight", "optimizer/down.bias"), strict=True):
        assert f"{file}: {key}" in fault


def test_diff_compares_bits_whatever_the_pieces(folder, tmp_path):
    assert diff(folder / "step-000001", folder / "step-000001").exit_code == 0
    other = diff(folder / "step-000001", folder / "step-000002")
    assert other.exit_code == 1
    assert "of 30 elements differ" in other.changed["model/up.weight"]
    assert other.state == ("step (1, 2)", "extra/tokens")
    # Four ranks: the mean of four equal gradients is exact, so the optimizer's state is equal too.
    run_ranks(4, write, str(tmp_path / "four"), (1,))
    assert diff(folder / "step-000001", tmp_path / "four").exit_code == 0


def test_a_consolidated_model_computes_the_same_in_plain_pytorch(folder):
    (file,) = consolidate(folder, folder / "out")
    assert file.name == "model.safetensors"
    plain = net(99)
    assert load_model(plain, file) == (set(), [])
    x = torch.arange(11)
    assert torch.equal(plain(x), net(2)(x))
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata()["head.weight"] == "embed.weight"
    with pytest.raises(CheckpointError, match="exists already"):
        consolidate(folder, folder / "out")


def test_consolidate_splits_converts_and_copies_tied_weights(folder):
    calls = []
    out = folder / "out"
    options = {"dtype": torch.bfloat16, "max_file_nbytes": 200, "tied_copies": True}
    files = consolidate(folder, out, **options, progress=lambda done, total: calls.append((done, total)))
    assert len(files) > 1
    assert (out / "model.safetensors.index.json").exists()
    state = {k: v for file in files for k, v in load_file(file).items()}
    expected = net(2).bfloat16().state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[k], expected[k]) for k in expected)
    assert calls[-1][0] == calls[-1][1] == sum(v.nbytes for v in expected.values())


def test_convert_goes_round_all_formats_and_back(folder, tmp_path):
    at = folder
    # safetensors last but one: it has no place for the second name of a tied weight.
    formats = (Format.TORCH, Format.FAIRSCALE, Format.DCP, Format.XLA, Format.SAFETENSORS, Format.SHARDWRIGHT)
    assert set(formats) == set(Format)
    for to in formats:
        at = convert(at, tmp_path / f"as-{to}", to, ranks=3 if to in PER_RANK else 1)
        model = net(99)
        load(at, model=model)
        assert all(torch.equal(v, net(2).state_dict()[k]) for k, v in model.state_dict().items()), to
    for to in PER_RANK:
        assert len(list((tmp_path / f"as-{to}").iterdir())) == 3
    with pytest.raises(InputError, match="ranks is 2, expected 1, or more with fairscale or xla"):
        convert(folder, tmp_path / "two", Format.DCP, ranks=2)
    assert net(99).load_state_dict(torch.load(tmp_path / "as-torch", weights_only=True)).missing_keys == []
    with pytest.raises(CheckpointError, match="exists already"):
        convert(folder, tmp_path / "as-torch", Format.TORCH)
    flip(folder / "step-000002", "model/up.weight")
    with pytest.raises(CheckpointError, match=r"model/up.weight is damaged"):
        convert(folder, tmp_path / "damaged", Format.DCP)
    assert not list(tmp_path.glob(".torn*")) and not (tmp_path / "damaged").exists()


def test_a_damaged_checkpoint_is_not_consolidated(folder):
    flip(folder / "step-000002", "model/up.weight")
    with pytest.raises(CheckpointError, match=r"model/up.weight is damaged"):
        consolidate(folder, folder / "out")
    assert not (folder / "out").exists()
    assert not list(folder.glob(".torn*"))


def test_the_ten_lines_of_numpy_in_the_docs_read_every_tensor(folder):
    block = re.search(r"ten lines of NumPy\n\n```python\n(.*?)```", DOCS.read_text(), re.S)
    assert block is not None
    names: dict = {}
    exec(block[1], names)
    for name, expected in net(2).state_dict().items():
        if name != "head.weight":
            got = names["read"](folder / "step-000002", f"model/{name}")
            assert np.array_equal(got, expected.numpy()), name
    assert len(block[1].partition("def")[2].strip().splitlines()) <= 10


def test_each_shard_file_opens_with_the_plain_library(folder):
    seen: dict[str, int] = {}
    for file in sorted((folder / "step-000002").glob("*.safetensors")):
        for key, value in load_file(file).items():
            seen[key] = seen.get(key, 0) + value.numel()
    manifest = read_manifest(folder / "step-000002")
    assert seen == {key: entry.numel for key, entry in manifest.tensors.items()}
