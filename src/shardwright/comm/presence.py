"""Which ranks' processes have ended: what a rank that waits for others can know before its time limit.

Every rank leaves in the job's store where its process can be looked up. A rank of the same host (one boot,
one namespace of process ids) looks there; of other hosts nothing is known, and their ranks count as alive.
"""

import os

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store  # no public way to the job's store


def announce() -> None:
    """Leave this process' identity in the job's store. No collective; without ``/proc`` nothing is left."""
    own = identity()
    if own is not None:
        _get_default_store().set(_key(dist.get_rank()), own)


def ended(ranks: list[int]) -> list[int]:
    """Those of ``ranks`` whose processes are known to have ended: gone, or a zombie."""
    store = _get_default_store()
    return [rank for rank in ranks if store.check([_key(rank)]) and has_ended(store.get(_key(rank)).decode())]


def _key(rank: int) -> str:
    return f"shardwright/process/{rank}"


def has_ended(told: str) -> bool:
    """Whether the process with this identity is known to have ended; False for one of another host."""
    own = identity()
    host, pid, _ = told.rsplit(" ", 2)
    return own is not None and own.rsplit(" ", 2)[0] == host and identity(int(pid)) != told


def identity(pid: int | None = None) -> str | None:
    """Host, id and start time of a living process, this one by default; None for one that has ended.

    (Ids are used again, pairs with a time are not.)
    """
    pid = os.getpid() if pid is None else pid
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before may hold spaces
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else f"{boot} {namespace} {pid} {started}"
