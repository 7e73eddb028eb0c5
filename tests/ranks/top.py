"""``shardwright top`` as a rank of the job asks it."""

import io
from contextlib import redirect_stdout

import torch.distributed as dist

from shardwright.cli import main
from shardwright.observe.watch.status_exchange import store_address


def printed_by_top() -> str:
    """What ``top --once --json`` prints on this rank."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["top", store_address(), "--once", "--json"]) == 0
    return printed.getvalue()


def said_by_top(rank: int) -> str:
    """What it prints on rank 1 while all ranks are here, else ""; every rank calls."""
    dist.barrier()
    said = printed_by_top() if rank == 1 else ""
    dist.barrier()
    return said
