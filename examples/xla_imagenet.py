"""ImageNet on XLA devices: a residual network or a vision transformer, one unit per block.

    export XLA_FLAGS=--xla_force_host_platform_device_count=2
    python examples/xla_imagenet.py --fake-data --image 64 --rows 4 --steps 3 --epochs 1
    python examples/xla_imagenet.py --data FOLDER --save runs/imagenet
    python examples/xla_imagenet.py --datadir FOLDER --drop_last --model resnet50 --test_set_batch_size 64 \
        --eval_interval 10 --lr 0.4 --batch_size 128 --num_warmup_epochs 5 --num_epochs 100 \
        --lr_scheduler_divide_every_n_epochs 30 --lr_scheduler_divisor 10 --use_nested_fsdp

The recipe is that of XlaFullyShardedDataParallel's own example: nested, 128 rows on each device, SGD at 0.4
after 5 epochs of warm-up, a tenth of it after every 30, evaluated every 10; its options are taken by its
names, too.

FOLDER holds train/<class>/<image> and val/<class>/<image>; reading images needs Pillow. --fake-data makes
noise in the same shapes. --save keeps a checkpoint after each epoch, and goes on from the last one there.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from xla_vit import Block, VisionTransformer, add_sharding_options, sharding_of

from shardwright import xla
from shardwright.checkpoint.xla import load_xla, save_xla

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
DEPTHS = {"resnet26": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [rows, 3, size, size] -> logits [rows, classes]."""

    def __init__(self, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], 64
        for stage, depth in enumerate(depths):
            for place in range(depth):
                width = 64 * 2**stage
                blocks.append(Bottleneck(inputs, width, 2 if stage and not place else 1))
                inputs = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def images_of(folder: Path) -> tuple[list[tuple[Path, int]], int]:
    """``((file, label), ...)`` and the number of classes, which are the folders' names in order."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise SystemExit(f"{folder} has no folders, expected one for each class")
    found = [(file, i) for i, name in enumerate(classes) for file in sorted((folder / name).iterdir())]
    return found, len(classes)


def read_image(path: Path, size: int, crop: np.random.Generator | None) -> torch.Tensor:
    """[3, size, size]: a random part of the image, mirrored or not; without ``crop`` its middle."""
    from PIL import Image  # noqa: PLC0415 (only where images are read)

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    side = min(image.size) * (0.875 if crop is None else crop.uniform(0.5, 1.0))
    left, top = ((full - side) * (0.5 if crop is None else crop.uniform()) for full in image.size)
    image = image.resize((size, size), box=(left, top, left + side, top + side))
    pixels = torch.from_numpy(np.asarray(image, np.float32).copy()) / 255
    if crop is not None and crop.uniform() < 0.5:
        pixels = pixels.flip(1)
    return ((pixels - MEAN) / STD).permute(2, 0, 1)


def batches(
    options: argparse.Namespace, part: str, epoch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Whole batches of one epoch, in an order that follows from the epoch alone."""
    rng = np.random.default_rng((epoch, part == "train"))
    size = options.rows if part == "train" else options.test_rows
    if options.fake_data:
        for _ in range(options.steps or 10):
            shape = (size, 3, options.image, options.image)
            labels = torch.from_numpy(rng.integers(0, options.classes, size))
            yield torch.from_numpy(rng.standard_normal(shape, np.float32)), labels
        return
    files, _ = images_of(options.data / part)
    order = rng.permutation(len(files)) if part == "train" else np.arange(len(files))
    count = len(files) // size
    if not count:
        raise SystemExit(f"{options.data / part} has {len(files)} images, fewer than a batch of {size} has")
    for i in range(min(count, options.steps or count)):
        rows = [files[j] for j in order[i * size : (i + 1) * size]]
        crop = rng if part == "train" else None
        yield (
            torch.stack([read_image(path, options.image, crop) for path, _ in rows]),
            torch.tensor([label for _, label in rows]),
        )


def build(options: argparse.Namespace) -> tuple[nn.Module, type[nn.Module]]:
    """The model, without its values, and the class of its blocks."""
    with torch.device("meta"):
        if options.model == "vit":
            patch = 16 if options.image >= 128 else 8
            return VisionTransformer(384, 12, 6, options.image, patch, options.classes), Block
        return ResNet(DEPTHS[options.model], options.classes), Bottleneck


def accuracy(model: nn.Module, options: argparse.Namespace) -> float:
    """Share of right answers in the validation part."""
    model.eval()
    right = count = 0
    for images, labels in batches(options, "val", 0):
        right += int((model(images).argmax(1) == labels).sum())
        count += len(labels)
    model.train()
    return right / max(1, count)


def rate_at(epoch: jnp.ndarray, options: argparse.Namespace) -> jnp.ndarray:
    """The rate after so many epochs, of which parts count in the warm-up."""
    after = 1 / options.divisor ** (epoch // options.divide_every)
    return options.lr * jnp.where(epoch < options.warmup, epoch / max(1, options.warmup), after)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", "--datadir", type=Path, help="folder with train/ and val/")
    source.add_argument(
        "--fake-data", "--fake_data", action="store_true", help="noise in the shapes of ImageNet"
    )
    parser.add_argument("--model", choices=[*DEPTHS, "vit"], default="resnet50")
    parser.add_argument("--image", type=int, default=224, help="height and width")
    parser.add_argument("--rows", "--batch_size", type=int, default=128, help="of a batch on each device")
    parser.add_argument(
        "--test_set_batch_size", dest="test_rows", type=int, default=64, help="in evaluations"
    )
    parser.add_argument("--epochs", "--num_epochs", type=int, default=90)
    parser.add_argument("--steps", type=int, help="at most so many in an epoch")
    parser.add_argument("--lr", type=float, default=0.4, help="after the warm-up")
    warmup, every = ("--warmup", "--num_warmup_epochs"), ("--evaluate-every", "--eval_interval")
    parser.add_argument(*warmup, type=int, default=5, help="epochs in which the rate grows from 0")
    divide = ("--divide-every", "--lr_scheduler_divide_every_n_epochs")
    parser.add_argument(*divide, type=int, default=30, help="epochs after which the rate is divided")
    parser.add_argument("--divisor", "--lr_scheduler_divisor", type=int, default=10, help="by what")
    parser.add_argument(*every, type=int, default=10, help="epochs; and after the last")
    add_sharding_options(parser)
    parser.add_argument("--save", type=Path, help="folder of checkpoints, one after each epoch")
    options = parser.parse_args()
    options.rows *= jax.device_count()
    options.test_rows *= jax.device_count()
    options.classes = 1000 if options.fake_data else images_of(options.data / "train")[1]

    torch.manual_seed(0)
    model, block = build(options)
    xla.fully_shard(model, None, (block,), **sharding_of(options))
    xla.materialize(model)
    count = 10 * options.rows if options.fake_data else len(images_of(options.data / "train")[0])
    per_epoch = options.steps or count // options.rows
    total = options.epochs * per_epoch

    def rate(count: jnp.ndarray) -> jnp.ndarray:  # part of the compiled step
        return rate_at(count / per_epoch, options)

    step = xla.make_train_step(
        model,
        lambda model, x, y: F.cross_entropy(model(x).float(), y),
        xla.SGD(rate, momentum=0.9, weight_decay=1e-4),
        sync_buffers=not options.no_sync_buffers,
    )
    first = 0
    if options.save and (options.save / "latest").exists():
        first = load_xla(options.save, model=model, train_step=step).step // per_epoch
    print(f"{xla.stats(model).param_numel:,} parameters, {total} steps, from epoch {first + 1}")
    for epoch in range(first, options.epochs):
        loss = 0.0
        for number, (images, labels) in enumerate(batches(options, "train", epoch), 1):
            loss = step(images, labels)
            if number % 50 == 1:
                print(f"epoch {epoch + 1}  step {number}/{per_epoch}  loss {float(loss):.4f}")
        print(f"epoch {epoch + 1}  loss {float(loss):.4f}")
        if (epoch + 1) % options.evaluate_every == 0 or epoch + 1 == options.epochs:
            print(f"epoch {epoch + 1}  accuracy {accuracy(model, options):.4f}")
        if options.save:
            save_xla(options.save, model=model, train_step=step, step=(epoch + 1) * per_epoch, keep=2)


if __name__ == "__main__":
    main()
