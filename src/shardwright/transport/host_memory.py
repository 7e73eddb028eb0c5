"""What the operating system says of memory, and a bound that a rank keeps on the host."""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwright.errors import ConfigError, OutOfMemory

VARIABLE = "SHARDWRIGHT_MEMORY_BUDGET"
"""Bytes of host memory that one rank may hold ("6GiB", "500MB", "4000000000"), or "container": what the
container has, for all ranks in it together. Empty: no bound."""

_CGROUP = Path("/sys/fs/cgroup")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class Budget:
    """A bound of host memory. container: it is that of all processes of the container, below ``root``; else
    of this process, as ``ps`` shows it (resident)."""

    nbytes: int
    container: bool = False
    root: Path = _CGROUP

    def held_nbytes(self) -> int:
        """What counts against it, now."""
        if self.container:
            found = re.search(r"^inactive_file (\d+)$", (self.root / "memory.stat").read_text(), re.MULTILINE)
            current = int((self.root / "memory.current").read_text())
            return current - (int(found[1]) if found else 0)  # the kernel drops clean pages of files first
        return resident_nbytes()

    def has_room(self, more_nbytes: int) -> bool:
        """Whether ``more_nbytes`` more can be held."""
        # Asked at every event of a step, while there is still time to say what is held: the kernel ends a
        # process that takes more than its container has by SIGKILL, without a word.
        return self.held_nbytes() + more_nbytes <= self.nbytes

    def error(self, more_nbytes: int, rank: int, doing: str) -> OutOfMemory:
        """What is raised where there is no room for ``more_nbytes`` more."""
        whose = "its container" if self.container else "this process"
        from shardwright.columns import in_words  # noqa: PLC0415 exceeded budgets

        more = f" and needs {in_words(more_nbytes)} more" if more_nbytes else ""
        return OutOfMemory(
            f"rank {rank}, {doing}: {whose} holds {in_words(self.held_nbytes())}{more}, expected at most "
            f"{in_words(self.nbytes)} ({VARIABLE}={os.environ.get(VARIABLE, '')}). Raise that where the "
            "machine has more, or have the step hold less"
        )


def resident_nbytes() -> int:
    """Bytes of memory that this process has, on Linux; 0 elsewhere. Takes 3 us."""
    file = _statm(os.getpid())
    return 0 if file is None else int(os.pread(file, 64, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anonymous_nbytes() -> int:
    """Of these, what no other process shares; 0 where the kernel doesn't say."""
    return _status_nbytes("RssAnon")


def peak_resident_nbytes() -> int:
    """The most of them that this process has had; 0 where the kernel doesn't say."""
    return _status_nbytes("VmHWM")


def _status_nbytes(name: str) -> int:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def host_free_nbytes() -> int:
    """Bytes of the host's memory that can be taken; 0 where the kernel doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def free_nbytes(root: Path = _CGROUP) -> int:
    """Bytes that processes here can still take, of the host or its container; 0 where neither says."""
    host = host_free_nbytes()
    try:
        bound = Budget(_container_nbytes(root), True, root)
        return min(host, bound.nbytes - bound.held_nbytes())
    except (ConfigError, OSError):
        return host


def total_nbytes(root: Path = _CGROUP) -> int:
    """Bytes of the host, or of its container where that has a bound."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(host, _container_nbytes(root))
    except ConfigError:
        return host


@cache
def _statm(pid: int) -> int | None:
    """The open file, of this process: a forked one opens its own."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


@cache
def budget_of(text: str, root: Path = _CGROUP) -> Budget | None:
    """What the variable says. Raises: ConfigError for anything else."""
    if not text:
        return None
    if text == "container":
        return Budget(_container_nbytes(root), True, root)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(
            f'{VARIABLE}: got {text!r}, expected bytes as "6GiB" or "500MB", or "container"; set it to one '
            "of these on every rank, or unset it"
        )
    return Budget(int(float(found[1]) * _UNITS[found[2] or ""]))


def stated_budget() -> Budget | None:
    """What the environment says. Raises: ConfigError."""
    return budget_of(os.environ.get(VARIABLE, ""))


def _container_nbytes(root: Path) -> int:
    try:
        text = (root / "memory.max").read_text().strip()
    except OSError as error:
        text = str(error)
    if not text.isdecimal():
        raise ConfigError(
            f"{VARIABLE}=container: {root / 'memory.max'} says {text!r}, expected bytes; set the variable to "
            'a number as "6GiB" where the container has no bound of its own, or no cgroup of version 2'
        )
    return int(text)
