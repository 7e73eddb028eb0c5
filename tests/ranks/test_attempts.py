"""Ranks of one attempt find each other in a store that is full of what an attempt before has left there."""

import gc
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import fully_shard, set_transport
from tests.ranks.pool import on_ranks, run_ranks


def starts_again(rank, world, port):
    """As a rank of torchrun, whose agent has the store: its script makes the process group by itself."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    time.sleep(0.3 * rank)  # who comes first finds all that the others left in the last attempt
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return total.item()


def test_a_script_that_makes_the_process_group_itself_has_keys_of_its_attempt_alone():
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    for _ in range(3):
        assert run_ranks(2, starts_again, store.port, grouped=False, limit_s=30.0) == [3, 3]


def held() -> tuple[int, int]:
    """Descriptors, and address space in GiB."""
    gc.collect()
    [size] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line]
    return len(os.listdir("/proc/self/fd")), int(size.split()[1]) >> 20


@pytest.mark.parametrize("transport", ["auto", "sockets"])
@on_ranks(2)
def test_leaving_and_making_the_default_group_again_leaves_nothing(rank, world, tmp_path, transport):
    folder = str(tmp_path)
    set_transport(transport)
    found = []
    for life in range(6):
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{life}", world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20)
        )
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(8, 8)), nn.Linear(8, 8)))
        model(torch.ones(2, 8)).sum().backward()
        dist.barrier()
        del model, store
        found.append(held())
    descriptors, gibibytes = zip(*found[1:], strict=True)
    assert descriptors[-1] <= descriptors[0] + 1, found  # one that is on its way out; each life took nine
    assert max(gibibytes) - min(gibibytes) <= 1, found  # a segment has 64
