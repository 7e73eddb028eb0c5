"""What is trained on the simulated device, and on the CPU beside it: random small models, each way to gather.

``train`` is the same code in both: on CPU ranks the package's own transport, in processes; on the simulated
device ``NcclComm`` over simulated communicators, in threads. What it returns is compared bit for bit.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import _disable_current_modes

from shardwright import CPUOffloadPolicy, MixedPrecisionPolicy, SchedulePolicy, fully_shard, quantize_
from shardwright.policy import OptimizerOffloadPolicy
from tests.ranks.models import Run
from tests.ranks.test_extended import Bf16Gathered, ScaledInt8
from tests.ranks.test_rows import Scores

HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
SMALLER = {"reshard_after_forward": 2}
OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
KEPT = {"offload_policy": OptimizerOffloadPolicy()}
ON_DIM_1 = {"shard_placement_fn": lambda param: Shard(param.ndim - 1) if param.ndim else None}


class Layer(nn.Module):
    """A residual MLP with a scalar parameter."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


def layers(draw: random.Random) -> tuple[nn.Module, int]:
    """One group for each layer, of random widths that no world divides."""
    width = draw.choice((5, 7, 12))
    made = [Layer(width, draw.choice((6, 9, 13))) for _ in range(draw.choice((2, 3)))]
    return nn.Sequential(*made, nn.Linear(width, 3)), width


def converted(kind: type) -> Callable[[random.Random], tuple[nn.Module, int]]:
    """Linear layers whose weights are of a class that says itself what is gathered."""

    def make(draw: random.Random) -> tuple[nn.Module, int]:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(draw.choice((2, 3)))))
        for layer in model:
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
        return model, 8

    return make


def encoded(dequantise: str) -> Callable[[random.Random], tuple[nn.Module, int]]:
    """A frozen base in 4 bits, and what is trained beside it."""

    def make(draw: random.Random) -> tuple[nn.Module, int]:
        model, width = layers(draw)
        for layer in list(model)[:-1]:
            layer.up.weight.requires_grad_(False)
            layer.down.weight.requires_grad_(False)
        quantize_(model, "nf4", where=["*.up.weight", "*.down.weight"], dequantise=dequantise)
        return model, width

    return make


class Lookup(Scores):
    """A table of which few rows are read, in a model that takes numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.abs() * 1000).long() % self.embedding.num_embeddings)


KINDS: dict[str, tuple[int, Callable[[random.Random], tuple[nn.Module, int]], dict[str, Any]]] = {
    "plain": (2, layers, {}),
    "alone": (1, layers, {}),
    "half": (2, layers, HALF),
    "another dim": (2, layers, ON_DIM_1),
    "quantised": (2, encoded("group"), {}),
    "quantised, decoded where it is read": (2, encoded("layer"), {}),
    "offloaded": (2, layers, OFFLOADED),
    "offloaded, half": (2, layers, OFFLOADED | HALF),
    "offloaded optimizer": (2, layers, KEPT),
    "offloaded and quantised": (2, encoded("group"), OFFLOADED),
    "hybrid": (4, layers, {"hybrid": True}),
    "hybrid, half": (4, layers, {"hybrid": True} | HALF),
    "smaller world": (4, layers, SMALLER),
    "quantised in a smaller world": (4, encoded("group"), SMALLER),
    "offloaded in a smaller world": (4, layers, SMALLER | OFFLOADED),
    "rows in use": (2, lambda draw: (Lookup(), 3), {"row_wise": True}),
    "subclass": (2, converted(Bf16Gathered), {}),
    "subclass of two tensors": (2, converted(ScaledInt8), {}),
}
"""Ranks, model, and options of ``fully_shard``, by the way that parameters are gathered."""


def train(
    kind: str,
    number: int,
    rank: int,
    read: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    sharded: Callable[[nn.Module], None] = lambda model: None,
    synchronize: Callable[[], None] = lambda: None,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Losses, gradients and shards of this rank, of a model drawn by ``number``; nothing else is returned."""
    draw = random.Random(number)
    model, inputs = model_of(kind, number, rank, draw, device)
    sharded(model)
    run, seen = Run.of(model), []
    for _ in range(2):
        happens = draw.choice(("step", "two forwards", "evaluation", "accumulation"))
        if happens == "evaluation":
            with torch.no_grad():
                seen.append(model(next(inputs)).square().mean())
        loss = model(next(inputs)).square().mean()
        if happens == "evaluation" and draw.random() < 0.5:
            with torch.no_grad():
                seen.append(model(next(inputs)).square().mean())
        if happens == "two forwards":
            loss = loss + model(next(inputs)).square().mean()
        loss.backward()
        seen.append(loss.detach())
        if happens == "accumulation":
            model(next(inputs)).square().mean().backward()
        seen += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        run.step()
    seen += [inner_of(param.detach().to_local()) for param in model.parameters()]
    synchronize()
    return [read(each) for each in seen]


def model_of(
    kind: str, number: int, rank: int, draw: random.Random, device: str = "cpu"
) -> tuple[nn.Module, Iterator[torch.Tensor]]:
    """A sharded model, and batches of this rank's."""
    _, make, options = KINDS[kind]
    options, world = dict(options), dist.get_world_size()
    row_wise = options.pop("row_wise", False)
    shape = (2, world // 2) if options.pop("hybrid", False) else (world,)
    with _disable_current_modes():
        torch.manual_seed(number)
        model, width = make(draw)
        inputs = torch.randn(8, world, 4, width, generator=torch.Generator().manual_seed(number))
        inputs = iter([each[rank].clone().to(device) for each in inputs])
        mesh = init_device_mesh(device, shape)
    for layer in list(model.children())[:-1]:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=number % 2, row_wise=row_wise))
    return model, inputs


def inner_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a subclass has its numbers in."""
    return tensor.data_ if isinstance(tensor, Bf16Gathered) else tensor


def on_cpu(rank: int, world: int, wanted: list[tuple[str, int]]) -> list[list[torch.Tensor]]:
    """What CPU ranks give, of each ``(kind, number)``."""
    found = []
    for kind, number in wanted:
        found.append(train(kind, number, rank))
        dist.barrier()
    return found
