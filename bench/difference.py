"""Does ``wire="difference"`` ever change a bit? Two models side by side, one with it and one without.

    python bench/difference.py        2,000 steps at each of three learning rates, some ten minutes

A transformer of 3 M parameters with an untied embedding, fp32 masters, compute and wire in bf16, sums in
fp32, AdamW; ranks that talk over TCP. Losses are compared in every step, shards bit for bit at ``--every``
step. Prints the bytes that a rank has sent with and without it; exits with an error where any bit differs.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.launch import arguments, run
from bench.model import Size, build
from bench.toy import add_toy
from shardwright import MixedPrecisionPolicy, SchedulePolicy, fully_shard, set_transport, stats

PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Training:
    """One of the two models, and its optimizer."""

    def __init__(self, size: Size, wire: str, lr: float) -> None:
        self.model = build(size)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mp_policy=PRECISION)
        self.model.set_schedule_policy(SchedulePolicy(wire=wire))  # type: ignore[operator,arg-type]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, foreach=True)

    def step(self, tokens: torch.Tensor) -> float:
        """A step on this rank's tokens; its loss."""
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def shards(self) -> list[torch.Tensor]:
        """This rank's, as they lie in memory."""
        return [param.to_local().detach().view(torch.int32) for param in self.model.parameters()]  # type: ignore[attr-defined]


def measure(options: argparse.Namespace) -> None:
    """One rank: every learning rate; rank 0 prints."""
    set_transport("sockets")
    size = Size(layers=options.layers, width=options.width, vocab=options.vocab, sequence=32, batch=2)
    for lr in options.rates:
        plain, changes = (Training(size, wire, lr) for wire in ("plain", "difference"))
        generator = torch.Generator().manual_seed(options.rank)
        before = stats(plain.model).sent_nbytes  # of all models on the transport
        sent = [0, 0]
        for step in range(1, options.steps + 1):
            # Few of the words are most of the text, as in any language.
            chances = torch.rand(size.batch, size.sequence + 1, generator=generator)
            tokens = (size.vocab * chances**4).long()
            losses = []
            for index, training in enumerate((plain, changes)):
                losses.append(training.step(tokens))
                after = stats(training.model).sent_nbytes
                sent[index] += after - before
                before = after
            same = losses[0] == losses[1]
            if same and (step % options.every == 0 or step == options.steps):
                same = all(map(torch.equal, plain.shards(), changes.shards()))
            if not same:
                sys.exit(f"lr {lr:g}, step {step}, rank {options.rank}: not the same: losses {losses}")
        if options.rank == 0:
            params, mib = stats(plain.model).param_numel, [nbytes / options.steps / 2**20 for nbytes in sent]
            print(
                f"lr {lr:g}: {options.steps} steps of {params:,} parameters on {options.world} ranks, equal "
                f"bit for bit; MiB a step {mib[0]:.2f} plain, {mib[1]:.2f} difference; loss {losses[0]:.3f}",
                flush=True,
            )


def main() -> None:
    """Parse, then measure as a rank or launch the ranks."""
    parser = arguments(__doc__, limit_s=3600.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-4, 1e-5])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between comparisons of all shards")
    for name, default in (("layers", 4), ("width", 192), ("vocab", 3200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_toy(parser, steps=6, every=2, layers=2, width=64, vocab=256)
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
