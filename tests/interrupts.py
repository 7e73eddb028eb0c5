"""Ctrl-C at any instruction of the package's: KeyboardInterrupt wherever Python would raise it."""

import gc
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import shardwright

ROOT = Path(shardwright.__file__).parent
ROOMS = tuple(f"{ROOT / room}/" for room in ("engine", "params", "schedule", "transport"))


class Interrupt:
    """A block in which KeyboardInterrupt is raised at the ``at``-th place that this thread comes to in the
    package's core: where a function begins and after each call of one in C, since Python looks for signals
    there. place: where that was; None: there were fewer. No garbage is collected in it: what is raised in a
    callback of the collector Python ignores, and 3.11 may crash where the profiler is taken off in one."""

    def __init__(self, at: int) -> None:
        self.at, self._count = at, 0
        self.place: str | None = None

    def _come(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(ROOMS):
            self._count += 1
            if self._count == self.at:
                sys.setprofile(None)
                file = Path(frame.f_code.co_filename).relative_to(ROOT)
                self.place = f"{file}:{frame.f_lineno} in {frame.f_code.co_qualname}, {event}"
                raise KeyboardInterrupt

    def __enter__(self) -> "Interrupt":
        gc.disable()
        sys.setprofile(self._come)
        return self

    def __exit__(self, kind: Any, *_: object) -> bool:
        sys.setprofile(None)
        gc.enable()
        return kind is KeyboardInterrupt


def is_free(turn: Any) -> bool:
    """Whether another thread could have the lock of a runtime."""
    got: list[bool] = []
    other = threading.Thread(
        target=lambda: got.append(turn._lock.acquire(timeout=0) and not turn._lock.release())
    )
    other.start()
    other.join()
    return got[0]
