"""Lightning Fabric with strategy="shardwright": trains as one process does, clips, accumulates, resumes."""

import os
import shutil
import sys
from importlib import import_module

import pytest

pytest.importorskip(
    "lightning_fabric", reason="needs the extra: pip install 'shardwright[fabric]' (make test-hf)"
)

import torch
from torch import nn

from shardwright import FSDPModule, Grouping, checkpoint
from shardwright.clients.strategies import publish, read_file, write_file
from shardwright.errors import CheckpointError, InputError
from shardwright.fabric import ShardwrightStrategy
from tests.ranks.models import full
from tests.ranks.pool import on_ranks, run_ranks


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


@on_ranks(2)
def test_what_cannot_be_done_is_refused(rank, world, tmp_path):
    folder = tmp_path / "saved"
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


class Passes:
    """Has state, as a scheduler or a data loader of torchdata does."""

    def __init__(self):
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def state_of(fabric):
    model = make()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    return {"model": model, "optimizer": optimizer, "step": 0, "passes": Passes(), "mean": torch.zeros(2)}


def saves_each_epoch(rank, world, path, kind):
    fabric = launched(rank, world, ShardwrightStrategy(None, state_dict_type=kind))
    state = state_of(fabric)
    for epoch in range(3):
        steps(state["model"], state["optimizer"], fabric, epoch, epoch + 1)
        state["passes"].done, state["mean"] = epoch + 1, torch.full((2,), float(epoch))
        # Its number may fall, where a run goes back, and differ between ranks, as a loss does.
        fabric.save(path, {**state, "step": 2 - epoch, "loss": epoch + rank / 10})
    state["passes"].done = 7
    fabric.load(path, state, strict=False)
    return [full(p).detach() for p in state["model"].parameters()], state["passes"].done


def loads_it(rank, world, path, strategy):
    fabric = launched(rank, world, strategy)
    state = state_of(fabric)
    passes = state["passes"]
    left = fabric.load(path, state)
    assert state["passes"] is passes
    assert (state["step"], passes.done, state["mean"].tolist(), left) == (0, 3, [2.0, 2.0], {"loss": 2.0})
    loaded = [full(p).detach().clone() for p in state["model"].parameters()]
    steps(state["model"], state["optimizer"], fabric, 3, 4)
    return loaded, [full(p).detach() for p in state["model"].parameters()]


def same(found, expected):
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


KINDS = pytest.mark.parametrize("kind", ["sharded", "full"])


@KINDS
def test_a_save_at_the_same_path_replaces_the_one_before(kind, tmp_path):
    path = tmp_path / "step-1"  # a name that a checkpoint in a folder of them has, too
    _, weights = run_ranks(1, alone)[0]
    (trained, done), _ = run_ranks(2, saves_each_epoch, path, kind)
    assert done == 3
    assert path.is_file() if kind == "full" else len([*path.glob("step-*")]) == 1
    for loaded, resumed in run_ranks(3, loads_it, path, ShardwrightStrategy(None)):
        assert same(loaded, trained)
        assert same(resumed, weights)
    if kind == "full":  # of which DDP reads whole tensors
        for loaded, _ in run_ranks(2, loads_it, path, "ddp"):
            assert same(loaded, trained)


CHANGES = [(os, "rename"), (os, "replace"), (shutil, "rmtree"), (os, "fsync"), (torch, "save")]


def ended_at(calls, work):
    """Whether a process that does the work is ended by one of the calls that change files, of this number."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1] != 0

    def dying(kept):
        def call(*args, **options):
            nonlocal calls
            calls -= 1
            return kept(*args, **options) if calls >= 0 else os._exit(1)

        return call

    for owner, name in CHANGES:
        setattr(owner, name, dying(getattr(owner, name)))
    work()
    os._exit(0)


def dies_everywhere(rank, world, folder, kind):
    seen, model = [], make()

    def saved(path, epoch):
        if kind == "full":
            write_file(path, {"epoch": epoch})
        else:
            publish(path, 0, model=model, extra={"epoch": epoch})

    def found(path):
        restored = read_file(path, None) if kind == "full" else checkpoint.load(path, model=model).extra
        return restored["epoch"]

    for calls in range(100):
        path = folder / f"{calls}.ckpt"
        saved(path, 1)
        ended = ended_at(calls, lambda path=path: saved(path, 2))
        seen.append(found(path))
        saved(path, 3)
        assert found(path) == 3
        if not ended:
            return seen
    raise AssertionError(f"it is ended after {calls} calls, too")


@KINDS
def test_a_save_that_is_killed_anywhere_leaves_a_checkpoint_that_loads(kind, tmp_path):
    (seen,) = run_ranks(1, dies_everywhere, tmp_path, kind, grouped=False)
    assert set(seen) == {1, 2}
    assert seen == sorted(seen)


@on_ranks(2)
def test_what_something_else_has_saved_is_not_overwritten(rank, world, tmp_path):
    folder = tmp_path
    strategies = (ShardwrightStrategy(state_dict_type=kind) for kind in ("sharded", "full"))
    sharded, whole = (launched(rank, world, strategy) for strategy in strategies)
    model = sharded.setup_module(make())
    sharded.save(folder / "folder", {"model": model})
    whole.save(folder / "file", {"model": model}, filter={"model": lambda name, _: name.endswith("bias")})
    assert sorted(torch.load(folder / "file")["model"]) == ["0.bias", "2.bias"]
    for fabric, name in ((sharded, "file"), (whole, "folder")):
        with pytest.raises(CheckpointError, match=f"{name}.*saves a.*nothing was overwritten: give another"):
            fabric.save(folder / name, {"model": model})
    for step in range(3):
        checkpoint.save(folder / "run", model=model, step=step)
    with pytest.raises(CheckpointError, match="is a folder of 3 checkpoints, which this one would replace"):
        sharded.save(folder / "run", {"model": model})
    with pytest.raises(InputError, match="state_dict_type is 'whole', expected 'sharded' or 'full'"):
        ShardwrightStrategy(state_dict_type="whole")


@KINDS
@on_ranks(2)
def test_an_object_without_state_is_pickled_as_under_ddp(rank, world, tmp_path, kind):
    folder = tmp_path
    fabric = launched(rank, world, ShardwrightStrategy(None, state_dict_type=kind))
    model = fabric.setup_module(make())
    plain = torch.utils.data.DataLoader(range(8), 2)
    loader = fabric.setup_dataloaders(plain)
    state = {"model": model, "plain": plain, "loader": loader, "step": 4}
    fabric.save(folder / "it", state)
    with torch.no_grad():
        model.module[0].bias.fill_(7.0)
    with pytest.raises(Exception, match=r"(?s)Weights only load failed.*weights_only"):
        fabric.load(folder / "it", {**state, "step": 0})
    assert full(model.module[0].bias).eq(7.0).all()  # nothing was changed
    state["step"] = 0
    assert fabric.load(folder / "it", state, weights_only=False) == {}
    assert (state["step"], [*state["plain"].dataset], state["plain"].batch_size) == (4, [*range(8)], 2)
    assert state["plain"] is not plain
    assert state["loader"] is loader
    with pytest.raises(CheckpointError, match=r"a value can't be pickled .*Can't pickle local object"):
        fabric.save(folder / "other", {"model": model, "function": lambda: None})


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@PACKAGES
@on_ranks(2)
def test_the_default_strategy_groups_by_blocks_and_a_model_without_any_is_one_group(rank, world, package):
    fabric = launched(rank, world, package=package)
    model = fabric.setup_module(Blocks())
    names = [group.name for group in model.module._unit().runtime.groups]
    with pytest.warns(UserWarning, match="nothing in Linear says how to group it"):
        alone = fabric.setup_module(nn.Linear(4, 4))
    alone = len(alone.module._unit().runtime.groups)
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
        ours = name.startswith(("shardwright.fabric", "shardwright.clients"))
        if ours or name.split(".")[0] in ("lightning", "lightning_fabric"):
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
