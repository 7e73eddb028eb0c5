"""MNIST on XLA devices: nested units split in rows, per-rank checkpoints, and the consolidated one evaluated.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/xla_mnist.py --fake-data
    python examples/xla_mnist.py --data FOLDER
    python examples/xla_mnist.py --batch_size 16 --drop_last --num_epochs 2 --use_nested_fsdp \
        --shard_param_on_dim_0 --pin_layout_in_collective_ops

FOLDER has the files of MNIST, as train-images-idx3-ubyte(.gz); of the t10k files alone, 2,000 are held out.
Without it the digits are scikit-learn's. Options are also taken by the names that they have in
XlaFullyShardedDataParallel's own example.

The last two lines compare the sharded model with the consolidated file in plain torch. They are equal up to
rounding; with --no_sync_buffers the file has the BatchNorm statistics of the first device only, while the
sharded model has those of each.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import torch
from mnist import mnist, scikit_digits
from torch import nn
from torch.nn import functional as F
from xla_vit import add_sharding_options, sharding_of

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


def digits(folder: Path | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(images [n, 1, 28, 28], labels [n])`` to train on, and those held out."""
    parts = mnist(folder) if folder else scikit_digits()
    return [
        ((F.interpolate(images, size=(28, 28), mode="bilinear") - 0.1307) / 0.3081, labels)
        for images, labels in parts
    ]


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
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", "--datadir", type=Path, help="folder with the files of MNIST")
    source.add_argument("--fake-data", "--fake_data", action="store_true", help="noisy patterns of 28 x 28")
    parser.add_argument("--images", type=int, default=2048, help="of fake data, to train on")
    parser.add_argument("--epochs", "--num_epochs", type=int, default=2)
    parser.add_argument("--rows", "--batch_size", type=int, default=32, help="of a batch on each device")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--flatten_parameters", action="store_true")
    add_sharding_options(parser)
    options = parser.parse_args()
    options.rows *= jax.device_count()

    torch.manual_seed(42)
    train, test = (
        (fake_mnist(options.images), fake_mnist(1024)) if options.fake_data else digits(options.data)
    )
    model = Net()
    for part in (model.conv1, model.conv2, model.fc1, model.fc2):
        xla.fully_shard(part, flatten_parameters=options.flatten_parameters, **sharding_of(options))
    xla.fully_shard(model, flatten_parameters=options.flatten_parameters, **sharding_of(options))
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
