"""What is trained on the simulated device, and on the CPU beside it: random small models, each way to gather.

``train`` is the same code in both: on CPU ranks the package's own transport, in processes; on the simulated
device ``ProcessGroupComm`` over simulated communicators, in threads. What it returns is compared bit for bit.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from shardwright import (
    Blocks,
    CPUOffloadPolicy,
    DiskOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    Owned,
    ReduceScatterBucketer,
    SchedulePolicy,
    StepInBackward,
    clip_grad_norm_,
    communication_s,
    full_state_dict,
    fully_shard,
    lockstep,
    offload_states,
    quantize_,
    reload_states,
    stats,
    torch_private,
)
from shardwright.checkpoint.live import collect, part_of
from shardwright.checkpoint.save import Snapshot, staged
from shardwright.engine.building import deferred
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.step import batches
from shardwright.engine.unit import unit_of, units_in
from shardwright.policy import OptimizerOffloadPolicy
from shardwright.schedule.schedule import ActionKind, Phase
from shardwright.torch_private import all_gather_of, reduce_scatter_of
from tests.ranks.models import Run
from tests.ranks.test_extended import Bf16Gathered, ScaledInt8
from tests.ranks.test_rows import Scores

HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
SMALLER = {"reshard_after_forward": 2}
OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
IN_FILES = {"offload_policy": DiskOffloadPolicy(folder=tempfile.gettempdir())}
KEPT = {"offload_policy": OptimizerOffloadPolicy()}
GRADS_STAY = {"offload_policy": CPUOffloadPolicy(grads=False)}
STATE_ALONE = {"offload_policy": CPUOffloadPolicy(params=False, grads=False)}
OWNED = {"shard_placement_fn": lambda param: Owned(param.numel() % 2) if param.ndim == 2 else None}
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

    def drawn(self) -> list[nn.Module]:
        """Of the hidden layers those that the next forward uses."""
        hidden = [*self][:-1]
        return self.numbers.sample(hidden, self.numbers.randint(0, len(hidden)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.drawn():
            x = layer(x)
        return self[-1](x)


class RunByAll(Routed):
    """Each second forward runs the other layers, too, and drops what they give: ranks then differ in the
    backward alone."""

    num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        used = self.drawn()
        for layer in used:
            x = layer(x)
        for layer in [*self][:-1] if self.num_forwards % 2 else ():
            if layer not in used:
                layer(x)
        return self[-1](x)


def routed(kind: type = Routed) -> Callable[[random.Random], tuple[nn.Module, int]]:
    """As ``layers``, of which ranks use different ones."""

    def make(draw: random.Random) -> tuple[nn.Module, int]:
        model, width = layers(draw)
        return kind(*model), width

    return make


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
        return all_gather_of(dist)(whole, own, group=group, async_op=True)

    def reduce_scatter(self, total: torch.Tensor, values: torch.Tensor, group: Any) -> Any:
        """In flight."""
        return reduce_scatter_of(dist)(total, values, group=group, async_op=True)

    def sharded(self, model: nn.Module) -> None:
        """A model was sharded."""

    def stream(self) -> Any:
        """A stream of the caller's."""
        return None

    def beside(self, call: Callable[[], Any]) -> Any:
        """Run it on a stream of the caller's, after what compute had queued; the event of its end."""
        call()

    def is_idle(self) -> bool:
        """Whether nothing is queued any more."""
        return True

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
    "offloaded to files": (2, layers, IN_FILES),
}
"""Ranks, model, and options of ``fully_shard``, by the way that parameters are gathered."""

OTHERS: dict[str, tuple[int, Callable[[random.Random], tuple[nn.Module, int]], dict[str, Any]]] = {
    "different layers by rank": (2, routed(), {}),
    "different layers by rank, in a smaller world": (4, routed(RunByAll), SMALLER),
    "different layers by rank, offloaded": (2, routed(), OFFLOADED),
    "different quantised layers by rank": (2, encoded("group", Routed), {}),
    "another dim, in a smaller world": (4, layers, SMALLER | ON_DIM_1),
    "whole matrices": (2, layers, OWNED),
    "whole matrices, half": (2, layers, OWNED | HALF),
    "whole matrices, hybrid": (4, layers, OWNED | {"hybrid": True}),
    "whole matrices, sharded over all": (4, layers, OWNED | {"hybrid": True, "shard_over_all": True}),
    "whole matrices, in a smaller world": (4, layers, OWNED | SMALLER),
    "whole matrices, offloaded": (2, layers, OWNED | OFFLOADED),
    "blocks of chosen sizes": (2, layers, {"layout": Blocks(2, shares=(2, 1))}),
    "groups cut in two": (2, layers, {"cut": True}),
    "groups cut in two, offloaded": (2, layers, {"cut": True} | OFFLOADED),
    "custom collectives": (2, layers, {"custom": True}),
    "a hook on a stream": (2, layers, {"hooked": True}),
    "sums in buckets": (2, layers, {"buckets": True}),
    "steps in the backward": (2, layers, {"steps": True}),
    "steps in the backward, offloaded": (2, layers, {"steps": True} | OFFLOADED),
    "steps in the backward, state alone on the host": (2, layers, {"steps": True} | STATE_ALONE),
}
"""What else differs in a step."""


def setting(kind: str) -> tuple[int, Callable[[random.Random], tuple[nn.Module, int]], dict[str, Any]]:
    """Of ``KINDS`` or ``OTHERS``."""
    return KINDS[kind] if kind in KINDS else OTHERS[kind]


def is_supported(kind: str) -> bool:
    """Whether the installed torch makes the process groups of this kind (``new_group(sort_ranks=)``)."""
    return torch_private.keeps_order or "shard_over_all" not in setting(kind)[2]


HAPPENS = (
    "step",
    "two forwards",
    "evaluation",
    "accumulation",
    "failure",
    "failure within a layer",
    "failing launch",
    "failing arrival",
    "by hand",
)
"""Before the step of an optimizer; in another order for each kind."""
BETWEEN = ("clipping", "communication", "state", "whole state", "away", "saving", "nothing")
"""Beside it."""


def train(kind: str, number: int, rank: int, place: Place | None = None) -> list[torch.Tensor]:
    """Losses, gradients and shards of this rank, of a model drawn by ``number``."""
    place = place or Place()
    draw = random.Random(f"{kind} {number}")
    model, inputs = model_of(kind, number, rank, draw, place)
    place.sharded(model)
    run, seen = Run.of(model), []
    optimizers = [run.optimizer]
    if "steps" in setting(kind)[2]:
        inside = StepInBackward(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        optimizers = [*inside.optimizers.values()]
        _note_steps(model, optimizers, seen)
    bucketer = ReduceScatterBucketer((0, 1e-3, 1e-2)[number % 3])
    for step in range(2):
        seen += _step(kind, run, inputs, draw, _turn(HAPPENS, kind, 2 * number + step))
        if "buckets" in setting(kind)[2]:
            seen += _summed(bucketer, next(inputs), draw)
        between = _turn(BETWEEN, kind, 2 * number + step)
        if between == "clipping" and can_clip(kind):
            seen.append(clip_grad_norm_(model.parameters(), 0.01))
        if between == "communication":
            communication_s(model)
            seen.append(torch.full((), place.is_idle()))
        if between == "away":
            seen += _away(run, inputs)
        seen += _update(kind, run, inputs, draw, place)
        seen += [state for optimizer in optimizers for state in _state_of(optimizer)]
        if between == "state":
            seen += [inner_of(each.to_local()).clone() for each in shards_in(model.state_dict())]
        if between == "whole state" and "subclass" not in kind:  # which torch's own collectives gather
            seen += full_state_dict(model).values()
        if between == "saving":
            seen += _saved(model, rank)
    for unit in (unit for unit in model.modules() if isinstance(unit, FSDPModule)):
        unit.reshard()  # what an evaluation has left
    seen += [inner_of(param.detach().to_local()) for param in model.parameters()]
    return place.read(seen)


def _summed(bucketer: ReduceScatterBucketer, like: torch.Tensor, draw: random.Random) -> list[torch.Tensor]:
    """Lists of tensors over all ranks, small and large ones, beside what the model moves; their sums."""
    handles, later = [], []
    for number in range(draw.randint(4, 12)):
        rows = like.flatten().repeat(draw.choice((1, 2, 40)))
        inputs = [rows * (number + rank) for rank in range(dist.get_world_size())]
        if draw.random() < 0.3:  # as neighbouring parts of one tensor
            inputs = [*torch.stack(inputs)]
        handles.append(bucketer.reduce_scatter_async(inputs, callback_fn=lambda sums: later.append(sums * 2)))
        if draw.random() < 0.2:
            later.append(draw.choice(handles).wait() + 1)
    bucketer.flush()
    seen = [handle.wait().clone() for handle in handles]
    if draw.random() < 0.5:
        bucketer.teardown()
    return seen + later


def _note_steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], seen: list[torch.Tensor]) -> None:
    """Add to ``seen`` how many steps were taken whenever a backward comes to the first layer."""
    taken: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda stepped, *_: taken.append(stepped))

    def note(_: torch.Tensor) -> None:
        seen.append(torch.full((), len(taken)))

    def watch(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(note)

    next(model.children()).register_forward_hook(watch)


def _turn(names: tuple[str, ...], kind: str, number: int) -> str:
    """One after another, so that a few models have them all."""
    return random.Random(kind).sample(names, len(names))[number % len(names)]


def _update(
    kind: str, run: Run, inputs: Iterator[torch.Tensor], draw: random.Random, place: Place
) -> list[torch.Tensor]:
    """By the optimizer, maybe on a stream of its own, or as who writes a loop by hand; losses."""
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    plain = all(type(param.to_local()) is torch.Tensor for param in params)
    offloaded, chance, losses = "offload_policy" in setting(kind)[2], draw.random(), []
    if chance < 0.2 and plain:
        for param in (param for param in params if param.grad is not None):
            param.detach().to_local().sub_(param.grad.to_local(), alpha=0.1)
            param.grad = None
        return losses
    if offloaded and chance < 0.8:  # gathers may still read shards
        losses = [_evaluated(run.model, inputs)]
    elif chance < 0.5 and not offloaded:
        run.model.set_post_optim_event(place.beside(run.optimizer.step))
        losses = [_evaluated(run.model, inputs)]
        run.optimizer.zero_grad()
        return losses
    run.step()
    return losses


def _evaluated(model: nn.Module, inputs: Iterator[torch.Tensor]) -> torch.Tensor:
    """A loss without a graph."""
    with torch.no_grad():
        return model(next(inputs)).square().mean()


def _away(run: Run, inputs: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """A forward that no backward follows, and the states on the host and back again."""
    run.model(next(inputs))
    offload_states(run.model, run.optimizer)
    seen = _held(run.model) + _state_of(run.optimizer)
    seen += [inner_of(param.detach().to_local()).clone() for param in run.model.parameters()]
    reload_states(run.model)
    return seen


def _saved(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """What a checkpoint in the background writes."""
    live = collect(model, None, None)
    parts = {key: part_of(key, tensor, rank) for key, tensor in live.tensors.items()}
    return [inner_of(part.local).clone() for part in staged(Snapshot(parts, {}, {})).parts.values()]


def _by_hand(model: nn.Module, edits: bool) -> list[torch.Tensor]:
    """Unshard without a forward: with and without a wait for it, and behind one that fails; and maybe edit
    what is unsharded."""
    units, seen = [unit for unit in model.modules() if isinstance(unit, FSDPModule)], []
    for unit, other in [*pairwise(units), *pairwise(reversed(units))]:
        unit.unshard(async_op=True)
        unit.reshard()
        seen += _read(other)
        with _arrivals_failing(unit), suppress(_Failed):
            unit.unshard()
        seen += _read(other)
    if edits:
        with model.unsharded(), torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.mul_(0.99)
    return seen


def _in_one_batch(model: nn.Module) -> list[torch.Tensor]:
    """All-gathers of two groups, of which one is unsharded already, as where ranks held different ones; and
    of that one alone."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    own, seen = [(unit, unit_of(unit).groups[0]) for unit in units if unit_of(unit).groups], []
    for (unit, held), (other, group) in pairwise(own):
        if held.gatherer.decoding.extended:
            continue
        unit.unshard()
        batches.unshard([held], smaller=False)
        seen += _doubled(held)
        batches.unshard([held, group], smaller=False)
        seen += _doubled(held)
        group.wait()
        seen += _doubled(group)
        other.reshard()
        unit.reshard()
    return seen


def _doubled(group: ParamGroup) -> list[torch.Tensor]:
    """In new memory, what it has unsharded and not decoded."""
    return [
        param.unsharded.detach() * 2 for param in group.params if param not in group.gatherer.decoding.parts
    ]


def _read(unit: FSDPModule) -> list[torch.Tensor]:
    """Its parameters, unsharded by hand."""
    unit.unshard()
    own = [param for param in unit.parameters() if not isinstance(param, DTensor)]
    seen = [inner_of(param.detach()).clone() for param in own]
    unit.reshard()
    return seen


def _held(model: nn.Module) -> list[torch.Tensor]:
    """Bytes of buffers, now and at most; and now of those that are only gathered into."""
    found, groups = stats(model), [group for unit in units_in(model) for group in unit.groups]
    wires = [group.buffer.arrival for group in groups if group.buffer is not None]
    nbytes = sum(wire.allocated_nbytes for wire in wires if wire is not None)
    return [torch.full((), n) for n in (found.unsharded_nbytes, found.peak_unsharded_nbytes, nbytes)]


def _num_reduced(model: nn.Module) -> torch.Tensor:
    """Reductions of groups in the last backward: one that was launched too early is launched again."""
    passed = model.trace().phases[Phase.BACKWARD]
    reduced = [action for entry in passed for action in entry.actions if action.kind is ActionKind.REDUCE]
    return torch.full((), sum(len(action.groups) for action in reduced))


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer keeps, as its step has left it."""
    found = [value for state in optimizer.state.values() for value in state.values()]
    return [inner_of(each.to_local()).clone() for each in found if isinstance(each, DTensor)]


def _step(
    kind: str, run: Run, inputs: Iterator[torch.Tensor], draw: random.Random, happens: str
) -> list[torch.Tensor]:
    """Up to the optimizer's step: losses and gradients."""
    model, seen = run.model, []
    if isinstance(model, Routed) and "fail" in happens:  # ranks would, in different places
        happens = "step"
    if happens == "two forwards" and "steps" in setting(kind)[2]:  # which is refused
        happens = "accumulation"
    if happens == "evaluation":
        seen.append(_evaluated(model, inputs))
    if happens == "failure":
        x = next(inputs).requires_grad_()
        x.register_hook(_fail)
        with suppress(_Failed):
            model(x).square().mean().backward()
    if happens == "failure within a layer":
        with _gradients_failing(model), suppress(_Failed):
            model(next(inputs)).square().mean().backward()
    if happens == "failing launch":
        x = next(inputs)  # ranks exchange words in it, which may travel on the same transport
        with _launches_failing(model, draw.randint(0, 2)), suppress(_Failed):
            model(x).square().mean().backward()
    if happens == "failing arrival":
        with _arrivals_failing(model), suppress(_Failed):
            model(next(inputs)).square().mean().backward()
    if "fail" in happens:
        if draw.random() < 0.5:
            model.reset_iter_state()
            groups = [group for unit in units_in(model) for group in unit.groups]
            filled = {each for group in groups if (on := group.gatherer.comm.streams) for each in on._filled}
            idle = all(group.reducer.gradients.is_idle for group in groups)
            seen.append(torch.full((), idle and not filled))
        run.optimizer.zero_grad()
    if happens == "by hand":
        seen += _by_hand(model, draw.random() < 0.5)
        seen += _in_one_batch(model)
    if happens == "accumulation":
        model.set_requires_gradient_sync(draw.random() < 0.5)
    loss = model(next(inputs)).square().mean()
    if happens == "evaluation" and draw.random() < 0.5:
        seen.append(_evaluated(model, inputs))
    if happens == "two forwards":
        loss = loss + model(next(inputs)).square().mean()
    seen += _held(model)
    loss.backward()
    seen += [loss.detach(), *_held(model), _num_reduced(model)]
    if happens == "accumulation":
        model.set_requires_gradient_sync(True)
        model(next(inputs)).square().mean().backward()
        x = next(inputs)
        if not isinstance(model, Routed):  # a third that fails, with gathers in flight, and is left out
            with _arrivals_failing(model), suppress(_Failed):
                model(x)
    return seen + [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]


class _Failed(Exception):
    """What the caller's own code raises in a backward, or the backend at a launch."""


def _fail(*_: Any) -> None:
    raise _Failed


@contextmanager
def _gradients_failing(model: nn.Module) -> Iterator[None]:
    """Inside of it a backward fails in the middle of each layer: some of its gradients are there."""

    def fail(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        output.register_hook(_fail)

    layers = [layer.up if isinstance(layer, Layer) else layer for layer in model.children()]
    handles = [layer.register_forward_hook(fail) for layer in layers[:1]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _launches_failing(model: nn.Module, others: int) -> Iterator[None]:
    """Inside of it no all-gather of a model's groups can be launched, but for the first ``others``."""
    left = iter(range(others))

    def failing(launch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: _fail() if next(left, None) is None else launch(*args)

    gatherers = [group.gatherer for unit in units_in(model) for group in unit.groups]
    comms = [comm for each in gatherers for comm in (each.comm, each.options.smaller_world) if comm]
    with ExitStack() as stack:
        for comm in dict.fromkeys(comms):
            stack.enter_context(patch.object(comm, "all_gather", failing(comm.all_gather)))
        yield


@contextmanager
def _arrivals_failing(model: nn.Module) -> Iterator[None]:
    """Inside of it copying what an all-gather has brought, or decoding it, fails once it is queued."""

    def unending(arrive: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: _fail(arrive(*args))

    groups = [group for unit in units_in(model) for group in unit.groups]
    buffers = [group.buffer for group in groups if group.buffer]
    decoding = [group.gatherer.decoding for group in groups]
    arriving = [*buffers, *(each for each in decoding if not each.is_idle)]
    with ExitStack() as stack:
        for each in arriving:
            stack.enter_context(patch.object(each, "arrive", unending(each.arrive)))
        yield


def can_clip(kind: str) -> bool:
    """Of at most two addends, in which order they are summed over ranks makes no difference."""
    ranks, _, options = setting(kind)
    two_addends = ranks < 4 or ("hybrid" in options and "shard_over_all" not in options)
    return two_addends and not {"offload_policy", "steps"} & options.keys()


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
    names = ("row_wise", "custom", "hooked", "cut", "steps", "buckets")
    row_wise, custom, hooked, cut, *_ = (options.pop(name, False) for name in names)
    shape = (2, world // 2) if options.pop("hybrid", False) else (world,)
    with _disable_current_modes():
        torch.manual_seed(number)
        model, width = make(draw)
        inputs = torch.randn(16, world, 4, width, generator=torch.Generator().manual_seed(number))
        inputs = [each[rank].clone().to(place.device) for each in inputs[: 16 - rank]]
        mesh = init_device_mesh(place.device, shape)
    for layer in list(model.children())[cut:-1]:  # the outermost has the first, too, where groups are cut
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


def cutting(kind: str) -> list[tuple[Any, str, Any]]:
    """What stands in, and where, so that groups of a few bytes are cut in two, where the kind has that."""
    cut = kind in OTHERS and "cut" in OTHERS[kind][2]
    return [(deferred, "SchedulePolicy", lambda: SchedulePolicy(bucket_cap_mb=0))] if cut else []


def inner_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a subclass has its numbers in."""
    return tensor.data_ if isinstance(tensor, Bf16Gathered) else tensor


def on_cpu(rank: int, world: int, wanted: list[tuple[str, int]]) -> list[list[torch.Tensor]]:
    """What CPU ranks give, of each ``(kind, number)``."""
    found = []
    for kind, number in wanted:
        with ExitStack() as stack:
            for owner, name, value in cutting(kind):
                stack.enter_context(patch.object(owner, name, value))
            found.append(train(kind, number, rank))
        dist.barrier()
    return found
