"""A load writes every element that it allocates, reads no byte that another rank owns, and needs no room.

What is streamed whole is so one tensor after another."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwright import fully_shard, stream_state_dict
from shardwright.checkpoint import load, save
from shardwright.checkpoint.tools import consolidate
from shardwright.errors import CheckpointError
from tests.ranks.models import sharded
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_checkpoint import assert_equal, everything


class Quantised(nn.Module):
    """Codes and scales whose shapes share no dim with each other, beside weights; small next to them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 509)
        self.register_buffer("codes", torch.arange(39, dtype=torch.uint8).reshape(13, 3))
        self.register_buffer("scales", torch.arange(1, 6).to(torch.bfloat16))
        self.register_buffer("signs", torch.tensor([-1, 1, -128], dtype=torch.int8))


def save_quantised(rank: int, world: int, path: str) -> dict:
    model = fully_shard(Quantised())
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    save(path, model=model, optimizer=optimizer, step=1)
    return everything(model, optimizer)


def load_poisoned(rank: int, world: int, path: str) -> tuple[dict, int]:
    # Every torch.empty is now NaN or the largest integer: an element that is not written is not equal.
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    with torch.device("meta"):
        model = Quantised()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    restored = load(path, model=model, optimizer=optimizer)
    return everything(model, optimizer), restored.read_nbytes


def test_each_element_of_a_meta_model_is_written_and_each_byte_read_once(tmp_path):
    before = run_ranks(2, save_quantised, str(tmp_path))[0]
    found = run_ranks(3, load_poisoned, str(tmp_path))
    for after, _ in found:
        assert_equal(before, after)
    nbytes = sum(file.stat().st_size for file in (tmp_path / "step-000001").iterdir())
    assert sum(read for _, read in found) <= 1.05 * nbytes


def test_integer_codes_and_their_scales_consolidate_as_they_are(tmp_path):
    before = run_ranks(2, save_quantised, str(tmp_path))[0]
    consolidate(tmp_path, tmp_path / "out", dtype=torch.float16)
    from_file = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("codes", "signs"):
        assert from_file[name].dtype == before[name].dtype
        assert torch.equal(from_file[name], before[name])
    assert torch.equal(from_file["scales"], before["scales"].half())


class Large(nn.Module):
    """Four tensors of 8 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(4))


MIB = 1 << 20


def grown(work: Callable[[], Any]) -> int:
    """By how many bytes this process was larger, at most, while it did ``work``."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def save_and_load_large(rank: int, world: int, path: str) -> tuple[int, int, int]:
    model = Large()
    for layer in model.layers:
        fully_shard(layer)
    save(f"{path}/first", model=model, step=0)  # imports, threads and groups are made once
    saving = grown(lambda: save(path, model=model, step=1))
    with torch.device("meta"):
        empty = Large()
    for layer in empty.layers:
        fully_shard(layer)
    loading = grown(lambda: load(path, model=empty))
    again = grown(lambda: load(path, model=model))
    return saving, loading, again


def test_saving_needs_no_memory_and_loading_a_shard_and_less_than_a_tensor(tmp_path):
    shard, tensor = 16 * MIB, 8 * MIB
    for saving, loading, again in run_ranks(2, save_and_load_large, str(tmp_path)):
        assert saving < tensor  # of chunks of 2 MiB; a model twice as large needs no more
        assert shard / 2 < loading < shard + tensor
        assert again < tensor


class Deep(nn.Module):
    """Twelve tensors of 16 MiB, and two names that are far apart for one of 32 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2048, 4096, bias=False)
        self.layers = nn.ModuleList(nn.Linear(1024, 4096, bias=False) for _ in range(12))
        self.last = nn.Linear(2048, 4096, bias=False)
        self.last.weight = self.first.weight


def stream_deep(rank: int, world: int) -> tuple[int, list[tuple[str, float]]]:
    with torch.device("meta"):
        model = Deep()
    sharded(model, model.layers).to_empty(device="cpu")
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(number + 1)
    seen = []

    def stream() -> None:
        for name, whole in stream_state_dict(model):
            time.sleep(0.02)  # as long as writing it to a file takes: the others are ready far sooner
            seen.append((name, whole[0, 0].item() + whole[-1, -1].item()))

    return grown(stream), seen


def test_no_rank_holds_more_than_a_part_of_a_model_that_is_streamed():
    found = run_ranks(3, stream_deep)
    layers = [(f"layers.{n}.weight", 2.0 * (n + 2)) for n in range(12)]
    assert found[0][1] == [("first.weight", 2.0), *layers, ("last.weight", 2.0)]
    # The caller's last tensor and the next one, and what is on its way: all in all 224 MiB.
    assert max(nbytes for nbytes, _ in found) < 96 * MIB


@on_ranks(2)
def test_a_tensor_that_is_cut_unlike_its_placement_says_is_not_saved(rank, world, tmp_path):
    path = str(tmp_path)
    mesh = init_device_mesh("cpu", (world,))
    rows = torch.ones(4 if rank else 2)  # of six, that three each would hold
    parts = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=(6,), stride=(1,))
    model = nn.Module()
    model.weight = nn.Parameter(parts)
    with pytest.raises(CheckpointError, match=r"weight: .*this rank holds \[[24]\], expected \[3\]"):
        save(path, model=model, step=1)
