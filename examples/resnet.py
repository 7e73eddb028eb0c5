"""A residual network learns to tell images apart: BatchNorm on shards, and the whole model saved at the end.

    torchrun --nproc-per-node 2 examples/resnet.py
    torchrun --nproc-per-node 8 examples/resnet.py --data FOLDER --size resnet50 --rows 128 --epochs 90 --bf16

FOLDER has train/<class>/<image> and val/<class>/<image>; without one, drawn shapes are told apart. BatchNorm
takes mean and variance of the rows of its rank. Its running statistics are buffers, which differ from rank to
rank, as with DistributedDataParallel; their average over ranks is what is evaluated and saved.
"""

import argparse
from pathlib import Path

import torch
from images import accuracy, batches, datasets, plot
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

from shardwright import full_state_dict, fully_shard

SIZES = {  # blocks of each stage, width, image
    "tiny": ((1, 1, 1), 16, 16),
    "resnet50": ((3, 4, 6, 3), 64, 224),
    "resnet101": ((3, 4, 23, 3), 64, 224),
    "resnet152": ((3, 8, 36, 3), 64, 224),
}


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        inner = F.relu(self.norm2(self.conv2(inner)))
        return F.relu(self.norm3(self.conv3(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [rows, 3, image, image] -> logits [rows, classes]."""

    def __init__(self, size: str, classes: int) -> None:
        super().__init__()
        depths, width, image = SIZES[size]
        kernel, stride = (7, 2) if image > 64 else (3, 1)
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1) if image > 64 else nn.Identity(),
        )
        self.stages, inputs = nn.ModuleList(), width
        for stage, depth in enumerate(depths):
            blocks = []
            for place in range(depth):
                blocks.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not place else 1))
                inputs = 4 * width * 2**stage
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Give every rank the mean over ranks of BatchNorm's running means and variances. Every rank calls it."""
    for buffer in model.buffers():
        if buffer.is_floating_point():  # not the number of batches, which is the same everywhere
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def running_means(model: nn.Module) -> torch.Tensor:
    """Those of the stem's norm on each rank, [ranks, channels]. Every rank calls it."""
    mine = model.stem[1].running_mean.clone()
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(each, mine)
    return torch.stack(each).cpu()


def draw(history: dict, of_ranks: torch.Tensor, out: Path) -> None:
    """The losses and accuracies; the stem's running means on each rank, and their average."""
    from matplotlib import pyplot  # noqa: PLC0415 (only on the rank that draws)

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    plot(left, history["losses"], history["accuracy"])
    for rank, means in enumerate(of_ranks):
        right.plot(means - of_ranks.mean(0), "o", markersize=4, label=f"rank {rank}")
    right.axhline(0, color="#111111", linewidth=1, label="average")
    right.set_title("running means of the first BatchNorm, less the average", fontsize=9)
    right.set_xlabel("channel")
    right.legend(fontsize=8)
    figure.savefig(out / "picture.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with train/ and val/; default: drawn shapes")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rows", type=int, default=32, help="images of a batch on each rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1, help="the highest of the run")
    parser.add_argument("--bf16", action="store_true", help="convolutions in bf16, norms in fp32")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, on each rank")
    parser.add_argument("--out", type=Path, default="runs/resnet", help="folder for model.pt and the picture")
    options = parser.parse_args()

    seen, held = datasets(options.data, SIZES[options.size][2])
    torch.manual_seed(0)  # the same weights on every rank
    model = ResNet(options.size, len(seen.classes))
    for stage in model.stages:  # a group for each; blocks of few MB are too small for groups of their own
        fully_shard(stage)
    fully_shard(model)
    rank, device = dist.get_rank(), next(model.parameters()).device  # an accelerator, where there is one
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]  # norms and biases, without decay
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": 1e-4}, {"params": others}], options.lr, 0.9, nesterov=True
    )
    steps = options.epochs * (len(seen) // (options.rows * dist.get_world_size()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, steps, cycle_momentum=False)
    # BatchNorm wants its weights in fp32, which a policy for all parameters would cast; autocast leaves them.
    precision = torch.autocast(device.type, torch.bfloat16, enabled=options.bf16)
    history, of_ranks = {"losses": [], "accuracy": []}, torch.empty(0)

    for epoch in range(options.epochs):
        torch.manual_seed(dist.get_world_size() * epoch + rank)  # how images are cut
        for images, labels in batches(seen, options.rows, epoch, options.workers):
            with precision:
                logits = model(images.to(device))
            loss = F.cross_entropy(logits.float(), labels.to(device), label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mean = loss.detach()
            dist.all_reduce(mean)
            history["losses"].append(mean.item() / dist.get_world_size())
        of_ranks = running_means(model)
        average_statistics(model)
        history["accuracy"].append(accuracy(model, held, options.rows))
        if rank == 0:
            losses, accuracies = history["losses"], history["accuracy"]
            print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}, accuracy {accuracies[-1]:.3f}")
    weights = full_state_dict(model)  # every rank calls it; plain tensors on rank 0, BatchNorm's buffers too
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(weights, options.out / "model.pt")
        draw(history, of_ranks, options.out)


if __name__ == "__main__":
    main()
