"""Torch's flight recorder, read beside our launch logs: which collective of a process group hasn't ended.

A rank on an accelerator launches and goes on: its thread stands in whatever call needs a number next, and
what its transports have launched says nothing of how far the device has come. Nor do they know the
collectives of the caller's own process groups. Torch writes both down, for NCCL and for Gloo: of each group
how many were launched and have ended (``pg_status``, read several times a second), and what each of the last
2,000 was (``entries``, read while nothing moves). ``TORCH_FR_BUFFER_SIZE=0`` turns it off.

A group with sends and receives is left out: not all of its ranks take part in those, and in some versions of
torch they count.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwright import clock
from shardwright.observe.watch.findings import Launched
from shardwright.torch_private import flight_records, process_groups
from shardwright.transport.process import RING, LaunchLog, process_state, short

logger = logging.getLogger(__name__)

STANDS_S = 0.5
"""A thread that has stood in one call for so long, while nothing of torch's was launched or has ended, may
wait for what is in flight."""


@dataclass(frozen=True)
class InFlight:
    """A collective that this rank has launched and that has not ended; since_s: ``clock.monotonic``."""

    log: str
    number: int
    key: str
    since_s: float


@dataclass
class GroupRecord:
    """What torch remembers of the collectives of one process group, by their numbers from 1.

    name: torch's, the same on all ranks. title: its description, if it was given one. count: how many were
    launched. keys: what they were, as "nccl:all_reduce". begun: how many the device has begun; None where
    nothing tells. pending: number of the oldest one that hasn't ended, and when that was launched.
    """

    name: str
    title: str
    count: int = 0
    keys: dict[int, str] = field(default_factory=dict)
    begun: int | None = None
    pending: tuple[int, int] | None = None
    has_messages: bool = False

    def add(self, entry: Mapping[str, Any]) -> None:
        """One more, in the order in which they were launched."""
        if entry["is_p2p"]:
            self.has_messages = True
            return
        number, has_ended = entry["collective_seq_id"], entry["retired"] or entry["state"] == "completed"
        self.count = max(self.count, number)
        self.keys.setdefault(number, entry["profiling_name"])
        if entry["time_discovered_started_ns"]:  # None or 0 where nothing times it
            self.begun = max(self.begun or 0, number)
        if not has_ended and self.pending is None:
            self.pending = number, entry["time_created_ns"]
        if has_ended and self.begun is not None:
            self.begun = max(self.begun, number)

    @property
    def ended(self) -> int:
        """How many have ended: those before the oldest one that hasn't."""
        return self.count if self.pending is None else self.pending[0] - 1

    @property
    def last_keys(self) -> tuple[str, ...]:
        """Of the last ones, without a gap."""
        found: list[str] = []
        while len(found) < RING and (key := self.keys.get(self.count - len(found))) is not None:
            found.append(f"{key} in group {self.title or self.name}")
        return tuple(found[::-1])


def remembers_all(records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether nothing is forgotten, so that on a group without entries nothing was launched."""
    sizes = [os.environ.get(name, "") for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    firsts = [record["entries"][0]["record_id"] for record in records if record.get("entries")]
    return "0" not in sizes and not any(firsts)


def parsed(records: Iterable[Mapping[str, Any]], since_ns: float = 0.0) -> dict[str, GroupRecord]:
    """By name the groups of dumps with entries. Of a name that was used again the newest group counts, and
    nothing from before ``since_ns``: a group that was destroyed then may have had the name of one that has
    launched nothing yet."""
    found: dict[str, tuple[int, GroupRecord]] = {}
    for record in records:
        for entry in (each for each in record.get("entries", ()) if each["time_created_ns"] >= since_ns):
            (name, title), place = entry["process_group"], entry["pg_id"]
            if name not in found or found[name][0] != place:
                titled = "" if title == "undefined" else title
                found[name] = place, GroupRecord(name, titled)
            found[name][1].add(entry)
    return {name: group for name, (_, group) in found.items()}


class FlightRecorder:
    """The reader of one process; the watch thread looks a few times a second.

    read: gives the dumps, with entries or without.
    """

    def __init__(self, read: Callable[[bool], list[dict[str, Any]]] = flight_records) -> None:
        self.changed_s = clock.monotonic()
        self._read = read
        self._status: list[dict[str, Any]] = []
        self._groups: dict[str, GroupRecord] | None = None
        self._is_whole = False
        self._in_flight: InFlight | None = None

    def look(self) -> None:
        """Note whether anything was launched, begun or ended since the last look."""
        status = [record.get("pg_status") or {} for record in self._dumped(entries=False)]
        if status != self._status:
            self._status, self._groups, self.changed_s = status, None, clock.monotonic()

    def _dumped(self, entries: bool) -> list[dict[str, Any]]:
        """Nothing any more once torch has failed: the watch goes on without."""
        try:
            return self._read(entries)
        except Exception:
            logger.warning("torch's flight recorder can't be read, and is left alone", exc_info=True)
            self._read = lambda _: []
            return []

    def _read_groups(self) -> dict[str, GroupRecord]:
        if self._groups is None:
            records, since_ns = self._dumped(entries=True), process_state.destroyed_ns
            self._groups, self._is_whole = parsed(records, since_ns), remembers_all(records)
        return self._groups

    @property
    def _has_pending(self) -> bool:
        return any(
            int(group["last_enqueued_collective"]) > max(0, int(group["last_completed_collective"]))
            for status in self._status
            for group in status.values()
        )

    def in_flight(self, stands_since_s: float) -> InFlight | None:
        """What this rank's thread may wait for, which stands in one call since then: the oldest collective
        that hasn't ended. None where there is none, or that isn't long ago."""
        since_s = max(stands_since_s, self.changed_s)
        if clock.monotonic() - since_s < STANDS_S or not self._has_pending:
            return None
        own = _own_logs()
        found: list[tuple[int, str, int, str]] = []
        for name, group in self._read_groups().items():
            if group.pending is None or group.has_messages:
                continue
            number, created_ns = group.pending
            if name not in own:
                if ranks := _ranks_of(name):
                    found.append((created_ns, _log_name(name, ranks), number, _key(group, number)))
            elif (launch := own[name].launch_of(number)) is not None:
                found.append((created_ns, own[name].name, launch.number, launch.key))
        if not found:
            return None
        oldest = InFlight(*min(found)[1:], since_s)
        if oldest != self._in_flight:
            self._in_flight = oldest
        return self._in_flight

    def launched(self) -> dict[str, Launched]:
        """The launches of the caller's own groups, by a name that is the same on all ranks; none of a process
        in which they come and go, since to read them takes it 35 ms."""
        if self._groups is None and clock.monotonic() - self.changed_s < STANDS_S:
            return {}
        own, groups, found = _own_logs(), self._read_groups(), {}
        for name in {each.group_name for each in process_groups()} - own.keys():
            group = groups.get(name) or (GroupRecord(name, "") if self._is_whole else None)
            ranks = _ranks_of(name)
            if group is not None and ranks and not group.has_messages:
                found[_log_name(name, ranks)] = Launched(
                    ranks, group.count, group.last_keys, group.begun, group.ended, of_torch=True
                )
        return found

    def progress(self, log: LaunchLog) -> tuple[int | None, int | None]:
        """How many of a transport's launches its device has begun and ended, where the last reading tells."""
        groups = self._groups or {}
        for each in log.groups if log.operations else ():
            group = groups.get(each.group_name)
            if group is not None:
                begun = log.launch_of(group.begun) if group.begun else None
                pending = log.launch_of(group.ended + 1)
                ended = log.launched if pending is None else pending.number - 1
                return (None if begun is None else begun.number), ended
        return None, None


def _own_logs() -> dict[str, LaunchLog]:
    """Return our launch logs by torch's name of the process group that they travel on."""
    return {group.group_name: log for log in process_state.logs for group in log.groups}


def _ranks_of(name: str) -> tuple[int, ...]:
    """Empty for a group that is gone, and for one of a single rank, which waits for nobody."""
    for group in process_groups():
        if group.group_name == name and group.size() > 1:
            return tuple(dist.get_process_group_ranks(group))
    return ()


def _log_name(name: str, ranks: tuple[int, ...]) -> str:
    return f"group {name} of {short(ranks)}"


def _key(group: GroupRecord, number: int) -> str:
    return f"{group.keys[number]} in group {group.title or group.name}"
