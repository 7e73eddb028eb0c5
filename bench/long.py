"""A training step of one long sequence that ranks share (context parallelism), and what memory it takes.

python bench/long.py                      131,072 tokens on two processes of this machine, float32
python bench/long.py --tokens 16384       another length
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import shardwright  # noqa: E402
from bench.toy import add_toy  # noqa: E402
from shardwright.parallel import mean_over_tokens, shift_labels  # noqa: E402

VOCABULARY, WIDTH, HEADS = 32_000, 32, 2


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        q, k, v = self.into(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Returns the loss's sum: of logits only a few rows exist at once."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """Tokens of this rank [batch, tokens / cp] -> shape ()."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return shardwright.linear_cross_entropy(x.flatten(0, 1), self.head.weight, labels.flatten())


def growth_mib(before: int) -> float:
    """What the resident memory of this process has grown by at most."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def train(tokens: int, layers: int, steps: int) -> None:
    """What each rank does."""
    torch.manual_seed(0)
    mesh = shardwright.mesh(cp=int(os.environ["WORLD_SIZE"]))
    model = shardwright.context_parallel(Model(layers), mesh)
    for block in model.blocks:
        shardwright.fully_shard(block, mesh=mesh.shard)
    shardwright.fully_shard(model, mesh=mesh.shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = torch.arange(tokens)[None] * 7 % 97  # what comes next can be learned
    for step in range(steps):
        began = time.perf_counter()
        part = mesh.split({"input_ids": text, "labels": shift_labels(text)})
        loss = mean_over_tokens(model(**part), (part["labels"] != -100).sum(), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh.loss_group.rank() == 0:
            took = f"{time.perf_counter() - began:.0f} s, {growth_mib(before):.0f} MiB more than before it"
            print(f"step {step}: {tokens} tokens, loss {loss.item():.3f}, {took}", flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    add_toy(parser, tokens=512, steps=1)
    given = parser.parse_args()
    run = partial(train, given.tokens, given.layers, given.steps)
    if "RANK" in os.environ:
        run()
        return
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={given.ranks}",
    ]
    raise SystemExit(subprocess.run([*command, __file__, *sys.argv[1:]]).returncode)


if __name__ == "__main__":
    main()
