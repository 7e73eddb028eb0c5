"""What a model's groups hold in unsharded buffers, and what is checked and noted of memory as a step runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
import torch.distributed as dist

from shardwright import clock
from shardwright.engine.groups.group import ParamGroup
from shardwright.engine.listeners import listeners
from shardwright.schedule.schedule import Event, event_in_words
from shardwright.transport.cpu.pages import allocated_nbytes
from shardwright.transport.host_memory import Budget, stated_budget
from shardwright.transport.process import process_state
from shardwright.transport.recorder import HELD

PAUSE = 500
"""Of an ask of the allocator: 0.2% of the time of a step."""
Watcher = Callable[[Event, ParamGroup | None, bool], None]


@dataclass
class Memory:
    """Bytes of unsharded buffers, now and at most since the start; ``counted``: now, by group.

    other_nbytes: what the process was seen to hold besides, as a forward began; None: not seen, or not known.
    states_nbytes: of shards and of the optimizer's states, as seen then.
    in_step: a forward has begun, and its backward not ended. budget: of host memory, if there is one.
    watchers: called with each event and its group, before its actions (False) and after them (True).
    sample_s: when the allocator is asked next.
    """

    now_nbytes: int = 0
    peak_nbytes: int = 0
    counted: dict[ParamGroup, int] = field(default_factory=dict)
    other_nbytes: int | None = None
    states_nbytes: int = 0
    in_step: bool = False
    budget: Budget | None = field(default_factory=stated_budget)
    watchers: list[Watcher] = field(default_factory=list)
    sample_s: float = 0.0

    def sample(self, start: float, device: torch.device) -> None:
        """Into the recorder, at an event that began at ``start``: what is held in all. To ask an allocator
        takes 40 us, or with many free blocks milliseconds; it isn't asked again for ``PAUSE`` times that."""
        if start < self.sample_s:
            return
        start = clock.perf_counter()
        whole_nbytes = allocated_nbytes(device)
        self.sample_s = inf
        if whole_nbytes is not None:
            process_state.recorder.write(
                (HELD, start, whole_nbytes, self.states_nbytes, self.other_nbytes or 0)
            )
            self.sample_s = start + PAUSE * (clock.perf_counter() - start)

    def touch(self, nbytes: int) -> None:
        """Count ``nbytes`` more that were held for a moment."""
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes + nbytes)

    def count(self, groups: Iterable[ParamGroup], freed_nbytes: int = 0) -> None:
        """Count what ``groups`` hold now, instead of what they held when they were counted before.

        freed_nbytes: what they gave back only once they held the rest.
        """
        before_nbytes = self.now_nbytes
        for group in groups:
            held_nbytes = group.held_nbytes
            self.now_nbytes += held_nbytes - self.counted.get(group, 0)
            self.counted[group] = held_nbytes
        self.peak_nbytes = max(self.peak_nbytes, before_nbytes, self.now_nbytes + freed_nbytes)

    def recount(self, groups: Iterable[ParamGroup]) -> None:
        """Count anew; all of them. Counting may have been interrupted."""
        self.now_nbytes = 0
        self.counted.clear()
        self.count(groups)

    def check_unshard(self, groups: Sequence[ParamGroup]) -> None:
        """Raises: OutOfMemory where the budget has no room for the buffers of ``groups``."""
        assert self.budget is not None
        more_nbytes = sum([group.unsharded_nbytes - group.held_nbytes for group in groups])
        if not self.budget.has_room(more_nbytes):
            self._refuse(more_nbytes, f"unsharding {', '.join(group.name for group in groups)}")

    def check_event(self, event: Event, group: ParamGroup | None) -> None:
        """Raises: OutOfMemory where more than the budget is held before the actions of an event."""
        assert self.budget is not None
        if not self.budget.has_room(0):
            self._refuse(0, event_in_words(event.kind, "" if group is None else group.name))

    def _refuse(self, more_nbytes: int, doing: str) -> None:
        assert self.budget is not None
        error = self.budget.error(more_nbytes, dist.get_rank() if dist.is_initialized() else 0, doing)
        listeners.amend(error)  # in a backward nobody else sees it on its way
        raise error
