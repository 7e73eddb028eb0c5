"""What a model is to the planner: what is computed between a step's events, and what that keeps. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shardwright.schedule.schedule import Event, EventKind, Phase


class OpKind(StrEnum):
    """What limits an operation: the units that multiply matrices, those in fused attention, memory, or links
    to other ranks that it waits for."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"
    EXCHANGE = "exchange"


class Op(NamedTuple):
    """Kernels of one kind and shape.

    flops: floating-point operations of all of them. nbytes: read and written. narrowest: of a matmul, the
    least of its three sizes. kernels: how many. dtype: that a matmul or an attention multiplies in, by
    torch's name; "float8" for each kind of 8 bits, and "tf32" for float32 where torch may take TF32. axis:
    of an exchange, "tp", "cp", "ep" or "pp" (``plan/axes.py``).
    """

    kind: OpKind
    flops: float = 0.0
    nbytes: float = 0.0
    narrowest: float = 1.0
    kernels: int = 1
    dtype: str = "bfloat16"
    axis: str = ""


class Stretch(NamedTuple):
    """What is computed from one event to the next.

    saved_nbytes: activations that live on after it, less those it frees. transient_nbytes: held besides, at
    most, inside of it. head: it is of the loss. gradients: bytes of parameters' gradients that are made in
    it, by group, where that is known; they are in neither of the others.
    """

    ops: tuple[Op, ...] = ()
    saved_nbytes: int = 0
    transient_nbytes: int = 0
    head: bool = False
    gradients: tuple[tuple[int, int], ...] = ()


class ParamSize(NamedTuple):
    """One parameter; ``itemsize``: bytes of an element at rest."""

    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    floating: bool = True


class GroupSize(NamedTuple):
    """What a group holds. numel: elements of its parameters. trained: of those that have a gradient.
    entry_nbytes: activations that its forward begins from, which is all it has to keep to be computed again.
    params: each by itself, where that is known. part_of: the group whose modules it runs with, of a group
    that is cut off that one and gathered when it is first read. frozen: elements of frozen weights that
    ``quantize_`` takes, and bytes of their codes in NF4; coded: the same of those that are codes at rest and
    on the wire. per_use: elements of the largest of these, if each is decoded only while it is read; 0: all
    are decoded with the group. elsewhere: elements of experts that other ranks of ep have: the ranks that a
    parameter is sharded over have shards of these too, and gather only their own.
    """

    name: str
    numel: int
    trained: int
    entry_nbytes: int = 0
    params: tuple[ParamSize, ...] = ()
    part_of: int | None = None
    frozen: tuple[int, int] = (0, 0)
    coded: tuple[int, int] = (0, 0)
    per_use: int = 0
    elsewhere: int = 0

    def at(self, itemsize: int) -> int:
        """Bytes of its parameters with so many for each element, except those that are codes."""
        return (self.numel - self.coded[0]) * itemsize + self.coded[1]

    def decoded(self, itemsize: int) -> int:
        """Bytes of what is decoded with the group, besides."""
        return 0 if self.per_use else self.coded[0] * itemsize


@dataclass(frozen=True)
class Workload:
    """A model, and one microbatch of it on one rank.

    groups: in the order in which schedules number them. phases: the events of each phase in their order, each
    with what is computed after it. Layers that are equal may share their ``Stretch``: it is priced once.
    root: the group of what lies right in the model itself; None: there is none. itemsize: bytes of an element
    of parameters while they are computed with. tokens: of the microbatch. outside_nbytes: of what
    there is before it: inputs, and buffers of modules. name: what people call the model. parameters: of the
    whole model, where ranks have parts of it; 0: ``numel``. earlier: where this is the last stage of a
    pipeline, any of those before it, of the same events.
    """

    groups: tuple[GroupSize, ...]
    phases: dict[Phase, tuple[tuple[Event, Stretch], ...]]
    root: int | None = None
    itemsize: int = 2
    tokens: int = 1
    outside_nbytes: int = 0
    name: str = "the model"
    parameters: int = 0
    earlier: "Workload | None" = None

    @property
    def orders(self) -> dict[Phase, tuple[Event, ...]]:
        """What a schedule is planned from."""
        return {phase: tuple(event for event, _ in entries) for phase, entries in self.phases.items()}

    @property
    def ran(self) -> tuple[int, ...]:
        """The groups in the order in which a forward begins them."""
        begun = (e.group for e, _ in self.phases[Phase.FORWARD] if e.kind is EventKind.FORWARD_BEGIN)
        return tuple(dict.fromkeys(begun))

    @property
    def of_root(self) -> tuple[int, ...]:
        """The root's group, and what is cut off it."""
        if self.root is None:
            return ()
        return (self.root, *(n for n, group in enumerate(self.groups) if group.part_of == self.root))

    @property
    def numel(self) -> int:
        """Parameters of all groups."""
        return sum(group.numel for group in self.groups)

    @property
    def elsewhere(self) -> int:
        """Those of experts that other ranks have."""
        return sum(group.elsewhere for group in self.groups)

    @property
    def trained(self) -> int:
        """Those of them that have a gradient."""
        return sum(group.trained for group in self.groups)
