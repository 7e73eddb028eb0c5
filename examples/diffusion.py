"""A diffusion model (DDPM) learns to draw images of a class; the average of its weights is sharded, too.

    torchrun --nproc-per-node 2 examples/diffusion.py
    torchrun --nproc-per-node 8 examples/diffusion.py --data FOLDER --size 64 --rows 32 --steps 400000 --bf16

FOLDER has train/<class>/<image> and val/, which isn't used; without one it learns to draw shapes. A U-Net is
given an image with noise and learns to tell the two apart. Samples are drawn by DDIM, some on each rank.
"""

import argparse
import math
from itertools import pairwise
from pathlib import Path

import torch
from images import batches, datasets, shown
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwright import MixedPrecisionPolicy, clip_grad_norm_, full_state_dict, fully_shard

SIZES = {16: (32, 64), 64: (192, 384, 576, 768), 128: (256, 512, 512, 768, 1024)}
"""Height and width of images -> channels at each resolution, of which each is half of the one before."""


class Residual(nn.Module):
    """Two convolutions beside a shortcut; ``about`` (time and class) shifts and scales what is between."""

    def __init__(self, inputs: int, outputs: int, about: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.about = nn.Linear(about, 2 * outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        nn.init.zeros_(self.conv2.weight)  # begins as the shortcut alone

    def forward(self, x: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
        scale, shift = self.about(about)[:, :, None, None].chunk(2, dim=1)
        inner = self.conv1(F.silu(self.norm1(x)))
        inner = self.conv2(F.silu(self.norm2(inner) * (1 + scale) + shift))
        return self.shortcut(x) + inner


class Attention(nn.Module):
    """Each place of [rows, channels, height, width] looks at all others."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(places).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)  # heads of 32
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """Noisy images [rows, 3, size, size], time (int64, 0 to 1000) and labels [rows] -> velocity."""

    def __init__(self, channels: tuple[int, ...], classes: int) -> None:
        super().__init__()
        first, *_, last = channels
        about = 4 * first
        self.classes = nn.Embedding(classes, about)
        self.time = nn.Sequential(nn.Linear(first, about), nn.SiLU(), nn.Linear(about, about))
        self.begin = nn.Conv2d(3, first, 3, padding=1)
        pairs = list(zip((first, *channels), channels, strict=False))
        self.down = nn.ModuleList(Residual(inputs, outputs, about) for inputs, outputs in pairs)
        self.middle = nn.ModuleList([Residual(last, last, about), Residual(last, last, about)])
        self.attention = Attention(last)
        self.up = nn.ModuleList(Residual(2 * outputs, inputs, about) for inputs, outputs in reversed(pairs))
        self.end = nn.Sequential(nn.GroupNorm(8, first), nn.SiLU(), nn.Conv2d(first, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, time: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        half = self.begin.out_channels // 2
        rates = torch.exp(-math.log(10_000) / half * torch.arange(half, device=x.device))
        waves = time[:, None] * rates
        waves = torch.cat([waves.sin(), waves.cos()], 1).to(x.dtype)
        about = F.silu(self.time(waves) + self.classes(labels))
        x, kept = self.begin(x), []
        for number, block in enumerate(self.down):
            x = block(F.avg_pool2d(x, 2) if number else x, about)
            kept.append(x)
        x = self.middle[1](self.attention(self.middle[0](x, about)), about)
        for number, block in enumerate(self.up):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0) if number else x, kept.pop()], 1), about)
        return self.end(x)


def signal(time: torch.Tensor) -> torch.Tensor:
    """The image's share of a noisy one, in variance: 1 at time 0, almost 0 at 1000 (cosine schedule)."""
    return (torch.cos((time / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2).clamp(min=1e-4)[:, None, None, None]


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean square error of the velocity: noise less image, each by its share (Salimans and Ho, 2022)."""
    time = torch.randint(1, 1001, (len(images),), device=images.device)
    noise, share = torch.randn_like(images), signal(time)
    noisy = share.sqrt() * images + (1 - share).sqrt() * noise
    velocity = share.sqrt() * noise - (1 - share).sqrt() * images
    return F.mse_loss(model(noisy, time, labels).float(), velocity)


@torch.no_grad()
def sample(model: nn.Module, labels: torch.Tensor, size: int, steps: int = 50) -> torch.Tensor:
    """Images of these classes, out of noise, by DDIM. Every rank calls it, with as many steps."""
    x = torch.randn(len(labels), 3, size, size, device=labels.device)
    times = torch.linspace(1000, 0, steps + 1, device=labels.device).long()
    for now, then in pairwise(times):
        share, after = signal(now[None]), signal(then[None])
        velocity = model(x, now.expand(len(labels)), labels).float()
        image = (share.sqrt() * x - (1 - share).sqrt() * velocity).clamp(-1, 1)
        noise = (x - share.sqrt() * image) / (1 - share).sqrt()
        x = after.sqrt() * image + (1 - after).sqrt() * noise
    return image


def draw(losses: list[float], images: torch.Tensor, out: Path) -> None:
    """The losses, and samples: a row for each class."""
    from matplotlib import pyplot  # noqa: PLC0415 (only on the rank that draws)

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    bins = torch.tensor(losses).tensor_split(min(len(losses), 200))  # the mean of several steps each
    steps = torch.linspace(0, len(losses), len(bins))
    left.plot(steps, [part.mean() for part in bins], color="#1f77b4", linewidth=1)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    tiles = F.pad(images, (1, 1, 1, 1), value=1.0)  # [classes, samples, 3, size, size], with a white edge
    right.imshow(shown(torch.cat([torch.cat([*row], 2) for row in tiles], 1)), interpolation="none")
    right.axis("off")
    figure.savefig(out / "picture.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with train/ and val/; default: drawn shapes")
    parser.add_argument("--size", type=int, choices=SIZES, default=16, help="height and width of images")
    parser.add_argument("--rows", type=int, default=16, help="images of a batch on each rank")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; weights and sums stay fp32")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, on each rank")
    parser.add_argument(
        "--out", type=Path, default="runs/diffusion", help="folder for model.pt and the picture"
    )
    options = parser.parse_args()

    data, _ = datasets(options.data, options.size)
    torch.manual_seed(0)  # the same weights on every rank
    model = UNet(SIZES[options.size], len(data.classes))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.bf16 else MixedPrecisionPolicy()
    for block in (*model.down, *model.middle, *model.up):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)  # what is in no block
    rank, world = dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device  # an accelerator, where there is one
    decay = min(0.9999, max(0.9, 1 - 20 / options.steps))  # over about a twentieth of the run
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # a copy of the shards
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    torch.manual_seed(1 + rank)  # each rank has noise of its own
    losses: list[float] = []
    while len(losses) < options.steps:
        epoch = len(losses) // max(1, len(data) // (options.rows * world))
        for images, labels in batches(data, options.rows, epoch, options.workers):
            loss = loss_of(model, images.to(device), labels.to(device))
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            mean = loss.detach()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
            if rank == 0 and len(losses) % 50 == 0:
                print(f"step {len(losses)}: loss {sum(losses[-50:]) / 50:.4f}")
            if len(losses) == options.steps:
                break

    classes = min(4, len(data.classes))
    labels = torch.arange(classes, device=device).repeat_interleave(-(-8 // world))
    mine = sample(average.module, labels, options.size).unflatten(0, (classes, -1))
    each = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(each, mine)
    weights = full_state_dict(average.module)  # every rank calls it; plain tensors, on rank 0
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(weights, options.out / "model.pt")
        draw(losses, torch.cat(each, 1)[:, :8], options.out)


if __name__ == "__main__":
    main()
