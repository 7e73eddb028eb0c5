"""Whether a process has ended: what a rank that waits for others can know before its time limit.

Every rank leaves in the job's store where its process can be looked up, for ranks of the same host.
"""

import os
from collections.abc import Mapping


def ended(told: Mapping[int, str]) -> set[int]:
    """Those of some ranks, of which each has told its process' identity, that are known to have ended."""
    own = identity()
    if own is None:  # no /proc
        return set()
    # Of another boot, or another namespace of ids, nothing is known: such a rank counts as alive.
    host = own.rsplit(" ", 2)[0] + " "
    ours = {rank: each for rank, each in told.items() if each.startswith(host)}
    return {rank for rank, each in ours.items() if identity(int(each.split(" ")[-2])) != each}


def identity(pid: int | None = None) -> str | None:
    """Host, id and start time of a living process, this one by default; None for one that has ended."""
    pid = os.getpid() if pid is None else pid
    boot = boot_id()
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before may hold spaces
    except OSError:
        return None
    state, started = fields[0], fields[19]  # ids are used again, pairs of an id and a start are not
    return None if state in "ZX" else f"{boot} {namespace} {pid} {started}"


def boot_id() -> str:
    """The same for all that runs on one machine until it starts anew; "" where there is no /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
