"""Ranks in CPU cgroups of their own, so that each can be given a part of a core."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.links import PREFIX

PERIOD_US = 10_000  # of a quota: the kernel's own 100 ms would stop some of so short steps, and others not


class Quota:
    """A CPU cgroup for each rank, of the first or second version."""

    def __init__(self, stack: ExitStack, world: int) -> None:
        first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
        self._is_first = (first / "cpu.cfs_quota_us").exists() or (first / "cgroup.procs").exists()
        root = first if self._is_first else second
        self.folders = [root / f"{PREFIX}-{os.getpid()}-{rank}" for rank in range(world)]
        for folder in self.folders:
            folder.mkdir()
            stack.callback(_remove, folder)

    def set(self, rank: int, cores: float | None) -> None:
        """Give a rank so many cores; None: all."""
        folder = self.folders[rank]
        quota = None if cores is None else max(1000, int(cores * PERIOD_US))
        if self._is_first:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
        else:
            (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")

    def hold(self, rank: int, pid: int) -> None:
        """Move a rank's process to its cgroup."""
        (self.folders[rank] / "cgroup.procs").write_text(str(pid))


def _remove(folder: Path) -> None:
    for _ in range(50):  # until the kernel has seen that its processes have ended
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)


@contextmanager
def cgroups(world: int) -> Iterator[Quota | None]:
    """A quota for each rank; None where this machine lends none."""
    with ExitStack() as stack:
        try:
            quota = Quota(stack, world)
            for rank in range(world):
                quota.set(rank, None)
        except OSError:
            quota = None
        yield quota
