"""A process that plays rank 0 of any number of ranks, over collectives that do nothing.

For what one rank's host does by itself: calls, operations launched, time. Values mean nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

from shardwright.engine.step import executor
from shardwright.torch_private import new_group_of
from shardwright.transport import mesh, recorder
from shardwright.transport.base import Comm
from shardwright.transport.channel import AxisChannel
from shardwright.transport.process import LaunchLog, process_state
from shardwright.transport.process_group import ProcessGroupComm
from shardwright.transport.streams import Streams

EXCHANGE = AxisChannel.exchange.__code__
"""Runs once for every exchange of control words."""
COLLECTIVES = {
    "all-gather": ProcessGroupComm.all_gather.__code__,
    "reduce-scatter": ProcessGroupComm.reduce_scatter.__code__,
}
"""Run once for every collective of a group."""


class NoStream:
    """A stream of a device on which everything is done at once, and an event of it."""

    device = None

    def record_event(self, _: object = None) -> "NoStream":
        """An event that nobody need wait for."""
        return self

    def wait_event(self, event: "NoStream") -> None:
        """Wait for nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


class NoEvent:
    """An event of such a device that takes times: passed as soon as it is recorded."""

    def record(self) -> None:
        """Passed."""

    def query(self) -> bool:
        """Whether it is passed."""
        return True

    def elapsed_time(self, event: "NoEvent") -> float:
        """Milliseconds between two of them."""
        return 0.0


class NoHost:
    """The host's transport: the words of all ranks are this rank's own."""

    rank = num_channels = 0

    def __init__(self, world: int) -> None:
        self.world = world

    def exchange(self, words: list[int], key: str) -> list[list[int]]:
        """The words of every rank: as many rows as there are ranks."""
        return [words] * self.world

    def all_reduce_words(self, words: list[int], combine: object, key: str) -> list[int]:
        """The words of all ranks, combined."""
        return words


def _make_comm(ranks: list[int], device_type: str, within: ProcessGroup, host: Comm | None = None) -> Comm:
    log = LaunchLog(ranks, device_type)
    streams = Streams(NoStream, NoStream, make_event=NoEvent)
    return ProcessGroupComm(within, within, log, streams, NoHost(within.size()))  # type: ignore[arg-type]


def _new_group(ranks: list[int], backend: str, timeout: timedelta) -> ProcessGroup:
    made = new_group_of(ranks, timeout, "fake")
    assert isinstance(made, ProcessGroup)
    return made


@contextmanager
def rank_zero_of(world: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``world`` ranks, whose collectives over host memory move nothing.

    What is sharded inside goes through the transport of accelerators, the one over a backend's collectives,
    with side streams on which everything is done at once, and takes times of it. Control words come back as
    they were said. What the recorder asks the kernel and the allocator goes by time, not by event: they
    aren't asked here.
    """
    alone = mock.patch.dict(os.environ, {"SHARDWRIGHT_PROCESS": "off"})  # nobody to watch over
    made = mock.patch.multiple(mesh, _make_comm=_make_comm, new_group=_new_group)
    no_looks = mock.patch.object(process_state.recorder, "look_s", inf)
    no_quota = mock.patch.multiple(recorder, _QUOTA_S=inf, _QUEUED_S=inf)
    with alone, made, no_looks, no_quota, mock.patch.object(executor, "PAUSE", inf):
        dist.init_process_group("fake", store=HashStore(), rank=0, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()
