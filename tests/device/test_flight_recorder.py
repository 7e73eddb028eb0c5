"""Hangs inside of a device's collectives, in which no host waits: torch's recorder tells who is missing.

The simulated communicators write down what torch's recorder does for NCCL, in its own format (version 2.10,
torch/csrc/distributed/c10d/FlightRecorderDetail.hpp). Its real dumps, of Gloo groups, are read in
tests/ranks/test_watch.py.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from shardwright.observe.watch import flight_recorder, process_status
from shardwright.observe.watch.diagnosis import diagnose
from shardwright.observe.watch.findings import Fault, Findings
from shardwright.observe.watch.flight_recorder import FlightRecorder
from shardwright.observe.watch.process_status import ProcessStatus
from shardwright.observe.watch.table import table, tell
from shardwright.policy import WatchPolicy
from shardwright.schedule.layout import equal_spans
from shardwright.transport.base import Segment
from shardwright.transport.process import LaunchLog, ProcessState
from shardwright.transport.process_group import ProcessGroupComm
from shardwright.transport.streams import Streams
from tests.device.kernels import Kernels
from tests.device.ranks import Communicator
from tests.device.sim import Meeting, Part, Stream, World, resizing

SEEDS = range(8)
KEYS = ("all-gather first", "all-gather second", "all-gather third")


class Recorded(Communicator):
    """A communicator that torch's recorder would know by ``group_name``."""

    def __init__(self, device, name, entries):
        super().__init__(device, [0, 1], name)
        self.group_name, self._entries = name, entries

    def _launch(self, read, write):
        work = super()._launch(read, write)
        self._entries.append((self, self._launched, work._event))
        return work

    def has_begun(self, number):
        return self._stream in self._device.world.meeting((self._name, number), 2)._come


def dumped(entries, timed):
    """What torch's recorder would give of them now. timed: under TORCH_NCCL_ENABLE_TIMING=1."""
    groups = sorted({group.group_name for group, _, _ in entries})
    rows, status = [], {}
    for place, (group, number, event) in enumerate(entries):
        pg_id = str(groups.index(group.group_name))
        before = status.setdefault(pg_id, {"last_started_collective": -1, "last_completed_collective": -1})
        before["last_enqueued_collective"] = number
        begun = timed and group.has_begun(number)
        if event.done:
            before["last_completed_collective"] = number
        rows.append(
            {
                "record_id": place,
                "pg_id": int(pg_id),
                "process_group": (group.group_name, "undefined"),
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "profiling_name": "nccl:all_reduce" if group.group_name == "tensor" else "nccl:coalesced",
                "time_created_ns": place,
                "state": "completed" if event.done else "started" if begun else "scheduled",
                "time_discovered_started_ns": 1 if begun else None,
                "retired": event.done,
                "is_p2p": False,
            }
        )
    return [{"version": "2.10", "pg_status": status, "entries": rows}]


class Rank:
    """What a rank has launched, and what it says of itself."""

    def __init__(self, device, number):
        self.number, self.entries, self.state = number, [], ProcessState()
        self.shards = Recorded(device, "shards", self.entries)
        self.tensor = Recorded(device, "tensor", self.entries)
        self.device = device
        self.log = LaunchLog([0, 1])
        self.log.name = "axis"
        self.log.travels_on(self.shards)
        self.state.add(self.log)
        streams = Streams(lambda: Stream(device), lambda: device.current[-1])
        self.comm = ProcessGroupComm(self.shards, self.shards, self.log, streams)

    def gather(self, key):
        self.comm.all_gather([Segment(torch.ones(8), equal_spans(4, 2))], key).wait()

    def all_reduce(self):
        self.tensor.allreduce_coalesced([torch.ones(4)]).wait()

    def says(self, patch, timed, thread):
        self.state.thread = thread
        for module in (process_status, flight_recorder):
            patch.setattr(module, "process_state", self.state)
        groups = [SimpleNamespace(group_name=name) for name in ("shards", "tensor")]
        patch.setattr(flight_recorder, "process_groups", lambda: groups)
        patch.setattr(flight_recorder, "_ranks_of", lambda name: (0, 1))
        status = ProcessStatus(self.number)
        status._recorder = FlightRecorder(lambda entries: dumped(self.entries, timed))
        status._sampled_s -= 1.0
        status.sample()
        status._recorder.changed_s -= 5.0
        status._stands = (status._stands[0], time.monotonic() - 5.0)
        return status.answer()


def found_after(program, seed, timed=True):
    """What the ranks say once nothing on their devices goes on, and their threads stand in one call."""
    world = World(2, seed)
    world.depth = 10**6  # hosts come to the end of the program
    ranks = [Rank(device, number) for number, device in enumerate(world.devices)]

    def run(number):
        with resizing(world), Kernels(ranks[number].device):
            program(ranks[number])

    world.run(run)
    while world.candidates:
        world.run_one()
    never = threading.Event()
    thread = threading.Thread(target=never.wait, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            answers = {rank.number: rank.says(patch, timed, thread.ident) for rank in ranks}
    finally:
        never.set()
    return Findings(2, answers)


def leaves_out_the_third(rank):
    for key in KEYS[: 2 if rank.number else 3]:
        rank.gather(key)


def all_reduces_before_the_third(rank):
    for key in KEYS[:2]:
        rank.gather(key)
    if rank.number == 1:
        rank.all_reduce()
    rank.gather(KEYS[2])


def computes_before_the_third(rank):
    """For ever."""
    for key in KEYS[:2]:
        rank.gather(key)
    if rank.number == 1:
        meeting = Meeting(2)
        rank.device.compute.put(Part(meeting, lambda: None, lambda _: None))
    rank.gather(KEYS[2])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_has_not_launched_what_a_device_waits_in_is_named(seed):
    found = found_after(leaves_out_the_third, seed)
    diagnosis = diagnose(found, WatchPolicy())
    assert (diagnosis.fault, diagnosis.ranks) == (Fault.SLOW, (1,))
    assert "in all-gather third for rank 1" in diagnosis.sentence
    assert "waits in all-gather third, number 3" in table(found).splitlines()[1]
    assert "waits" not in table(found).splitlines()[2]


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_whose_device_is_in_a_collective_of_the_callers_own_has_diverged(seed, timed):
    found = found_after(all_reduces_before_the_third, seed, timed)
    diagnosis = diagnose(found, WatchPolicy())
    assert (diagnosis.fault, diagnosis.ranks) == (Fault.DIVERGED, (0, 1))
    assert "rank 0 is in all-gather third" in diagnosis.sentence
    assert "rank 1 is in nccl:all_reduce in group tensor" in diagnosis.sentence
    assert tell(diagnosis, found).count("waits in") == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_whose_device_has_launched_and_not_begun_is_named(seed):
    found = found_after(computes_before_the_third, seed)
    slow = diagnose(found, WatchPolicy())
    assert (slow.fault, slow.ranks) == (Fault.SLOW, (1,))
    assert "all ranks have launched; rank 1 has not entered it" in slow.sentence
    stalled = diagnose(found, WatchPolicy(collective_s=1.0))
    assert (stalled.fault, stalled.ranks) == (Fault.STALLED, (1,))
    assert "rank 1 has not entered it" in stalled.sentence


@pytest.mark.parametrize("timed", [True, False])
def test_ranks_whose_devices_have_ended_all_wait_for_nothing(timed):
    found = found_after(lambda rank: [rank.gather(key) for key in KEYS], 0, timed)
    assert "no rank waits" in diagnose(found, WatchPolicy()).sentence
