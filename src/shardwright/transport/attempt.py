"""One attempt of a job: ranks that know each other apart from the ranks of an attempt before.

A launcher that starts a job again keeps its store (torchrun's lives in the agent), and with it every key of
the attempt that failed: its diagnosis, its addresses, what its ranks had announced. No variable of the
environment tells two attempts apart: agents count restarts each for themselves. So the first rank makes a
random token, and keys lie under it (``welcome`` is how the others learn it). Nothing here is a collective:
a rank that never comes keeps nobody waiting for longer than it is asked to.
"""

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwright import clock
from shardwright.errors import CommError
from shardwright.torch_private import default_store_is, new_group_of, rendezvous_handlers
from shardwright.transport import liveness
from shardwright.transport.host_limits import host_limits_told
from shardwright.transport.jobstore import job_store
from shardwright.transport.launches import Launch, LaunchLog
from shardwright.transport.process import process_is_ours, process_state
from shardwright.transport.welcome import Round, answer, ask, met

_NAME = "shardwright/attempt"
_POLL_S, _POLL_MOST_S = 0.001, 0.02
_UNKNOWN = "?"  # of a host without /proc
_Result = TypeVar("_Result")
_Found = tuple[Store, int, int]
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_GLOO_LAZY, _GLOO_OVER = "TORCH_GLOO_LAZY_INIT", "GLOO_DEVICE_TRANSPORT"  # variables that torch reads


class Attempt:
    """The ranks ``0..world-1`` that use ``store`` now, as ``rank`` sees them.

    token: random, the same on all ranks; "" until this rank has met the first one.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = PrefixStore(_NAME, store)
        self._rank = rank
        self._number = secrets.token_hex(8)
        self._process = liveness.identity() or _UNKNOWN
        self._unmet = set(range(1, world)) if rank == 0 else set[int]()
        self.token = self._number if rank == 0 else ""
        if rank == 0:
            self._store.set(met(0, self.token), self._process)
        self.meet()

    def meet(self) -> bool:
        """Answer who says hello, or see whether this rank was answered. Returns whether all is said."""
        if self._rank == 0:
            self._unmet -= {rank for rank in tuple(self._unmet) if self._go(answer(rank, self.token))}
            return not self._unmet
        if not self.token:
            self.token = self._go(ask(self._rank, self._number, self._process))
        return bool(self.token)

    def _go(self, steps: Round[_Result]) -> _Result:
        try:
            key, value = next(steps)
            while True:
                if value is not None:
                    self._store.set(key, value)
                key, value = steps.send(self._read(key) if value is None else "")
        except StopIteration as end:
            return end.value

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def meet_within(self, seconds: float) -> bool:
        """``meet`` until all is said, or ``seconds`` are over; whether all is said."""
        deadline, pause = clock.monotonic() + seconds, _POLL_S
        while not self.meet():
            process_state.raise_diagnosis()
            if clock.monotonic() > deadline:
                return False
            clock.sleep(pause)
            pause = min(1.5 * pause, _POLL_MOST_S)
        return True

    @property
    def missing(self) -> str:
        """Who hasn't come, for messages."""
        return f"ranks {sorted(self._unmet)}" if self._rank == 0 else "the first of them"

    def keys(self) -> Store:
        """Where this attempt's keys lie, for a rank that has the token."""
        return PrefixStore(self.token, self._store)

    def ended(self, ranks: list[int]) -> list[int]:
        """Those of ``ranks`` that were here and whose processes, of this host, are known to have ended."""
        if not self.token:
            return []
        told = {rank: self._read(met(rank, self.token)) for rank in ranks}
        return [rank for rank, process in told.items() if process != _UNKNOWN and liveness.has_ended(process)]


def this_attempt() -> Attempt:
    """The attempt of the default process group; begun at the first call, on a connection of its own."""
    made = process_state.made_here()
    if made.attempt is None:
        made.attempt = Attempt(job_store(), dist.get_rank(), dist.get_world_size())
    return made.attempt


def new_group(ranks: Sequence[int], backend: str, timeout: timedelta) -> ProcessGroup:
    """``dist.new_group`` among ``ranks``, which all call it, by keys of this attempt alone.

    Raises: CommError where one of them doesn't come within ``timeout``.
    """
    keys = keys_of(ranks, timeout, "to make a process group")
    with process_state.swapping, default_store_is(keys), host_limits_told():
        made = new_group_of(ranks, timeout, backend)
    assert isinstance(made, ProcessGroup)
    return made


def keys_of(ranks: Sequence[int], timeout: timedelta, what: str) -> Store:
    """Where ``ranks``, which all call it, leave keys for each other: of this call alone.

    what: what for, in messages. Raises: CommError where one of them doesn't come within ``timeout``.
    """
    ours = list(ranks).index(dist.get_rank())
    members = PrefixStore(f"group/{','.join(map(str, ranks))}", job_store())
    wait = Launch(0, what.removeprefix("to "), process_state.phase, process_state.step)
    with LaunchLog(ranks, "meeting ").waiting(wait):
        return _met(Attempt(members, ours, len(ranks)), timeout, what).keys()


def join_job(backend: str | None, timeout: timedelta) -> None:
    """``init_process_group`` by the launcher's variables, also where the store has keys of an attempt before.

    Its Gloo groups connect two ranks when they first need it, not every rank to each other at once.
    Every rank calls it. Raises: CommError where some rank doesn't come within ``timeout``.
    """
    with host_limits_told():
        _join(backend, timeout)


def _join(backend: str | None, timeout: timedelta) -> None:
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    attempt = _met(Attempt(store, rank, world), timeout, "to start")
    if process_is_ours() and sys.platform == "linux" and os.environ.get(_GLOO_OVER, "TCP") == "TCP":
        os.environ.setdefault(_GLOO_LAZY, "1")  # elsewhere torch refuses it
    dist.init_process_group(backend, store=attempt.keys(), rank=rank, world_size=world, timeout=timeout)


def _of_this_attempt(torchs: Callable[..., Iterator[_Found]]) -> Callable[..., Iterator[_Found]]:
    """torch's way to a job's store, but where that is torchrun's: by keys of this attempt alone."""

    def found(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[_Found]:
        for store, rank, world in torchs(url, timeout=timeout, **options):
            if os.environ.get(_AGENTS_STORE) == "True" and process_is_ours():
                yield _met(Attempt(store, rank, world), timeout, "to start").keys(), rank, world
            else:
                yield store, rank, world

    return found


# Before a script's own init_process_group(). (``register_rendezvous_handler`` replaces none.)
for _scheme in ("env", "tcp"):
    rendezvous_handlers[_scheme] = _of_this_attempt(rendezvous_handlers[_scheme])


def _met(attempt: Attempt, timeout: timedelta, what: str) -> Attempt:
    seconds = timeout.total_seconds()
    if not attempt.meet_within(seconds):
        raise CommError(
            f"waited {seconds:.0f} s for other ranks {what}, and {attempt.missing} did not come: look at "
            "what the launcher says of them"
        )
    return attempt
