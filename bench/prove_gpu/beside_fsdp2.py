"""Section: blocks of the shape of a 7B model beside torch's FSDP2 and beside the same blocks on one device.

A step is forward, backward and ``zero_grad``, parameters in float32, computed in bfloat16, gradients reduced
in float32. Peak memory is measured with one system alive. Times are medians of rounds in which the systems
alternate, ratios and differences those of each round; host time is what a step takes until ``backward`` has
returned, over that of "local"; device time lies between two events of a stream. Kernels and copies are those
that "local" hasn't; communication is exposed while collectives run on the device and nothing else does.
"""

import gc
import time
from collections.abc import Callable
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

WARM_UP = 3
INNER = (11008, 14336)
"""Widths of the feed-forward networks of 7B and 8B models."""


def local(shape: Shape, place: torch.device, blocks: int) -> Stack:
    """No communication: parameters are on the device, in the dtype that is computed in."""
    half = torch.bfloat16
    return Stack([made(shape, place, half) for _ in range(blocks)], norm_of(shape, place, half))


def ours(shape: Shape, place: torch.device, blocks: int) -> Stack:
    """Sharded by this package, with its defaults."""
    policy = shardwright.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return _sharded(shardwright.fully_shard, policy, shape, place, blocks)


def fsdp2(shape: Shape, place: torch.device, blocks: int) -> Stack:
    """Sharded by torch, with its defaults."""
    policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return _sharded(torch_fsdp.fully_shard, policy, shape, place, blocks)


def _sharded(shard: Callable[..., Any], policy: Any, shape: Shape, place: torch.device, blocks: int) -> Stack:
    options = {"mesh": init_device_mesh(place.type, (dist.get_world_size(),)), "mp_policy": policy}
    made_blocks = [made(shape, place) for _ in range(blocks)]
    for block in made_blocks:
        shard(block, **options)
    model = Stack(made_blocks, norm_of(shape, place))
    shard(model, **options)
    return model


SYSTEMS = {"local": local, "shardwright": ours, "fsdp2": fsdp2}


def measure(device: Device, place: torch.device, rows: Rows) -> None:
    """All figures of both shapes."""
    room = 0 if device.simulated else torch.accelerator.get_memory_info()[1]
    blocks = device.size(4 if room > 36 * 2**30 else 1, 2)
    for inner in INNER:
        shape = Shape.on(device, inner)
        x = inputs_of(shape, place)
        peaks = {name: _peak(device, SYSTEMS[name](shape, place, blocks), x, place) for name in SYSTEMS}
        models = {name: make(shape, place, blocks) for name, make in SYSTEMS.items()}
        taken = _times(device, models, x, device.size(15, 3))
        for model in models.values():
            device.traced(partial(_step, model, x))  # the profiler's own beginnings
        traces = {name: device.traced(partial(_step, model, x)) for name, model in models.items()}
        groups, none = blocks + 1, traces["local"]
        for name, each in taken.items():
            host_ms = median(ours - alone for (ours, _), (alone, _) in zip(each, taken["local"], strict=True))
            ratio = median(one / other for (_, one), (_, other) in zip(each, taken["fsdp2"], strict=True))
            trace = traces[name]
            rows.add(
                f"{blocks} blocks of {shape.hidden} with a feed-forward network of {shape.inner}",
                world=dist.get_world_size(),
                system=name,
                **{
                    "step ms": round(median(step for _, step in each), 2),
                    "step / FSDP2's": round(ratio, 3),
                    "exposed communication ms": round(trace.exposed_ms, 2),
                    "host us per group": round(1e3 * host_ms / groups),
                    "kernels per group": round((len(trace.kernels) - len(none.kernels)) / groups, 1),
                    "copies per group": round((len(trace.copies) - len(none.copies)) / groups, 1),
                    "collectives per group": round(len(trace.collectives) / groups, 1),
                    "peak MiB": mib(peaks[name][0]),
                    "peak of the allocator MiB": mib(peaks[name][1]),
                },
            )
        del models
        _forget(device)


def _step(model: Stack, x: torch.Tensor) -> None:
    model(x).backward()
    model.zero_grad()


def _peak(device: Device, model: Stack, x: torch.Tensor, place: torch.device) -> tuple[float, float]:
    for _ in range(WARM_UP):
        _step(model, x)
    allocated, reserved = device.peak_nbytes(partial(_step, model, x))
    found = largest(allocated, place), largest(reserved, place)
    del model
    _forget(device)
    return found


def _forget(device: Device) -> None:
    gc.collect()
    device.empty_cache()


def _times(
    device: Device, models: dict[str, Stack], x: torch.Tensor, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of the host and of the device for each system's step of each round."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(WARM_UP + rounds):
        names = list(models)
        for name in names if number % 2 else reversed(names):
            device.together()
            begin, start = device.mark(), time.perf_counter()
            _step(models[name], x)
            host_ms, end = 1e3 * (time.perf_counter() - start), device.mark()
            device.synchronize()
            taken[name].append((host_ms, device.between_ms(begin, end)))
    return {name: each[WARM_UP:] for name, each in taken.items()}


if __name__ == "__main__":
    run(measure)
