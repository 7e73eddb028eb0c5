"""Section: parameters, gradients and optimizer state on the host, or the optimizer's part alone.

The host's time is taken until ``backward`` returns: where a copy stops it, it nears the device's time.
"""

import time
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import shardwright
from bench.prove_gpu.blocks import Shape, Stack, inputs_of, made, norm_of
from bench.prove_gpu.device import Device
from bench.prove_gpu.rank import Rows, largest, mib, run

OURS: dict[str, Any] = {
    "nothing": shardwright.OffloadPolicy,
    "all": shardwright.CPUOffloadPolicy,
    "the optimizer's part": shardwright.OptimizerOffloadPolicy,
    "all but gradients": partial(shardwright.CPUOffloadPolicy, grads=False),
    "the optimizer's state": partial(shardwright.CPUOffloadPolicy, params=False, grads=False),
}
WARM_UP = 2


def measure(device: Device, place: torch.device, rows: Rows) -> None:
    """A row for each policy; the model of one is gone before the next is made."""
    shape = Shape.on(device)
    blocks = device.size(2, 2)
    policies = {kind: make() for kind, make in OURS.items()}
    policies |= {"all, FSDP2": torch_fsdp.CPUOffloadPolicy(pin_memory=not device.simulated)}
    for kind, policy in policies.items():
        before = device.now_nbytes()
        model = _made(shardwright if kind in OURS else torch_fsdp, shape, place, blocks, policy)
        device.synchronize()
        device.empty_cache()
        at_rest = largest(device.now_nbytes() - before, place)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
        taken, x = [], inputs_of(shape, place)
        for _ in range(WARM_UP + device.size(4, 2)):
            taken.append(_step(device, model, optimizer, x))
        peak, _ = device.peak_nbytes(partial(_step, device, model, optimizer, x))
        host_ms, device_ms, optimizer_ms = (median(each) for each in zip(*taken[WARM_UP:], strict=True))
        rows.add(
            f"{blocks} blocks of {shape.hidden}, AdamW",
            world=dist.get_world_size(),
            **{"on the host": kind},
            **{
                "on the device at rest MiB": mib(at_rest),
                "peak of a step MiB": mib(largest(peak, place)),
                "forward and backward ms": round(device_ms, 2),
                "the host's share of it ms": round(host_ms, 2),
                "optimizer ms": round(optimizer_ms, 2),
            },
        )
        del model, optimizer


def _step(
    device: Device, model: Stack, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> tuple[float, float, float]:
    """Milliseconds of the host and of the device for forward and backward, and of the optimizer's step."""
    device.together()
    begin, start = device.mark(), time.perf_counter()
    model(x).backward()
    host_ms, end = 1e3 * (time.perf_counter() - start), device.mark()
    device.synchronize()
    start = time.perf_counter()
    optimizer.step()
    device.synchronize()
    optimizer_ms = 1e3 * (time.perf_counter() - start)
    optimizer.zero_grad()
    return host_ms, device.between_ms(begin, end), optimizer_ms


def _made(package: Any, shape: Shape, place: torch.device, blocks: int, policy: Any) -> Stack:
    options = {
        "mesh": init_device_mesh(place.type, (dist.get_world_size(),)),
        "mp_policy": package.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": policy,
    }
    found = [package.fully_shard(made(shape, place), **options) for _ in range(blocks)]
    model = Stack(found, norm_of(shape, place))
    package.fully_shard(model, **options)
    return model


if __name__ == "__main__":
    run(measure)
