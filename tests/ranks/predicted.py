"""Live bytes of a step on a CPU, at every event, as an allocator counts them: to the byte.

What ``memory.py`` rounds for any runtime is done here as ours does it on the host: buffers are padded to the
world and aligned, and gradients live until their reduce-scatter has been waited for. Pure.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.plan.memory import Category, HeldBytes
from shardwright.plan.workload import ParamSize, Workload
from shardwright.policy import MixedPrecisionPolicy
from shardwright.schedule.layout import GroupLayout, ParamLayout
from shardwright.schedule.schedule import Action, ActionKind, Phase, Schedule


@dataclass(frozen=True)
class Rank:
    """Whose bytes are counted: rank ``rank`` of ``world`` that a parameter is sharded over.

    precision: as ``fully_shard`` takes it. optimizer: states for each trained parameter that are as large as
    its shard, and bytes besides (``torch.optim.AdamW``: two, and a step of 4 bytes).
    """

    rank: int = 0
    world: int = 1
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    optimizer: tuple[int, int] = (2, 4)

    def layout(self, param: ParamSize) -> ParamLayout:
        """Where its elements lie."""
        return ParamLayout(param.shape, self.world, 0 if param.shape else None)

    def shard_nbytes(self, params: Sequence[ParamSize]) -> int:
        """Bytes of shards, in the dtypes at rest."""
        return sum(self.layout(param).shard_numel(self.rank) * param.itemsize for param in params)

    def compute_itemsize(self, param: ParamSize) -> int:
        """Bytes of an element while unsharded, and so of its gradient."""
        dtype = self.precision.param_dtype
        return param.itemsize if dtype is None or not param.floating else dtype.itemsize

    def buffer_nbytes(self, params: Sequence[ParamSize]) -> int:
        """Bytes of the buffer that a group is gathered into."""
        sizes = tuple(self.compute_itemsize(param) for param in params)
        return GroupLayout(tuple(self.layout(param) for param in params), sizes).nbytes


def live_bytes(schedule: Schedule, workload: Workload, rank: Rank) -> list[HeldBytes]:
    """What is alive in a steady step at each event before its actions, and after them, by turns.

    workload: of ``trace``. Before the step: shards, the optimizer's states, inputs, and no gradients.
    """
    ledger = _HostLedger(workload, rank)
    found = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for entry, (event, stretch) in zip(schedule.phases[phase], workload.phases[phase], strict=True):
            found.append(HeldBytes(f"before {event}", dict(ledger.held)))
            for action in entry.actions:
                ledger.act(action)
            found.append(HeldBytes(f"after {event}", dict(ledger.held)))
            ledger.held[Category.ACTIVATIONS] += stretch.saved_nbytes
            for group, nbytes in stretch.gradients:
                ledger.made[group] += nbytes
                ledger.held[Category.GRADIENTS] += nbytes
    return found


class _HostLedger:
    """made: bytes of unsharded gradients by group, that are not reduced yet."""

    def __init__(self, workload: Workload, rank: Rank) -> None:
        self.workload, self.rank = workload, rank
        self.made: Counter[int] = Counter()
        params = [param for group in workload.groups for param in group.params]
        trained = [param for param in params if param.trained]
        states, each_nbytes = rank.optimizer
        self.held: Counter[Category] = Counter()
        self.held[Category.STATES] = rank.shard_nbytes(params) + states * rank.shard_nbytes(trained)
        self.held[Category.STATES] += each_nbytes * len(trained)
        self.held[Category.ACTIVATIONS] = workload.outside_nbytes

    def act(self, action: Action) -> None:
        """One action of the schedule."""
        for group in action.groups:
            params = self.workload.groups[group].params
            if action.kind is ActionKind.UNSHARD:
                self.held[Category.UNSHARDED] += self.rank.buffer_nbytes(params)
            elif action.kind is ActionKind.RESHARD:
                self.held[Category.UNSHARDED] -= self.rank.buffer_nbytes(params)
            elif action.kind is ActionKind.REDUCE:
                self._send(group, [param for param in params if param.trained])
            elif action.kind is ActionKind.WAIT_REDUCE:
                self._reduced(group, [param for param in params if param.trained])

    def _send(self, group: int, params: Sequence[ParamSize]) -> None:
        """A scalar, which can't be cut, goes to each rank as a whole."""
        whole = [self.rank.compute_itemsize(param) for param in params if not param.shape]
        more = sum(whole) * (self.rank.world - 1)
        self.made[group] += more
        self.held[Category.GRADIENTS] += more

    def _reduced(self, group: int, params: Sequence[ParamSize]) -> None:
        """The shards have their gradients; the unsharded ones are freed."""
        self.held[Category.GRADIENTS] += self.rank.shard_nbytes(params) - self.made.pop(group, 0)
