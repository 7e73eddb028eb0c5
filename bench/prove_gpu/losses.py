"""Section: losses of a sharded model beside those of one process that sees all ranks' batches."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from bench.model import Size, Transformer, build, tokens
from bench.prove_gpu.device import Device
from bench.prove_gpu.rank import Rows, run
from shardwright import MixedPrecisionPolicy, fully_shard, quantize_
from shardwright.lora import Lora, add_lora

ALLOWED = {"float32": 1e-3, "bfloat16": 0.2, "4-bit base, adapters": 1e-3}
"""How far losses may differ, in nats: in float32 by the order of sums; bfloat16, in which a loss has
three digits, is compared with float32."""


def measure(device: Device, place: torch.device, rows: Rows) -> None:
    """Trains each kind twice; raises where losses differ by more than is allowed."""
    size = device.size(Size(batch=2), Size(2, 64, 128, 16, 2))
    worst = {}
    for kind in ALLOWED:
        reference = build(size)
        if kind.startswith("4-bit"):
            quantize_(reference, "nf4", where="*expand.weight")
            torch.manual_seed(1)  # the same adapters on every rank
            add_lora(reference, Lora(("expand", "contract"), 4))
        model = copy.deepcopy(reference)
        computed = torch.bfloat16 if kind == "bfloat16" else None
        policy = MixedPrecisionPolicy(computed, torch.float32)
        for module in [*model.blocks, model]:
            fully_shard(module, mp_policy=policy)
        ours = _losses(model, size, place, device.size(20, 3), alone=False)
        theirs = _losses(reference.to(place), size, place, len(ours), alone=True)
        worst[kind] = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        rows.add(
            "losses",
            world=dist.get_world_size(),
            kind=kind,
            steps=len(ours),
            **{"first loss": round(ours[0], 5), "last loss": round(ours[-1], 5)},
            **{"last loss in one process": round(theirs[-1], 5), "largest difference": f"{worst[kind]:.1e}"},
        )
    wrong = {kind: found for kind, found in worst.items() if not found <= ALLOWED[kind]}
    if wrong:
        raise AssertionError(f"losses differ by {wrong}, allowed are {ALLOWED}")


def _losses(model: nn.Module, size: Size, place: torch.device, steps: int, alone: bool) -> list[float]:
    """alone: one process, of the batches of all ranks."""
    assert isinstance(model, Transformer)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9)  # Adam would hide a wrong scale of gradients
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    for step in range(steps):
        batches = [tokens(size, each, step % 2).to(place) for each in (range(world) if alone else [rank])]
        loss = torch.stack([model(batch) for batch in batches]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if not alone:
            dist.all_reduce(loss)
            loss /= world
        found.append(loss.item())
    return found


if __name__ == "__main__":
    run(measure)
