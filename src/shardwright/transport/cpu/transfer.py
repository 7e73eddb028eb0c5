"""What a rank waits for on its connections, and what all of its waits have in common."""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any, NamedTuple, Protocol

import torch

from shardwright import clock
from shardwright.errors import CommError
from shardwright.transport.cpu.coder import Coder
from shardwright.transport.process import Launch, LaunchLog, process_state
from shardwright.transport.recorder import DONE

LOOK_S = 0.1  # how often who waits looks whether the watch has found something


class Link(Protocol):
    """A connection, as waits and their rank see it.

    peer: the other end's rank. is_open: whether the peer has been reached, or has called.
    trouble: what ended it, "" while it works.
    """

    peer: int
    trouble: str

    @property
    def is_open(self) -> bool: ...

    def tell(self, failure: "CollectiveFailure") -> None:
        """Queue word of a failure for the peer."""
        ...


class CollectiveFailure(NamedTuple):
    """The first collective of an axis that can't end, by its number, and why."""

    number: int
    why: str


class Worker:
    """A thread beside the rank's own, that codes or decodes messages one after the other.

    Its thread begins with the first job, and ends with the worker. ``fail`` is told why a job failed.
    coder: for its jobs alone.
    """

    def __init__(self, name: str, fail: Callable[[str], None]) -> None:
        self._name, self._fail = name, fail
        self.coder = Coder()
        self._pool = ThreadPoolExecutor(1, name)

    def do(self, job: Callable[[], None]) -> None:
        """Queue a job. Any thread."""
        try:
            self._pool.submit(self._try, job)
        except RuntimeError as error:  # Python is ending
            self._fail(f"the thread {self._name!r} takes no more: {error}")

    def _try(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._fail(f"the thread {self._name!r} failed: {error!r}")
            raise


class Endpoint:
    """One rank's end of its connections.

    rank: its place on the mesh axis. log: of the axis' transport.
    changed: guards connections and transfers; notified when one of them is done or fails.
    trouble: what ended all of them, "" while they work.
    links: those that were opened, or are to be. wake: has the event loop look at what was queued on them.
    claimed: from which of them the rank's own thread reads, and not the event loop.
    decoder: the thread that decodes what arrives coded.
    failure: of which this rank has heard, or which it has met. It goes to all ranks.
    """

    def __init__(self, rank: int, timeout_s: float, log: LaunchLog) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self.log = log
        self.changed = threading.Condition()
        self.trouble = ""
        self.links: list[Link] = []
        self.claimed: Collection[Link] = ()
        self.wake: Callable[[], None] = lambda: None
        self.failure: CollectiveFailure | None = None
        self.decoder = Worker("shardwright-decoder", self.fail)

    def name(self, rank: int) -> str:
        """What messages call a rank of the mesh axis: its number in the job."""
        return f"rank {self.log.ranks[rank]}"

    def why_not(self, number: int) -> str:
        """Why the collective of that number can't end, as far as is known; ""."""
        failure = self.failure
        # A peer that has passed it on may have ended for it since.
        told = failure.why if failure is not None and failure.number <= number else ""
        return self.trouble or told

    def fail(self, trouble: str) -> None:
        """Nothing moves any more: whoever waits raises ``trouble``."""
        with self.changed:
            self.trouble = trouble
            self.changed.notify_all()

    def spread(self, failure: CollectiveFailure) -> None:
        """Who waits for this collective or a later one raises it, here and on the other ranks."""
        with self.changed:
            if self.failure is not None and self.failure.number <= failure.number:
                return
            self.failure = failure
            # A rank that ends is seen by those alone that it has a connection to, so each passes word on.
            for link in self.links:
                if link.is_open:
                    link.tell(failure)
            self.changed.notify_all()
        self.wake()


@dataclass
class Transfer:
    """The messages of one collective of one rank. Its fields change under the endpoint's lock.

    keep: what is sent from and received into, and must live so long: also where the wait for it was given
        up, since a peer may come later. received: what arrived, by peer, on connections that take memory.
    sources: from how many peers something is to arrive. took: seconds and peer of each message that has.
    """

    endpoint: Endpoint
    launch: Launch
    keep: list[torch.Tensor]
    receiving: set[Link] = field(default_factory=set)
    sending: set[Link] = field(default_factory=set)
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    sources: int = 0
    took: list[tuple[float, int]] = field(default_factory=list)

    def take(self, link: Link, memory: torch.Tensor | None, took_s: float) -> None:
        """A message has arrived, in ``took_s`` seconds; in ``memory``, where the connection takes that."""
        if memory is not None:
            self.received[link.peer] = memory
        self.took.append((took_s, link.peer))
        self.receiving.discard(link)
        if not self.receiving:
            self._arrived()

    def _arrived(self) -> None:
        """Everything has arrived, of what is expected by now."""
        log, own = self.endpoint.log, self.endpoint.rank
        (longest_s, peer), (next_s, _) = nlargest(2, (*self.took, (0.0, own)))
        alone = peer != own and longest_s > 2 * next_s  # else they came beside each other
        link = (log.ranks[peer], log.ranks[own]) if alone else (log.ranks[own],)
        met = self.sources == len(log.ranks) - 1
        process_state.recorder.write(
            (DONE, log.name, self.launch.number, clock.perf_counter(), met, link, longest_s)
        )

    def wait_received(self, waiting: Any = None) -> None:
        """Return when everything has arrived. Raises: CommError naming a rank that ended, is in another
        collective, or doesn't come in time. waiting: the ``LaunchLog.waiting`` that it is part of."""
        self._wait(self.receiving, waiting)

    def wait_sent(self) -> None:
        """Return when what is sent may be freed or changed. Raises: as ``wait_received``."""
        self._wait(self.sending)

    def _wait(self, links: set[Link], within: Any = None) -> None:
        if not links:
            return
        start = clock.monotonic()
        within_it = nullcontext(within) if within else self.endpoint.log.waiting(self.launch)
        with within_it as waiting, self.endpoint.changed:
            num_missing = 0
            while links:
                if len(links) == 1 != num_missing:
                    own, (last,) = self.endpoint.rank, links
                    waiting.only(*((own, last.peer) if links is self.sending else (last.peer, own)))
                num_missing = len(links)
                if trouble := self._trouble(links):
                    raise CommError(f"{trouble} ({self._own} was in {self._what})")
                if not clock.wait(self.endpoint.changed, LOOK_S):
                    process_state.raise_diagnosis()
                    self._check_time(links, clock.monotonic() - start)

    def _trouble(self, links: set[Link]) -> str:
        """Why what is waited for never comes; "" while it may."""
        endpoint = self.endpoint
        if known := endpoint.why_not(self.launch.number):
            return known
        found = next((link.trouble for link in links if link.trouble), "")
        if found:
            endpoint.spread(CollectiveFailure(self.launch.number, found))
        return found

    def _check_time(self, links: set[Link], waited_s: float) -> None:
        if links and waited_s > self.endpoint.timeout_s:
            late = min(links, key=lambda link: link.peer)
            how = "open" if late.is_open else "not opened yet"
            raise CommError(
                f"{self._own} waited {self.endpoint.timeout_s:.0f} s for {self.endpoint.name(late.peer)} in "
                f"{self._what}; the connection is {how} but it did not come there"
            )

    @property
    def _own(self) -> str:
        return self.endpoint.name(self.endpoint.rank)

    @property
    def _what(self) -> str:
        return repr(self.launch.key)
