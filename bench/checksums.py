"""What checksums cost: their share of a rank's CPU time in a step of the bench's model, over sockets.

    python bench/checksums.py --link 1gbit

Counted with ``SHARDWRIGHT_CHECKSUMS=all``, in CPU time of the threads that sum, so that other work on the
machine hardly matters.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["SHARDWRIGHT_CHECKSUMS"] = "all"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.launch import arguments, run
from bench.model import Size, build, tokens
from bench.toy import add_toy
from shardwright import fully_shard, set_transport
from shardwright.engine.groups import summed
from shardwright.transport.cpu import connection, message


def counted(module: Any, name: str, spent_s: list[float]) -> None:
    """From now on a function of a module adds the CPU time of its calls to ``spent_s``."""
    real = getattr(module, name)

    def call(*given: Any) -> Any:
        start = time.thread_time()
        found = real(*given)
        spent_s.append(time.thread_time() - start)
        return found

    setattr(module, name, call)


def measure(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints."""
    messages, memory = list[float](), list[float]()
    counted(message, "crc32_of", messages)
    counted(connection, "crc32_of", messages)
    counted(summed, "sum_of", memory)
    set_transport("sockets")
    size = Size(layers=options.layers, width=options.width)
    model = build(size)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    began = 0.0
    for step in range(options.steps + 1):
        if step == 1:  # the first one makes the optimizer's state
            messages.clear()
            memory.clear()
            began = time.process_time()
        model(tokens(size, options.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    took = time.process_time() - began
    if options.rank == 0:
        for what, spent in (("messages", messages), ("memory besides (all)", memory)):
            share = sum(spent) / took
            print(f"{what}: {1e3 * sum(spent) / options.steps:.1f} ms of CPU time a step, {share:.2%} of it")


def main() -> None:
    """The command (see above)."""
    parser = arguments(__doc__, 600.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    add_toy(parser, layers=1, width=64, steps=1)
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
