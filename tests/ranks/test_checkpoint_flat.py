"""Tensors in flat parameters are saved under their own names: flat and per-parameter layouts read each
other's checkpoints, at any numbers of ranks, optimizer state included."""

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwright import fully_shard
from shardwright.checkpoint import load, save
from shardwright.checkpoint.folder import read_manifest
from shardwright.errors import CheckpointError
from shardwright.schedule.layout import FlatEntry, FlatLayout
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_checkpoint import assert_equal, kept


class Layer(nn.Module):
    """Shapes that ranges cut in the middle of rows, of planes, or not at all; a scalar; tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.table = nn.Embedding(11, 3)
        self.head = nn.Linear(3, 11)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.randn(()))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.register_buffer("seen", torch.arange(5))


def per_parameter(model: Pair) -> nn.Module:
    return fully_shard(model)


def flat(model: Pair, gap: int = 3) -> nn.Module:
    """One flat parameter per layer; ``gap`` elements of no tensor before each tensor and at the end."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second):
        tied = {"table.weight": ("head.weight",)}
        params = [(n, p.detach()) for n, p in layer.named_parameters() if n != "head.weight"]
        entries, end, values = [], 0, []
        for name, p in params:
            entries.append(FlatEntry(name, tuple(p.shape), end + gap, tied.get(name, ())))
            values += [torch.zeros(gap), p.reshape(-1)]
            end += gap + p.numel()
        for child in ("table", "head"):
            delattr(layer, child)
        del layer.cube, layer.scale
        whole = torch.cat([*values, torch.zeros(gap)])
        layer.flat = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        layer.flat.flat_layout = FlatLayout(tuple(entries))
    return model


Sharding = Callable[[Pair], nn.Module]
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


def build(sharding: Sharding, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = sharding(Pair())
    return model, OPTIMIZERS[kind](model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A gradient that depends on nothing but the element, so that every layout does the same."""
    for p in model.parameters():
        p.grad = torch.sin(p.detach())
    optimizer.step()


def named(values: Iterable[tuple[str, nn.Parameter, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors under the names of the model, of tensors that are like its parameters."""
    found = {}
    for name, p, value in values:
        whole, layout = kept(value), getattr(p, "flat_layout", None)
        for entry in layout.entries if layout else ():
            prefix = name[: name.rfind(".") + 1]
            found[prefix + entry.name] = whole[entry.start :][: entry.numel].view(entry.shape)
        if not layout:
            found[name] = whole
    return found


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    params = list(model.named_parameters())
    state = named([(n, p, p) for n, p in params])
    for key in optimizer.state[params[0][1]]:
        if key != "step":
            like = named([(n, p, optimizer.state[p][key]) for n, p in params])
            state |= {f"{name} {key}": value for name, value in like.items()}
    steps = {float(optimizer.state[p]["step"]) for _, p in params if "step" in optimizer.state[p]}
    return {**state, "steps": torch.tensor(sorted(steps)), "seen": model.seen.clone()}


def save_stepped(rank: int, world: int, path: str, sharding: Sharding, kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = build(sharding, kind, 1)
    step(model, optimizer)
    step(model, optimizer)
    save(path, model=model, optimizer=optimizer, step=2)
    return everything(model, optimizer)


def load_poisoned(
    rank: int, world: int, path: str, sharding: Sharding, kind: str, stepped: bool
) -> tuple[dict[str, torch.Tensor], int]:
    model, optimizer = build(sharding, kind, 100 + rank)
    if stepped:  # its state is there already, and is filled in place
        step(model, optimizer)
    torch.use_deterministic_algorithms(True)  # every torch.empty is NaN from now on
    restored = load(path, model=model, optimizer=optimizer)
    for p in model.parameters():
        state = [kept(v) for v in optimizer.state[p].values()]
        assert all(v.isfinite().all() for v in state)  # between the tensors of a flat parameter too
    step(model, optimizer)
    return everything(model, optimizer), restored.read_nbytes


def stepped_once_more(rank: int, world: int, kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = build(per_parameter, kind, 1)
    for _ in range(3):
        step(model, optimizer)
    return everything(model, optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded", "kind", "stepped"),
    [
        ((3, flat), (2, per_parameter), "adamw", False),
        ((2, per_parameter), (3, flat), "adamw", False),
        ((4, flat), (3, flat), "sgd", True),
        ((1, flat), (4, flat), "adamw", True),
    ],
)
def test_flat_and_per_parameter_layouts_read_each_other(tmp_path, saved, loaded, kind, stepped):
    run_ranks(saved[0], save_stepped, str(tmp_path), saved[1], kind)
    expected = run_ranks(1, stepped_once_more, kind)[0]
    found = run_ranks(loaded[0], load_poisoned, str(tmp_path), loaded[1], kind, stepped)
    for after, _ in found:
        assert_equal(expected, after)
    manifest = read_manifest(tmp_path / "step-000002")
    assert manifest.tensors["model/first.table.weight"].aliases == ("model/first.head.weight",)
    small = 5 * 8 + 8 * 4 if kind == "adamw" else 5 * 8  # the buffer, and ``step``: read by every rank
    rng = sum(entry.nbytes for key, entry in manifest.tensors.items() if key.startswith("rng"))
    assert sum(read for _, read in found) <= manifest.nbytes + (loaded[0] - 1) * (small + rng)


def test_the_pieces_of_one_tensor_in_one_file_open_with_the_plain_library(tmp_path):
    run_ranks(2, save_stepped, str(tmp_path), flat, "sgd")
    manifest = read_manifest(tmp_path / "step-000002")
    seen: dict[str, int] = {}
    for file in (tmp_path / "step-000002").glob("*.safetensors"):
        for name, value in load_file(file).items():
            key = name.partition("#")[0]
            seen[key] = seen.get(key, 0) + value.numel()
    assert seen == {key: entry.numel for key, entry in manifest.tensors.items()}
    assert len(manifest.tensors["model/first.cube"].pieces) > 2  # cut within a row of a plane


@on_ranks(2)
def test_state_that_one_flat_parameter_cannot_have_is_named(tmp_path):
    path = str(tmp_path)
    model, optimizer = build(per_parameter, "adamw", 1)
    for name, p in model.named_parameters():
        if name != "first.cube":
            p.grad = torch.sin(p.detach())
    optimizer.step()
    save(path, model=model, optimizer=optimizer, step=1)
    model, optimizer = build(flat, "adamw", 2)
    with pytest.raises(CheckpointError) as uneven:
        load(path, model=model, optimizer=optimizer)
    optimizer = torch.optim.Adafactor(model.parameters())
    optimizer.state[model.first.flat] = {"row_var": torch.ones(4)}
    with pytest.raises(CheckpointError) as whole:
        save(path, model=model, optimizer=optimizer, step=2)
    uneven = str(uneven.value)
    whole = str(whole.value)
    assert "optimizer state of first.cube and first.scale is not of one kind" in uneven
    assert "optimizer/first.cube/row_var: state of shape [4] belongs to a flat parameter" in whole
