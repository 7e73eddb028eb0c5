"""A table of what equals one process: models and options, how they are trained, and on which ranks.

``beside_one_process`` runs a row on ranks (test_cases.py); ``trained`` gives its bits, which the simulated
device must give too (tests/device/test_cases.py). A row's ``shard`` and ``look`` may say more of it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from shardwright import FSDPModule, Grouping, explain, full_state_dict, fully_shard, set_transport, stats
from tests.ranks.models import (
    WIDTH,
    Block,
    Decoder,
    Run,
    assert_same_grads,
    batches,
    both_step,
    build,
    full,
    loss_of,
    mean_over_ranks,
    shard_decoder,
    sharded,
    squared,
    waits,
)

TRANSPORTS = ("auto", "sockets", "collectives")


def on(*worlds: int, transports: Iterable[str] = ("auto",)) -> tuple[tuple[int, str], ...]:
    """Each world, over each transport."""
    return tuple((world, transport) for transport in transports for world in worlds)


def vectors(*shape: int) -> Callable[[int, int], torch.Tensor]:
    """Of a number and a world, inputs of all ranks: [world, *shape]."""
    return lambda number, world: torch.randn(world, *shape, generator=torch.Generator().manual_seed(number))


def nothing(*_: Any) -> None:
    """What most rows do before a forward, and look at afterwards."""


class Case(NamedTuple):
    """A row: a model, what shards it, and its training.

    before: called before each forward with a model (of both), the step, and how many microbatches come after.
    look: called with the trained model, its rank and world.
    runs: worlds and transports. ``make test`` has the middle one, but for rows that are slow; CI has all of
    them, of rows that are sampled three.
    """

    make: Callable[[], nn.Module]
    shard: Callable[[Any], Any]
    runs: tuple[tuple[int, str], ...]
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = squared
    inputs: Callable[[int, int], torch.Tensor] = vectors(5, WIDTH)
    before: Callable[[Any, int, int], None] = nothing
    look: Callable[[Any, int, int], None] = nothing
    steps: int = 3
    micros: int = 1
    lr: float = 0.1
    slow: bool = False
    sampled: bool = False


def backwards(case: Case, model: nn.Module, ranks: Iterable[int], world: int) -> Iterator[torch.Tensor]:
    """A step's last loss, averaged over ``ranks``, after all of its backwards; one step after another."""
    for step in range(case.steps):
        for micro in range(case.micros):
            case.before(model, step, case.micros - 1 - micro)
            inputs = case.inputs(step * case.micros + micro, world)
            loss = torch.stack([case.loss(model, inputs[rank]) for rank in ranks]).mean() / case.micros
            loss.backward()
        yield loss.detach()


def made(case: Case) -> nn.Module:
    """Its model, the same each time."""
    torch.manual_seed(5)
    return case.make()


def run_of(case: Case, model: nn.Module) -> Run:
    """SGD of all parameters, also of those that are frozen at first."""
    return Run(model, torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.9))


def beside_one_process(rank: int, world: int, name: str, transport: str) -> None:
    """Losses, gradients and weights are those of one process that sees all ranks' inputs; after each step
    everything is at rest."""
    set_transport(transport)
    case = CASES[name]
    model, reference = made(case), made(case)
    case.shard(model)
    ours, theirs = run_of(case, model), run_of(case, reference)
    roots = [model] if isinstance(model, FSDPModule) else list(model.children())
    steps = backwards(case, model, [rank], world), backwards(case, reference, range(world), world)
    for loss, expected in zip(*steps, strict=True):
        assert abs(mean_over_ranks(loss) - expected) <= 1e-6 * max(1, abs(expected) / 10)
        assert all(stats(root).unsharded_nbytes == 0 for root in roots)
        assert_same_grads(model, reference)
        both_step(ours, theirs)
    case.look(model, rank, world)


def trained(name: str, number: int, rank: int, place: Any) -> list[torch.Tensor]:
    """Losses, gradients and shards of this rank in two steps. place: as of tests/device/cases.py."""
    case, seen, world = CASES[name]._replace(steps=2), [], dist.get_world_size()
    with _disable_current_modes():
        model = made(case)
        inputs = [case.inputs(number, world).clone() for number in range(case.steps * case.micros)]
    case.shard(model)
    place.sharded(model)
    run = run_of(case, model)
    case = case._replace(inputs=lambda number, _: inputs[number].to(place.device))
    for loss in backwards(case, model, [rank], world):
        seen += [loss, *(p.grad.to_local().clone() for p in model.parameters() if p.grad is not None)]
        run.step()
    return place.read(seen + [param.detach().to_local() for param in model.parameters()])


# ---- models


class Checkpointed(nn.Module):
    """Blocks whose forwards are recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(13, 13)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Scaled(nn.Module):
    """A layer, and a scale whose group has nothing else: it is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Formats(nn.Module):
    """A channels-last convolution, a transposed and a strided weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(7, 5).t() * 0.3)
        self.strided = nn.Parameter(torch.randn(7, 14)[:, ::2] * 0.3)
        assert not self.transposed.is_contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3)) @ self.transposed @ self.strided


class Branching(nn.Module):
    """Calls one block twice, another only where ``runs`` says so, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.sometimes = Block(), Block()
        self.runs = True

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.shared(x)
        if self.runs:
            x = self.sometimes(x)
        return {"out": self.shared(x)}


class Adapter(nn.Module):
    """A frozen weight beside trainable ones in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(13, 13)
        self.base.requires_grad_(False)
        self.down = nn.Linear(13, 3, bias=False)
        self.up = nn.Linear(3, 13, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Lists(nn.Module):
    """Modules in lists and dicts, which have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(13, 4), "b": nn.ModuleList([nn.Linear(13, 4)])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x) + self.heads["b"][0](x)


class Hinted(Decoder):
    """A decoder that says of itself what models of transformers say, and owns a parameter itself."""

    _no_split_modules = ("Block",)
    _fsdp_plan: ClassVar = {"norm": "keep_full_weight", "head": "keep_full_weight"}

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) / self.temperature


@dataclasses.dataclass
class Record:
    """A container that torch's pytree doesn't know."""

    out: torch.Tensor
    more: dict


class Opaque:
    """Another, which no field tells of."""

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "a dataclass": (lambda y: Record(y, {"n": 1}), lambda r: r.out),
    "an object": (Opaque, lambda r: r._held),
    "a container of containers": (
        lambda y: [({"a": Record(y, {})},), Opaque([1, y])],
        lambda r: r[0][0]["a"].out + r[1]._held[1] * 0.5,
    ),
    "a set": (lambda y: {y}, lambda r: next(iter(r))),
    "a view that is changed in place": (lambda y: y[:, :], lambda y: y.mul_(1.5)),
    "a tensor that is changed in place": (lambda y: y, lambda y: y.add_(1.0)),
}


class Wraps(nn.Module):
    """Gives its result in a container, and takes its input out of one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Block()
        self.wrap, self.unwrap = CONTAINERS[kind]

    def forward(self, x: Any) -> Any:
        return self.wrap(self.block(x if isinstance(x, torch.Tensor) else self.unwrap(x)))


def perceptrons() -> nn.Sequential:
    """Of smooth layers, which have second derivatives."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)) for _ in range(3)))


def penalised(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A loss with the norm of its own gradient, and another forward between the two backwards."""
    inputs = inputs.clone().requires_grad_(True)
    slope = torch.autograd.grad(model(inputs).pow(2).sum(), inputs, create_graph=True)[0]
    return slope.pow(2).sum() + model(inputs * 2).sum()


def wrapping(kind: str) -> nn.Sequential:
    return nn.Sequential(*(Wraps(kind) for _ in range(3)))


def unwrapped(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return model[0].unwrap(model(x)).square().mean()


def of_its_dict(model: Branching, x: torch.Tensor) -> torch.Tensor:
    return model(x)["out"].square().mean()


def adapters() -> nn.Sequential:
    return nn.Sequential(*(Adapter() for _ in range(3)))


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)))


def pair() -> nn.ModuleList:
    return nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block())])


def in_turn(models: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The loss of one through the other."""
    return models[1](models[0](x)).square().mean()


# ---- what shards them, what is said before a microbatch, and what is looked at afterwards


def over(*shape: int, **options: Any) -> Callable[[Decoder], None]:
    """A mesh of that shape; a size may be -1."""

    def shard(model: Decoder) -> None:
        rest = dist.get_world_size() // -prod(shape) if -1 in shape else 0
        sizes = tuple(rest if size == -1 else size for size in shape)
        names = None if options else ("replicate", "shard")  # a mesh needs none
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        shard_decoder(model, fully_shard, mesh=mesh, **options)
        if options.get("reshard_after_forward") is None:
            assert model.norm.weight.placements == (Replicate(), Shard(0))

    return shard


def on_channels(model: Formats) -> None:
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 4 else None)


def of_process_groups(model: Decoder) -> None:
    shard_decoder(model, fully_shard, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))


def last_dim(param: torch.Tensor) -> Shard | None:
    """A ``shard_placement_fn``."""
    return Shard(param.ndim - 1) if param.ndim else None


def on_the_last_dim(model: Decoder) -> None:
    shard_decoder(model, fully_shard, shard_placement_fn=last_dim)
    assert model.head.weight.placements == (Shard(1),)
    part = -(-WIDTH // dist.get_world_size())
    expected = max(0, min(part, WIDTH - dist.get_rank() * part))
    assert model.head.weight.to_local().shape[1] == expected


def parts_of_lists(model: Lists) -> None:
    assert fully_shard(model.blocks) is model.blocks
    fully_shard(model.heads)
    fully_shard(model)
    assert stats(model).num_groups == 4
    assert isinstance(model.heads["b"][0], FSDPModule)


def each_alone(models: nn.ModuleList) -> None:
    sharded(models[0])
    fully_shard(models[1])


def second_alone(model: nn.Sequential) -> None:
    sharded(model, [model[1]])


def in_parts(model: nn.Module) -> None:
    sharded(model, model.children())


def groups_of(model: nn.Module) -> list[list[str]]:
    """Names of the parameters of each group."""
    return [[param.name for param in row.params] for row in explain(model).groups]


def names_in(number: int) -> list[str]:
    """Of a decoder's block."""
    parts = ["scale", "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
    return [f"blocks.{number}.{part}" for part in parts]


ENDS = ["norm.weight", "norm.bias", "head.weight"]
AUTO = [names_in(0), names_in(1), names_in(2), ["embedding.weight"], ENDS]


def grouped(groups: Any, expected: list[list[str]]) -> Callable[[Decoder], None]:
    """As ``groups`` says, by the names of their parameters."""

    def shard(model: Decoder) -> None:
        assert fully_shard(model, groups=groups) is model
        assert sorted(map(sorted, groups_of(model))) == sorted(map(sorted, expected))

    return shard


def told(*setters: str) -> Callable[[Any, int, int], None]:
    """Setters are told whether a microbatch is its step's last; until then gradients wait where they must."""

    def before(model: Any, step: int, left: int) -> None:
        if isinstance(model, FSDPModule):
            assert left == 2 or "set_is" in setters[-1] or all(waits(param) for param in model.parameters())
            for setter in setters:
                getattr(model, setter)(left == 0)

    return before


def branch(model: Branching, step: int, left: int) -> None:
    model.runs = step % 2 == 0


def freeze(model: nn.Sequential, step: int, left: int) -> None:
    """After two steps one is unfrozen, and one that trained is frozen."""
    if step == 2:
        model[1].base.requires_grad_(True)
        model[2].up.requires_grad_(False)


def collected(model: nn.Module, rank: int, world: int) -> None:
    """The first rank gets the whole state dict."""
    state = full_state_dict(model)
    assert bool(state) == (rank == 0)
    for name, param in model.named_parameters():
        whole = full(param)
        assert rank or torch.equal(state[name], whole)


def copies_are_equal(model: Decoder, rank: int, world: int) -> None:
    """Bit for bit; and the whole state dict is there."""
    collected(model, rank, world)
    for param in model.parameters():
        group = param.device_mesh.get_group(0)
        others = [torch.empty_like(param.to_local()) for _ in range(group.size())]
        dist.all_gather(others, param.to_local().detach().contiguous(), group=group)
        assert all(torch.equal(other, others[0]) for other in others)


def stays(does: bool) -> Callable[[Decoder, int, int], None]:
    """Whether anything is unsharded after an evaluation: of a world of one everything, as by False."""

    def look(model: Decoder, rank: int, world: int) -> None:
        with torch.no_grad():
            loss_of(model, batches(0, world)[rank])
        assert (stats(model).unsharded_nbytes > 0) == does

    return look


# ---- the table

tied = partial(build, tied=True)
decoder = partial(Case, loss=loss_of, inputs=batches)
ON_LAST = {"shard_placement_fn": last_dim}
SMALLER: list[tuple[int, int, dict]] = [
    (2, 4, {}),
    (2, 4, ON_LAST),
    (1, 4, {}),
    (4, 4, {}),
    (1, 3, ON_LAST),
    (2, 2, {}),
]
"""Ranks to which is resharded, of how many, and how."""
ONE_ALL_REDUCE = ("set_is_last_backward", "set_requires_all_reduce")
BY_SIZE = [[*names_in(0), *names_in(1), *names_in(2)], *AUTO[3:]]
BY_NAME = [["head.weight"], ["blocks.1.up.weight", "embedding"], ["blocks.0", "blocks.1"]]
SO_NAMED = [
    ["head.weight"],
    ["blocks.1.up.weight", "embedding.weight"],
    [*names_in(0), *(name for name in names_in(1) if "up.weight" not in name)],
    [*names_in(2), *ENDS[:2]],
]
CUT_UP = [["head.weight", "norm.weight", "norm.bias"], ["blocks.0.up.weight"], ["blocks.0.up.bias"]]
"""One module's parameters in two groups: both are unsharded around it."""

CASES: dict[str, Case] = {
    "a decoder": decoder(build, sharded, on(1, 2, 3, 4), sampled=True),
    "tied ends": decoder(tied, sharded, on(1, 2, 3, 4, transports=TRANSPORTS), sampled=True),
    "never resharded": decoder(build, partial(sharded, reshard_after_forward=False), on(2), slow=True),
    "always resharded": decoder(build, partial(sharded, reshard_after_forward=True), on(2)),
    "a mesh of process groups": decoder(build, of_process_groups, on(2)),
    "reduced once": decoder(build, sharded, on(1, 2, 3), before=told("set_requires_gradient_sync"), micros=3),
    "reduced in each microbatch": decoder(build, sharded, on(2), micros=2),
    "reduced after backwards": decoder(
        build, sharded, on(1, 2, 3), before=told("set_is_last_backward"), micros=3
    ),
    "one all-reduce over copies": decoder(
        build, over(2, -1), on(2, 4), before=told(*ONE_ALL_REDUCE), micros=3
    ),
    "recomputed": Case(partial(Checkpointed, False), sharded, on(2, 3), slow=True),
    "recomputed, reentrant": Case(partial(Checkpointed, True), sharded, on(2, 3)),
    "a penalty on the gradient": Case(perceptrons, sharded, on(1, 2, 4), penalised, vectors(4, 7), lr=1e-3),
    "cut on the last dim": decoder(
        build, on_the_last_dim, on(1, 2, 3, 4) + on(3, transports=TRANSPORTS[1:]), look=collected
    ),
    **{
        f"a scalar alone over {each}": Case(Scaled, in_parts, on(2, transports=[each]), inputs=vectors(2, 6))
        for each in TRANSPORTS
    },
    "channels last and strided": Case(Formats, on_channels, on(1, 2, 3, 4), inputs=vectors(2, 3, 6, 6)),
    **{
        f"{copies} copies of {shards} shards": decoder(
            tied,
            over(copies, shards),
            on(copies * shards),
            look=copies_are_equal,
            slow=(copies, shards) != (2, 2),
        )
        for copies, shards in ((2, 1), (1, 2), (2, 2), (4, 1), (3, 1))
    },
    **{
        f"resharded to {size} of {world}{', on the last dim' * bool(options)}": decoder(
            tied,
            partial(sharded, reshard_after_forward=size, **options),
            on(world),
            look=stays(size == 1),
            slow=(size, world, options) != (2, 4, {}),
        )
        for size, world, options in SMALLER
    },
    "copies resharded": decoder(
        tied, over(2, 2, reshard_after_forward=2, **ON_LAST), on(4), look=stays(False), slow=True
    ),
    **{
        kind: Case(
            partial(wrapping, kind),
            partial(sharded, reshard_after_forward=True),
            on(2),
            unwrapped,
            slow="of containers" not in kind,
        )
        for kind in CONTAINERS
    },
    "lists and dicts of modules": Case(Lists, parts_of_lists, on(1, 2, 3)),
    "a list as the root": Case(pair, lambda models: fully_shard([*models]), on(1, 2, 3), in_turn),
    "one model through another": Case(pair, each_alone, on(2), in_turn),
    "called twice or sometimes": Case(Branching, in_parts, on(1, 2, 3), of_its_dict, before=branch, steps=4),
    "frozen in turn": Case(adapters, sharded, on(1, 2, 3), before=freeze, steps=4),
    "its input changed in place": Case(in_place, second_alone, on(2), inputs=vectors(3, 4)),
    "grouped by lists": decoder(build, grouped("auto", AUTO), on(1, 2, 3, 4)),
    "grouped by lists, tied ends": decoder(tied, grouped("auto", [*AUTO[:4], ENDS[:2]]), on(2), slow=True),
    "grouped by class": decoder(build, grouped(Grouping(classes=(Block,)), AUTO), on(2), slow=True),
    "grouped by size": decoder(build, grouped(Grouping(least_nbytes=4000), BY_SIZE), on(2)),
    "grouped by name": decoder(build, grouped(BY_NAME, SO_NAMED), on(2), slow=True),
    "one module in two groups": decoder(
        build, lambda model: fully_shard(model, groups=CUT_UP), on(2), slow=True
    ),
    "grouped by its hints": decoder(Hinted, grouped("auto", [*AUTO, ["temperature"]]), on(2)),
}
