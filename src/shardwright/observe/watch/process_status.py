"""What this process does, as its watch thread sees it: where the training thread is, and if anything runs."""

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from shardwright import clock
from shardwright.observe.watch.findings import Answer, Launched, Status, Waits
from shardwright.observe.watch.flight_recorder import FlightRecorder, InFlight
from shardwright.torch_private import WAIT_BATCH_P2P
from shardwright.transport.host_memory import resident_nbytes
from shardwright.transport.process import Wait, process_state
from shardwright.transport.recorder import LINE

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = os.sep + "site-packages" + os.sep
_MADE = "<string>"  # exec and eval
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_C10D = _DISTRIBUTED + "distributed_c10d.py"
_WAITS = {  # of tensor parallelism, and between a pipeline's stages
    _DISTRIBUTED + "_functional_collectives.py": "wait_tensor",
    os.path.join(_DISTRIBUTED, "pipelining", "schedules.py"): WAIT_BATCH_P2P,
}
_WATCHING = ("shardwright-watch", "shardwright-store", "shardwright-signals")
_SAMPLE_S = 0.1  # at least between two samples: a share of less says nothing
_BUSY_SHARE = 0.05  # of a core: below it a process counts as idle, if no thread of it is runnable either


@contextmanager
def frame_of(thread: int) -> Iterator[FrameType | None]:
    """Where a thread is now, for the length of the block; None for one that has ended.

    No garbage collection begins meanwhile. Before Python 3.12 one may begin in any allocation, also while
    Python makes the object of another thread's frame (here, and for each ``f_back``). A finalizer then may
    let that thread return, and Python goes on to write where the frame was: into others, or the heap.
    """
    pauses = sys.version_info < (3, 12) and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield sys._current_frames().get(thread)
    finally:
        if pauses:
            gc.enable()


def user_line(frame: FrameType | None) -> str:
    """``"train.py:40 in main"``: the innermost frame that is the user's: not ours, torch's or Python's own.

    Where there is none (``shardwright train`` itself), the outermost of ours. "" without a frame. Code of no
    file is the user's where nothing else is (``python -c``): dataclasses and named tuples have some, too.
    """
    outermost, made = frame, None
    while frame is not None:
        if frame.f_code.co_filename == _MADE:
            made = made or frame
        elif not is_library(frame.f_code.co_filename):
            return _said(frame)
        if frame.f_code.co_filename.startswith(_OURS + "train"):
            return _said(frame)
        outermost, frame = frame, frame.f_back
    outermost = made or outermost
    return _said(outermost) if outermost is not None else ""


def foreign_call(frame: FrameType | None) -> tuple[str, object]:
    """The ``torch.distributed`` function that a thread is in, and the frame that called it; ("", None)."""
    name, caller = "", None
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or not name):
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        if path == _C10D or function == _WAITS.get(path):
            name, caller = function, frame.f_back
        elif not frame.f_code.co_filename.startswith(_TORCH):
            break
        frame = frame.f_back
    return name, caller


def is_library(path: str) -> bool:
    """Whether a source file is ours, torch's or Python's own."""
    if path.startswith((_TORCH, _OURS, "<frozen")):
        return True
    return path.startswith(_STDLIB) and _SITE not in path


def _said(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    here_path = os.getcwd() + os.sep
    return f"{path.removeprefix(here_path)}:{frame.f_lineno} in {frame.f_code.co_name}"


class ProcessStatus:
    """Samples of this process, taken by the watch thread a few times a second."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sampled_s = self._ran_s = clock.monotonic()
        self._cpu_s = _others_cpu_s()
        self._foreign: tuple[str, object, float] = ("", None, 0.0)
        self._call: InFlight | None = None
        self._stands: tuple[object, float] = (None, self._ran_s)
        self._recorder = FlightRecorder()

    @property
    def wait(self) -> Wait | None:
        """What the training thread waits for."""
        return process_state.waits.get(process_state.thread)

    @property
    def in_flight(self) -> InFlight | None:
        """What it may wait for, where it is in no wait that is known, but stands in one call."""
        known = self.wait is not None or bool(self._foreign[0])
        return None if known else self._recorder.in_flight(self._stands[1])

    @property
    def stands_in(self) -> Wait | InFlight | None:
        """A wait of ours, a collective that is in flight, or a call of the caller's to torch.distributed."""
        return self.wait or self._call or self.in_flight

    def sample(self) -> None:
        """Note whether anything ran since the last sample, and the foreign call that is running."""
        now = clock.monotonic()
        if now - self._sampled_s < _SAMPLE_S:
            return
        cpu = _others_cpu_s()
        share = (cpu - self._cpu_s) / (now - self._sampled_s)
        self._sampled_s, self._cpu_s = now, cpu
        # CPU time is no sign of life on a busy machine: a thread that waits for a core counts as running.
        if self.wait is not None or share > _BUSY_SHARE or _runnable():
            self._ran_s = now
        self._recorder.look()
        name, call, stands = "", None, None
        if self.wait is None:
            with frame_of(process_state.thread) as frame:
                process_state.recorder.write((LINE, user_line(frame), clock.perf_counter()))
                name, caller = foreign_call(frame)
                call = (id(caller), getattr(caller, "f_lasti", 0))
                stands = (process_state.thread, id(frame), getattr(frame, "f_lasti", 0))
            del frame, caller  # while they are held, what the functions' variables hold isn't freed
        if (name, call) != self._foreign[:2]:
            self._foreign = (name, call, now)
            self._call = InFlight("", 0, name, now) if name else None
        if stands is None or stands != self._stands[0]:
            self._stands = (stands, now)

    def answer(self) -> Answer:
        """What this rank says of itself now."""
        self.sample()
        now, wait, in_flight = clock.monotonic(), self.wait, self.in_flight
        idle_s = now - self._ran_s
        with frame_of(process_state.thread) as frame:
            line = user_line(frame)
        foreign, _, since_s = self._foreign
        caught, caught_step = process_state.caught
        progress = process_state.progress or (f"pass {process_state.step}" if process_state.step else "")
        waits = None
        if wait is not None:
            waits = Waits(wait.log.name, wait.launch.number, wait.launch.key, now - wait.since_s)
        elif in_flight is not None:
            waits = Waits(in_flight.log, in_flight.number, in_flight.key, now - in_flight.since_s, True)
        logs = self._recorder.launched()
        for log in process_state.logs:
            if log.launched:
                keys = tuple(launch.key for launch in tuple(log.ring))
                begun, ended = self._recorder.progress(log)
                logs[log.name] = Launched(
                    log.ranks, log.launched, keys, begun, ended, in_memory=log.in_memory
                )
        return Answer(
            rank=self._rank,
            place=f"{process_state.phase} of pass {process_state.step}" if process_state.phase else "",
            line=line,
            waits=waits,
            does="idle" if idle_s > 0.5 else "computes",
            since_s=(now - since_s) if foreign else idle_s if idle_s > 0.5 else now - process_state.moved_s,
            idle_s=idle_s,
            foreign=foreign,
            foreign_s=(now - since_s) if foreign else 0.0,
            caught=caught if caught_step >= process_state.step - 1 else "",
            status=Status(progress, resident_nbytes(), _device_nbytes()),
            logs=logs,
            gone=tuple({log.ranks[place] for log in process_state.logs for place in tuple(log.ended)}),
        )


def _ours() -> list[int]:
    """The threads by which the watch itself works."""
    return [thread.native_id or 0 for thread in threading.enumerate() if thread.name in _WATCHING]


def _others_cpu_s() -> float:
    """CPU time of this process, without what the watch itself has used."""
    used_ns = 0
    try:
        for thread in _ours():
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                used_ns += int(file.read().split()[0])
    except OSError:  # not Linux, or a thread that has just ended
        return clock.process_time() - clock.thread_time()
    return clock.process_time() - used_ns / 1e9


def _device_nbytes() -> int:
    """Memory of this process' tensors on accelerators; the watch thread has no current one of its own."""
    return sum(map(torch.accelerator.memory_allocated, range(torch.accelerator.device_count())))


def _runnable() -> bool:
    """Whether a thread of this process, none of the watch's, is running or waits for a core."""
    own = {str(thread) for thread in _ours()}
    try:
        for thread in os.listdir("/proc/self/task"):
            if thread not in own:
                with open(f"/proc/self/task/{thread}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] == "R":
                        return True
    except OSError:  # not Linux, or a thread that has just ended
        return True
    return False
