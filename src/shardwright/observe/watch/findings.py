"""What ranks say of themselves, what a status exchange brings, and what is found wrong: values, no more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from shardwright.errors import CommError, Diverged, RankFailed, RankLost, Stalled


class Fault(StrEnum):
    """The class of what is wrong."""

    FAILED = "failed"
    LOST = "lost"
    DIVERGED = "diverged"
    STALLED = "stalled"
    SLOW = "slow"


ERRORS: dict[Fault, type[CommError]] = {
    Fault.FAILED: RankFailed,
    Fault.LOST: RankLost,
    Fault.DIVERGED: Diverged,
    Fault.STALLED: Stalled,
}


@dataclass(frozen=True)
class Waits:
    """What a rank waits for: number ``number`` of the transport ``log``, ``key``, for ``since_s`` seconds.

    in_flight: its thread isn't known to wait: it stands in one call while the collective, which it has
        launched, has not ended. On an accelerator that is how ranks wait.
    """

    log: str
    number: int
    key: str
    since_s: float
    in_flight: bool = False


@dataclass(frozen=True)
class Launched:
    """A transport's launches on one rank: its ranks, how many there were, the keys of the last ones.

    begun, ended: how many the device has begun and ended; None where that isn't known. of_torch: of one of
        the caller's process groups, as torch's flight recorder has them. in_memory: its bytes go through
        memory that its ranks share, not over a network.
    """

    ranks: tuple[int, ...]
    count: int
    keys: tuple[str, ...]
    begun: int | None = None
    ended: int | None = None
    of_torch: bool = False
    in_memory: bool = False

    def key(self, number: int) -> str | None:
        """What was launched under ``number``; None where that is not known (any more, or yet)."""
        index = number - 1 - (self.count - len(self.keys))
        return self.keys[index] if 0 <= index < len(self.keys) else None


class Status(NamedTuple):
    """How far a rank is, in its loop's words; memory of its process, and of its tensors on a device."""

    progress: str = ""
    host_nbytes: int = 0
    device_nbytes: int = 0


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself.

    place: the phase it is in, in words. line: the user's file, line and function. does: what it does while
    it doesn't wait, for since_s seconds. idle_s: how long no thread of it has run. foreign: the name of the
    ``torch.distributed`` call that it is in, for foreign_s. caught: an exception that went through a forward
    of this step or the last, and was caught. gone: ranks whose connection to this one is closed.
    """

    rank: int
    place: str
    line: str
    waits: Waits | None = None
    does: str = "computes"
    since_s: float = 0.0
    idle_s: float = 0.0
    foreign: str = ""
    foreign_s: float = 0.0
    caught: str = ""
    status: Status = field(default_factory=Status)
    logs: Mapping[str, Launched] = field(default_factory=dict)
    gone: tuple[int, ...] = ()


@dataclass(frozen=True)
class Note:
    """What a rank left behind: ``raised`` is "ValueError: bad batch", or "" where its program just ended.

    held_store: the job's store was in that process, and has ended with it.
    """

    rank: int
    raised: str
    line: str
    at_s: float
    held_store: bool = False

    def __str__(self) -> str:
        where = f" in {self.line}" if self.line else ""
        return f"raised {self.raised}{where}" if self.raised else f"ended its program{where}"


@dataclass(frozen=True)
class Findings:
    """All that one status exchange has brought.

    ended: ranks whose process or connection is known to be gone. silent: seconds since a rank last answered,
    of those that did not. took_s: how long answers were waited for. asker, hosts: who asked, and the address
    of each rank's host, as far as they are known.
    """

    world: int
    answers: Mapping[int, Answer]
    notes: Sequence[Note] = ()
    ended: frozenset[int] = frozenset()
    silent: Mapping[int, float] = field(default_factory=dict)
    took_s: float = 0.0
    asker: int = -1
    hosts: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def missing(self) -> dict[tuple[str, int], list[int]]:  # not a field: `top --json` prints the fields
        """What the diagnosis has counted, by what is waited for: a transport's name, a launch's number."""
        return {}


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, in words: a sentence, and what to do. ranks: those at fault, or all that disagree."""

    fault: Fault
    ranks: tuple[int, ...]
    sentence: str
    remedy: str

    @property
    def is_error(self) -> bool:
        """Whether the step can't go on."""
        return self.fault is not Fault.SLOW
