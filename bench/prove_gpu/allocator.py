"""Section: what the allocator holds for tensors of changing sizes, by its settings; NCCL's priority.

Run once for each setting, which both read from the environment when a process starts. Each step has sequences
of another length, so that memory is cut up as real batches do it.
"""

import os
from statistics import median

import torch
import torch.distributed as dist

from bench.prove_gpu.beside_fsdp2 import WARM_UP, ours
from bench.prove_gpu.blocks import Shape, inputs_of
from bench.prove_gpu.device import Device
from bench.prove_gpu.rank import Rows, largest, mib, run

PARTS = (8, 5, 7, 3, 6, 4, 8, 2)
"""Lengths of sequences, in eighths of the longest."""
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY")


def measure(device: Device, place: torch.device, rows: Rows) -> None:
    """One row, of this process' setting."""
    shape = Shape.on(device)
    model = ours(shape, place, device.size(4, 2))
    whole, taken = inputs_of(shape, place), []
    batches = [whole[:, : shape.sequence * part // 8] for part in PARTS]

    def steps() -> None:
        for x in batches:
            device.together()
            begin = device.mark()
            model(x).backward()
            model.zero_grad()
            end = device.mark()
            device.synchronize()
            taken.append(device.between_ms(begin, end))

    for _ in range(WARM_UP):
        model(whole).backward()
        model.zero_grad()
    allocated, reserved = device.peak_nbytes(steps)
    allocated, reserved = largest(allocated, place), largest(reserved, place)
    set_to = [f"{name}={os.environ[name]}" for name in NAMES if name in os.environ]
    rows.add(
        "sharded blocks of a 7B model, sequences of changing lengths",
        world=dist.get_world_size(),
        setting=", ".join(set_to) or "none",
        **{
            "peak of tensors MiB": mib(allocated),
            "peak of the allocator MiB": mib(reserved),
            "held for nobody MiB": mib(reserved - allocated),
            "step ms": round(median(taken), 2),
        },
    )


if __name__ == "__main__":
    run(measure)
