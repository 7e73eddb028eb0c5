"""Images for vit.py, resnet.py and diffusion.py: of a folder, or shapes that are drawn here.

A folder has train/<class>/<image> and val/<class>/<image>, as ImageNet is usually unpacked; reading its files
takes Pillow. Images are float32 [3, size, size] from -1 to 1.
"""

from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from shardwright import lockstep

SHAPES = ("disc", "square", "ring", "cross")


class Shapes(Dataset):
    """``count`` drawn images of four classes, which differ in colour, place and size."""

    classes = SHAPES

    def __init__(self, count: int, size: int, first: int = 0) -> None:
        self.count, self.size, self.first = count, size, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if not 0 <= number < self.count:
            raise IndexError(number)
        rng = np.random.default_rng(self.first + number)
        label = number % len(SHAPES)
        radius = rng.uniform(0.4, 0.6)
        along = np.linspace(-1, 1, self.size, dtype=np.float32)
        y, x = np.meshgrid(along, along, indexing="ij")
        x, y = x - rng.uniform(-0.3, 0.3), y - rng.uniform(-0.3, 0.3)
        far, near = np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
        outside = (  # below 0 inside of the shape
            np.hypot(x, y) - radius,
            far - 0.85 * radius,
            abs(np.hypot(x, y) - 0.8 * radius) - 0.25 * radius,
            np.maximum(far - radius, near - 0.3 * radius),
        )[label]
        cover = np.clip(0.5 - outside * self.size / 2, 0, 1)  # its edge is smooth
        colour, behind = rng.uniform(0, 1, (3, 1, 1)), rng.uniform(-1, -0.6, (3, 1, 1))
        return torch.tensor(cover * colour + (1 - cover) * behind, dtype=torch.float32), label


class ImageFolder(Dataset):
    """Images of folder/<class>/; with ``augment`` a random part of each, mirrored or not, else its middle."""

    def __init__(self, folder: Path, size: int, augment: bool) -> None:
        self.classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        if not self.classes:
            raise SystemExit(f"{folder} has no folders, expected one for each class")
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted((folder / name).iterdir())
        ]
        self.size, self.augment = size, augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        from PIL import Image  # noqa: PLC0415 (only where files are read)

        path, label = self.files[number]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        part, left, top, mirrored = torch.rand(4).tolist() if self.augment else (0.75, 0.5, 0.5, 1.0)
        side = min(image.size) * (0.5 + part / 2)
        left, top = left * (image.width - side), top * (image.height - side)
        image = image.resize((self.size, self.size), box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(image, np.float32)).permute(2, 0, 1) / 127.5 - 1
        return (pixels.flip(2) if mirrored < 0.5 else pixels), label


def datasets(folder: Path | None, size: int) -> tuple[Dataset, Dataset]:
    """What is trained on, and what is held out; each has ``classes``, the names of the labels."""
    if folder is None:
        return Shapes(1024, size), Shapes(125, size, first=1024)
    return ImageFolder(folder / "train", size, augment=True), ImageFolder(folder / "val", size, augment=False)


def batches(data: Dataset, rows: int, epoch: int, workers: int) -> DataLoader:
    """This rank's part of an epoch, in an order that follows from its number."""
    sampler = DistributedSampler(data, drop_last=True)
    sampler.set_epoch(epoch)
    return DataLoader(data, rows, sampler=sampler, num_workers=workers, drop_last=True)


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset, rows: int) -> float:
    """The share of right answers. Every rank calls it, and takes its part of the images."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device
    mine = Subset(data, range(rank, len(data), world))
    right, seen = torch.zeros((), device=device), 0
    model.eval()
    for images, labels in lockstep(DataLoader(mine, rows), "pad"):  # some ranks may have a batch less
        answers = model(images.to(device)).argmax(1)
        if seen < len(mine):  # not a batch that is repeated, so that the other ranks aren't alone
            right += (answers == labels.to(device)).sum()
        seen += len(labels)
    model.train()
    dist.all_reduce(right)
    return right.item() / len(data)


def plot(axes, losses: list[float], accuracies: list[float]) -> None:
    """The loss of each step, and what was right after each epoch."""
    axes.plot(losses, color="#1f77b4", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss", color="#1f77b4")
    right = axes.twinx()
    per_epoch = len(losses) / len(accuracies)
    right.plot([per_epoch * (1 + i) for i in range(len(accuracies))], accuracies, "o-", color="#c0392b")
    right.set_ylim(0, 1.02)
    right.set_ylabel("accuracy, held out", color="#c0392b")


def shown(image: torch.Tensor) -> np.ndarray:
    """An image as matplotlib's ``imshow`` takes it."""
    return (image.float().cpu().clamp(-1, 1).permute(1, 2, 0) / 2 + 0.5).numpy()
