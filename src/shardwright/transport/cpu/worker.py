"""A thread beside the rank's own, that codes or decodes messages one after the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardwright.transport.cpu.coder import Coder


class Worker:
    """Its thread begins with the first job, and ends with the worker. ``fail`` is told why a job failed.
    coder: for its jobs alone."""

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
