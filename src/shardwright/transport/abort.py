"""Process groups from outside of the thread that waits in them: is a peer gone, and let go of who waits.

A thread that waits in Gloo can't be interrupted, and Gloo's ``abort`` frees nobody (torch 2.13). What does:
a receive whose time limit passes closes all connections of its group, on this rank and so at its neighbours;
every wait in that group ends with an error at once, and other groups live on.
"""

import contextlib
import datetime

import torch
from torch.distributed import ProcessGroup

from shardwright.transport.process import process_state

_TAG = 1 << 30
"""Above those of our transports (30 bits): nobody ever sends or receives with it."""


_MESSAGE = torch.zeros(1)  # there for as long as it may be sent: as long as the process


def close(group: ProcessGroup) -> None:
    """End every wait of this rank in a group, now and later, with an error. Not a collective; any thread."""
    if group.size() == 1:
        return
    if group.name() == "nccl":
        with contextlib.suppress(RuntimeError):
            group.abort()
        return
    for shift in range(1, group.size()):  # a peer that has closed its end tells at once, and closes only that
        with contextlib.suppress(RuntimeError):  # the time limit, or a connection that is closed already
            peer = (group.rank() + shift) % group.size()
            group.recv([torch.empty(1)], peer, _TAG).wait(datetime.timedelta(milliseconds=1))


def is_closed(group: ProcessGroup, peer: int) -> bool:
    """Whether the connection to a peer (its rank in the group) is known to be closed.

    A message of one element that nobody receives: it can only be queued where the connection stands. Never
    with a time limit, which would close the group.
    """
    if group.name() == "nccl":
        return False
    try:
        # The last one is held. Gloo lets go of the one before it.
        process_state.probes.setdefault(group, {})[peer] = group.send([_MESSAGE], peer, _TAG + 1)
    except RuntimeError:
        return True
    return False
