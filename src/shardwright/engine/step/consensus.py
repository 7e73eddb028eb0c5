"""Consensus: the answers to the follower's syncs, from words that all ranks exchange on a channel.

A word of the channel is an int64, combined by OR. A number that must be equal on all ranks is sent with its
complement: ORed, they have a bit in common where two ranks differ. 0 and 0 says nothing.

    point | digest ~ | entry ~ | evaluated entry ~ | modes ~ | missing | not smaller
    | used | kept | gradients
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Sequence
from typing import NoReturn

from shardwright.engine.groups.gradient_state import GradPlace
from shardwright.engine.groups.group import Stage
from shardwright.engine.step.executor import Executor
from shardwright.errors import Diverged
from shardwright.schedule.recorded import bits
from shardwright.schedule.schedule import Event, EventKind, Phase
from shardwright.schedule.sync import (
    AllReduceMin,
    Answer,
    Broadcast,
    ConsensusResult,
    Diverge,
    Inspect,
    Recorded,
    RecordedOrder,
    Sync,
    Synchronize,
    SyncPoint,
)
from shardwright.transport.base import Comm
from shardwright.transport.channel import AxisChannel, Channel, JointChannel, broadcast
from shardwright.transport.mesh import Axis
from shardwright.transport.process import process_state

_WORD_BITS = 62
_OURS = ("shardwright", "torch", "threading", "contextlib", "functools")
_NAMES = {
    SyncPoint.FORWARD: "the forward",
    SyncPoint.EVALUATION: "an evaluation",
    SyncPoint.BACKWARD: "the backward",
    SyncPoint.BACKWARD_END: "the end of the backward",
    SyncPoint.JOIN_EVALUATIONS: "join_evaluations",
    SyncPoint.FORWARD_END: "the end of the forward",
}


class Consensus:
    """Answers syncs for the groups of one model. channel: None where this rank follows alone.

    names: of the outermost modules that have run, by entry. settles: what every rank must have said of the
    end of the next backward.
    """

    def __init__(self, executor: Executor, channel: Channel | None) -> None:
        self.names: dict[int, str] = {}
        self.settles = True
        self._executor = executor
        self._table = executor.table
        self._channel = channel
        self._compared = False
        self._comms = self._table.comms()
        groups = enumerate(self._table.groups)
        self._reshard_smaller = [index for index, group in groups if group.gatherer.smaller_world is not None]
        self._num_params = sum(len(group.params) for group in self._table.groups)

    def exchange(self, sync: Sync) -> Answer:
        """The answer to ``sync``. Every rank of the channel calls it, except with a sync that asks no other
        rank.

        Raises: Diverged, on every rank, where ranks are at different sync points.
        """
        if isinstance(sync, Inspect):
            return self._executor.inspect(sync.group)
        # Another rank may wait for the second hop of something that was begun here, before it comes to this
        # exchange.
        for comm in self._comms:
            comm.go_on()
        if isinstance(sync, Synchronize):
            return self._synchronize(sync)
        if isinstance(sync, AllReduceMin):
            return self._agreed.exchange([sync.code], "min")[0]
        if isinstance(sync, Diverge):
            self._diverge(sync.point, sync.entry, sync.digest)
        orders = self._broadcast(sync.order) if isinstance(sync, Broadcast) else (sync.order,)
        return Recorded(orders, self._table.specs())

    @property
    def _agreed(self) -> Channel:
        assert self._channel is not None
        return self._channel

    # ---- a meeting of all ranks

    def _synchronize(self, sync: Synchronize) -> ConsensusResult:
        if not self._compared:
            self._executor.compare()
            self._compared = True
        masks = self._masks(sync.point, sync.used)
        widths = [-(-count // _WORD_BITS) for count in (*[len(self._table.groups)] * 4, self._num_params)]
        words = [int(sync.point)]
        for value in self._equals(sync.point, sync.entry, sync.digest):
            words += (0, 0) if value is None else (value, ~value)
        for mask, width in zip(masks, widths, strict=True):
            words += [mask >> at & (1 << _WORD_BITS) - 1 for at in range(0, width * _WORD_BITS, _WORD_BITS)]
        words = self._agreed.exchange(words)
        points, equals, rest = SyncPoint(words[0]), words[1:9], words[9:]
        differ = any(equals[at] & equals[at + 1] for at in range(0, 8, 2))
        if SyncPoint.DEVIATES not in points and differ:
            self._diverge(sync.point, sync.entry, sync.digest)
        unions = []
        for width in widths:
            unions.append(sum(word << _WORD_BITS * place for place, word in enumerate(rest[:width])))
            rest = rest[width:]
        missing, not_smaller, used, kept, gradients = unions
        if points == SyncPoint.BACKWARD:
            self._executor.promote, self._executor.left = kept, gradients
        return ConsensusResult(points, equals[4], missing, not_smaller, used | kept, gradients)

    def _masks(self, point: SyncPoint, used: int) -> tuple[int, int, int, int, int]:
        """This rank's bits of ``missing``, ``not smaller``, ``used``, ``kept`` and ``gradients``, of what
        earlier microbatches have left; at the end of a backward, of what it has brought."""
        groups = self._table.groups
        if point in (SyncPoint.DEVIATES, SyncPoint.FORWARD_END):
            return 0, 0, 0, 0, 0
        if point is SyncPoint.BACKWARD_END:
            return 0, 0, 0, 0, self._joined([group.reducer.gradient_mask for group in groups])
        every = (1 << len(groups)) - 1
        missing = bits(index for index, group in enumerate(groups) if group.stage is Stage.SHARDED)
        if point not in (SyncPoint.FORWARD, SyncPoint.BACKWARD):
            return missing, every, 0, 0, 0
        kept = [index for index in self._reshard_smaller if groups[index].keeps_smaller]
        not_smaller = every - bits(kept)
        if point is SyncPoint.FORWARD:
            return missing, not_smaller, 0, 0, 0
        kept = bits(
            index for index, group in enumerate(groups) if group.reducer.gradients.of(GradPlace.ACCUMULATING)
        )
        always = bits(i for i, group in enumerate(groups) if group.reducer.policy.unused_params)
        left = self._joined([group.reducer.left_mask for group in groups])
        return missing, not_smaller, used | always, kept, left

    def _joined(self, masks: list[int]) -> int:
        """The bits of all parameters, of those of each group's."""
        joined = 0
        for group, mask in zip(reversed(self._table.groups), reversed(masks), strict=True):
            joined = joined << len(group.params) | mask
        return joined

    def _equals(self, point: SyncPoint, entry: int, digest: int) -> tuple[int | None, ...]:
        """What must be equal on all ranks: what they agreed on, the module that runs, how gradients go."""
        if point is SyncPoint.DEVIATES:
            return None, None, None, None
        evaluates = point is SyncPoint.EVALUATION
        runs = point not in (SyncPoint.JOIN_EVALUATIONS, SyncPoint.FORWARD_END)
        # A rank that left a step of the optimizer out (its loss was nan, say) has other weights from then on.
        modes = self._table.num_steps if point is SyncPoint.FORWARD else None
        if point is SyncPoint.BACKWARD:
            policies = [(group.reducer.policy, group.trainable) for group in self._table.groups]
            # Of bools and ints: unlike that of a string, their hash is the same in every process.
            modes = hash((self.settles, *((p.reduce, p.all_reduce, trainable) for p, trainable in policies)))
        return digest, entry if runs and not evaluates else None, entry if evaluates else None, modes

    def _broadcast(self, order: RecordedOrder | None) -> tuple[RecordedOrder, ...]:
        """The orders that ranks have recorded, each once, on every rank."""
        data = None if order is None else json.dumps(order, separators=(",", ":")).encode()
        key = int.from_bytes(hashlib.sha256(data or b"").digest()[:7], "big")
        told = broadcast(self._agreed, key, data)
        return tuple(_read(told[key]) for key in sorted(told))

    def _diverge(self, point: SyncPoint, entry: int, digest: int) -> NoReturn:
        """Raises: Diverged, the same on every rank, with the calls of all."""
        name = self.names.get(entry, "")
        what = _NAMES[point]
        if name and point is not SyncPoint.JOIN_EVALUATIONS:
            what = f"{what} of {name}"
        if point is SyncPoint.FORWARD:
            what += f", after {self._table.num_steps} steps of optimizers"
        policies = [group.reducer.policy for group in self._table.groups]
        if point is SyncPoint.BACKWARD:
            reduced = sum(policy.reduce for policy in policies)
            trained = sum(group.trainable.bit_count() for group in self._table.groups)
            what += f", reducing {reduced} of {len(policies)} groups, {trained} trainable parameters"
        kind = zlib.crc32(f"{what} {digest} {self._equals(point, entry, digest)}".encode())
        rank = self._table.groups[0].axis.mesh.get_rank()
        text = f"rank {rank}: {what}, of pass {process_state.step} ({_user_line()})"
        told = broadcast(self._agreed, kind << 31 | rank, text.encode(), lambda key: key >> 31)
        said = sorted(told.items(), key=lambda pair: pair[0] & 0x7FFFFFFF)
        lines = "\n".join(f"  {text.decode(errors='replace')}" for _, text in said)
        raise Diverged(
            f"ranks are in different calls (one rank of each kind is shown):\n{lines}\n"
            "Every rank must train, step optimizers, evaluate and save at the same places of its program, "
            "with the same settings; only the groups that it uses and the number of its evaluations may vary"
        )


def _user_line() -> str:
    """``file:line`` of the innermost frame that is neither Shardwright's nor PyTorch's."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread of autograd's"


def _read(data: bytes) -> RecordedOrder:
    entry, phase, events = json.loads(data)
    return RecordedOrder(entry, Phase(phase), tuple(Event(EventKind(kind), group) for kind, group in events))


def channel_of(axes: Sequence[Axis]) -> Channel | None:
    """The channel of all ranks that share parameters on these axes; None where this rank is alone.

    Every rank of the axes calls it. It runs on the host, wherever the parameters are.
    """
    found: dict[Comm, AxisChannel] = {}
    for axis in axes:
        for comm in (axis.comm, axis.replicate):
            if comm is not None and comm.world > 1 and comm not in found:
                found[comm] = AxisChannel(comm)
    if not found:
        return None
    ascending = [found[comm] for comm in sorted(found, key=lambda comm: comm.world)]
    return ascending[0] if len(ascending) == 1 else JointChannel(ascending)
