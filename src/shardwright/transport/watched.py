"""Has torch's ``CommDebugMode`` count our collectives, which are messages and copies, not c10d operations.

Each collective is told to the modes that are entered, as the operation that it stands for: one for each
group, however many messages it takes.
"""

import sys
from enum import Enum
from typing import Any

import torch

from shardwright.torch_private import ALL_GATHER_OP, COMM_DEBUG_MODE, REDUCE_SCATTER_OP, dispatch_modes
from shardwright.transport.base import Comm


class Collective(Enum):
    """The operation of c10d that a collective stands for."""

    ALL_GATHER = ALL_GATHER_OP
    REDUCE_SCATTER = REDUCE_SCATTER_OP
    ALL_REDUCE = torch.ops.c10d.allreduce_


class _Operation:
    """What a mode is given as the operation: its name, and nothing to do."""

    def __init__(self, packet: Any) -> None:
        self._overloadpacket = packet

    def __call__(self) -> None:
        """Do nothing."""


def notify_modes(comm: Comm, kind: Collective) -> None:
    """A collective begins on ``comm``, and some mode is entered. In a world of one nothing is sent."""
    # The mode counts operations as they are dispatched, as those of c10d are, and messages of a CPU never.
    if comm.world > 1 and not comm.uses_c10d:
        loaded = sys.modules.get(COMM_DEBUG_MODE)  # importing it costs 1 s, and who uses the mode has done so
        if loaded is None:
            return
        for mode in dispatch_modes():
            if isinstance(mode, loaded.CommDebugMode):
                mode.__torch_dispatch__(_Operation(kind.value), ())
