"""What publishing costs: two trainer ranks and two receivers, each in a network namespace of its own.

    python bench/publish.py --link 1gbit      100 M parameters, AdamW at 1e-5 and 1e-6; a quarter of an hour

Trainers keep fp32 masters and publish bf16. Of each rate: bytes that a receiver gets a version, beside a
whole one and beside the entropy of the integer differences (``bench/entropy.py``); seconds from the call of
``send`` until the weights lie in a plain module of both receivers, while no rank trains; of a step, and the
median ratio of one (with its ``send``) beside which a version leaves to the step before it. What a version
costs the processor is the same for longer steps: ``--sequence 512``.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from bench.launch import arguments, start
from bench.links import LinkError
from bench.model import Size, build
from bench.toy import add_toy
from shardwright import MixedPrecisionPolicy, fully_shard, publish, receive, set_transport
from shardwright.transport.cpu.coder import ordered

TRAINERS, RECEIVERS = 2, 2
PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def entropy_nbytes(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Bytes of the differences of two versions, if each took as many bits as its rarity says."""
    counts: Counter[int] = Counter()
    for old, new in zip(before, after, strict=True):
        patterns = [ordered(each.view(torch.int16).reshape(-1).numpy()) for each in (old, new)]
        values, numbers = np.unique(patterns[1] - patterns[0], return_counts=True)
        counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
    numbers = np.array([*counts.values()], np.float64)
    return float(-(numbers * np.log2(numbers / numbers.sum())).sum() / 8)


def say(folder: Path, name: str, text: str = "") -> None:
    """Leave a word for another process."""
    (folder / f".{name}").write_text(text)
    os.replace(folder / f".{name}", folder / name)


def hear(folder: Path, name: str) -> str:
    """Wait for a word."""
    while not (folder / name).exists():
        time.sleep(0.002)
    return (folder / name).read_text()


def train(options: argparse.Namespace, folder: Path) -> None:
    """A trainer rank; rank 0 prints."""
    store = dist.FileStore(f"{folder}/store", TRAINERS)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=TRAINERS)
    set_transport("sockets")
    size = Size(options.layers, options.width, options.vocab, sequence=options.sequence, batch=1)
    if options.rank == 0:
        print(f"{options.link}: of {TRAINERS} trainer ranks, to each of {RECEIVERS} receivers")
        print("| rate | MiB a version | of full | entropy, of full | s to usable | s a step | beside one |")
        print("|---|---:|---:|---:|---:|---:|---:|")
    for rate in options.rates:
        model = build(size)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=PRECISION)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=True)
        kept: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(options.rank)

        def step(lr: float, model=model, optimizer=optimizer, generator=generator) -> None:
            optimizer.param_groups[0]["lr"] = lr
            chances = torch.rand(size.batch, size.sequence + 1, generator=generator)
            model((size.vocab * chances**4).long()).backward()
            optimizer.step()
            optimizer.zero_grad()

        publisher = publish(model, options.address, dtype=torch.bfloat16)
        if options.rank == 0:
            say(folder, f"address{rate}", publisher.address)
        for _ in range(2):
            step(rate)
        waits, ratios, entropies, steps = [], [], [], []
        for number in range(options.versions):
            # Steps at rate 0 take as long, and let each version be one of a single step at the rate.
            taken = []
            for sends in (False, True):
                dist.barrier()
                began = time.monotonic()
                if sends:
                    publisher.send()
                step(0.0)
                dist.barrier()
                taken.append(time.monotonic() - began)
            ratios.append(taken[1] / taken[0])
            steps.append(taken[0])
            step(rate)
            now = [p.to_local().to(torch.bfloat16).clone() for p in model.parameters()]  # type: ignore[attr-defined]
            entropies.append(entropy_nbytes(kept, now) if kept else 0.0)
            kept = now
            for receiver in range(RECEIVERS):
                hear(folder, f"ready{rate}-{receiver}-{2 * number + 1}")
            dist.barrier()
            began = time.monotonic()
            publisher.send()
            ends = [hear(folder, f"got{rate}-{receiver}-{2 * number + 1}") for receiver in range(RECEIVERS)]
            waits.append(max(map(float, ends)) - began)
            step(rate)
        full = 2 * sum(p.numel() for p in model.parameters())
        entropy = torch.tensor(median(entropies[1:]))
        dist.all_reduce(entropy)
        if options.rank == 0:
            got = [json.loads(hear(folder, f"nbytes{rate}-{receiver}")) for receiver in range(RECEIVERS)]
            nbytes = median(each for numbers in got for each in numbers[1:])
            print(
                f"| {rate:g} | {nbytes / 2**20:.2f} | {nbytes / full:.2%} | {entropy.item() / full:.2%} | "
                f"{median(waits[1:]):.2f} | {median(steps[1:]):.2f} | {median(ratios[1:]):.3f} |",
                flush=True,
            )
        publisher.close()
    dist.destroy_process_group()


def follow(options: argparse.Namespace, folder: Path) -> None:
    """A receiver. It leaves the cores to the trainers, whose hosts a receiver isn't on."""
    os.nice(19)
    size = Size(options.layers, options.width, options.vocab, sequence=options.sequence, batch=1)
    own = options.rank - TRAINERS
    counter = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/rx_bytes")
    plain = build(size).to(torch.bfloat16)
    for rate in options.rates:
        nbytes = list[int]()
        with receive(hear(folder, f"address{rate}")) as receiver:
            for number in range(2 * options.versions):
                before = int(counter.read_text())
                say(folder, f"ready{rate}-{own}-{number}")
                receiver.wait(number + 1)
                receiver.load_into(plain)
                say(folder, f"got{rate}-{own}-{number}", str(time.monotonic()))
                nbytes.append(int(counter.read_text()) - before)
            say(folder, f"nbytes{rate}-{own}", json.dumps(nbytes))


def main() -> None:
    """Parse, then train, follow or launch both."""
    parser = arguments(__doc__, limit_s=3600.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-6])
    parser.add_argument("--versions", type=int, default=7)
    for name, default in (("layers", 7), ("width", 1024), ("vocab", 6144), ("sequence", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_toy(parser, rates=[1e-4], versions=3, layers=2, width=64, vocab=256)
    options = parser.parse_args()
    if options.rank is None:
        os.environ["BENCH_HOST"] = "127.0.0.1" if options.link == "loopback" else "10.77.0.1"
        try:
            start(options.link, TRAINERS + RECEIVERS, __file__, options.limit_s)
        except LinkError as error:
            sys.exit(f"bench: {error}")
        return
    torch.set_num_threads(1)
    options.address = f"tcp://{os.environ['BENCH_HOST']}:0"
    folder = Path(options.store).parent
    (train if options.rank < TRAINERS else follow)(options, folder)


if __name__ == "__main__":
    main()
