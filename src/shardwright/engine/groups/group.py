"""A group: parameters that share one all-gather and one reduce-scatter.

    stage        legal next      what it holds
    SHARDED      GATHERING       shards
    GATHERING    UNSHARDED       shards, and the buffer being filled (SHARDED, where that could not begin)
    UNSHARDED    SHARDED         shards, and the filled buffer; modules show the unsharded parameters

A group knows nothing of its neighbours, of the order they run in, or of hooks.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch

from shardwright.engine.groups.gatherer import Gatherer, GatherOptions, choose
from shardwright.engine.groups.reducer import Reducer
from shardwright.errors import StageError
from shardwright.params.binding import Bound, Buffer, FaceVersions, is_extended, moved_memory, own_buffer
from shardwright.params.param import ShardedParam, Versions
from shardwright.policy import MixedPrecisionPolicy
from shardwright.torch_private import local_of, num_dispatch_modes, parameters_of, version_of
from shardwright.transport.base import Gather, Segment
from shardwright.transport.mesh import Axis


class Stage(StrEnum):
    """Where a group's parameters are (see the table above)."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_MOVES = {
    Stage.SHARDED: (Stage.GATHERING,),
    Stage.GATHERING: (Stage.UNSHARDED, Stage.SHARDED),
    Stage.UNSHARDED: (Stage.SHARDED,),
}


class ParamGroup:
    """Parameters of one or several modules on one axis, moved together.

    name: for messages; of the first module. policy: replaced as a whole by setters, never edited.
    gatherer: how it is gathered, and what its quantised weights are decoded by. reducer: what becomes of the
        gradients.
    trainable: bits of the parameters that ask for a gradient, as of the last unshard. gather: the all-gather
        in flight, which ``wait`` waits for.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[ShardedParam],
        axis: Axis,
        policy: MixedPrecisionPolicy,
        options: GatherOptions | None = None,
    ) -> None:
        self.name = name
        self.params = tuple(params)
        self.axis = axis
        self.policy = policy
        self.gatherer = choose(name, self.params, axis, policy, options or GatherOptions())
        self.reducer = Reducer(name, self.params, axis, policy, self.gatherer)
        self.stage = Stage.SHARDED
        self.buffer: Buffer | None = None
        self.trainable = 0
        self._bound: Bound | None = None
        self.face_versions = FaceVersions()
        self.gather: Gather | None = None

    def rename(self, name: str) -> None:
        """Another name for messages: its group became part of a larger model."""
        self.name = self.reducer.name = name

    def request(self, **changes: Any) -> None:
        """Be gathered in another way from the next all-gather on: replaces fields of ``GatherOptions``."""
        options = replace(self.gatherer.options, **changes)
        if options != self.gatherer.options:
            self._choose(options, self.gatherer)

    def _choose(self, options: GatherOptions, before: Gatherer | None) -> None:
        self.gatherer = choose(self.name, self.params, self.axis, self.policy, options, before)
        self.reducer.gatherer = self.gatherer
        if self._bound is not None:
            self.gatherer.choose_sends(self._bound.segments)

    # ---- parameters

    def regroup(self, params: Sequence[ShardedParam]) -> None:
        """Hold ``params`` from now on; at rest."""
        self.params = self.reducer.params = tuple(params)
        self._choose(self.gatherer.options, None)
        self.buffer = self._bound = None
        self.face_versions = FaceVersions()

    @property
    def keeps_smaller(self) -> bool:
        """Whether this rank keeps its shard over the smaller world, of the parameters as they are now."""
        smaller = self.gatherer.smaller_world
        return smaller is not None and smaller.holds(self.shard_versions())

    @property
    def is_stale(self) -> bool:
        """Whether a shard has changed since the group was unsharded (an optimizer step, a load)."""
        return self.stage is not Stage.SHARDED and self.shard_versions() != self.face_versions.gathered

    def forget_copies(self) -> None:
        """Shards may have been written without a mark, as ``AdamW(fused=True)`` and ``.data`` do: what is
        gathered next is copied to the device anew, and gathered from all ranks."""
        for param in self.params:
            param.forget_device_copy()
        if self.gatherer.smaller_world is not None:
            self.gatherer.smaller_world.forget()

    def let_go(self) -> None:
        """Keep no reference to the memory of the shards, and no copy of them; at rest. It is taken anew."""
        self._bound = None
        self.face_versions.gathered = ()
        self.forget_copies()

    def shard_versions(self) -> Versions:
        """How often each shard was changed in place, and which tensor it is."""
        shards = [(param.sharded, local_of(param.sharded)) for param in self.params]
        return tuple([(id(local), version_of(local) + version_of(shard)) for shard, local in shards])

    @property
    def faces(self) -> tuple[torch.Tensor, ...]:
        """What modules show of each parameter while it is unsharded."""
        decoded = self.gatherer.decoding.faces
        return tuple([decoded.get(param, param.unsharded) for param in self.params])

    def _bind(self) -> Bound:
        """Follow what was done to the parameters, and list where they lie now."""
        for param in self.params:
            param.adopt()
        if any(param.split.on_host for param in self.params):
            from shardwright.params.offload import place_shards  # noqa: PLC0415 offloaded shards

            place_shards(self.params)
        if any(is_extended(param.local) != param.extended for param in self.params):
            from shardwright.params.subclass import follow_extensions  # noqa: PLC0415 such classes

            follow_extensions(self.params)
            self.regroup(self.params)
        buffered = [param for param in self.params if not param.extended]
        dtypes = [(param.compute_dtype(self.policy), param.sent_dtype(self.policy)) for param in buffered]
        bound = [(param.unsharded.dtype, param.own.dtype) for param in buffered if param.bound is not None]
        if self.buffer is None or dtypes != bound:
            self.buffer = None  # until all of them are bound to another
            decoding = self.gatherer.decoding
            decoding.bind()
            typed = [
                (param, *of)
                for param, of in zip(buffered, dtypes, strict=True)
                if param not in decoding.parts
            ]
            self.buffer = own_buffer(
                typed, self.axis.device, keeps_order=self.gatherer.smaller_world is not None
            )
        _check_materialised(self)
        return Bound(self.params, self.policy, self.gatherer.decoding.parts)

    # ---- the all-gather

    def prepare(self) -> None:
        """Before ``fill``: follow what was done to the parameters (replaced, frozen or unfrozen, cast).

        Raises: StageError for a parameter that is still on the meta device or was replaced by something else.
        """
        bound = self._bound
        if bound is None or bound.policy is not self.policy or not bound.is_current():
            self._bound = None  # where an error comes now, the next time begins here, too
            self._bound = bound = self._bind()
            # Of new segments nothing is kept, and the transport is told what to send.
            self.gatherer.choose_sends(bound.segments)
        for pair in self.gatherer.decoding.frozen:
            pair.check_frozen()
        self.trainable = bound.follow_freezing()

    def fill(self, kept: bool) -> list[Segment] | None:
        """Take the buffer and fill this rank's part; what an all-gather has to move, for ``receive``.

        None where an all-gather of less was issued here: over the smaller world, or of rows in use.
        kept: whether the ranks of the smaller world have kept their shards, and gather from those.
        """
        self._move(Stage.GATHERING)
        # Before the shards are read: what is written while they are copied is seen as a change since.
        before = self.face_versions.gathered
        versions = self.face_versions.gathered = self.shard_versions()
        gatherer, smaller = self.gatherer, self.gatherer.smaller_world if kept else None
        if num_dispatch_modes():
            from shardwright.transport.watched import Collective, notify_modes  # noqa: PLC0415 entered modes

            notify_modes((smaller or gatherer).comm, Collective.ALL_GATHER)
        if smaller is not None or gatherer.rows is not None:
            # All of it, also where a part is filled: tensors that autograd saves view the whole.
            self._take_buffer()
            gather = gatherer.gather_part(smaller is not None, ShardedParam.gather_segment, self.name)
            if gather is not None:
                self.gather = gather
                return None
        streams = gatherer.comm.streams
        if streams is None:
            return self._copy_in()
        # Of rows the buffer is memory of compute, whose earlier use the host has waited for, to count them.
        with streams.filling(changed=before != versions):
            segments = self._copy_in()
        streams.filled([segment.flat for segment in segments])
        return segments

    def _take_buffer(self) -> list[Segment]:
        """Take the memory that is gathered into; what of it extended parameters have filled."""
        assert self.buffer is not None
        self.buffer.alloc()
        return [] if self.gatherer.decoding.is_idle else self.gatherer.decoding.fill()

    def _copy_in(self) -> list[Segment]:
        """Take the buffer, and fill this rank's part; what is to be gathered."""
        assert self._bound is not None
        with torch.no_grad():
            segments = self._take_buffer()
            self._bound.copy_in()
        return segments + self._bound.segments

    def give_up(self) -> None:
        """Be at rest again where ``fill`` was not followed by an all-gather, since issuing it failed, or
        where what it brought could not be decoded."""
        assert self.buffer is not None
        if self.stage is Stage.GATHERING and self.gather is None:
            self._move(Stage.SHARDED)
            self._free()
            if self.gatherer.comm.streams is not None:
                self.gatherer.comm.streams.forget_filled()

    def wait(self) -> int:
        """Wait for the all-gather; from now on modules show the unsharded parameters.

        Returns the bytes of buffers that it held at most: while decoding, codes and decoded weights.
        Where waiting fails the all-gather stays in flight; where decoding does the group is at rest again.
        """
        assert self.gather is not None and self.buffer is not None and self._bound is not None
        self.gather.wait()
        self.gather = None
        held_nbytes, decoding = self.held_nbytes, self.gatherer.decoding
        # The smaller world's shards are taken of what was gathered, after the forward.
        keep_arrival = self.gatherer.smaller_world is not None
        try:
            self.buffer.arrive(keep_arrival)
            if not decoding.is_idle:
                held_nbytes -= decoding.held_nbytes
                held_nbytes += decoding.arrive(keep_arrival)
        except Exception:
            self.give_up()
            raise
        streams = self.axis.comm.streams
        if held_nbytes > self.held_nbytes and streams is not None:
            streams.release()  # what was gathered was given back once it was decoded
        self._move(Stage.UNSHARDED)
        self.face_versions.follow(self.faces, self.face_versions.gathered or self.shard_versions())
        self._bound.show(unsharded=True)
        if not decoding.is_idle:
            decoding.show()
        return held_nbytes

    def show_sharded(self) -> None:
        """Modules show the shards while the unsharded parameters are kept for the backward: between the two
        everything is as it would be after a reshard, but that memory."""
        if self.stage is Stage.UNSHARDED and not self.gatherer.decoding.frozen:
            assert self._bound is not None
            self._bound.show(unsharded=False)

    def show_unsharded(self) -> None:
        """Modules show the unsharded parameters again, where they show the shards."""
        # All of a group are shown together, so that one place tells.
        site = self.params[0].sites[0]
        shown = parameters_of(site.module).get(site.name)
        if self.stage is Stage.UNSHARDED and shown is self.params[0].sharded:
            assert self._bound is not None
            self._bound.show(unsharded=True)

    def write_back(self, unmarked: bool = False) -> None:
        """Copy this rank's rows of the unsharded parameters into the shards, where they were edited in place.

        With ``unmarked`` they are compared, since an edit of ``.data`` leaves no mark.
        """
        if self.stage is Stage.UNSHARDED:
            decoding = self.gatherer.decoding
            with torch.no_grad():
                for param, is_edited in zip(self.params, self.face_versions.edited(), strict=True):
                    if param in decoding.parts:
                        if is_edited:
                            decoding.write_back(param)
                    elif is_edited or (unmarked and not param.extended and param.differs):
                        param.write_back()
            self.face_versions.count(self.shard_versions())

    def follow_writes(self) -> None:
        """Before a backward of parameters that have stayed unsharded: of those whose shards were written
        since, what autograd has saved isn't what they are."""
        if self.stage is Stage.UNSHARDED and self.is_stale:
            self.face_versions.follow(self.faces, self.shard_versions())

    def reshard(self, smaller: bool = False) -> None:
        """Modules show the shards again, with what was edited; the buffer's memory is freed.

        smaller: keep shards over the smaller world, which the group has, for the next unshard.
        """
        if self.stage is Stage.GATHERING:
            self.wait()
        elif any(self.face_versions.edited()) and not self.is_stale:
            # Where the shards were written themselves since, by an optimizer, those stay.
            self.write_back()
        if smaller:
            assert self.gatherer.smaller_world is not None
            self.gatherer.smaller_world.keep(self.face_versions.gathered)
        follow_freezing(self)
        self._move(Stage.SHARDED)
        assert self._bound is not None
        self._bound.show(unsharded=False)
        self._free()
        # After all is at rest, so that the error leaves nothing half done.
        moved = moved_memory(self.params, self.faces)
        if moved is not None:
            self.let_go()
            self.buffer = None
            raise moved

    def _free(self) -> None:
        assert self.buffer is not None
        self.face_versions.hide()
        self.buffer.free()
        if not self.gatherer.decoding.is_idle:
            self.gatherer.decoding.free()
        if self.axis.comm.streams is not None:
            self.axis.comm.streams.release()  # the next gather follows what compute still reads of it

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the buffers while unsharded (0 before the first unshard)."""
        return 0 if self.buffer is None else self.buffer.nbytes + self.gatherer.decoding.dense_nbytes

    @property
    def arriving_nbytes(self) -> int:
        """Bytes of the buffers as an all-gather arrives: of what is used, and what came in another form."""
        arrival = None if self.buffer is None else self.buffer.arrival
        more_nbytes = self.gatherer.decoding.arrival_nbytes + (0 if arrival is None else arrival.nbytes)
        return self.unsharded_nbytes + more_nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes held now for unsharded parameters, or for their shards over a smaller world."""
        held = 0 if self.buffer is None else self.buffer.allocated_nbytes
        gatherer = self.gatherer
        if not gatherer.decoding.is_idle:
            held += gatherer.decoding.held_nbytes
        return held if gatherer.smaller_world is None else held + gatherer.smaller_world.held_nbytes

    @property
    def has_grads(self) -> bool:
        """Whether a backward has brought gradients that are not reduced yet."""
        return bool([p for p in self.params if p.bound is not None and p.bound.param.grad is not None])

    # ---- stages

    def _move(self, to: Stage) -> None:
        if to not in _MOVES[self.stage]:
            raise StageError(
                f"group {self.name!r} can't go from {self.stage} to {to}: "
                f"from {self.stage} it only goes to {' or '.join(_MOVES[self.stage])}"
            )
        self.stage = to


def gathered_nbytes(group: ParamGroup) -> int:
    """Bytes of all ranks' shards in the dtypes that are sent, except of subclasses that say what is
    gathered."""
    params = [param for param in group.params if param.layout.dim is not None and not param.extended]
    return sum([param.layout.numel * param.sent_dtype(group.policy).itemsize for param in params])


def grad_nbytes(group: ParamGroup) -> int:
    """Bytes of the gradients that a backward brings now, of unsharded parameters in the dtype at rest."""
    return sum(p.local.element_size() * p.layout.numel for p in group.params if p.trainable)


def restore(group: ParamGroup) -> None:
    """Bring a group to rest, wherever an interrupt has come; not what is being gathered, which the next use
    waits for."""
    was, bound = group.stage, group._bound
    if was is Stage.GATHERING and group.gather is not None:
        return
    if was is not Stage.SHARDED:
        group._move(Stage.SHARDED)
    if bound is not None and bound.shows_any(group.faces):
        bound.show(unsharded=False)
    if was is Stage.GATHERING:  # maybe issued, into memory that can't be used again before it has ended
        group.regroup(group.params)
    elif group.held_nbytes and group.buffer is not None:
        group._free()


def follow_freezing(group: ParamGroup) -> None:
    """Where the caller has frozen or unfrozen one face of a parameter since the last unshard, do so with the
    other: which of them modules show depends on where the group stands."""
    for place, param in enumerate(group.params):
        if param.bound is None:
            continue
        was, face = bool(group.trainable >> place & 1), param.bound.param
        if param.sharded.requires_grad != was or face.requires_grad != was:
            param.sharded.requires_grad_(not was)
            face.requires_grad_(not was)
            group.trainable ^= 1 << place


def _check_materialised(group: ParamGroup) -> None:
    names = [param.fqn for param in group.params if param.local.device.type == "meta"]
    if names:
        raise StageError(
            "FSDP parameters should be materialized from meta device before training, but the following "
            f"were still on meta device: {names} of group {group.name!r}. Before the first forward call "
            "model.to_empty(device=...), on the CPU or the accelerator, and initialise or load every one"
        )
    for param in group.params:
        if param.split.on_host and param.local.device.type != "cpu":
            raise StageError(
                f"Expected param to be on CPU: {param.fqn!r} is offloaded to the host but was moved to "
                f"{param.local.device}; leave out the .to() after sharding, or the offload"
            )
