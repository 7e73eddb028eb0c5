"""One attempt of a job: ranks that know each other apart from the ranks of an attempt before.

A launcher that starts a job again keeps its store (torchrun's lives in the agent), and with it every key of
the attempt that failed: its diagnosis, its addresses, what its ranks had announced. No variable of the
environment tells two attempts apart: agents count restarts each for themselves. So the first rank makes a
random token, and keys lie under it (``answer`` and ``ask`` are how the others learn it). Nothing here is a
collective: a rank that never comes keeps nobody waiting for longer than it is asked to.
"""

import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import DistError, ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwright.errors import CommError, printable
from shardwright.torch_private import default_store_is, new_group_of, rendezvous_handlers
from shardwright.transport import liveness
from shardwright.transport.host_limits import host_limits_told
from shardwright.transport.jobstore import batches, job_store, of_ranks, pause_s, values
from shardwright.transport.process import Launch, LaunchLog, came, process_is_ours, process_state, short

_NAME = "shardwright/attempt"
_POLLS_S = 0.02, 20  # the longest pause between two looks, of few ranks, and how much shorter the first is
_UNKNOWN = "?"  # of a host without /proc
_Result = TypeVar("_Result")
_Found = tuple[Store, int, int]
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_GLOO_LAZY, _GLOO_OVER = "TORCH_GLOO_LAZY_INIT", "GLOO_DEVICE_TRANSPORT"  # variables that torch reads
_MEETING_POLLS_S = 0.05, 100  # of all ranks of a transport, which ask one store at a time
_NO_REASON = " "
Round = Generator[tuple[str, str | None], str, _Result]


# How ranks that use one store come to share a random token: the protocol, step by step, with no store in it.
#
# The store may be full of what ranks before have left, and the same ranks meet again and again by the same
# keys, some already in their next meeting while others are still in the last one. The first rank makes the
# token; the others learn it by three keys each:
#
#     hello/<rank>            the rank's own random number      written by the rank
#     welcome/<rank>          that number, and the token        written by the first rank
#     <token>/met/<rank>      that the rank has the token       written by the rank
#
# And once it has said hello, a rank leaves under "caller/<n>" that it has: whom the first rank looks for.
#
# A welcome counts for the number that it repeats, so nobody takes an old one. A rank that has the token is
# seen to have it before it says its next hello, and the first rank looks for that *after* it has read a
# hello: so a hello of the next meeting is never answered with the token of the last one. Each looks whether
# what it wrote still stands, and writes it again where it doesn't: what comes late from a process that has
# ended does no harm. Processes that have the same rank, and live at the same time, can't be told apart: a
# launcher ends the ranks of an attempt before it starts those of the next.
#
# A round is a generator: it yields a key to be read, with None, and is sent what is there, "" for nothing; or
# a key to be written, with its value. ``tests/pure/test_welcome.py`` explores all interleavings of them.


def answer(rank: int, token: str) -> Round[bool]:
    """A round of the first rank for one of the others. Returns whether that has the token."""
    number = yield f"hello/{rank}", None
    if not number:
        return False
    # After the hello was read, not before: else a hello of the next meeting might be answered with the token
    # of the last one.
    if (yield met(rank, token), None):
        return True
    if (yield f"welcome/{rank}", None) != f"{number} {token}":
        yield f"welcome/{rank}", f"{number} {token}"
    return False


def ask(rank: int, number: str, word: str) -> Round[str]:
    """A round of a rank but the first. Returns the token, "" where this number isn't welcome yet.

    word: left for all who have the token.
    """
    welcomed, _, token = (yield f"welcome/{rank}", None).partition(" ")
    if welcomed != number:
        if (yield f"hello/{rank}", None) != number:
            yield f"hello/{rank}", number
        return ""
    # Seen in the store before this rank goes on to its next hello, which must not get the same token.
    while not (yield met(rank, token), None):
        yield met(rank, token), word
    return token


def met(rank: int, token: str) -> str:
    """The key by which a rank that has the token is known."""
    return f"{token}/met/{rank}"


class Attempt:
    """The ranks ``0..world-1`` that use ``store`` now, as ``rank`` sees them.

    token: random, the same on all ranks; "" until this rank has met the first one.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = PrefixStore(_NAME, store)
        self._rank, self._world = rank, world
        self._number = secrets.token_hex(8)
        self._process = liveness.identity() or _UNKNOWN
        self._unmet = set(range(1, world)) if rank == 0 else set[int]()
        self._heard, self._calls, self._num_calls = set[int](), list[int](), 0
        self.token = self._number if rank == 0 else ""
        if rank == 0:
            self._store.set(met(0, self.token), self._process)
        self.meet()

    def meet(self) -> bool:
        """Answer who says hello, or see whether this rank was answered. Returns whether all is said."""
        if self._rank == 0:
            self._hear()
            met = self._go({rank: answer(rank, self.token) for rank in self._unmet & self._heard})
            self._unmet -= {rank for rank, has_token in met.items() if has_token}
            return not self._unmet
        if not self.token:
            self.token = self._go({0: ask(self._rank, self._number, self._process)})[0]
        if not self._heard:  # only now, when it has said hello
            self._store.set(f"caller/{self._store.add('callers', 1)}", str(self._rank))
            self._heard = {0}
        return bool(self.token)

    def _hear(self) -> None:
        """See who has said hello: of many that haven't none is looked for."""
        before, self._num_calls = self._num_calls, self._store.add("callers", 0)
        self._calls += range(before + 1, self._num_calls + 1)
        found = self._read([f"caller/{number}" for number in self._calls])
        self._calls = [number for number in self._calls if f"caller/{number}" not in found]
        self._heard |= {*map(int, found.values())}

    def _go(self, rounds: dict[int, Round[_Result]]) -> dict[int, _Result]:
        """Go through rounds side by side: the keys of a step are read, and written, in batches."""
        told: dict[int, str | None] = dict.fromkeys(rounds)
        results = dict[int, _Result]()
        while told:
            steps = dict[int, tuple[str, str | None]]()
            for rank, said in told.items():
                try:
                    steps[rank] = rounds[rank].send(said)  # pyright: ignore[reportArgumentType]  # None begins it
                except StopIteration as end:
                    results[rank] = end.value
            written = {key: value for key, value in steps.values() if value is not None}
            for keys in batches([*written]):
                self._store.multi_set(keys, [written[k] for k in keys])  # pyright: ignore[reportAttributeAccessIssue]
            found = self._read([key for key, value in steps.values() if value is None])
            told = {rank: found.get(key, "") for rank, (key, _) in steps.items()}
        return results

    def _read(self, keys: Sequence[str]) -> dict[str, str]:
        return {key: data.decode() for key, data in values(self._store, keys).items()}

    def meet_within(self, seconds: float) -> bool:
        """``meet`` until all is said, or ``seconds`` are over; whether all is said."""
        return _came(self.meet, seconds, 8 * self._world if self._rank else 1, *_POLLS_S)

    @property
    def missing(self) -> list[int]:
        """Who hasn't come, as far as this rank can tell: all others wait for the first."""
        return sorted(self._unmet) if self._rank == 0 else [0]

    def keys(self) -> Store:
        """Where this attempt's keys lie, for a rank that has the token."""
        return PrefixStore(self.token, self._store)

    def began(self, ranks: set[int]) -> set[int]:
        """Those of ``ranks`` that have said hello, here or in an attempt before; the first one always has."""
        return {0}.intersection(ranks) | of_ranks(self._store, "hello", ranks).keys()

    def ended(self, ranks: list[int]) -> list[int]:
        """Those of ``ranks`` that were here and whose processes, of this host, are known to have ended."""
        told = self._read([met(rank, self.token) for rank in ranks])  # nothing before there is a token
        return sorted(liveness.ended({rank: told.get(met(rank, self.token), "") for rank in ranks}))


def _came(ready: Callable[[], bool], seconds: float, world: int, most_s: float, shorter: int) -> bool:
    most_s = pause_s(most_s, world)
    return came(ready, seconds, most_s / shorter, most_s)


def this_attempt() -> Attempt:
    """The attempt of the default process group; begun at the first call, on a connection of its own."""
    made = process_state.made_here()
    if made.attempt is None:
        with needing_store("to watch over the job"):
            made.attempt = Attempt(job_store(), dist.get_rank(), dist.get_world_size())
    return made.attempt


def new_group(ranks: Sequence[int], backend: str, timeout: timedelta) -> ProcessGroup:
    """``dist.new_group`` among ``ranks``, which all call it, by keys of this attempt alone.

    Raises: CommError where one of them doesn't come within ``timeout``.
    """
    keys = keys_of(ranks, timeout, "to make a process group")
    # `dist.new_group` has no argument for a store: it takes that of the default group.
    with process_state.swapping, default_store_is(keys), host_limits_told():
        made = new_group_of(ranks, timeout, backend)
    assert isinstance(made, ProcessGroup)
    return made


def keys_of(ranks: Sequence[int], timeout: timedelta, what: str) -> Store:
    """Where ``ranks``, which all call it, leave keys for each other: of this call alone.

    what: what for, in messages. Raises: CommError where one of them doesn't come within ``timeout``.
    """
    ours = list(ranks).index(dist.get_rank())
    # Groups of other ranks are made at the same time, so that the ranks are part of the keys.
    members = PrefixStore(f"group/{short(ranks)}", job_store())
    wait = Launch(0, what.removeprefix("to "), process_state.phase, process_state.step)
    with LaunchLog(ranks, "meeting ").waiting(wait):
        return _met(members, ours, ranks, timeout, what).keys()


def join_job(backend: str | None, timeout: timedelta) -> None:
    """``init_process_group`` by the launcher's variables, also where the store has keys of an attempt before.

    Its Gloo groups connect two ranks when they first need it, not every rank to each other at once.
    Every rank calls it. Raises: CommError where some rank doesn't come within ``timeout``.
    """
    with host_limits_told():
        _join(backend, timeout)


def _join(backend: str | None, timeout: timedelta) -> None:
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    attempt = _met(store, rank, range(world), timeout, "to start")
    if process_is_ours() and sys.platform == "linux" and os.environ.get(_GLOO_OVER, "TCP") == "TCP":
        os.environ.setdefault(_GLOO_LAZY, "1")  # elsewhere torch refuses it
    dist.init_process_group(backend, store=attempt.keys(), rank=rank, world_size=world, timeout=timeout)


def _of_this_attempt(torchs: Callable[..., Iterator[_Found]]) -> Callable[..., Iterator[_Found]]:
    """torch's way to a job's store, but where that is torchrun's: by keys of this attempt alone."""

    def found(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[_Found]:
        for store, rank, world in torchs(url, timeout=timeout, **options):
            if os.environ.get(_AGENTS_STORE) == "True" and process_is_ours():
                yield _met(store, rank, range(world), timeout, "to start").keys(), rank, world
            else:
                yield store, rank, world

    return found


# Before a script's own init_process_group(). (``register_rendezvous_handler`` replaces none.)
for _scheme in ("env", "tcp"):
    rendezvous_handlers[_scheme] = _of_this_attempt(rendezvous_handlers[_scheme])


@contextmanager
def needing_store(what: str) -> Iterator[None]:
    """Inside, an error of the job's store says what it was needed for. Raises: CommError."""
    try:
        yield
    except DistError as error:
        raise CommError(
            f"lost the job's store while waiting for other ranks {what} ({error}). The launcher or rank 0 "
            "holds it: look at its output, and whether its host can be reached"
        ) from error


def _met(store: Store, place: int, ranks: Sequence[int], timeout: timedelta, what: str) -> Attempt:
    seconds = timeout.total_seconds()
    with needing_store(what):
        attempt = Attempt(store, place, len(ranks))
        all_came = attempt.meet_within(seconds)
    if not all_came:
        raise CommError(
            f"waited {seconds:.0f} s for other ranks {what}, and ranks {[ranks[n] for n in attempt.missing]} "
            "did not come: look at what the launcher says of them"
        )
    return attempt


class Meeting:
    """The ranks that make one transport: ``rank`` is this one's place among ``world``.

    A few keys of each rank, and no connection between them: how many that takes doesn't grow with the ranks.

        <what>/<place>      left by that rank, or for it
        <what>/refused      the first reason that a rank gave
        <what>/came         how many have come
        <what>/came/<place> whether that rank has
        <what>/all          they all have

    store: theirs alone. log: of the transport.
    """

    def __init__(self, store: Store, log: LaunchLog, rank: int, timeout: timedelta) -> None:
        self.log = log
        self.rank = rank
        self.world = len(log.ranks)
        self.timeout_s = timeout.total_seconds()
        self.store = store

    def leave(self, what: str, data: str, at: int | None = None) -> None:
        """Leave something for the others; ``refusal`` follows before they ``read`` it. Or for the one at a
        place, which takes it by ``own``."""
        self.store.set(f"{what}/{self.rank if at is None else at}", data)

    def own(self, what: str, of: int) -> str:
        """What the rank at place ``of`` leaves for this one, once it is there. Raises: as ``refusal``."""
        self._wait_for(f"{what}/{self.rank}", what, lambda: [of])
        return self.store.get(f"{what}/{self.rank}").decode()

    def read(self, what: str, ranks: Sequence[int]) -> dict[int, str]:
        """What these ranks have left, all of which have come. One message for a batch of them."""
        found = of_ranks(self.store, what, ranks)
        return {rank: found[rank].decode() for rank in ranks}

    def refusal(self, what: str, own: str | None) -> str | None:
        """Return when all ranks have come here: why one of them refused, None where none did; the same on
        all.

        own: this rank's reason ("": it has none to tell), None where it doesn't refuse.
        Raises: CommError where they don't come within the time limit, or the watch found why they can't.
        """
        store = self.store
        # Before this rank is counted: who sees that all have come also sees why one of them refused.
        if own is not None:
            store.compare_set(f"{what}/refused", "", own or _NO_REASON)
        # The last one to come tells the others, so that each asks for one key, however many ranks there are.
        if store.add(f"{what}/came", 1) == self.world:
            store.set(f"{what}/all", "")
        store.set(f"{what}/came/{self.rank}", "")  # after that: who has told nobody has not come
        places, came = range(self.world), f"{what}/came"
        self._wait_for(f"{what}/all", what, lambda: {*places} - of_ranks(store, came, places).keys())
        if not store.check([f"{what}/refused"]):
            return None
        return printable(store.get(f"{what}/refused").decode().strip())

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        """Around a wait for other ranks, which the watch then sees."""
        return self.log.waiting(
            Launch(0, f"make a transport ({what})", process_state.phase, process_state.step)
        )

    def _wait_for(self, key: str, what: str, absent: Callable[[], Iterable[int]]) -> None:
        with self.waiting(what):
            if not _came(lambda: self.store.check([key]), self.timeout_s, self.world, *_MEETING_POLLS_S):
                ranks = sorted(self.log.ranks[place] for place in absent())
                raise CommError(
                    f"waited {self.timeout_s:.0f} s for other ranks to make a transport, and ranks {ranks} "
                    "did not come: look at what the launcher says of them"
                )
