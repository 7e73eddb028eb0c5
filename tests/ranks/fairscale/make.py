"""Writes the files of this folder with fairscale 0.4.13 itself, on 3 Gloo ranks, without a GPU.

    python -m venv FS && FS/bin/pip install torch fairscale==0.4.13 && FS/bin/python make.py

``flat-*``: one flat parameter per wrapper (the default). ``apart-*``: ``flatten_parameters=False``. Each rank
saves ``{"model": local_state_dict(), "shard_metadata": local_metadata_dict()}``; ``*-whole.pt`` is what
``FullyShardedDataParallel.consolidate_shard_weights`` makes of the three.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fairscale.nn import FullyShardedDataParallel
from torch import nn

WORLD = 3


def model(wrap):
    """Uneven, tied, with buffers, wrapped inside of wrapped; a parameter with fewer elements than ranks."""
    torch.manual_seed(5)
    net = nn.Module()
    net.embed = nn.Embedding(11, 6)
    net.up = wrap(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2, bias=False)))
    net.norm = nn.BatchNorm1d(6)
    net.norm.running_mean += torch.arange(6)
    net.head = nn.Linear(6, 11, bias=True)
    net.head.weight = net.embed.weight
    net.scale = nn.Parameter(torch.tensor([0.25]))
    return wrap(net)


def write(rank, folder, flat):
    store = dist.FileStore(f"{folder}/store{flat}", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    group, cpu = dist.group.WORLD, torch.device("cpu")
    wrap = functools.partial(
        FullyShardedDataParallel,
        process_group=group,
        process_group_reduce_scatter=group,
        compute_device=cpu,
        flatten_parameters=flat,
    )
    sharded = model(wrap)
    content = {
        "model": {k: v.detach().clone() for k, v in sharded.local_state_dict().items()},
        "shard_metadata": sharded.local_metadata_dict(),
    }
    kind = "flat" if flat else "apart"
    torch.save(content, f"{folder}/{kind}-rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        files = [torch.load(f"{folder}/{kind}-rank{r}.pt", weights_only=True) for r in range(WORLD)]
        whole = FullyShardedDataParallel.consolidate_shard_weights(
            [f["model"] for f in files], [f["shard_metadata"] for f in files]
        )
        torch.save({k: v.clone() for k, v in whole.items()}, f"{folder}/{kind}-whole.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # Gloo takes no 2-D input
    here = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
    here = here if here.is_dir() else here.parent
    with tempfile.TemporaryDirectory() as folder:
        for flat in (True, False):
            mp.spawn(write, (folder, flat), nprocs=WORLD)
        for file in Path(folder).glob("*.pt"):
            (here / file.name).write_bytes(file.read_bytes())
