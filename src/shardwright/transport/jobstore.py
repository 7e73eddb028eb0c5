"""The job's store, asked by a thread of its own, so that whoever asks can stop waiting.

The calls of all threads of a process are made one after another by one thread, and who asked waits in Python:
until the watch has found that the others can't come, or, in a block of ``hasty``, for so many seconds.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwright import clock
from shardwright.torch_private import default_store
from shardwright.transport.process import Launch, LaunchLog, Wait, came, process_state, start_thread

_POLL_S = 0.02  # between two looks at a key that isn't there yet
_LOOK_S = 0.05  # how often who waits looks what the watch has found
_LOOKS_PER_S = 10_000  # of all ranks together, at most: a TCPStore serves 30,000 calls a second
_BATCH = 128  # keys of a call: a TCPStore takes 0.6 ms to look for so many, and 1.7 s for 4,096


class StoreSilent(DistNetworkError):
    """The store has not answered in the time that there was."""


@contextmanager
def hasty(seconds: float) -> Generator[None]:
    """In this block this thread waits so long for the job's store, and no longer: then ``StoreSilent``."""
    before = getattr(process_state.haste, "seconds", None)
    process_state.haste.seconds = seconds
    try:
        yield
    finally:
        process_state.haste.seconds = before


class _Line:
    """The thread that asks, and the connection to the store that it makes."""

    def __init__(self, store: Store) -> None:
        self.patience_s = store.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]
        self.busy_since = 0.0
        self.closed = False
        self.fronts: list[JobStore] = []  # torch's C++ holds only half of a store that is written in Python
        self.log = LaunchLog(range(dist.get_world_size()), "store ")
        self.asked: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = queue.SimpleQueue()
        self.thread = start_thread("shardwright-store", self._serve, store)

    def _serve(self, store: Store) -> None:
        own: Any = None
        while (asked := self.asked.get()) is not None:
            future, call = asked
            if future.set_running_or_notify_cancel():  # else who asked waits no longer
                self.busy_since = clock.monotonic()
                try:
                    # A clone may be used beside the original, which torch's own threads ask.
                    own = own or store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # not in the stub
                    # A host that went dark, or a store's process that is stopped, holds this call for 15
                    # minutes, in C++: torch's TCPStore has no time limit where it counts.
                    future.set_result(call(own))
                except BaseException as error:
                    future.set_exception(error)
                self.busy_since = 0.0


class JobStore(Store):
    """The job's store, or what is below its prefixes. ``get`` waits for its key."""

    def __init__(self, line: _Line, at_bottom: bool = False) -> None:
        super().__init__()
        self._line, self._at_bottom = line, at_bottom
        line.fronts.append(self)

    @property
    def silent_s(self) -> float:
        """For how long it has owed an answer."""
        since_s = self._line.busy_since
        return clock.monotonic() - since_s if since_s else 0.0

    def bottom(self) -> "JobStore":
        """The same store, with the keys of all who use it."""
        return JobStore(self._line, True)

    def close(self) -> None:
        """End the thread, once the store has answered what it was asked."""
        self._line.closed = True
        self._line.asked.put(None)
        # Not waited for while the store owes an answer, which may take as long as the call in `_serve`.
        self._line.thread.join(0.0 if self.silent_s > _LOOK_S else 1.0)

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self._line.closed:
            raise DistStoreError("the process group of this store was destroyed")

        def call(own: Store) -> Any:
            return getattr(bottom_of(own) if self._at_bottom else own, name)(*arguments)

        future: Future[Any] = Future()
        self._line.asked.put((future, call))
        seconds = getattr(process_state.haste, "seconds", None)
        try:
            return future.result(_LOOK_S if seconds is None else seconds)
        except TooLate:
            if seconds is None:
                return self._result(future, name)
            future.cancel()
            raise StoreSilent(f"the job's store has not answered for {self.silent_s:.1f} s") from None

    def _result(self, future: Future[Any], name: str) -> Any:
        """What the store answers late: this thread waits, as the watch sees."""
        began = clock.monotonic()
        with self._waiting():
            while clock.monotonic() < began + self._line.patience_s:
                process_state.raise_diagnosis()
                try:
                    return future.result(_LOOK_S)
                except TooLate:
                    pass
        future.cancel()
        raise StoreSilent(f"the job's store has not answered {name!r} for {self._line.patience_s:.0f} s")

    @contextmanager
    def _waiting(self) -> Generator[None]:
        thread = threading.get_ident()
        launch = Launch(0, "the job's store", process_state.phase, process_state.step)
        wait = process_state.waits.setdefault(thread, Wait(self._line.log, launch, clock.monotonic()))
        try:
            yield
        finally:
            if wait.launch is launch:
                process_state.waits.pop(thread, None)

    # ---- what torch calls a store by

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        # In Python first: the store's own wait would hold the one thread that asks, and so whoever asks next.
        self.wait([key])
        return self._ask("get", key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._ask("multi_get", keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._ask("multi_set", keys, values)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask("compare_set", key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = self._line.patience_s if timeout is None else timeout.total_seconds()
        if self.check(keys):
            return
        with self._waiting():
            if not came(lambda: self.check(keys), limit_s, _POLL_S, _POLL_S):
                missing = [key for key in keys if not self.check([key])]
                raise DistStoreError(f"waited {limit_s:.0f} s for the key {missing[:1]} of the job's store")

    deleteKey = delete_key  # the name by which other stores call it


def values(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """What those of ``keys`` hold that are there, in order. A batch in which some are missing is halved: few
    missing ones cost few calls."""
    found, parts = dict[str, bytes](), batches(keys)[::-1]
    while parts:
        part = parts.pop()
        if store.check(part):
            found |= zip(part, store.multi_get(part), strict=True)
        elif len(part) > 1:
            parts += part[len(part) // 2 :], part[: len(part) // 2]
    return found


def of_ranks(store: Store, kind: str, ranks: Iterable[int]) -> dict[int, bytes]:
    """What is there under a kind of keys, ``<kind>/<rank>``, of some ranks."""
    keys = {f"{kind}/{rank}": rank for rank in ranks}
    return {keys[key]: data for key, data in values(store, [*keys]).items()}


def batches(keys: Sequence[str]) -> list[list[str]]:
    """Keys, as many at a time as a store is to be asked for."""
    return [list(keys[at : at + _BATCH]) for at in range(0, len(keys), _BATCH)]


def pause_s(least_s: float, world: int) -> float:
    """Between two looks of a rank into the store, where so many ranks look."""
    return max(least_s, world / _LOOKS_PER_S)


def bottom_of(store: Store) -> Store:
    """The store itself, without the prefixes that were put before its keys."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def job_store() -> JobStore:
    """The store of the default process group, as all of this process ask it."""
    with process_state.making:
        made = process_state.made_here()
        if made.store is None:
            made.store = JobStore(_Line(default_store()))
        return made.store
