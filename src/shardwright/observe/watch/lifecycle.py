"""The watch begins and ends with the default process group; what ends the process is noted.

A note tells the other ranks why this one no longer comes: the exception that nobody caught, or just that
its program ended. Hooks that Python calls leave it (``sys.excepthook``, ``atexit``); a process that is killed
leaves none, nor one that calls ``os._exit`` without calling ``leave`` before.
"""

import atexit
import logging
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch.distributed import DistError

from shardwright import clock
from shardwright.engine.listeners import listeners
from shardwright.errors import InputError
from shardwright.observe.watch.findings import Note
from shardwright.observe.watch.process_status import is_library
from shardwright.observe.watch.watchdog import Watch
from shardwright.policy import WatchPolicy
from shardwright.torch_private import when_default_group_changes
from shardwright.transport.attempt import this_attempt
from shardwright.transport.jobstore import hasty, job_store
from shardwright.transport.mesh import timeout_of
from shardwright.transport.process import came, process_is_ours, process_state

logger = logging.getLogger(__name__)

VARIABLE = "SHARDWRIGHT_WATCH"
"""The policy of programs that don't call ``set_watch``: see ``WatchPolicy.from_text``."""

_GLOO = "gloo/transport/"  # in what its collectives raise where a peer has ended
_LINGER_S = 3.0  # at most, of the process that holds the store, until the others have read what is there
_STORE_S = 1.0  # at most, for each answer of the store to a process that ends


class _Lifecycle:
    """Holds this process' watch, the default group that it is of, what was chosen, and the hooks' state."""

    def __init__(self) -> None:
        self.policy: WatchPolicy | None = None
        self.watch: Watch | None = None
        self.group: Any = lambda: None
        self.hook, self.is_hooked = sys.excepthook, False
        self.pid = 0


_lifecycle = _Lifecycle()


def set_watch(policy: WatchPolicy) -> None:
    """Choose how long a rank waits before it asks the others for their state, and what is an error then; the
    same on all ranks. Local.

    The watchdog begins with the default process group. ``on=False`` ends it, and any other policy applies
    from then on; a watchdog that is off starts with the next ``fully_shard``.

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
            _warn_of_limit(policy)
        else:
            _end()


def keep_watch() -> None:
    """Watch over the ranks of the default process group, if that isn't done yet; local. Nothing for a world
    of one, or where the policy says off."""
    group = dist.group.WORLD if dist.is_initialized() else None
    policy = _lifecycle.policy or WatchPolicy.from_text(os.environ.get(VARIABLE, ""))
    wanted = group is not None and dist.get_world_size() > 1 and policy.on and process_is_ours()
    if wanted and group is _lifecycle.group():
        _hook_exceptions()  # as it shards: what it raises next has a remedy, though ranks may not have met
        return
    _end()
    if group is None or not wanted:
        return
    _lifecycle.watch = Watch(policy, dist.get_rank(), this_attempt(), job_store(), _hook_exceptions)
    _lifecycle.group, _lifecycle.pid = ref(group), os.getpid()
    _lifecycle.watch.start()
    atexit.register(_leave_at_exit)
    _warn_of_limit(policy)


def _warn_of_limit(policy: WatchPolicy) -> None:
    group = dist.group.WORLD
    limit_s = timeout_of(group).total_seconds() if group is not None else 0.0
    if policy.stall_s is not None and 0 < limit_s < policy.stall_s and dist.get_rank() == 0:
        logger.warning(
            "the default process group gives up after %.0f s, before a rank counts as stalled (stall_s = "
            "%.0f): give init_process_group a longer timeout, or lower stall_s",
            limit_s,
            policy.stall_s,
        )


def _group_changed() -> None:
    if dist.group.WORLD is not None:
        keep_watch()
        return
    leave(sys.exc_info()[1])  # of a script that ends its group in `finally`
    process_state.destroyed_ns = 1e9 * clock.time()
    process_state.end_store()


def late_over_the_run() -> list[str]:
    """Which ranks were found late since the job began, as ``Late.to_json`` says it; any rank may ask."""
    watch = _lifecycle.watch
    if watch is not None and not watch.is_deaf:
        with suppress(RuntimeError), hasty(_STORE_S):  # the store may have gone
            return watch.exchange.late()
    return []


def leave(error: BaseException | None = None) -> None:
    """This process is about to end, or its process group has ended: note why, for the ranks that still need
    it, and end the watch. Waits for no store that is silent.

    Called by hooks as Python ends; by hand before ``os._exit``. error: what nobody caught, if anything.
    """
    watch = _lifecycle.watch
    if watch is None or os.getpid() != _lifecycle.pid:  # a forked child inherits the hooks
        return
    with suppress(RuntimeError), hasty(_STORE_S):  # the store may have gone first
        if error is not None and not watch.is_deaf:  # it may raise as it begins
            came(lambda: watch.reach.has_met, _STORE_S, 0.01, 0.05)
        watch.look()  # who was told first has ended, and broke what this one waited in: no fault of its own
        exchange = watch.exchange
        if process_state.diagnosis is not None:
            if exchange.holds_store:
                exchange.linger(_LINGER_S)
        elif not watch.is_deaf:
            watch.stop()
            raised = "" if error is None else f"{type(error).__name__}: {error}"[:400]
            exchange.leave(Note(watch.rank, raised, _raised_in(error), clock.time(), exchange.holds_store))
            if exchange.holds_store:
                exchange.part(_LINGER_S)
    _end()


def _end() -> None:
    if _lifecycle.watch is not None:
        _lifecycle.watch.stop()
        atexit.unregister(_leave_at_exit)
        if sys.excepthook is _told:
            sys.excepthook, _lifecycle.is_hooked = _lifecycle.hook, False
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


def _leave_at_exit() -> None:
    # Python keeps there what nobody has caught: raised before our hook was set, or while torch set its own.
    leave(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))


def _hook_exceptions() -> None:
    """Once, until it is taken back: a hook of the script's own, which calls ours, would be called by it. The
    watch calls this once it has met the others: later than torch sets a hook of its own."""
    if not _lifecycle.is_hooked and (found := sys.excepthook) is not _told:  # asked once: of two threads
        _lifecycle.hook, sys.excepthook, _lifecycle.is_hooked = found, _told, True


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    ours = _lifecycle.watch is not None and _lifecycle.pid == os.getpid()
    if ours:
        listeners.amend(error)
    _lifecycle.hook(kind, error, trace)
    if _lifecycle.watch is not None and ours:
        watch, is_torchs = _lifecycle.watch, isinstance(error, DistError) or _GLOO in str(error)
        if is_torchs and isinstance(error, RuntimeError) and (better := watch.explain(error)) is not error:
            print(better, file=sys.stderr, flush=True)  # a peer had ended
        with hasty(_STORE_S):
            _lifecycle.watch.look()
        if process_state.diagnosis is not None and not process_state.delivered:
            # it was let go out of a call of its own
            process_state.delivered = True
            print(process_state.diagnosis, file=sys.stderr, flush=True)
    if not hasattr(sys, "ps1"):  # an interactive Python goes on
        leave(error)


when_default_group_changes(_group_changed)
if dist.is_initialized():
    keep_watch()
