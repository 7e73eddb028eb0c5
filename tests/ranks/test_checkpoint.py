"""What is saved at one number of ranks, sharded in one way, comes back bit-equal at any other number and in
any way, optimizer state included."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardwright import fully_shard
from shardwright.checkpoint import load, save
from shardwright.wrapper import FSDP
from tests.ranks.models import Run, full, sharded, train_by
from tests.ranks.pool import run_ranks


class Net(nn.Module):
    """Uneven (5 rows), empty on some ranks (1 row), tied and frozen parameters, bf16 and fp32 in one group;
    a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 5)
        self.one = nn.Linear(5, 1)
        self.down = nn.Linear(5, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.embed(x)).tanh()
        h = self.down(h * self.one(h))
        h = h + self.narrow(h.bfloat16()).float()
        return self.head(self.norm(self.frozen(h)))


def by_layers(model: Net) -> nn.Module:
    """``fully_shard``, a group for some of the layers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return sharded(model, [model.up, model.one, model.down, model.frozen], mesh=mesh)


def wrapped(model: Net) -> nn.Module:
    """The wrapper class, other groups than ``by_layers`` has."""
    model.up, model.frozen = FSDP(model.up), FSDP(model.frozen)
    return FSDP(model)


def beside_tensor_parallelism(model: Net) -> nn.Module:
    """One layer is split on both axes; of the rest each row of ranks along "data" holds all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"narrow": ColwiseParallel(output_layouts=Replicate())})
    return fully_shard(model, mesh=mesh["data"])


def plain(model: Net) -> nn.Module:
    """One process, as it is."""
    return model


WAYS = (by_layers, wrapped, beside_tensor_parallelism, plain)
SHARDINGS = {sharding.__name__: sharding for sharding in WAYS}


def build(kind: str, seed: int, sharding: str = "by_layers") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = SHARDINGS[sharding](Net())
    trained = [p for p in model.parameters() if p.requires_grad]
    decay, rest = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}]
    if kind == "adamw":
        return model, torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.95))
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    x = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(x), (x + 1) % 11)


def kept(value):
    return full(value).detach().clone() if isinstance(value, torch.Tensor) else value


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    state = {k: kept(v) for k, v in model.state_dict().items()}
    names = {id(p): n for n, p in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        state |= {f"group {i} {k}": v for k, v in group.items() if k != "params"}
        for p in group["params"]:
            state |= {f"{names[id(p)]} {k}": kept(v) for k, v in optimizer.state[p].items()}
    return state


def assert_equal(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], torch.Tensor):
            assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key
        else:
            assert a[key] == b[key], key


def save_trained(rank: int, world: int, path: str, kind: str, sharding: str) -> dict:
    model, optimizer = build(kind, 1, sharding)
    train_by(Run(model, optimizer), (loss_of(model, step) for step in range(2)))
    save(path, model=model, optimizer=optimizer, extra={"tokens": 123, "note": (1, None)}, step=2)
    return everything(model, optimizer)


def load_fresh(rank: int, world: int, path: str, kind: str, sharding: str) -> dict:
    model, optimizer = build(kind, rank + 100, sharding)
    restored = load(path, model=model, optimizer=optimizer)
    assert (restored.step, restored.extra) == (2, {"tokens": 123, "note": (1, None)})
    assert model.head.weight is model.embed.weight
    return everything(model, optimizer)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("adamw", (1, "plain"), (4, "wrapped")),
        ("adamw", (1, "wrapped"), (3, "by_layers")),
        ("adamw", (2, "by_layers"), (1, "plain")),
        ("adamw", (2, "wrapped"), (2, "by_layers")),
        ("adamw", (3, "by_layers"), (2, "wrapped")),
        ("adamw", (4, "wrapped"), (5, "wrapped")),
        ("adamw", (4, "beside_tensor_parallelism"), (2, "by_layers")),
        ("sgd", (2, "by_layers"), (4, "beside_tensor_parallelism")),
        ("sgd", (2, "by_layers"), (4, "by_layers")),
        ("sgd", (3, "wrapped"), (8, "by_layers")),
        ("sgd", (4, "by_layers"), (1, "wrapped")),
    ],
)
def test_any_world_size_and_door_restores_bit_equal(tmp_path, kind, saved, loaded):
    before = run_ranks(saved[0], save_trained, str(tmp_path), kind, saved[1])[0]
    assert {before["narrow.weight"].dtype, before["up.weight"].dtype} == {torch.bfloat16, torch.float32}
    for after in run_ranks(loaded[0], load_fresh, str(tmp_path), kind, loaded[1]):
        assert_equal(before, after)
