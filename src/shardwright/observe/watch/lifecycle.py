"""The watch begins with the first sharded module and ends with the process; what ends the process is noted.

A note tells the other ranks why this one no longer comes: the exception that nobody caught, or just that
its program ended. Hooks that Python calls leave it (``sys.excepthook``, ``atexit``); a process that is killed
leaves none, nor one that calls ``os._exit`` without calling ``leave`` before.
"""

import atexit
import logging
import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any
from weakref import ref

import torch.distributed as dist

from shardwright.engine.listeners import listeners
from shardwright.errors import InputError
from shardwright.observe.watch.diagnosis import Note
from shardwright.observe.watch.process_status import is_library
from shardwright.observe.watch.status_exchange import address_of, open_exchange
from shardwright.observe.watch.watchdog import Watch
from shardwright.policy import WatchPolicy
from shardwright.torch_private import default_store
from shardwright.transport.attempt import this_attempt
from shardwright.transport.launches import process_state
from shardwright.transport.mesh import timeout_of
from shardwright.transport.process import process_is_ours

logger = logging.getLogger(__name__)

VARIABLE = "SHARDWRIGHT_WATCH"
"""The policy of programs that don't call ``set_watch``: see ``WatchPolicy.from_text``."""

_PATIENCE_S = 2.0  # at most, for ranks that come to their first sharded module later
_LINGER_S = 3.0  # at most, of the process that holds the store, until the others have read what is there


class _Lifecycle:
    """Of this process: the watch that is on, over which default group, and whose ranks were met; what was
    chosen; the hooks' state."""

    def __init__(self) -> None:
        self.policy: WatchPolicy | None = None
        self.watch: Watch | None = None
        self.group: Any = lambda: None
        self.met: Any = lambda: None
        self.pid = 0


_lifecycle = _Lifecycle()


def set_watch(policy: WatchPolicy) -> None:
    """Choose how long a rank waits before it asks the others for their state, and what is an error then; the
    same on all ranks. Local.

    Call it before the first ``fully_shard`` if possible. Later, ``on=False`` ends the watchdog, and any other
    policy applies from then on; a watchdog that is off starts with the next ``fully_shard``.

    Args:
        policy: see ``WatchPolicy``.

    Raises:
        InputError: ``policy`` isn't a WatchPolicy.
    """
    if not isinstance(policy, WatchPolicy):
        raise InputError(f"set_watch expects a WatchPolicy, got {policy!r}")
    _lifecycle.policy = policy
    if _lifecycle.watch is not None:
        if policy.on:
            _lifecycle.watch.follow(policy)
        else:
            _end()


def keep_watch() -> None:
    """Watch over the ranks of the default process group, if that isn't done yet. Every rank calls it.

    Nothing for a world of one, or where the policy says off. No collective: ranks come when they come.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or group is _lifecycle.group() or dist.get_world_size() == 1:
        return
    attempt = this_attempt()
    attempt.meet_within(0.0 if group is _lifecycle.met() else _PATIENCE_S)
    _lifecycle.met = ref(group)
    policy = _lifecycle.policy or WatchPolicy.from_text(os.environ.get(VARIABLE, ""))
    if not attempt.token or not policy.on or not process_is_ours():  # no token: the next call asks again
        return
    _end()
    rank = dist.get_rank()
    limit_s = timeout_of(group).total_seconds()
    if policy.stall_s is not None and limit_s < policy.stall_s and rank == 0:
        logger.warning(
            "the default process group gives up after %.0f s, before a rank counts as stalled (stall_s = "
            "%.0f): give init_process_group a longer timeout, or lower stall_s",
            limit_s,
            policy.stall_s,
        )
    exchange = open_exchange(default_store(), dist.get_world_size(), attempt.token)
    _lifecycle.watch = Watch(policy, exchange, rank, attempt)
    _lifecycle.group = ref(group)
    _set_hooks()
    _lifecycle.watch.start()


def store_address() -> str:
    """Where ``shardwright top`` finds the job's store: ``HOST:PORT`` or a path; "" where it can't."""
    return address_of(default_store()) if dist.is_initialized() else ""


def late_over_the_run() -> list[str]:
    """Which ranks were found late since the job began, as ``Late.to_json`` says it; any rank may ask."""
    watch = _lifecycle.watch
    if watch is None or watch.is_deaf:
        return []
    with suppress(RuntimeError):  # the store may have gone
        return watch.exchange.late()
    return []


def leave(error: BaseException | None = None) -> None:
    """This process is about to end: note why, for the ranks that still need it, and end the watch.

    Called by hooks as Python ends; by hand before ``os._exit``. error: what nobody caught, if anything.
    """
    watch = _lifecycle.watch
    if watch is None or os.getpid() != _lifecycle.pid:  # a forked child inherits the hooks
        return
    with suppress(RuntimeError):  # the store may have gone first
        exchange = watch.exchange
        watch.look()  # who was told first has ended, and broke what this one waited in: no fault of its own
        if process_state.diagnosis is not None:
            if exchange.holds_store:
                exchange.linger(_LINGER_S)
        elif not watch.is_deaf:
            watch.stop()
            raised = "" if error is None else f"{type(error).__name__}: {error}"[:400]
            exchange.leave(Note(watch.rank, raised, _raised_in(error), time.time(), exchange.holds_store))
            if exchange.holds_store:
                exchange.part(_LINGER_S)
    _end()


def _end() -> None:
    if _lifecycle.watch is not None:
        _lifecycle.watch.stop()
    _lifecycle.watch, _lifecycle.group = None, lambda: None
    process_state.diagnosis, process_state.delivered = None, False


def _raised_in(error: BaseException | None) -> str:
    """The user's line that an exception came through last."""
    trace, line = getattr(error, "__traceback__", None), ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not line or not is_library(code.co_filename):
            path = code.co_filename.removeprefix(os.getcwd() + os.sep)
            line = f"{path}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return line


def _set_hooks() -> None:
    if _lifecycle.pid == os.getpid():
        return
    _lifecycle.pid = os.getpid()
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        listeners.amend(error)
        before(kind, error, trace)
        if _lifecycle.watch is not None and _lifecycle.pid == os.getpid():
            _lifecycle.watch.look()
        if (
            process_state.diagnosis is not None
            and not process_state.delivered
            and _lifecycle.pid == os.getpid()
        ):
            # it was let go out of a call of its own
            print(process_state.diagnosis, file=sys.stderr, flush=True)
        if not hasattr(sys, "ps1"):  # an interactive Python goes on
            leave(error)

    sys.excepthook = told
    atexit.register(leave)
