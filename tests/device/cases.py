"""What is trained on the simulated device, and on the CPU beside it: random small models, each way to gather.

``train`` is the same code in both: on CPU ranks the package's own transport, in processes; on the simulated
device ``NcclComm`` over simulated communicators, in threads. What it returns is compared bit for bit.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from shardwright import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    SchedulePolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    lockstep,
    quantize_,
    stats,
)
from shardwright.engine.unit import units_in
from shardwright.params.buffer import ReorderedBuffer
from shardwright.policy import OptimizerOffloadPolicy
from tests.ranks.models import Run
from tests.ranks.test_extended import Bf16Gathered, ScaledInt8
from tests.ranks.test_rows import Scores

HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
SMALLER = {"reshard_after_forward": 2}
OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
KEPT = {"offload_policy": OptimizerOffloadPolicy()}
GRADS_STAY = {"offload_policy": CPUOffloadPolicy(grads=False)}
STATE_ALONE = {"offload_policy": CPUOffloadPolicy(params=False, grads=False)}
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


def encoded(dequantise: str, kind: type = nn.Sequential) -> Callable[[random.Random], tuple[nn.Module, int]]:
    """A frozen base in 4 bits, and what is trained beside it."""

    def make(draw: random.Random) -> tuple[nn.Module, int]:
        model, width = layers(draw)
        model = kind(*model)
        for layer in list(model)[:-1]:
            layer.up.weight.requires_grad_(False)
            layer.down.weight.requires_grad_(False)
        quantize_(model, "nf4", where=["*.up.weight", "*.down.weight"], dequantise=dequantise)
        return model, width

    return make


class Lookup(Scores):
    """A table of which few rows are read, or most of them, in a model that takes numbers."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_rows, self.embedding.embedding_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.abs() * 1000).long() % self.embedding.num_embeddings)


class Routed(nn.Sequential):
    """Each forward runs some of its layers, in any order, that differ by rank; and the last one."""

    def draw(self, numbers: random.Random) -> None:
        """Of the forwards to come on this rank."""
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *hidden, last = self
        for layer in self.numbers.sample(hidden, self.numbers.randint(0, len(hidden))):
            x = layer(x)
        return last(x)


def routed(draw: random.Random) -> tuple[nn.Module, int]:
    """As ``layers``, of which ranks use different ones."""
    model, width = layers(draw)
    return Routed(*model), width


class Gathering:
    """A caller's own all-gather, in the shape that ``set_custom_all_gather`` takes."""

    def __init__(self, place: "Place") -> None:
        self.place = place

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return self.place.all_gather(output_tensor, input_tensor, group)


class Scattering(Gathering):
    """A caller's own reduce-scatter."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool) -> Any:
        return self.place.reduce_scatter(output_tensor, input_tensor, group)


class Place:
    """What ``train`` asks of where it runs; here of CPU ranks."""

    device = "cpu"

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
        """In flight."""
        return dist.all_gather_single(whole, own, group=group, async_op=True)

    def reduce_scatter(self, total: torch.Tensor, values: torch.Tensor, group: Any) -> Any:
        """In flight."""
        return dist.reduce_scatter_single(total, values, group=group, async_op=True)

    def sharded(self, model: nn.Module) -> None:
        """A model was sharded."""

    def stream(self) -> Any:
        """A stream of the caller's."""
        return None

    def read(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Their numbers, once all is done."""
        return [each.clone() for each in tensors]


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
    "gradients stay on the device": (2, layers, GRADS_STAY),
    "state alone on the host": (2, layers, STATE_ALONE),
    "offloaded and quantised": (2, encoded("group"), OFFLOADED),
    "hybrid": (4, layers, {"hybrid": True}),
    "hybrid, half": (4, layers, {"hybrid": True} | HALF),
    "hybrid, sharded over all": (4, layers, {"hybrid": True, "shard_over_all": True}),
    "hybrid, sharded over all, half": (4, layers, {"hybrid": True, "shard_over_all": True} | HALF),
    "quantised, sharded over all": (4, encoded("group"), {"hybrid": True, "shard_over_all": True}),
    "smaller world": (4, layers, SMALLER),
    "quantised in a smaller world": (4, encoded("group"), SMALLER),
    "offloaded in a smaller world": (4, layers, SMALLER | OFFLOADED),
    "rows in use": (2, lambda draw: (Lookup(draw.choice((9, 211))), 3), {"row_wise": True}),
    "subclass": (2, converted(Bf16Gathered), {}),
    "subclass of two tensors": (2, converted(ScaledInt8), {}),
}
"""Ranks, model, and options of ``fully_shard``, by the way that parameters are gathered."""

OTHERS: dict[str, tuple[int, Callable[[random.Random], tuple[nn.Module, int]], dict[str, Any]]] = {
    "different layers by rank": (2, routed, {}),
    "different layers by rank, in a smaller world": (4, routed, SMALLER),
    "different quantised layers by rank": (2, encoded("group", Routed), {}),
    "another dim, in a smaller world": (4, layers, SMALLER | ON_DIM_1),
    "custom collectives": (2, layers, {"custom": True}),
    "a hook on a stream": (2, layers, {"hooked": True}),
}
"""What else differs in a step."""


def setting(kind: str) -> tuple[int, Callable[[random.Random], tuple[nn.Module, int]], dict[str, Any]]:
    """Of ``KINDS`` or ``OTHERS``."""
    return KINDS[kind] if kind in KINDS else OTHERS[kind]


HAPPENS = ("step", "two forwards", "evaluation", "accumulation", "failure", "failing launch")
"""Before the step of an optimizer."""
BETWEEN = ("nothing", "clipping", "state", "whole state")
"""Beside it."""


def train(kind: str, number: int, rank: int, place: Place | None = None) -> list[torch.Tensor]:
    """Losses, gradients and shards of this rank, of a model drawn by ``number``."""
    place = place or Place()
    draw = random.Random(f"{kind} {number}")
    model, inputs = model_of(kind, number, rank, draw, place)
    place.sharded(model)
    run, seen = Run.of(model), []
    for _ in range(2):
        seen += _step(run, inputs, draw)
        between = draw.choice(BETWEEN)
        if between == "clipping" and can_clip(kind):
            seen.append(clip_grad_norm_(model.parameters(), 0.01))
        if "offload_policy" in setting(kind)[2] and draw.random() < 0.5:  # gathers may still read shards
            with torch.no_grad():
                seen.append(model(next(inputs)).square().mean())
            run.step()
        else:
            _update(run, draw)
        seen += _state_of(run.optimizer)
        if between == "state":
            seen += [inner_of(each.to_local()).clone() for each in shards_in(model.state_dict())]
        if between == "whole state" and "subclass" not in kind:
            seen += full_state_dict(model).values()
    seen += [inner_of(param.detach().to_local()) for param in model.parameters()]
    return place.read(seen)


def _update(run: Run, draw: random.Random) -> None:
    """By the optimizer, or as who writes a loop by hand."""
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    plain = all(type(param.to_local()) is torch.Tensor for param in params)
    if draw.random() < 0.8 or not plain:
        run.step()
        return
    for param in (param for param in params if param.grad is not None):
        param.detach().to_local().sub_(param.grad.to_local(), alpha=0.1)
        param.grad = None


def _held(model: nn.Module) -> list[torch.Tensor]:
    """Bytes of buffers, now and at most; and now of those that are only gathered into."""
    found, groups = stats(model), [group for unit in units_in(model) for group in unit.groups]
    wires = [group.buffer.wire for group in groups if isinstance(group.buffer, ReorderedBuffer)]
    nbytes = sum(wire.allocated_nbytes for wire in wires)
    return [torch.full((), n) for n in (found.unsharded_nbytes, found.peak_unsharded_nbytes, nbytes)]


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer keeps, as its step has left it."""
    found = [value for state in optimizer.state.values() for value in state.values()]
    return [inner_of(each.to_local()).clone() for each in found if isinstance(each, DTensor)]


def _step(run: Run, inputs: Iterator[torch.Tensor], draw: random.Random) -> list[torch.Tensor]:
    """Up to the optimizer's step: losses and gradients."""
    model, seen = run.model, []
    happens = draw.choice(HAPPENS)
    if isinstance(model, Routed) and "fail" in happens:  # ranks would, in different places
        happens = "step"
    if happens == "evaluation":
        with torch.no_grad():
            seen.append(model(next(inputs)).square().mean())
    if happens == "failure":
        x = next(inputs).requires_grad_()
        x.register_hook(_fail)
        with suppress(_Failed):
            model(x).square().mean().backward()
        run.optimizer.zero_grad()
    if happens == "failing launch":
        x = next(inputs)  # ranks exchange words in it, which may travel on the same transport
        with _launches_failing(model, draw.randint(0, 2), draw.random() < 0.5), suppress(_Failed):
            model(x).square().mean().backward()
        run.optimizer.zero_grad()
    loss = model(next(inputs)).square().mean()
    if happens == "evaluation" and draw.random() < 0.5:
        with torch.no_grad():
            seen.append(model(next(inputs)).square().mean())
    if happens == "two forwards":
        loss = loss + model(next(inputs)).square().mean()
    seen += _held(model)
    loss.backward()
    seen += [loss.detach(), *_held(model)]
    if happens == "accumulation":
        model(next(inputs)).square().mean().backward()
    return seen + [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]


class _Failed(Exception):
    """What the caller's own code raises in a backward, or the backend at a launch."""


def _fail(*_: Any) -> None:
    raise _Failed


@contextmanager
def _launches_failing(model: nn.Module, others: int, decodings: bool) -> Iterator[None]:
    """Inside of it no all-gather of a model's groups can be launched, but for the first ``others``; or no
    decoding of what one brought ends."""
    left = iter(range(others))

    def failing(launch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: _fail() if next(left, None) is None else launch(*args)

    def unending(arrive: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: _fail(arrive(*args))

    gatherers = [group.gatherer for unit in units_in(model) for group in unit.groups]
    comms = [comm for each in gatherers for comm in (each.comm, each.options.smaller_world) if comm]
    with ExitStack() as stack:
        for each in gatherers if decodings else ():
            stack.enter_context(patch.object(each.decoding, "arrive", unending(each.decoding.arrive)))
        for comm in dict.fromkeys(comms) if not decodings else ():
            stack.enter_context(patch.object(comm, "all_gather", failing(comm.all_gather)))
        yield


def can_clip(kind: str) -> bool:
    """Of at most two addends, in which order they are summed over ranks makes no difference."""
    ranks, _, options = setting(kind)
    two_addends = ranks < 4 or ("hybrid" in options and "shard_over_all" not in options)
    return two_addends and "offload_policy" not in options


def shards_in(state: dict[str, Any]) -> list[DTensor]:
    """The sharded entries of a state dict."""
    return [value for value in state.values() if isinstance(value, DTensor)]


def model_of(
    kind: str, number: int, rank: int, draw: random.Random, place: Place | None = None
) -> tuple[nn.Module, Iterator[torch.Tensor]]:
    """A sharded model, and batches of this rank's, of which ranks have different numbers."""
    place = place or Place()
    _, make, options = setting(kind)
    options, world = dict(options), dist.get_world_size()
    row_wise, custom, hooked = (options.pop(name, False) for name in ("row_wise", "custom", "hooked"))
    shape = (2, world // 2) if options.pop("hybrid", False) else (world,)
    with _disable_current_modes():
        torch.manual_seed(number)
        model, width = make(draw)
        inputs = torch.randn(16, world, 4, width, generator=torch.Generator().manual_seed(number))
        inputs = [each[rank].clone().to(place.device) for each in inputs[: 16 - rank]]
        mesh = init_device_mesh(place.device, shape)
    for layer in list(model.children())[:-1]:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for unit in [*model.children()][:-1] if custom or hooked else ():
        if custom:
            unit.set_custom_all_gather(Gathering(place))
            unit.set_custom_reduce_scatter(Scattering(place))
        else:
            unit.set_all_reduce_hook(lambda flat: flat.mul_(0.5).add_(flat.square()), stream=place.stream())
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=number % 2, row_wise=row_wise))
    if isinstance(model, Routed):
        model.draw(random.Random(100 * number + rank))
    return model, iter(lockstep(inputs, mesh=mesh))


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
