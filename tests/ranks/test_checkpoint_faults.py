"""Whatever is killed, full, missing, damaged or in the way: a clear error on all ranks, nothing is lost."""

import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import agree, background, load, save
from shardwright.checkpoint.folder import find, read_manifest
from shardwright.checkpoint.shardfile import Item
from shardwright.checkpoint.writer import Writer
from shardwright.errors import CheckpointError
from tests.ranks.models import filled, warned
from tests.ranks.pool import run_ranks

# The package has functions of these names.
save_module, load_module = (sys.modules[f"shardwright.checkpoint.{name}"] for name in ("save", "load"))


def values(model: nn.Module) -> set[float]:
    return {v for p in model.parameters() for v in p.detach().to_local().flatten().tolist()}


def save_steps(rank: int, world: int, path: str, steps: tuple[int, ...]) -> None:
    for step in steps:
        save(path, model=fully_shard(filled(step)), step=step)


def told(call: Callable[[], Any]) -> tuple[str, float]:
    """The error of a call, and its seconds."""
    begin, said = time.monotonic(), "no error"
    try:
        call()
    except CheckpointError as error:
        said = str(error)
    return said, time.monotonic() - begin


def save_failing(rank: int, world: int, path: str, limit_rank: int) -> tuple[str, float]:
    """The error of a save of 2.5 MB, during which the files of one rank can't grow beyond 1 MB."""
    model = fully_shard(filled(2.0, width=50_000))
    if rank == limit_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    return told(lambda: save(path, model=model, step=2))


def test_a_file_that_cannot_grow_on_one_rank_fails_on_all_and_keeps_the_previous(tmp_path):
    run_ranks(2, save_steps, str(tmp_path), (1,))
    for message, seconds in run_ranks(2, save_failing, str(tmp_path), 1):
        assert "rank 1" in message
        assert "shard-00001.safetensors: can't write model/" in message
        assert seconds < 5
    assert find(tmp_path) == (tmp_path / "step-000001", ())
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "step-000001"]


def test_a_path_that_is_not_writable_fails_on_all(tmp_path):
    (tmp_path / "file").write_text("")
    for message, seconds in run_ranks(2, save_failing, str(tmp_path / "file" / "runs"), -1):
        assert "can't write to" in message
        assert "file/runs" in message
        assert seconds < 5


def test_a_second_writer_is_told_who_writes_and_harms_nothing(tmp_path):
    writer = Writer(tmp_path, 1)
    for message, _ in run_ranks(2, save_failing, str(tmp_path), -1):
        assert f"another process is saving here (pid {os.getpid()} " in message
    assert writer.attempt.at.is_dir()
    writer.close()
    assert run_ranks(2, save_failing, str(tmp_path), -1)[0][0] == "no error"


def save_on_rank_0_only(rank: int, world: int, path: str) -> str:
    agree.ARRIVAL_TIMEOUT_S = 1.0
    model = fully_shard(filled(1.0))
    message = told(lambda: save(path, model=model, step=1))[0] if rank == 0 else ""
    torch.distributed.barrier()
    agree.ARRIVAL_TIMEOUT_S = 20.0
    time.sleep(3.0 * (rank == 1))  # so long that the watch looks into it
    save(path, model=model, step=2)  # the next call that all make works
    return message


def test_a_save_that_not_all_ranks_enter_names_who_is_missing(tmp_path):
    message = run_ranks(3, save_on_rank_0_only, str(tmp_path))[0]
    assert "save(step=1) was entered by ranks [0], not by ranks [1, 2] within 1 s" in message
    assert find(tmp_path)[0].name == "step-000002"


def die_before_the_save(rank: int, world: int, path: str) -> None:
    model = fully_shard(filled(1.0))
    save(path, model=model, step=0)  # so that each rank has told the first one which process it is
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    leave(rank, path, told(lambda: save(path, model=model, step=1)))


def leave(rank: int, path: str, outcome: tuple[str, float]) -> None:
    """What a rank was told, for others to read where not all live to return it."""
    Path(path, f"outcome-{rank}.json").write_text(json.dumps(outcome))


def test_a_rank_that_ended_before_the_save_is_named_within_seconds(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 of 3 failed first: died without a report"):
        run_ranks(3, die_before_the_save, str(tmp_path))
    for rank in (0, 2):
        outcome, seconds = json.loads((tmp_path / f"outcome-{rank}.json").read_text())
        assert "the processes of ranks [1] have ended" in outcome
        assert seconds < 4


def different(rank: int, world: int, path: str, where: str) -> str:
    model = fully_shard(filled(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.1 * (where == "groups" and rank))
    own = "y" * 200 + f"ends with {rank}" + "y" * 200
    extras = {
        "values": {"best": {"loss": 1.5 + rank}, "note": own, "sizes": [1] * (1 + rank), "same": 1, 3: rank},
        "kinds": {"seen": torch.ones(2) if rank else None, "empty": [{}, [], ()][rank % 3]},
    }
    folder = Path(path, f"of-{rank}" if where == "paths" else "of-all")
    state = {"model": model, "optimizer": optimizer, "extra": extras.get(where)}
    return told(lambda: save(folder, **state, step=1 + (where == "steps" and rank > 0)))[0]


DIFFERENT = {
    "values": (
        "extra/best/loss: 1.5 on rank 0, 2.5 on rank 1 (and others)",
        "…" + "y" * 20 + "ends with 0" + "y" * 49 + "… on rank 0, …",
        "extra/sizes: a list of 1 on rank 0, a list of 2 on rank 1 (and others)",
        "extra/sizes/1: absent on rank 0, 1 on rank 1 (and others)",
        "extra/3: 0 on rank 0, 1 on rank 1 (and others)",
        "torch.distributed.broadcast_object_list",
    ),
    "kinds": (
        "extra/seen: None on rank 0, torch.float32 [2] on rank 1 (and others)",
        "extra/empty: {} on rank 0, a list of 0 on rank 1 (and others)",
    ),
    "groups": (
        "optimizer/<group 0>/lr: 0.1 on rank 0, 0.2 on rank 1",
        "Give all ranks the same path, model, optimizer",
    ),
    "steps": ("save(step=1) by ranks [0], save(step=2) by ranks [1, 2]", "expected one call of all ranks"),
    "paths": ("of-0 on rank 0, ", "of-1 on rank 1 (and others)", "the same path, "),
}
"""Where ranks differ, and what the message of each rank says."""


@pytest.mark.parametrize("where", DIFFERENT)
def test_state_that_differs_between_ranks_is_named_with_the_values_of_both(tmp_path, where):
    for message in run_ranks(3, different, str(tmp_path), where):
        for text in DIFFERENT[where]:
            assert text in message, message
        assert "same:" not in message
    assert not [*tmp_path.rglob("step-*"), *tmp_path.rglob(".torn*")]


def diverged(rank: int, world: int, path: str) -> list[str]:
    model = fully_shard(filled(1.0))
    return warned(lambda: save(path, model=model, extra={"seen": torch.tensor(rank)}, step=1))


def test_a_tensor_that_differs_between_ranks_is_named_with_both_ranks(tmp_path):
    (message,), *others = run_ranks(2, diverged, str(tmp_path))
    assert "extra/seen (ranks 0 and 1)" in message
    assert others == [[]]


def misfit(rank: int, world: int, path: str) -> tuple[str, bool]:
    model = nn.Module()
    model.forward = lambda x: x  # type: ignore[method-assign]
    model.add_module("0", nn.Linear(8, 9, bias=False))
    model.add_module("new", nn.Linear(2, 2))
    for p in model.parameters():
        nn.init.constant_(p, -1.0)
    for child in model.children():
        fully_shard(child)
    return told(lambda: load(path, model=model))[0], values(model) <= {-1.0}


def test_all_that_does_not_fit_is_listed_at_once_and_nothing_is_loaded(tmp_path):
    run_ranks(2, save_steps, str(tmp_path), (1,))
    for message, untouched in run_ranks(2, misfit, str(tmp_path)):
        assert "misshapen model/0.weight: [8, 8] in the checkpoint, [9, 8] expected" in message
        assert "missing model/new.weight: [2, 2]" in message
        assert "missing model/new.bias: [2]" in message
        assert "unexpected model/0.bias: [8]" in message
        assert "unexpected model/1.weight: [5, 8]" in message
        assert untouched


def save_without(rank: int, world: int, path: str, lost: str) -> str:
    """The error of a save in which something of rank 1 gets lost on the way to the disk, unnoticed there."""
    write = save_module.write_shard

    def losing(file: Path, items: Sequence[Item], pace: background.Pace | None):
        kept = items if lost == "file" else [item for item in items if item.key != lost]
        written = write(file, kept, pace)
        if lost == "file":
            file.unlink()
        return written

    if rank == 1:
        save_module.write_shard = losing
    return told(lambda: save(path, model=fully_shard(filled(2.0)), step=2))[0]


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("model/0.weight", "model/0.weight: 32 of 64 elements are stored"),
        ("file", "shard-00001.safetensors is missing (it holds model/0.bias, model/0.weight, "),
    ],
)
def test_what_gets_lost_while_writing_is_never_published(tmp_path, lost, said):
    run_ranks(2, save_steps, str(tmp_path), (1,))
    for message in run_ranks(2, save_without, str(tmp_path), lost):
        assert said in message
    assert find(tmp_path) == (tmp_path / "step-000001", ())
    assert (tmp_path / "latest").read_text() == "step-000001\n"
    assert not list(tmp_path.glob(".torn-*"))


def save_to_a_slow_disk(rank: int, world: int, path: str) -> None:
    agree._GROUP_TIMEOUT = timedelta(seconds=4)
    write = save_module.write_shard

    def slow(file: Path, items: Sequence[Item], pace: background.Pace | None):
        time.sleep(5.0 if rank == 1 else 0.0)
        return write(file, items, pace)

    save_module.write_shard = slow
    save(path, model=fully_shard(filled(2.0)), step=2)


@pytest.mark.slow
def test_a_disk_slower_than_the_time_limit_of_every_group_is_waited_for(tmp_path):
    run_ranks(2, save_to_a_slow_disk, str(tmp_path), timeout_s=4.0)
    assert find(tmp_path) == (tmp_path / "step-000002", ())


def load_of_a_file_that_changes(rank: int, world: int, path: str) -> str:
    """The error of a load before whose copy one element of rank 1 changes in the file that was verified."""
    model, allocated = fully_shard(filled(-1.0)), load_module.allocated

    def changing(targets):
        if rank == 1:
            pieces = read_manifest(Path(path, "step-000001")).tensors["model/0.weight"].pieces
            [piece] = [piece for piece in pieces if piece.file == "shard-00001.safetensors"]
            with open(Path(path, "step-000001", piece.file), "r+b") as file:
                file.seek(piece.start + 8)
                file.write(b"\x55")
        dist.barrier()
        return allocated(targets)

    load_module.allocated = changing
    return told(lambda: load(path, model=model))[0]


def test_live_state_that_is_not_what_was_verified_is_an_error_on_all_ranks(tmp_path):
    run_ranks(2, save_steps, str(tmp_path), (1,))
    for message in run_ranks(2, load_of_a_file_that_changes, str(tmp_path)):
        assert "the live state differs from what was read" in message
        assert "model/0.weight is damaged" in message


class Windows(nn.Module):
    """Two buffers: of memory of their own, or one over the other's middle."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        whole = torch.arange(300_000.0)
        self.register_buffer("whole", whole)
        self.register_buffer("middle", whole[1000:200_000] if shared else torch.full((199_000,), 7.0))


def test_live_tensors_of_which_one_was_written_over_by_another_are_an_error(tmp_path):
    save(tmp_path, model=Windows(shared=False), step=1)
    with pytest.raises(CheckpointError, match="half loaded and must not be used") as caught:
        load(tmp_path, model=Windows(shared=True))
    assert "model/whole is damaged" in str(caught.value) or "model/middle is damaged" in str(caught.value)
    save(tmp_path, model=Windows(shared=True), step=2)
    load(tmp_path, model=Windows(shared=True))


# ---- kills


def kill_at(call_number: int) -> None:
    """From now on, this process's ``call_number``-th change to the file system is a SIGKILL instead."""
    left = [call_number]

    def dying(name: str):
        original = getattr(os, name)

        def call(*args, **kwargs):
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return original(*args, **kwargs)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return original(*args, **kwargs)

        return call

    of_files = ["open", "write", "pwrite", "ftruncate", "fsync"]
    for name in [*of_files, "mkdir", "rename", "replace", "rmdir", "unlink"]:
        setattr(os, name, dying(name))


def one_dies(rank: int, world: int, path: str, call_number: int) -> None:
    model = fully_shard(filled(2.0))
    if rank == 1:
        kill_at(call_number)
    leave(rank, path, told(lambda: save(path, model=model, step=2)))


@pytest.mark.parametrize("call_number", [0, 2, 4])
def test_a_rank_killed_while_it_writes_is_noticed_by_the_others(tmp_path, call_number):
    run_ranks(2, save_steps, str(tmp_path), (1,))
    with pytest.raises(AssertionError, match="rank 1 of 2 failed first: died without a report"):
        run_ranks(2, one_dies, str(tmp_path), call_number)
    outcome, seconds = json.loads((tmp_path / "outcome-0.json").read_text())
    assert "lost contact with another rank" in outcome
    assert seconds < 5
    assert find(tmp_path) == (tmp_path / "step-000001", ())


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)

    def encode(self):
        return pickle.dumps(self)


def one_speaks_falsely(rank: int, world: int, path: str) -> str:
    """Rank 1 sends a pickle that runs code, where ranks tell each other how a save begins."""
    model = fully_shard(filled(2.0))
    if rank == 1:
        agree.json = SimpleNamespace(dumps=lambda value: Runs(f"{path}/ran"), loads=json.loads)
    return told(lambda: save(path, model=model, step=2))[0]


def test_what_another_rank_sends_is_never_run(tmp_path):
    for said in run_ranks(2, one_speaks_falsely, str(tmp_path)):
        assert "lost contact with another rank" in said
    assert not (tmp_path / "ran").exists()
