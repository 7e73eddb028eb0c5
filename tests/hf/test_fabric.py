"""Lightning Fabric with strategy="shardwright": trains as one process does, clips, accumulates, resumes."""

import os
import sys
from importlib import import_module

import pytest

pytest.importorskip(
    "lightning_fabric", reason="needs the extra: pip install 'shardwright[fabric]' (make test-hf)"
)

import torch
from torch import nn

from shardwright import FSDPModule, Grouping
from shardwright.errors import CheckpointError, InputError
from shardwright.fabric import ShardwrightStrategy
from tests.ranks.models import full
from tests.ranks.pool import run_ranks


def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))


def launched(rank, world, strategy="shardwright", package="lightning_fabric"):
    fabric, plugins = import_module(package), import_module(f"{package}.plugins.environments")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    environment = plugins.LightningEnvironment()
    fabric = fabric.Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[environment])
    fabric.launch()
    return fabric


def steps(model, optimizer, fabric, first=0, last=4):
    """Two microbatches a step; ranks share the 12 rows. Returns norms before clipping."""
    norms, (rank, world) = [], (fabric.global_rank, fabric.world_size)
    for step in range(first, last):
        rows = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).chunk(2)
        for i, part in enumerate(rows):
            own = part.chunk(world)[rank]
            with fabric.no_backward_sync(model, enabled=i == 0):
                fabric.backward(model(own).square().mean() / 2)
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def trained(rank, world, package, folder=None, resume=False):
    strategy = "shardwright" if folder else ShardwrightStrategy(groups=Grouping(classes=(nn.Linear,)))
    fabric = launched(rank, world, strategy, package)
    model = make()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    assert isinstance(model.module, FSDPModule)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume:
        rest = fabric.load(folder, state)
        assert (state["step"], rest) == (2, {})
    norms = steps(model, optimizer, fabric, state["step"], 2 if folder and not resume else 4)
    if folder and not resume:
        fabric.save(folder, {**state, "step": 2})
    return norms, [full(p).detach() for p in model.parameters()]


def alone(rank, world):
    fabric = import_module("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    model = make()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    norms = []
    for step in range(4):
        rows = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        fabric.backward(model(rows).square().mean())
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [p.detach() for p in model.parameters()]


PACKAGES = pytest.mark.parametrize("package", ["lightning_fabric", "lightning.fabric"])


@PACKAGES
def test_training_is_that_of_one_process_and_resumes_at_another_number_of_ranks(package, tmp_path):
    ((expected, weights),) = run_ranks(1, alone)
    assert min(expected) > 0.05
    for norms, found in run_ranks(2, trained, package):
        assert norms == pytest.approx(expected, rel=1e-4)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, weights, strict=True))
    run_ranks(2, trained, package, tmp_path / "saved")
    for norms, found in run_ranks(3, trained, package, tmp_path / "saved", True):
        assert norms == pytest.approx(expected[2:], rel=1e-4)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, weights, strict=True))


def refuses(rank, world, folder):
    fabric = launched(rank, world)
    model, other = make(), make()
    with pytest.raises(InputError, match="AdamW has stepped already, or has parameters that aren't those of"):
        fabric.setup(model, torch.optim.AdamW(other.parameters()))
    model = fabric.setup_module(model)
    with pytest.raises(InputError, match="one model and at most one optimizer, this has 0 and 0"):
        fabric.save(folder, {"step": 1})
    with pytest.raises(InputError, match="filter"):
        fabric.save(folder, {"model": model}, filter={"model": lambda *_: True})
    fabric.save(folder, {"model": model})
    with pytest.raises(CheckpointError, match="has no 'epoch'"):
        fabric.load(folder, {"model": model, "epoch": 1})
    assert fabric.load(folder, {"model": model, "epoch": 1}, strict=False) == {}


def test_what_cannot_be_done_is_refused(tmp_path):
    run_ranks(2, refuses, tmp_path / "saved")


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def groups_by_default(rank, world, package):
    fabric = launched(rank, world, package=package)
    model = fabric.setup_module(Blocks())
    names = [group.name for group in model.module._unit().runtime.groups]
    with pytest.warns(UserWarning, match="nothing in Linear says how to group it"):
        alone = fabric.setup_module(nn.Linear(4, 4))
    return names, len(alone.module._unit().runtime.groups)


@PACKAGES
def test_the_default_strategy_groups_by_blocks_and_a_model_without_any_is_one_group(package):
    for names, alone in run_ranks(2, groups_by_default, package):
        assert (names, alone) == (["blocks.0", "blocks.1", "blocks.2"], 1)


class Missing:
    """Of ``sys.meta_path``: these packages aren't installed."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without(rank, world, packages):
    for name in [*sys.modules]:
        if name.split(".")[0] in ("lightning", "lightning_fabric") or name == "shardwright.fabric":
            del sys.modules[name]
    sys.meta_path.insert(0, Missing(packages))
    try:
        _ours, *bases = import_module("shardwright.fabric").ShardwrightStrategy.__bases__
        return [base.__module__ for base in bases]
    except ModuleNotFoundError as error:
        return str(error)


def test_either_package_is_enough():
    assert run_ranks(1, without, ["lightning"]) == [["lightning_fabric.strategies.ddp"]]
    assert run_ranks(1, without, ["lightning_fabric"]) == [["lightning.fabric.strategies.ddp"]]
    assert run_ranks(1, without, ["lightning", "lightning_fabric"]) == ["No module named 'lightning_fabric'"]
