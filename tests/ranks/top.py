"""``shardwright top`` as a rank of the job asks it."""

import io
from contextlib import redirect_stdout

import torch.distributed as dist

from shardwright.cli import main
from shardwright.observe.watch.lifecycle import store_address


def said_by_top(rank: int) -> str:
    """What ``top --once --json`` prints on rank 1 while all ranks are here, else ""; every rank calls."""
    dist.barrier()
    printed = io.StringIO()
    if rank == 1:
        with redirect_stdout(printed):
            assert main(["top", store_address(), "--once", "--json"]) == 0
    dist.barrier()
    return printed.getvalue()
