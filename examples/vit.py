"""A vision transformer learns to tell images apart: mixed precision, activation checkpointing, checkpoints.

    torchrun --nproc-per-node 2 examples/vit.py
    torchrun --nproc-per-node 8 examples/vit.py --data FOLDER --size large --rows 128 --epochs 90 --bf16

FOLDER has train/<class>/<image> and val/<class>/<image>; without one, drawn shapes are told apart. It goes on
from the newest checkpoint in --out, where there is one, on any number of ranks.
"""

import argparse
import math
from pathlib import Path

import torch
from images import accuracy, batches, datasets, plot, shown
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwright import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from shardwright.checkpoint import latest, load, save

SIZES = {  # width, layers, heads, image, patch; the published ones from "base" on
    "tiny": (64, 3, 4, 16, 4),
    "base": (768, 12, 12, 224, 16),
    "large": (1024, 24, 16, 224, 16),
    "huge": (1280, 32, 16, 224, 14),
    "10b": (5120, 32, 32, 224, 14),
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images [rows, 3, image, image] -> logits [rows, classes]."""

    def __init__(self, size: str, classes: int, recompute: bool) -> None:
        super().__init__()
        width, layers, heads, image, patch = SIZES[size]
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.recompute = recompute

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x).mean(1))


def rate_at(done: float) -> float:
    """The share of --lr that is taken after this part of the run: it rises for a tenth, then falls."""
    return min(1.0, 10 * done) * (1 + math.cos(math.pi * done)) / 2


def draw(history: dict, examples: list, answers: list[str], out: Path) -> None:
    """Losses, accuracies, and images with what the model takes them for."""
    from matplotlib import pyplot  # noqa: PLC0415 (only on the rank that draws)

    figure = pyplot.figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subfigures(1, 2)
    plot(left.subplots(), history["losses"], history["accuracy"])
    for axes, (image, label), answer in zip(right.subplots(2, 4).flat, examples, answers, strict=False):
        axes.imshow(shown(image), interpolation="none")
        axes.set_title(answer, fontsize=9, color="#2a9d5c" if answer == label else "#c0392b")
        axes.axis("off")
    figure.savefig(out / "picture.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with train/ and val/; default: drawn shapes")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rows", type=int, default=32, help="images of a batch on each rank")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; weights and sums stay fp32")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, on each rank")
    parser.add_argument("--out", type=Path, default="runs/vit", help="folder for checkpoints and the picture")
    options = parser.parse_args()

    seen, held = datasets(options.data, SIZES[options.size][3])
    torch.manual_seed(0)  # the same weights on every rank
    model = VisionTransformer(options.size, len(seen.classes), recompute=options.size != "tiny")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)  # what is in no block
    rank, device = dist.get_rank(), next(model.parameters()).device  # an accelerator, where there is one
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    steps = options.epochs * (len(seen) // (options.rows * dist.get_world_size()))
    first, history = 0, {"losses": [], "accuracy": []}
    if latest(options.out / "checkpoints"):
        restored = load(options.out / "checkpoints", model=model, optimizer=optimizer)
        first, history = restored.step, restored.extra["history"]
        if rank == 0:
            print(f"goes on after epoch {first}, from {restored.path}")

    for epoch in range(first, options.epochs):
        torch.manual_seed(dist.get_world_size() * epoch + rank)  # how images are cut
        for images, labels in batches(seen, options.rows, epoch, options.workers):
            loss = F.cross_entropy(model(images.to(device)).float(), labels.to(device))
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = options.lr * rate_at(len(history["losses"]) / steps)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach()
            dist.all_reduce(mean)
            history["losses"].append(mean.item() / dist.get_world_size())
        history["accuracy"].append(accuracy(model, held, options.rows))
        done = epoch + 1
        if rank == 0:
            print(f"epoch {done}: loss {history['losses'][-1]:.3f}, accuracy {history['accuracy'][-1]:.3f}")
        folder, extra = options.out / "checkpoints", {"history": history}
        save(folder, model=model, optimizer=optimizer, extra=extra, step=done, keep=2)
    chosen = [held[i] for i in range(0, len(held), max(1, len(held) // 8))][:8]
    with torch.no_grad():  # every rank calls the model
        answers = model(torch.stack([image for image, _ in chosen]).to(device)).argmax(1).tolist()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        names = held.classes
        examples = [(image, names[label]) for image, label in chosen]
        draw(history, examples, [names[answer] for answer in answers], options.out)


if __name__ == "__main__":
    main()
