"""The hands of a :class:`Participant`: a model's groups, and the channel that its ranks agree over.

A word of the channel is an int64, combined by OR. A number that must be equal on all ranks is sent with its
complement: ORed, they have a bit in common where two ranks differ. 0 and 0 says nothing.

    calls | digest ~ | entry ~ | evaluated entry ~ | modes ~ | missing | far | used | kept | brought
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NoReturn

from shardwright.engine import batches as together
from shardwright.engine.caller import user_line
from shardwright.engine.executor import GroupTable
from shardwright.engine.group import Stage, keeps_grads
from shardwright.errors import Diverged
from shardwright.schedule.hands import Call, Said, bits
from shardwright.schedule.recorded import Orders, Told
from shardwright.schedule.schedule import Action, ActionKind, Event, EventKind, GroupFacts, Phase
from shardwright.transport.base import Comm
from shardwright.transport.channel import AxisChannel, Channel, JointChannel, tell
from shardwright.transport.launches import here
from shardwright.transport.mesh import Axis

_WORD_BITS = 62
_NAMES = {
    Call.FORWARD: "the forward",
    Call.EVALUATION: "an evaluation",
    Call.BACKWARD: "the backward",
    Call.SETTLE: "the end of the backward",
    Call.REST: "join_evaluations",
    Call.END: "the end of the forward",
}


class TableHands:
    """``Hands`` on the groups of one model.

    names: of the outermost modules that have run, by entry. settles: what every rank must have said of the
    end of the next backward.
    """

    def __init__(self, table: GroupTable, orders: Orders, channel: Channel) -> None:
        self.table = table
        self.orders = orders
        self.names: dict[int, str] = {}
        self.settles = True
        self._channel = channel
        self._compared = False
        self._kept = 0
        self._nearby = [index for index, group in enumerate(table.groups) if group.near is not None]
        self._shifts = [0]
        for group in table.groups:
            self._shifts.append(self._shifts[-1] + len(group.params))

    # ---- words

    def meet(self, call: Call, entry: int, used: int) -> Said:
        """See ``Hands.meet``."""
        if not self._compared:
            self.table.compare()
            self._compared = True
        masks = self._masks(call, used)
        widths = [-(-count // _WORD_BITS) for count in (*[len(self.table.groups)] * 4, self._shifts[-1])]
        words = [int(call)]
        for value in self._equals(call, entry):
            words += (0, 0) if value is None else (value, ~value)
        for mask, width in zip(masks, widths, strict=True):
            words += [mask >> at & (1 << _WORD_BITS) - 1 for at in range(0, width * _WORD_BITS, _WORD_BITS)]
        words = self._channel.exchange(words)
        calls, equals, rest = Call(words[0]), words[1:9], words[9:]
        if Call.DEVIATES not in calls and any(equals[at] & equals[at + 1] for at in range(0, 8, 2)):
            self.diverged(call, entry)
        unions = []
        for width in widths:
            unions.append(sum(word << _WORD_BITS * place for place, word in enumerate(rest[:width])))
            rest = rest[width:]
        missing, far, used, kept, brought = unions
        if calls == Call.BACKWARD:
            self._kept = kept
        return Said(calls, equals[4], missing, far, used | kept, brought)

    def _masks(self, call: Call, used: int) -> tuple[int, int, int, int, int]:
        """This rank's bits of ``missing``, ``far``, ``used``, ``kept`` and ``brought``."""
        groups = self.table.groups
        if call in (Call.DEVIATES, Call.END):
            return 0, 0, 0, 0, 0
        if call is Call.SETTLE:
            shifted = zip(groups, self._shifts, strict=False)
            return 0, 0, 0, 0, sum(group.reducer.brought << shift for group, shift in shifted)
        missing = bits(index for index, group in enumerate(groups) if group.stage is Stage.SHARDED)
        if call is not Call.BACKWARD:
            return missing, (1 << len(groups)) - 1, 0, 0, 0
        far = (1 << len(groups)) - 1 - bits(index for index in self._nearby if groups[index].is_near)
        kept = bits(index for index, group in enumerate(groups) if group.reducer.joined.keeps)
        always = bits(i for i, group in enumerate(groups) if group.reducer.policy.unused_params)
        return missing, far, used | always, kept, 0

    def _equals(self, call: Call, entry: int) -> tuple[int | None, ...]:
        """What must be equal on all ranks: what they agreed on, the module that runs, how gradients go."""
        if call is Call.DEVIATES:
            return None, None, None, None
        evaluates = call is Call.EVALUATION
        runs = call not in (Call.REST, Call.END)
        modes = None
        if call is Call.BACKWARD:
            policies = [(group.reducer.policy, group.trainable) for group in self.table.groups]
            modes = hash((self.settles, *((p.reduce, p.all_reduce, trainable) for p, trainable in policies)))
        return (
            self.orders.digest,
            entry if runs and not evaluates else None,
            entry if evaluates else None,
            modes,
        )

    def least(self, code: int) -> int:
        """See ``Hands.least``."""
        return self._channel.exchange([code], "min")[0]

    def tell(self, order: Told | None) -> list[Told]:
        """See ``Hands.tell``. Ranks that went the same way say it once."""
        data = None if order is None else json.dumps(order, separators=(",", ":")).encode()
        key = int.from_bytes(hashlib.sha256(data or b"").digest()[:7], "big")
        told = tell(self._channel, key, data)
        return [_read(told[key]) for key in sorted(told)]

    def diverged(self, call: Call, entry: int) -> NoReturn:
        """See ``Hands.diverged``. Raises: Diverged, the same on every rank."""
        name = self.names.get(entry, "")
        what = f"{_NAMES[call]} of {name}" if name and call is not Call.REST else _NAMES[call]
        policies = [group.reducer.policy for group in self.table.groups]
        if call is Call.BACKWARD:
            reduced = sum(policy.reduce for policy in policies)
            trained = sum(group.num_trainable for group in self.table.groups)
            what += f", reducing {reduced} of {len(policies)} groups, {trained} trainable parameters"
        kind = zlib.crc32(f"{what} {self.orders.digest} {self._equals(call, entry)}".encode())
        rank = self.table.groups[0].axis.mesh.get_rank()
        text = f"rank {rank}: {what}, of pass {here.step} ({user_line()})"
        told = tell(self._channel, kind << 31 | rank, text.encode(), lambda key: key >> 31)
        said = sorted(told.items(), key=lambda pair: pair[0] & 0x7FFFFFFF)
        lines = "\n".join(f"  {text.decode(errors='replace')}" for _, text in said)
        raise Diverged(
            f"ranks are in different calls (one rank of each kind is shown):\n{lines}\n"
            "Every rank must train, evaluate and save at the same places of its program, with the same "
            "settings; only the groups that it uses and the number of its evaluations may differ"
        )

    # ---- groups

    def unshard(self, groups: Sequence[int], near: AbstractSet[int]) -> None:
        """See ``Hands.unshard``."""
        self.table.unshard(groups, near)

    def join(self, group: int, near: bool) -> None:
        """See ``Hands.join``."""
        together.join(self.table.groups[group], near)

    def hold(self, group: int) -> None:
        """See ``Hands.hold``."""
        self.table.hold([group], join=True, widen=self._kept)

    def reduce(self, groups: Sequence[int]) -> None:
        """See ``Hands.reduce``."""
        self.table.reduce(groups, join=True, widen=self._kept)

    def take(self, action: Action) -> None:
        """See ``Hands.take``."""
        self.table.take(action)

    def settle(self, brought: int | None) -> None:
        """See ``Hands.settle``."""
        self.table.settle()
        if brought is not None:
            for group, shift in zip(self.table.groups, self._shifts, strict=False):
                group.reducer.decide(brought >> shift)
            self.table.step(tuple(self.table.due))

    def holds(self, group: int) -> bool:
        """See ``Hands.holds``."""
        return self.table.groups[group].stage is not Stage.SHARDED

    def must_reduce(self, group: int) -> bool:
        """See ``Hands.must_reduce``."""
        params = self.table.groups[group]
        reducer = params.reducer
        if not reducer.policy.reduce:
            if params.has_grads:
                self.table.reduce([group])
            return False
        return params.has_grads or keeps_grads(params) or (reducer.policy.unused_params and not reducer.done)

    def facts(self, group: int) -> GroupFacts:
        """See ``Hands.facts``."""
        return self.table.wishes(group)

    def keep_near(self, group: int, reshard: bool) -> None:
        """See ``Hands.keep_near``."""
        if reshard:
            self.table.take(Action(ActionKind.RESHARD, group), nearby=True)
        elif self.table.groups[group].stage is Stage.UNSHARDED:
            self.table.groups[group].keep_near()
            self.table.memory.count([self.table.groups[group]])


def _read(data: bytes) -> Told:
    entry, phase, events = json.loads(data)
    return entry, Phase(phase), tuple(Event(EventKind(kind), group) for kind, group in events)


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
