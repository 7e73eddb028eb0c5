"""A vision transformer on XLA devices: trained on drawn shapes, or only planned, without memory for a weight.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/xla_vit.py --size tiny
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/xla_vit.py --size 10b --plan

--plan builds the model on the meta device, compiles the whole training step for the devices that jax sees,
and prints what it takes on each of them. After training, the picture in runs/xla_vit has the losses and what
each device holds.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import torch
from images import Shapes
from torch import nn
from torch.nn import functional as F

from shardwright import xla

SIZES = {  # width, layers, heads, image, patch
    "tiny": (64, 4, 4, 32, 8),
    "base": (768, 12, 12, 224, 16),
    "10b": (5120, 32, 32, 224, 14),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.norm2(x))


class Position(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class VisionTransformer(nn.Module):
    """Images [rows, 3, image, image] -> logits [rows, classes]."""

    def __init__(
        self, width: int, layers: int, heads: int, image: int, patch: int, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = Position((image // patch) ** 2, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.position(self.patches(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def add_sharding_options(parser: argparse.ArgumentParser) -> None:
    """Options of XlaFullyShardedDataParallel's examples, by their names."""
    parser.add_argument("--use_nested_fsdp", action="store_true", help="no effect: units are always nested")
    parser.add_argument("--drop_last", action="store_true", help="no effect: batches are always whole")
    parser.add_argument("--shard_param_on_dim_0", action="store_true", help="split and gather rows")
    parser.add_argument("--pin_layout_in_collective_ops", action="store_true", help="no effect, says so")
    parser.add_argument("--no_sync_buffers", action="store_true", help="statistics stay each device's own")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, sum gradients in fp32")


def sharding_of(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``xla.fully_shard`` that these options ask for."""
    return {
        "shard_param_on_dim_0": options.shard_param_on_dim_0,
        "pin_layout_in_collective_ops": True if options.pin_layout_in_collective_ops else None,
        "compute_dtype": torch.bfloat16 if options.bf16 else None,
        "fp32_reduce_scatter": options.bf16,
    }


def draw(losses: list[float], whole_nbytes: int, out: Path) -> None:
    """The losses, and the arrays that each device holds, beside what one device alone would hold."""
    from matplotlib import pyplot  # noqa: PLC0415 (only where something is drawn)

    held: Counter[str] = Counter()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            held[str(shard.device)] += shard.data.nbytes
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, color="#1f77b4")
    left.set(xlabel="step", ylabel="loss")
    right.barh(list(held), [nbytes / 2**20 for nbytes in held.values()], color="#1f77b4")
    right.axvline(whole_nbytes / 2**20, color="#c0392b", label="weights and AdamW's state, unsharded")
    right.set(xlabel="MiB", xlim=(0, 1.1 * whole_nbytes / 2**20))
    right.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), frameon=False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "picture.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch, over all devices")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plan", action="store_true", help="compile from shapes only and print the memory")
    parser.add_argument("--no_grad_ckpt", action="store_true", help="keep activations for the backward")
    parser.add_argument("--out", type=Path, default="runs/xla_vit", help="folder for the picture")
    add_sharding_options(parser)
    options = parser.parse_args()

    torch.manual_seed(0)
    with torch.device("meta"):
        model = VisionTransformer(*SIZES[options.size])
    xla.fully_shard(
        model,
        auto_wrap_policy=(Block,),
        flatten_parameters=not options.shard_param_on_dim_0,
        checkpoint_activations=not options.no_grad_ckpt,
        **sharding_of(options),
    )
    step = xla.make_train_step(
        model,
        lambda model, x, y: F.cross_entropy(model(x).float(), y),
        xla.AdamW(lr=1e-4, weight_decay=0.05),
        clip_norm=1.0,
        sync_buffers=not options.no_sync_buffers,
    )
    shape = (options.rows, 3, SIZES[options.size][3], SIZES[options.size][3])
    stats = xla.stats(model)
    print(f"{stats.param_numel:,} parameters in {stats.num_units} units")
    print(f"parameters at rest   {stats.at_rest_nbytes / 2**20:10,.1f} MiB on each device")
    if options.plan:
        labels = torch.empty(options.rows, dtype=torch.int64, device="meta")
        memory = step.lower(torch.empty(shape, device="meta"), labels).compile().memory_analysis()
        print(f"all that stays       {memory.argument_size_in_bytes / 2**20:10,.1f} MiB on each device")
        print(f"temporary, at most   {memory.temp_size_in_bytes / 2**20:10,.1f} MiB on each device")
        return
    xla.materialize(model)
    data, losses = Shapes(options.steps * options.rows, shape[-1]), []
    for number in range(options.steps):
        rows = [data[number * options.rows + row] for row in range(options.rows)]
        images, labels = torch.stack([image for image, _ in rows]), torch.tensor([label for _, label in rows])
        losses.append(float(step(images, labels)))
        print(f"step {number + 1}  loss {losses[-1]:.4f}")
    draw(losses, 3 * 4 * stats.param_numel, options.out)


if __name__ == "__main__":
    main()
