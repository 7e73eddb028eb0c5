"""A resumed run is the run that was never interrupted, and a restored model is the restored one in use."""

import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from shardwright import fully_shard
from shardwright.checkpoint import Keep, async_save, background, latest, load, save
from shardwright.errors import CheckpointError
from tests.ranks.models import Run, sharded, train_by, warned
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_checkpoint import loss_of


class Net(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + self.drop(checkpoint(block, h, use_reentrant=False).tanh())
        self.seen += 1
        return self.head(h)


def train(model, optimizer, scheduler, steps: range) -> list[float]:
    def losses():
        for step in steps:
            yield loss_of(model, step, dist.get_rank())
            scheduler.step()

    return train_by(Run(model, optimizer), losses())


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state[p].items():
            state[f"{i}.{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}


def assert_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert is_equal(value, b[key]), key


def is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def start(optimizer_class=torch.optim.AdamW):
    model = sharded(Net())
    optimizer = optimizer_class(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def two_and_two(rank: int, world: int, path: str, part: str) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(1 if part != "second" else 77)
    model, optimizer, scheduler = start()
    if part == "second":
        restored = load(path, model=model, optimizer=optimizer, extra={"scheduler": scheduler})
        assert restored.restore_rng()
        assert (restored.step, restored.extra["tokens"]) == (2, 24)
        return train(model, optimizer, scheduler, range(2, 4)), everything(model, optimizer)
    if part == "whole":
        return train(model, optimizer, scheduler, range(4)), everything(model, optimizer)
    losses = train(model, optimizer, scheduler, range(2))
    extra = {"scheduler": scheduler, "tokens": 24}
    save(path, model=model, optimizer=optimizer, extra=extra, step=2)
    return losses, {}


def test_two_steps_and_a_resume_for_two_equal_four_bit_by_bit(tmp_path):
    whole = run_ranks(2, two_and_two, str(tmp_path), "whole")
    first = run_ranks(2, two_and_two, str(tmp_path), "first")
    second = run_ranks(2, two_and_two, str(tmp_path), "second")
    for rank in range(2):
        assert whole[rank][0] == first[rank][0] + second[rank][0]
        assert_equal(whole[rank][1], second[rank][1])


CLASSES = [value for value in vars(torch.optim).values() if isinstance(value, type)]
OPTIMIZERS = {each.__name__: each for each in CLASSES if issubclass(each, torch.optim.Optimizer)}
del OPTIMIZERS["Optimizer"]
# On DTensors torch fails: LBFGS flattens all parameters, Adafactor and Rprop write across placements.
PLAIN_ONLY = {"Adafactor", "LBFGS", "Rprop"}
SPARSE = {"SparseAdam"}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    def closure():
        optimizer.zero_grad()
        x = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(seed))
        loss = sum(nn.functional.cross_entropy(layer(x), x) for layer in model)
        loss.backward()
        return loss

    optimizer.step(closure)


def resumes_with(rank: int, world: int, path: str, names: list[str]) -> None:
    for name in names:
        sparse = name in SPARSE
        runs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = nn.ModuleList(nn.Embedding(11, 11, sparse=sparse) for _ in range(2))
            if name not in PLAIN_ONLY | SPARSE:
                for layer in model:
                    fully_shard(layer)
            optimizer = OPTIMIZERS[name](model.parameters(), lr=0.01)
            runs.append((model, optimizer))
        (model, optimizer), (fresh, resumed) = runs
        for seed in range(2):
            one_step(model, optimizer, seed)
        save(f"{path}/{name}", model=model, optimizer=optimizer, step=2)
        load(f"{path}/{name}", model=fresh, optimizer=resumed)
        assert_equal(everything(model, optimizer), everything(fresh, resumed))
        one_step(model, optimizer, 3)
        one_step(fresh, resumed, 3)
        assert_equal(everything(model, optimizer), everything(fresh, resumed))


def test_every_optimizer_of_torch_resumes_bit_equal(tmp_path):
    assert len(OPTIMIZERS) >= 15
    run_ranks(2, resumes_with, str(tmp_path), sorted(OPTIMIZERS.keys() - PLAIN_ONLY - SPARSE))


def test_optimizers_that_need_plain_parameters_resume_bit_equal(tmp_path):
    run_ranks(1, resumes_with, str(tmp_path), sorted(PLAIN_ONLY | SPARSE))


@on_ranks(2)
def test_a_model_on_the_meta_device_gets_its_shards_and_trains(tmp_path):
    path = str(tmp_path)
    torch.manual_seed(1)
    model, optimizer, scheduler = start()
    train(model, optimizer, scheduler, range(2))
    save(path, model=model, optimizer=optimizer, step=2)
    # Torch then fills new memory with NaN: what is not written shows.
    torch.use_deterministic_algorithms(True)
    with torch.device("meta"):
        empty = Net()
    empty = sharded(empty)
    resumed = torch.optim.AdamW(empty.parameters(), lr=0.1)
    load(path, model=empty, optimizer=resumed)
    assert empty.head.weight is empty.embed.weight
    assert not any(t.is_meta for t in empty.state_dict().values())
    assert {id(p) for p in resumed.param_groups[0]["params"]} == {id(p) for p in empty.parameters()}
    assert_equal(everything(model, optimizer), everything(empty, resumed))
    scheduler = torch.optim.lr_scheduler.StepLR(resumed, 1, 1.0)
    train(empty, resumed, scheduler, range(2, 3))


@on_ranks(2)
def test_the_weights_in_use_after_a_load_are_the_loaded_ones(tmp_path):
    path = str(tmp_path)
    torch.manual_seed(1)
    model, other = sharded(Net()).eval(), sharded(Net()).eval()
    save(path, model=model, step=0)
    x = torch.arange(11)
    assert not torch.equal(other(x), model(x))
    load(path, model=other)  # the root group of `other` was left unsharded by its forward
    assert torch.equal(other(x), model(x))


@on_ranks(2)
def test_another_precision_is_converted_and_said(tmp_path):
    path = str(tmp_path)
    model = sharded(Net())
    save(path, model=model, step=0)
    half = sharded(Net().bfloat16())
    restored = load(path, model=half)
    assert len(restored.cast) == 5
    for name, value in half.state_dict().items():
        expected = model.state_dict()[name]
        if isinstance(value, DTensor):
            assert torch.equal(value.to_local(), expected.to_local().to(value.dtype)), name


class Placed(nn.Module):
    """One parameter per placement: inner dims, replicas, two mesh dims."""

    def __init__(self, mesh: tuple[int, ...], placements: list[list[Any]], seed: int) -> None:
        super().__init__()
        mesh_ = init_device_mesh("cpu", mesh)
        torch.manual_seed(seed)
        for i, placement in enumerate(placements):
            tensor = distribute_tensor(torch.randn(5, 7, 3), mesh_, placement)
            self.register_parameter(f"p{i}", nn.Parameter(tensor))


R, S = Replicate(), Shard


def save_placed(rank: int, world: int, path: str) -> list[torch.Tensor]:
    model = Placed((2, 2), [[S(0), S(1)], [S(1), S(1)], [R, S(2)], [R, R], [S(2), R]], 1)
    save(path, model=model, step=0)
    return [p.full_tensor().detach() for p in model.parameters()]


def load_placed(rank: int, world: int, path: str) -> list[torch.Tensor]:
    model = Placed((3,), [[S(1)], [S(0)], [S(2)], [S(1)], [R]], 2)
    load(path, model=model)
    return [p.full_tensor().detach() for p in model.parameters()]


def test_any_placement_on_any_mesh_restores_bit_equal(tmp_path):
    saved = run_ranks(4, save_placed, str(tmp_path))[0]
    for loaded in run_ranks(3, load_placed, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))


def kept(rank: int, world: int, path: str) -> None:
    model = fully_shard(nn.Linear(4, 4))
    for step in range(1, 8):
        save(path, model=model, step=step, keep=Keep(last=2, every=3))
    for step in (1, 2):
        save(f"{path}/all", model=model, step=step)


def test_the_last_and_every_kth_checkpoint_are_kept(tmp_path):
    run_ranks(2, kept, str(tmp_path))
    names = sorted(p.name for p in tmp_path.glob("step-*"))
    assert names == ["step-000003", "step-000006", "step-000007"]
    assert (tmp_path / "latest").read_text() == "step-000007\n"
    assert len(list((tmp_path / "all").glob("step-*"))) == 2


def in_the_background(rank: int, world: int, path: str) -> None:
    torch.manual_seed(1)
    model, optimizer, scheduler = start()
    train(model, optimizer, scheduler, range(2))
    before = everything(model, optimizer)
    pending = async_save(path, model=model, optimizer=optimizer, step=2)
    train(model, optimizer, scheduler, range(2, 4))  # must not reach what is being saved
    assert pending.wait() == Path(path, "step-000002")
    load(path, model=model, optimizer=optimizer)
    assert_equal(before, everything(model, optimizer))
    first = async_save(path, model=model, step=3)
    async_save(path, model=model, step=4)  # waits for the first: never two at once
    assert first.done()
    with pytest.raises(CheckpointError, match="exists already"):
        async_save(path, model=model, step=4).wait()
    async_save(path, model=model, step=4)
    with pytest.raises(CheckpointError, match="exists already"):
        save(path, model=model, step=5)  # the error of the one before; this one was not started
    save(path, model=model, step=5)


def test_a_save_in_the_background_is_of_the_moment_it_was_called(tmp_path):
    run_ranks(2, in_the_background, str(tmp_path))
    assert {p.name for p in tmp_path.glob("step-*")} == {f"step-00000{i}" for i in (2, 3, 4, 5)}


def flipped_in_the_background(rank: int, world: int, path: str) -> None:
    torch.manual_seed(1)
    model, optimizer, scheduler = start()
    train(model, optimizer, scheduler, range(1))
    save(path, model=model, optimizer=optimizer, step=1)
    saving = sys.modules["shardwright.checkpoint.save"]
    chance, write = random.Random(rank), saving.write_shard

    def write_flipped(file, items, pace):  # as a memory that loses a bit while the save waits
        if rank == 1:
            staged = [item.tensor for item in items if item.tensor.dim() and "rng" not in item.key]
            bits = chance.choice([each for each in staged if each.numel() and each.is_contiguous()])
            bits = bits.view(torch.uint8).view(-1)
            bits[chance.randrange(bits.numel())] ^= 1 << chance.randrange(8)
        return write(file, items, pace)

    saving.write_shard = write_flipped
    for _ in range(20):
        with pytest.raises(
            CheckpointError, match=r"of rank 1 changed in the memory of .*async_save\(step=2\)"
        ):
            async_save(path, model=model, optimizer=optimizer, step=2).wait()
        assert latest(path) == Path(path, "step-000001")
    saving.write_shard = write
    async_save(path, model=model, optimizer=optimizer, step=2).wait()


def test_a_bit_that_flips_in_what_is_saved_in_the_background_is_named_and_nothing_published(tmp_path):
    run_ranks(2, flipped_in_the_background, str(tmp_path))


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_save_in_the_background_takes_what_training_leaves_of_the_processor(tmp_path):
    before, seen = priority(), list[int]()

    def work(pace: background.Pace) -> Path:
        seen.append(priority())
        inner = threading.Thread(target=lambda: seen.append(priority()))
        inner.start()
        inner.join()
        return tmp_path

    background.start(work).wait()
    assert seen == [max(before, background.NICE)] * 2
    assert priority() == before


def test_a_save_beside_training_rests_where_others_want_the_cores_until_somebody_waits(monkeypatch):
    twice = [(0.001, 0.0), (0.003, 0.002), (9.0, 9.0)]
    life = iter([(0.0, 0.0), *(each for each in twice for _ in range(2))])
    monkeypatch.setattr(background, "_spent", lambda: background._Spent(*next(life)))
    pace, took = background.Pace(), list[float]()
    pace.begin()
    for hurry in (False, False, True):
        if hurry:
            pace.hurry()
        start = time.monotonic()
        pace.rest()
        took.append(time.monotonic() - start)
    assert took[0] < 0.04 <= 0.08 <= took[1] < 5.0  # nobody wanted its core; somebody did: 40 times 2 ms
    assert took[2] < 5.0  # not 40 times 9 s


class Average:
    """An average of the weights, kept as shards."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.decay = 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(isinstance(value, DTensor) for value in state["shadow"].values())
        self.shadow, self.decay = state["shadow"], state["decay"]


@on_ranks(2)
def test_sharded_extra_state_comes_back_sharded(tmp_path):
    path = str(tmp_path)
    torch.manual_seed(1)
    model = sharded(Net())
    average = Average(model)
    save(path, model=model, extra={"ema": average}, step=0)
    other = Average(sharded(Net()))
    load(path, model=model, extra={"ema": other})
    for name, value in average.shadow.items():
        assert torch.equal(value.to_local(), other.shadow[name].to_local()), name


def diverged_buffer(rank: int, world: int, path: str) -> list[str]:
    model = sharded(Net())
    model.seen.fill_(rank)
    return warned(lambda: save(path, model=model, step=0))


def test_buffers_that_differ_between_ranks_are_named(tmp_path):
    first, second = run_ranks(2, diverged_buffer, str(tmp_path))
    assert "model/seen" in first[0]
    assert not second
