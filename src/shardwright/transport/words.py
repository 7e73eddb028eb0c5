"""Do all ranks mean the same? Tiny exchanges over a mesh axis, before anything larger relies on the answer.

They travel on a transport of the host: that of the axis itself or, where parameters are on an accelerator,
the one beside it, so that nobody waits for a device to read a word back. A rank that ended, never came or is
elsewhere is named there as in any collective.
"""

import hashlib

import torch

from shardwright.errors import CommError
from shardwright.schedule.layout import equal_spans
from shardwright.transport.base import Comm, Segment
from shardwright.transport.cpu.shm import ShmComm
from shardwright.transport.nccl import NcclComm


def on_host(comm: Comm) -> Comm:
    """The transport of host memory among the ranks of ``comm``; ``comm`` itself where that is one."""
    return comm.host if isinstance(comm, NcclComm) and comm.host is not None else comm


def exchange(comm: Comm, words: list[int], key: str) -> list[list[int]]:
    """Every rank's ``words`` (as many on each, int64), in rank order. Every rank of the axis calls it.

    Returns when all are there. Not counted in ``sent_nbytes``, which is what parameters and gradients cost.
    """
    comm = on_host(comm)
    if comm.world == 1:
        return [words]
    if isinstance(comm, ShmComm):
        return comm.exchange(words, key)
    sent_nbytes = comm.sent_nbytes
    table = torch.zeros(comm.world, len(words), dtype=torch.int64, device="cpu")
    table[comm.rank] = torch.tensor(words, dtype=torch.int64, device="cpu")
    comm.all_gather([_segment(table)], key).wait()
    comm.sent_nbytes = sent_nbytes
    return table.tolist()


def compare(comm: Comm, text: str, key: str) -> list[str]:
    """[] where ``text`` is the same on every rank, else every rank's text. Every rank of the axis calls it.

    Sends a hash; the texts travel only where hashes differ, so the result is the same on all ranks.
    """
    data = text.encode()
    digest = int.from_bytes(hashlib.sha256(data).digest()[:8], "big", signed=True)
    rows = exchange(comm, [digest, len(data)], key)
    if all(row == rows[0] for row in rows):
        return []
    longest = max(nbytes for _, nbytes in rows)
    padded = list(data.ljust(longest, b"\0"))
    texts = exchange(comm, padded, f"{key}: what differs")
    return [
        bytes(row[:nbytes]).decode(errors="replace") for row, (_, nbytes) in zip(texts, rows, strict=True)
    ]


def check_alike(comm: Comm, text: str, key: str) -> None:
    """Before a collective of which ``text`` says what it moves: on a transport of c10d's collectives, which
    compare nothing (other sizes end the process, other dtypes give other numbers), wait for all ranks' words.

    Every rank of the axis calls it. Raises: CommError where ranks say different things.
    """
    if isinstance(comm, NcclComm) and (texts := compare(comm, text, key)):
        told = "".join(f"\n  rank {rank}: {each}" for rank, each in zip(comm.log.ranks, texts, strict=True))
        raise CommError(
            f"ranks are in different collectives:{told}\nAll ranks must make the same calls in one order"
        )


def _segment(table: torch.Tensor) -> Segment:
    world, width = table.shape
    return Segment(table.view(-1), equal_spans(width, world))
