"""Routed experts on several ranks: each token goes to its top-k experts, wherever they are.

    torchrun --nproc-per-node 2 examples/experts.py                   2 ranks with half of the experts each
    torchrun --nproc-per-node 4 examples/experts.py                   the same, each half sharded over 2 ranks
    torchrun --nproc-per-node 2 examples/experts.py --api wrapper     with FullyShardedDataParallel

A model of bytes learns this file. Its experts are distributed over the ranks of the axis "ep" of a mesh and
sharded over the others; all other weights are sharded over all ranks. The last two lines are the
loss of the ranks, and of one process with the whole model: the same. The picture in runs/experts shows how
many tokens went to which expert.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwright
from shardwright import clip_grad_norm_, expert_parallel, full_state_dict, fully_shard
from shardwright.parallel import tokens_per_expert
from shardwright.wrapper import FSDP, CustomPolicy

Seen = tuple[float, list[torch.Tensor]]
"""Of a step: the loss on this rank, and for each block how many tokens went to each expert on all ranks."""


class Experts(nn.Module):
    """Feed-forward experts, stacked: weights of shape [experts, in, out].

    forward: tokens [n, width], the experts that each is for and their weights, both [n, top_k] -> [n, width].
    """

    def __init__(self, num: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(num, hidden, width) / hidden**0.5)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        said = torch.zeros_like(hidden_states)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(top_k_index == expert)
            answer = torch.relu(hidden_states[token] @ up) @ down
            said = said.index_add(0, token, answer * top_k_weights[token, place, None])
        return said


class RoutedExperts(nn.Module):
    """Sends each token of [..., width] to its ``top_k`` experts and adds up what they say, by their scores.

    bias: added to the scores where experts are chosen, and only there, to keep them evenly used.
    """

    bias: torch.Tensor

    def __init__(self, num: int, width: int, hidden: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num, bias=False)
        self.experts = Experts(num, width, hidden)
        self.register_buffer("bias", torch.zeros(num))
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        chosen = (scores + self.bias).topk(self.top_k).indices
        return self.experts(tokens, chosen, scores.gather(1, chosen)).view_as(x)


class Block(nn.Module):
    """A look at the byte before, then routed experts."""

    def __init__(self, width: int, num: int, top_k: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.routed = RoutedExperts(num, width, 2 * width, top_k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        x = x + torch.tanh(self.mix(torch.cat([x, before], -1)))
        return x + self.routed(self.norm(x))


class Model(nn.Module):
    """Of bytes: int64 [rows, length] -> logits [rows, length, 256]."""

    def __init__(self, width: int = 32, num: int = 8, top_k: int = 2, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, num, top_k) for _ in range(num_blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_fully_shard(model: Model, mesh: shardwright.Mesh) -> nn.Module:
    """Experts over the mesh's axis "ep" and what it leaves, the rest over all ranks."""
    return fully_shard(expert_parallel(model, mesh), mesh=mesh.shard, groups="auto")


def by_wrapper(model: Model, mesh: shardwright.Mesh) -> nn.Module:
    """The same through ``FullyShardedDataParallel``."""
    policy = CustomPolicy(lambda module: isinstance(module, Block))
    return FSDP(expert_parallel(model, mesh), device_mesh=mesh.shard, auto_wrap_policy=policy)


APIS: dict[str, Callable[[Model, shardwright.Mesh], nn.Module]] = {
    "fully_shard": by_fully_shard,
    "wrapper": by_wrapper,
}


@torch.no_grad()
def balance(model: nn.Module, loads: list[torch.Tensor], rate: float) -> None:
    """Make experts that got less than their share likelier to be chosen."""
    for block, load in zip(model.blocks, loads, strict=True):  # type: ignore[call-overload]
        load = load.to(block.routed.bias.dtype)
        block.routed.bias.add_(rate * torch.sign(load.mean() - load))


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Of the next byte, in nats."""
    return F.cross_entropy(model(text)[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def train(
    model: nn.Module, mesh: shardwright.Mesh, text: torch.Tensor, options: argparse.Namespace
) -> list[Seen]:
    """Train on this rank's parts of ``text``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    history = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(text) - options.length, (world, options.rows), generator=generator)
        batch = torch.stack([text[start : start + options.length] for start in starts[rank].tolist()])
        loss = loss_of(model, batch)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loads = [*tokens_per_expert(model, mesh).values()]
        balance(model, loads, rate=0.001)
        history.append((loss.item(), loads))
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}  norm {norm.item():.3f}")
    return history


def draw(history: list[Seen], out: Path) -> None:
    """The losses, and for each block the share of the tokens that each expert got in each step."""
    from matplotlib import pyplot  # noqa: PLC0415 (only on the rank that draws)

    losses, loads = zip(*history, strict=True)
    figure, (left, *others) = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    left.plot(losses, color="#1f77b4", linewidth=1)
    left.set(xlabel="step", ylabel="loss, nats per byte")
    for number, axes in enumerate(others):
        shares = torch.stack([load[number] / load[number].sum() for load in loads], 1)
        found = axes.imshow(shares, aspect="auto", vmin=0, vmax=0.3, interpolation="nearest")
        axes.set(title=f"block {number}", xlabel="step", ylabel="expert")
    figure.colorbar(found, label="share of the tokens")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "picture.svg", metadata={"Date": None})


def run(options: argparse.Namespace) -> tuple[float, float]:
    """Train and collect; losses of the sharded model and, on rank 0, of the whole one."""
    mesh = shardwright.mesh(ep=options.ep or min(dist.get_world_size(), 2))
    torch.manual_seed(0)  # the same experts on every rank, before each keeps its own
    model = APIS[options.api](Model(), mesh)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    history = train(model, mesh, text, options)
    if options.out and dist.get_rank() == 0:
        draw(history, options.out)
    seen = text[: 8 * options.length].view(8, -1)
    with torch.no_grad():
        sharded = loss_of(model, seen).item()
    weights = full_state_dict(model)  # on rank 0: every expert, under its plain name
    if not weights:
        return sharded, sharded
    plain = Model()
    plain.load_state_dict(weights)
    with torch.no_grad():
        return sharded, loss_of(plain, seen).item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--api", choices=list(APIS), default="fully_shard")
    parser.add_argument("--ep", type=int, help="ranks that share the experts; default: 2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch on each rank")
    parser.add_argument("--length", type=int, default=64, help="bytes of a row")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default="runs/experts", help="folder for the picture")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    sharded, plain = run(options)
    if dist.get_rank() == 0:
        print(f"sharded  loss {sharded:.4f}")
        print(f"whole    loss {plain:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
