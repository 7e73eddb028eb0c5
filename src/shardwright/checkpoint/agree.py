"""The ranks save and load together: they arrive together, wait for each other without a deadline on file
I/O, and fail together.

A collective that waits for the slowest disk runs into the timeout of its group; one that a rank never
enters hangs. So (1) arrival is announced in the store, where who is missing can be seen and named; (2) the
I/O of a rank runs in a thread while the ranks exchange one integer, every 0.1 s at most, until all are
done: no collective waits for a file, and a rank that died is noticed by the next exchange; (3) what went
    wrong anywhere is raised everywhere.
"""

import base64
import json
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardwright import clock
from shardwright.checkpoint.format import Box, Piece, TensorEntry
from shardwright.checkpoint.storage import Unpublished
from shardwright.checkpoint.url import location_of
from shardwright.errors import CheckpointError, ShardwrightError, UnreadError
from shardwright.transport.attempt import Attempt, new_group, this_attempt
from shardwright.transport.process import Launch, LaunchLog, process_state
from shardwright.transport.recorder import LAUNCH, WAIT

T = TypeVar("T")

ARRIVAL_TIMEOUT_S = 60.0
"""How long the first rank waits for the last one to call save or load, while all their processes live."""
_LOOK_S = 0.5  # between looks whether the missing ranks' processes have ended
_POLL_S = 0.1
_GROUP_TIMEOUT = timedelta(seconds=300)  # for one exchange of an integer between living ranks


class Ranks:
    """The ranks of the default process group (or this process alone), as seen by checkpoints."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.calls = 0
        self.cpu_group: dist.ProcessGroup | None = None
        self._log = LaunchLog(range(world), "checkpoint")
        self._finished = 0

    def arrive(self, call: str) -> None:
        """Every rank calls this first; returns when all have.

        Raises:
            CheckpointError: some ranks did not arrive within ``ARRIVAL_TIMEOUT_S``, made another call, or
                their processes (of this host) have ended, which is looked for each second.
            CommError: the watch has found that the others can't come.
        """
        if self.world == 1:
            return
        keys = [f"checkpoint/{self.calls}/{rank}" for rank in range(self.world)]
        launch = self._log.launch(call)
        with self._log.waiting(launch):
            store = self._wait_for_arrival(this_attempt(), keys, call)
        calls = [store.get(key).decode() for key in keys]
        self.calls += 1
        if self.calls > 1:
            store.delete_key(f"checkpoint/{self.calls - 2}/{self.rank}")
        if len(set(calls)) > 1:
            by = {each: [rank for rank in range(self.world) if calls[rank] == each] for each in calls}
            made = ", ".join(f"{each} by ranks {who}" for each, who in by.items())
            raise CheckpointError(f"the ranks made different calls: {made}; expected one call of all ranks")
        if self.cpu_group is None:
            # A group of its own: its exchanges can't meet those of training, also when they run in the
            # background.
            self.cpu_group = new_group(range(self.world), "gloo", _GROUP_TIMEOUT)
            self._log.travels_on(self.cpu_group)

    def _wait_for_arrival(self, attempt: Attempt, keys: list[str], call: str) -> Store:
        """Returns when all keys are there: the store that they are in."""
        began, looks, pause = clock.monotonic(), 0, 0.001
        store: Store | None = None
        while True:
            attempt.meet()  # on rank 0: others may need the token to say that they are here
            if store is None and attempt.token:
                store = attempt.keys()
                store.set(keys[self.rank], call)
            if store is not None and store.check(keys):
                return store
            waited_s = clock.monotonic() - began
            late, lost = waited_s > ARRIVAL_TIMEOUT_S, list[int]()
            if late or waited_s > (looks + 1) * _LOOK_S:
                looks += 1
                # Where there is no store yet, the rank that would have answered.
                missing = [0] if store is None else [n for n, k in enumerate(keys) if not store.check([k])]
                lost = attempt.ended(missing)
            if late or lost:
                if process_state.look is not None:  # a rank that told us why may have ended since
                    process_state.look()
                    process_state.raise_diagnosis()
                self._log.ring.pop()  # the others, which haven't launched it, count on without it
                if not lost and store is not None:
                    store.delete_key(keys[self.rank])  # so that a late rank does not take us for waiting
                arrived = sorted({*range(self.world)} - {*missing})
                why = f": the processes of ranks {lost} have ended" if lost else ""
                raise CheckpointError(
                    f"{call} was entered by ranks {arrived}, not by ranks {missing} within "
                    f"{min(waited_s, ARRIVAL_TIMEOUT_S):.3g} s{why}; "
                    "every rank must call it (it writes or reads the pieces that the rank owns)"
                )
            process_state.raise_diagnosis()
            clock.sleep(pause)
            pause = min(2 * pause, _POLL_S)

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run ``work`` (file I/O of any length) on every rank; returns every rank's result, sent as
        ``plain`` says.

        Raises:
            UnreadError: on all ranks, where that is the only reason.
            CheckpointError: on all ranks, with the reasons of all ranks on which ``work`` failed, or if a
                rank was lost.
        """
        outcome: list[Any] = []
        if self.world == 1:
            _attempt(work, outcome)
            outcomes = outcome
        else:
            thread = threading.Thread(
                target=_attempt, args=(work, outcome), name="shardwright-io", daemon=True
            )
            thread.start()
            try:
                outcomes = self._wait_for_all(thread, outcome, what)
            except (RuntimeError, ValueError) as error:  # a ValueError: it said something else than JSON
                thread.join()
                own = f"; this rank: {outcome[0][1]}" if outcome[0][1] else ""
                raise CheckpointError(f"{what}: lost contact with another rank ({error}){own}") from error
        faults = [f"rank {rank}: {fault}" for rank, (_, fault, _) in enumerate(outcomes) if fault]
        if faults:
            unread = all(is_unread for _, fault, is_unread in outcomes if fault)
            raise (UnreadError if unread else CheckpointError)(
                f"{what} failed on {len(faults)} of {self.world} ranks\n  " + "\n  ".join(faults)
            )
        return [made(result) for result, _, _ in outcomes]

    def here(self, what: str, work: Callable[[], None]) -> None:
        """Run ``work`` in the calling thread, which may make collectives of its own; every rank hears how it
        went. Raises: CheckpointError, as ``together``; from its cause where that is on this rank."""
        failed: Exception | None = None
        try:
            work()
        except Exception as error:
            failed = error

        def tell() -> None:
            if failed is not None:
                raise CheckpointError(str(failed))

        try:
            self.together(what, tell)
        except CheckpointError as error:
            raise error from failed

    def _wait_for_all(self, thread: threading.Thread, outcome: list[Any], what: str) -> list[Any]:
        pause, own, name = 0.001, None, f"{self._log.name}, files"
        while True:
            thread.join(pause)
            # From here on this rank waits, which isn't its own disk's doing.
            if outcome and own is None and threading.get_ident() == process_state.thread:
                self._finished += 1
                launch = Launch(self._finished, what, process_state.phase, process_state.step)
                own = launch, clock.perf_counter()
                process_state.recorder.write((LAUNCH, name, *own))
            done, outcomes = torch.tensor([len(outcome)]), list[Any]()
            with self._log.waiting(Launch(0, what, process_state.phase, process_state.step)):
                dist.all_reduce(done, dist.ReduceOp.MIN, group=self.cpu_group)
                if done.item():
                    outcomes = self._tell(json.dumps(outcome[0]).encode())
            if outcomes:
                if own is not None:
                    span = threading.get_ident(), own[1], clock.perf_counter()
                    process_state.recorder.write((WAIT, name, own[0], *span))
                return outcomes
            pause = min(2 * pause, _POLL_S)

    def _tell(self, said: bytes) -> list[Any]:
        """What every rank says."""
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(said)
        dist.all_reduce(sizes, group=self.cpu_group)
        rows = torch.zeros(self.world, int(sizes.max()), dtype=torch.uint8)
        own = torch.frombuffer(bytearray(said.ljust(rows.shape[1])), dtype=torch.uint8)
        dist.all_gather([*rows], own, group=self.cpu_group)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _attempt(work: Callable[[], Any], outcome: list[Any]) -> None:
    try:
        with torch.no_grad():  # grad mode belongs to a thread
            outcome.append((plain(work()), "", False))
    except (ShardwrightError, OSError) as error:
        is_unread = isinstance(error, UnreadError) or not isinstance(error, ShardwrightError)  # of the disk
        outcome.append((None, str(error), is_unread))
    except BaseException:  # a bug, or a SystemExit of the user's code: every rank must still hear of it
        outcome.append((None, traceback.format_exc(), False))


_of_group: "WeakKeyDictionary[dist.ProcessGroup, Ranks]" = WeakKeyDictionary()


def ranks() -> Ranks:
    """The ranks of the current default process group; this process alone if there is none."""
    if not dist.is_initialized():
        return Ranks(0, 1)
    world = dist.group.WORLD
    assert world is not None
    if world not in _of_group:
        _of_group[world] = Ranks(dist.get_rank(), dist.get_world_size())
    return _of_group[world]


# ---- what they tell each other


@dataclass(frozen=True)
class Partial:
    """What a rank's part contributes to the checksum of a piece that several ranks hold."""

    key: str
    piece: Piece
    part: Box
    crc32: int


@dataclass(frozen=True)
class Written:
    """What one rank reports after writing: its file, its pieces by key, and the checksums of copies it did
    not write."""

    file: str
    nbytes: int
    pieces: Mapping[str, list[Piece]]
    copies: Mapping[tuple[str, tuple[int, ...]], int]
    rng: Any
    rng_entries: Mapping[str, TensorEntry]


_DESCRIBED = {kind.__name__: kind for kind in (Box, Piece, TensorEntry, Unpublished, Partial, Written)}
_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: kind for kind in (list, tuple, set, dict)},
    "bytes": lambda parts: base64.b64decode(parts[0]),
    "path": lambda parts: location_of(parts[0]),
}


def plain(value: Any) -> Any:
    """``value`` as JSON, of which nothing is run where it is read. (A pickle would let who speaks in a rank's
    place run code on all others.)

        null, numbers and text as they are; else a list of the kind, and what it is made of
        {"a": (1, 2)}   ["dict", ["tuple", "a", ["tuple", 1, 2]]]

    Raises: TypeError for one of another kind.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name, parts = type(value).__name__, value
    if name in _DESCRIBED:
        parts = vars(value).values()
    elif isinstance(value, Mapping):
        name, parts = "dict", value.items()
    elif isinstance(value, PurePath):
        name, parts = "path", [str(value)]
    elif isinstance(value, bytes):
        parts = [base64.b64encode(value).decode()]
    elif isinstance(value, tuple):  # a torch.Size, too
        name = "tuple"
    elif name not in _KINDS:
        raise TypeError(f"ranks don't tell each other of a {name}")
    return [name, *map(plain, parts)]


def made(value: Any) -> Any:
    """What ``plain`` was given on the rank that told it. Raises: KeyError for a kind that isn't known."""
    if not isinstance(value, list):
        return value
    name, parts = value[0], [made(each) for each in value[1:]]
    return _DESCRIBED[name](*parts) if name in _DESCRIBED else _KINDS[name](parts)
