"""MNIST on XLA devices: nested units split in rows, per-rank checkpoints, and the consolidated one evaluated.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/xla_mnist.py --fake-data
    python examples/xla_mnist.py --data FOLDER

FOLDER has the files of MNIST, as train-images-idx3-ubyte(.gz); of the t10k files alone, 2,000 are held out.

The last two lines compare the sharded model with the consolidated file in plain torch. They are equal up to
rounding; with --no-sync-buffers the file has the BatchNorm statistics of the first device only, while the
sharded model has those of each.
"""

import argparse
import gzip
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from shardwright import xla
from shardwright.xla.checkpoint import save_rank_files
from shardwright.xla.files import consolidate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(10))
        self.conv2 = nn.Sequential(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.BatchNorm2d(20))
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(self.conv1(x)).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


def read_idx(path: Path) -> torch.Tensor:
    """A file of MNIST: bytes, after a header that ends with its shape."""
    data = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    num_dims = data[3]
    shape = np.frombuffer(data, ">i4", num_dims, 4)
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * num_dims).reshape(shape).copy())


def load_mnist(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``(images [n, 1, 28, 28], labels [n])`` of ``train`` or ``t10k``."""
    images, labels = (read_idx(folder / f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    return ((images.float() / 255 - 0.1307) / 0.3081).unsqueeze(1), labels.long()


def fake_mnist(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten fixed patterns under noise, in the shapes of MNIST."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 10, (count,))
    return patterns[labels] + 2.5 * torch.randn(count, 1, 28, 28), labels


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, rows: int) -> float:
    """Share of right answers, over whole batches."""
    model.eval()
    count = len(labels) // rows * rows
    with torch.no_grad():
        right = sum(
            int((model(images[i : i + rows]).argmax(1) == labels[i : i + rows]).sum())
            for i in range(0, count, rows)
        )
    model.train()
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder with the files of MNIST")
    source.add_argument("--fake-data", action="store_true", help="noisy patterns of the same shapes")
    parser.add_argument("--images", type=int, default=2048, help="of fake data, to train on")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch, over all devices")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--no-sync-buffers", action="store_true")
    parser.add_argument("--flatten-parameters", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(42)
    if options.fake_data:
        train, test = fake_mnist(options.images), fake_mnist(1024)
    elif list(options.data.glob("train-images*")):
        train, test = load_mnist(options.data, "train"), load_mnist(options.data, "t10k")
    else:
        images, labels = load_mnist(options.data, "t10k")
        train, test = (images[:8000], labels[:8000]), (images[8000:], labels[8000:])
    model = Net()
    for part in (model.conv1, model.conv2, model.fc1, model.fc2):
        xla.fully_shard(part, shard_param_on_dim_0=True, flatten_parameters=options.flatten_parameters)
    xla.fully_shard(model, shard_param_on_dim_0=True, flatten_parameters=options.flatten_parameters)
    step = xla.make_train_step(
        model,
        lambda model, x, y: F.nll_loss(model(x), y),
        xla.SGD(options.lr, momentum=0.9),
        sync_buffers=not options.no_sync_buffers,
    )
    for epoch in range(options.epochs):
        order, loss = torch.randperm(len(train[1])), 0.0
        for i in range(0, len(order) - options.rows + 1, options.rows):
            rows = order[i : i + options.rows]
            loss = step(train[0][rows], train[1][rows])
        print(
            f"epoch {epoch + 1}  loss {float(loss):.4f}  accuracy {accuracy(model, *test, options.rows):.4f}"
        )

    with tempfile.TemporaryDirectory() as folder:
        save_rank_files(f"{folder}/mnist", model, step)
        plain = Net()
        plain.load_state_dict(torch.load(consolidate(f"{folder}/mnist"), weights_only=True)["model"])
    print(f"sharded       accuracy {accuracy(model, *test, options.rows):.4f}")
    print(f"consolidated  accuracy {accuracy(plain, *test, options.rows):.4f}")


if __name__ == "__main__":
    main()
