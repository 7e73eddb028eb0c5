"""Digits on several ranks: nested sharding, a shard file of each rank, the consolidated model evaluated.

    torchrun --nproc-per-node 2 examples/mnist.py                   scikit-learn's digits, 8x8, no file needed
    torchrun --nproc-per-node 2 examples/mnist.py --data FOLDER     MNIST's files, 28x28, .gz or not

Of a folder without MNIST's training files the first 8,000 images of t10k are trained on, the last 2,000 held
out; of scikit-learn's 1,797 digits every fifth is held out. The last two lines are the accuracy on what was
held out, of the sharded model and of the consolidated file in plain torch: the same.
"""

import argparse
import gzip
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from shardwright import checkpoint
from shardwright.checkpoint.tools import consolidate
from shardwright.wrapper import FSDP, ModuleWrapPolicy

Digits = tuple[torch.Tensor, torch.Tensor]
"""Images, float32 [n, 1, side, side] from 0 to 1, and labels, int64 [n]."""


class Net(nn.Module):
    """Two convolutions and two layers, for images of any side that 4 divides."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.hidden = nn.Sequential(nn.Linear(32 * (side // 4) ** 2, 64), nn.ReLU())
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.conv2(self.conv1(x)).flatten(1)))


def read_idx(folder: Path, name: str) -> np.ndarray:
    """A file of MNIST, with or without ``.gz``: bytes, after a header that ends with its shape."""
    packed = folder / f"{name}.gz"
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
    shape = np.frombuffer(data, ">i4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def mnist(folder: Path) -> tuple[Digits, Digits]:
    """What to train on and what is held out, of a folder with MNIST's files."""

    def part(name: str) -> Digits:
        images, labels = (read_idx(folder, f"{name}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        return torch.tensor(images).unsqueeze(1) / 255, torch.tensor(labels).long()

    if any(folder.glob("train-images*")):
        return part("train"), part("t10k")
    images, labels = part("t10k")
    return (images[:8000], labels[:8000]), (images[8000:], labels[8000:])


def scikit_digits() -> tuple[Digits, Digits]:
    """The digits that come with scikit-learn."""
    found = load_digits()
    images, labels = torch.tensor(found.images).float().unsqueeze(1) / 16, torch.tensor(found.target).long()
    held = torch.arange(len(labels)) % 5 == 0
    return (images[~held], labels[~held]), (images[held], labels[held])


try:
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
except ImportError:

    def load_digits():
        raise SystemExit("scikit-learn is not installed: pip install scikit-learn, or pass --data FOLDER")


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of right answers. Every rank calls it with the same digits."""
    images, labels = digits
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train(model: nn.Module, digits: Digits, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Train with equal parts of each batch on every rank; the optimizer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = digits
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    for epoch in range(options.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(options.rows * world)[:-1]:
            rows = batch.chunk(world)[rank]
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch + 1}  loss {loss.item():.4f}")
    return optimizer


def run(options: argparse.Namespace) -> tuple[float, float]:
    """Train, save, consolidate; accuracies of the sharded model and of the consolidated one."""
    seen, held = mnist(options.data) if options.data else scikit_digits()
    side = seen[0].shape[-1]
    torch.manual_seed(0)
    model = FSDP(Net(side), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    optimizer = train(model, seen, options)
    sharded = accuracy(model, held)
    checkpoint.save(options.out / "checkpoint", model=model, optimizer=optimizer, step=options.epochs)
    if dist.get_rank() == 0:
        consolidate(options.out / "checkpoint", options.out / "model")
    dist.barrier()
    plain = Net(side)
    plain.load_state_dict(load_file(options.out / "model" / "model.safetensors"))
    return sharded, accuracy(plain, held)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with MNIST's files; default: scikit-learn's digits")
    parser.add_argument("--out", type=Path, help="new folder for the checkpoint and model.safetensors")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch on each rank")
    parser.add_argument("--lr", type=float, default=0.003)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = [str(options.out or temporary)]
        dist.broadcast_object_list(folder)
        options.out = Path(folder[0])
        sharded, plain = run(options)
        if dist.get_rank() == 0:
            print(f"sharded       accuracy {sharded:.4f}")
            print(f"consolidated  accuracy {plain:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
