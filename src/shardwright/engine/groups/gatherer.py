"""How a group is gathered: one value, chosen in one place, with the reasons why not what was asked.

    whole          every rank's shards, over the axis; by the caller's own collective, where there is one
    smaller world  the shards kept after the forward, over a part of the axis (``reshard_after_forward=int``)
    rows in use    of a lookup's weight, over the axis (``SchedulePolicy.row_wise``)
    decoded        codes and scales, or what a tensor subclass gives; the weights are made on arrival

The first two go with the last; rows in use go with none of the others.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardwright.params.param import ShardedParam
from shardwright.policy import MixedPrecisionPolicy, SchedulePolicy
from shardwright.quantized import encodings
from shardwright.schedule.layout import ParamLayout
from shardwright.transport.base import Comm, Gather, Segment
from shardwright.transport.differences import WHOLE, Sends, differences_of
from shardwright.transport.mesh import Axis

if TYPE_CHECKING:
    from shardwright.engine.groups.decoding import Decoding
    from shardwright.params.rows import Rows
    from shardwright.params.smaller_world import SmallerWorld

logger = logging.getLogger(__name__)

PlaceOf = Callable[[ShardedParam, ParamLayout], Segment]
"""The memory that a parameter is gathered into, laid out over the axis or over a smaller world."""


@dataclass(frozen=True)
class GatherOptions:
    """What was asked of a group's collectives.

    smaller_world: the transport among the ranks that keep shards between forward and backward, or None.
    all_gather, reduce_scatter: the caller's own, or None. row_wise: the policy by which a lookup's group
        moves only rows in use, or None. stays: it is kept unsharded from forward to backward. sends: what
        its collectives send over a network, by ``SchedulePolicy.wire``.
    """

    smaller_world: Comm | None = None
    all_gather: Any = None
    reduce_scatter: Any = None
    row_wise: SchedulePolicy | None = None
    stays: bool = False
    sends: Sends = WHOLE


class NothingDecoded:
    """In place of a ``Decoding`` where parameters are gathered as they are used: there is nothing to do."""

    is_idle = True
    frozen = pairs = extended = ()
    parts: frozenset[ShardedParam] = frozenset()
    faces: Mapping[ShardedParam, nn.Parameter] = MappingProxyType({})
    dense_nbytes = arrival_nbytes = held_nbytes = 0

    def bind(self) -> None:
        """There are no buffers to lay out."""


class Gatherer:
    """How ``params`` are gathered, for as long as they and what was asked stay the same. See ``choose``.

    comm: the transport over the axis, or the caller's collectives in its place; gradients go by it, too.
    smaller_world: where shards are kept between forward and backward, or None. rows: what moves only rows in
        use, or None. decoding: the weights that are decoded on arrival. sends: what they do send. unmet:
        for what was asked and can't be, a sentence each that says why.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        axis: Axis,
        precision: MixedPrecisionPolicy,
        options: GatherOptions,
        before: "Gatherer | None" = None,
    ) -> None:
        """before: of the same parameters, whose memory and kept shards stay."""
        self.options = options
        self.params = params
        self.comm: Comm = axis.comm
        if options.all_gather is not None or options.reduce_scatter is not None:
            from shardwright.transport.custom import CustomComm  # noqa: PLC0415 replaced collectives

            self.comm = CustomComm(axis.comm, axis.group, options.all_gather, options.reduce_scatter)
        self.decoding: Decoding = cast(Any, NothingDecoded())  # it has what is asked of one that is idle
        if before is not None:
            self.decoding = before.decoding
        elif any(p.extended or any(encodings(site.module) for site in p.sites) for p in params):
            from shardwright.engine.groups import decoding  # noqa: PLC0415 encoded weights

            self.decoding = decoding.Decoding(params, precision, axis.device)
        unmet: list[str] = []
        self.smaller_world: SmallerWorld | None = None
        if options.smaller_world is not None:
            kept = None if before is None else before.smaller_world
            if self.decoding.extended:
                first, asked = self.decoding.extended[0].fqn, options.smaller_world.world
                unmet.append(
                    f"it is resharded to all {axis.world} ranks after forward, not to {asked}: the class of "
                    f"{first!r} says itself what is gathered"
                )
            elif kept is not None and kept.comm is options.smaller_world:
                self.smaller_world = kept
            else:
                from shardwright.params import smaller_world  # noqa: PLC0415 that world

                self.smaller_world = smaller_world.SmallerWorld(options.smaller_world, params)
        self.rows: Rows | None = None
        if options.row_wise is not None and axis.world > 1:
            why = self._why_no_rows(options.row_wise)
            if why and options.row_wise.row_wise:
                unmet.append(f"it moves whole weights, not rows in use: {why}")
            elif not why:
                from shardwright.params import rows  # noqa: PLC0415 rows alone

                self.rows = rows.Rows(params[0].layout)
        self.sends = options.sends
        if options.sends != WHOLE and axis.world > 1:
            why = self.comm.why_plain or options.sends.why
            if self.rows is not None:
                why = "it moves rows in use"
            self.sends = WHOLE if why else options.sends
            if why:
                unmet.append(f"its all-gathers send whole shards, not what has changed of them: {why}")
        self.unmet = tuple(unmet)

    def choose_sends(self, segments: Sequence[Segment]) -> None:
        """Have the transport send of these what ``sends`` says, from their next all-gather on."""
        differences = differences_of(self.comm)
        if differences is not None:
            differences.send(segments, self.sends)

    def _why_no_rows(self, policy: SchedulePolicy) -> str:
        if len(self.params) > 1:
            return "it has other parameters; call fully_shard on the embedding by itself"
        why = self.why_no_rows_of(self.params[0], policy)
        if not why and self.options.stays:
            why = (
                "it stays unsharded after its forward (reshard_after_forward=False, or the outermost module)"
            )
        return why

    def why_no_rows_of(self, param: ShardedParam, policy: SchedulePolicy) -> str:
        """Why a lookup's weight can't move rows in use only, by itself: other code could read it while it is
        unsharded, or it isn't in rows; "" where it can."""
        module = param.sites[0].module
        if len(param.sites) > 1:
            return "its weight is tied, and another module reads all of it"
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            return "its forward changes the weight (max_norm)"
        is_even = param.layout.dim == 0 and param.layout.sizes is None
        if not is_even or param.inner is not None or param.split.on_host:
            return "its weight isn't sharded by rows on this device"
        if param in self.decoding.parts or param.extended:
            return "its weight is a tensor subclass that says itself what is gathered"
        if self.options.smaller_world is not None or self.options.all_gather or self.options.reduce_scatter:
            return "its collectives were replaced, or it is resharded to a smaller world"
        if param.layout.numel * param.local.element_size() <= policy.bucket_cap_nbytes:
            return f"it is small, and shares collectives instead (bucket_cap_mb={policy.bucket_cap_mb:g})"
        return ""

    @property
    def is_whole(self) -> bool:
        """Whether all of the group is gathered over the axis, always: it may share an all-gather then."""
        return self.smaller_world is None and self.rows is None

    def gather_part(self, kept: bool, place_of: PlaceOf, name: str) -> Gather | None:
        """Issue an all-gather of less than everything, where one will do; None: everything must be gathered.

        kept: all ranks of the smaller world have kept their shards, which are forgotten now.
        place_of: where to, in memory that is held. name: the group's, for messages.
        """
        if kept and self.smaller_world is not None:
            self.comm.go_on()  # the smaller world may be the second hop's: its launches keep one order
            return self.smaller_world.gather(place_of, f"all-gather {name} over the smaller world")
        if self.rows is None:
            return None
        (param,) = self.params
        return self.rows.gather(
            self.comm, param.local, place_of(param, param.layout).flat, f"all-gather {name}"
        )


def has_lookup(params: Sequence[ShardedParam]) -> bool:
    """Whether one of ``params`` is the weight of a module that looks up rows of it."""
    sites = (site for param in params for site in param.sites)
    return any(looks_up(site.module) and site.name == "weight" for site in sites)


def looks_up(module: nn.Module) -> bool:
    """Whether a module's class has the forward of ``nn.Embedding``."""
    return type(module).forward is nn.Embedding.forward


def is_lookup(module: nn.Module, output: Any) -> bool:
    """Whether a module has done nothing but look up rows of its weight, and that is its output: its backward
    reads nothing of the weight.

    Its class has the forward of ``nn.Embedding`` (one of its own may use the weight in ways that the output
    doesn't show), and no hook has changed the output since.
    """
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    return looks_up(module) and node is not None and node.name() == "EmbeddingBackward0"


def choose(
    name: str,
    params: Sequence[ShardedParam],
    axis: Axis,
    precision: MixedPrecisionPolicy,
    options: GatherOptions,
    before: Gatherer | None = None,
) -> Gatherer:
    """How the group ``name`` of ``params`` is gathered. Every rank decides the same, from what the group is
    and what was asked of it; no communication.

    before: how it is now, if its parameters are the same. What can't be is logged with the reason, once.
    """
    made = Gatherer(params, axis, precision, options, before)
    for reason in made.unmet:
        if before is None or reason not in before.unmet:
            logger.info("group %s: %s (said once)", name, reason)
    return made
