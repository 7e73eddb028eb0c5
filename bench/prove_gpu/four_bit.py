"""Section: memory and time of a frozen base in bfloat16 and in 4 bits, with LoRA adapters beside it."""

from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from bench.prove_gpu.blocks import Shape, Stack, inputs_of, made, norm_of
from bench.prove_gpu.device import Device
from bench.prove_gpu.rank import Rows, largest, mib, run
from shardwright import MixedPrecisionPolicy, fully_shard, quantize_, stats
from shardwright.lora import Lora, add_lora

KINDS = {"bfloat16": None, "nf4, decoded by group": "group", "nf4, decoded where it is read": "layer"}
WARM_UP = 2
TARGETS = ("query", "key", "value", "output", "gate", "up", "down")


def measure(device: Device, place: torch.device, rows: Rows) -> None:
    """A row for each kind; the model of one is gone before the next is made."""
    shape, blocks = Shape.on(device), device.size(8, 2)
    for kind, dequantise in KINDS.items():
        before = device.now_nbytes()
        model = _made(shape, place, blocks, dequantise)
        device.synchronize()
        device.empty_cache()
        at_rest = largest(device.now_nbytes() - before, place)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        x, taken = inputs_of(shape, place), []
        step = partial(_step, model, optimizer, x)
        for _ in range(WARM_UP):
            step()
        peak, _ = device.peak_nbytes(step)
        for _ in range(device.size(10, 2)):
            device.together()
            begin = device.mark()
            step()
            end = device.mark()
            device.synchronize()
            taken.append(device.between_ms(begin, end))
        rows.add(
            f"a frozen base of {blocks} blocks, LoRA of rank 16",
            world=dist.get_world_size(),
            base=kind,
            **{
                "shards MiB": mib(stats(model).at_rest_nbytes),
                "on the device at rest MiB": mib(at_rest),
                "peak of a step MiB": mib(largest(peak, place)),
                "step ms": round(median(taken), 2),
            },
        )
        del model, optimizer, step


def _step(model: Stack, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def _made(shape: Shape, place: torch.device, blocks: int, dequantise: str | None) -> Stack:
    """Block by block, so that no more than one is whole."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    found = []
    for _ in range(blocks):
        block = made(shape, place, torch.bfloat16)
        if dequantise is not None:
            quantize_(block, "nf4", dequantise=dequantise)
        add_lora(block, Lora(TARGETS, 16))
        fully_shard(block, mp_policy=policy)
        found.append(block)
    model = Stack(found, norm_of(shape, place).requires_grad_(False))
    fully_shard(model, mp_policy=policy)
    return model


if __name__ == "__main__":
    run(measure)
