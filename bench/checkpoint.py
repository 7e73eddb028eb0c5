"""Saving and loading beside torch.distributed.checkpoint, in one run: MB/s, stall of a background save,
peak RSS.

    python bench/checkpoint.py --gb 1 --ranks 2 --rounds 3 --folder /tmp
    python bench/checkpoint.py --gb 1 --steps 3      the step after a background save, too
    python bench/checkpoint.py --gb 1 --cost         what the checksums of a load cost, in one process

The state is an fp32 model with AdamW, 12 bytes per parameter. Both libraries save the same tensors with
fsync and load them in place, in turn, ``rounds`` times; medians are printed. Files are in the page cache
when they are loaded, for both. Checksums are on in ours, and the live state is verified after the load.
``--steps N``: medians of N training steps without a save, and of those that began while one was written.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from bench.toy import add_toy
from shardwright import fully_shard
from shardwright.checkpoint import async_save, load, save
from shardwright.checkpoint.agree import ranks
from shardwright.checkpoint.load import fill, fill_and_prove
from shardwright.checkpoint.shardfile import Reader
from shardwright.checkpoint.sources import open_source
from shardwright.checkpoint.target import allocated, matched
from shardwright.checkpoint.verify import Verifier, crc_in

DIM = 2048


def build(gb: float, sharded: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stack of square layers with AdamW state, ``gb`` gigabytes in all."""
    num_layers = max(2, round(gb * 1e9 / 12 / DIM**2))
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(num_layers)))
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def resident_nbytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (at most since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds (of the slowest rank), extra peak RSS in bytes (of the largest rank), and the result of
    ``work``."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, begin = resident_nbytes("VmRSS"), time.perf_counter()
    result = work()
    figures = torch.tensor(
        [time.perf_counter() - begin, float(resident_nbytes("VmHWM") - before)], dtype=torch.float64
    )
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return figures[0].item(), figures[1].item(), result


class Peer:
    """torch.distributed.checkpoint."""

    name = "torch DCP"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.group = dist.new_group()  # its background thread must not meet the barriers of the main one

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self, step: int) -> None:
        dcp.save(self.state(), checkpoint_id=self.folder / f"{step}")

    def start_save(self, step: int) -> Any:
        return dcp.async_save(self.state(), checkpoint_id=self.folder / f"{step}", process_group=self.group)

    def end_save(self, pending: Any) -> None:
        pending.result()

    def load(self, step: int) -> None:
        dcp.load(self.state(), checkpoint_id=self.folder / f"{step}")


class Ours(Peer):
    """shardwright.checkpoint."""

    name = "shardwright"

    def save(self, step: int) -> None:
        save(self.folder, model=self.model, optimizer=self.optimizer, step=step)

    def start_save(self, step: int) -> Any:
        return async_save(self.folder, model=self.model, optimizer=self.optimizer, step=step)

    def end_save(self, pending: Any) -> None:
        pending.wait()

    def load(self, step: int) -> None:
        load(self.folder / f"step-{step:06d}", model=self.model, optimizer=self.optimizer)


def one_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", args.ranks), rank=rank, world_size=args.ranks
    )
    model, optimizer = build(args.gb)
    nbytes = 12 * sum(p.numel() for p in model.parameters())
    libraries = [kind(model, optimizer, Path(folder, kind.name.replace(" ", "-"))) for kind in (Ours, Peer)]
    figures: dict[str, dict[str, list[float]]] = {library.name: {} for library in libraries}
    for i in range(args.rounds + 1):  # the first round warms up and is not counted, but for its first stall
        for library in libraries if i % 2 else libraries[::-1]:
            found = one_round(library, 2 * i + 1, args.steps)
            for key, value in found.items():
                figures[library.name].setdefault(key if i else f"first {key}", []).append(value)
    if rank == 0:
        report(figures, nbytes, args)
    dist.destroy_process_group()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of one step, of the slowest rank."""
    begin = time.perf_counter()
    model(torch.ones(64, DIM)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def steps_beside(library: Peer, step: int, count: int) -> dict[str, float]:
    """A step without a save (some before, some after), and beside one: the first after it was begun, and all
    that it lasts."""
    without = [train(library.model, library.optimizer) for _ in range(count + 1)][1:]
    pending, beside = library.start_save(step), list[float]()
    while not beside or not everywhere(pending.done()):
        beside.append(train(library.model, library.optimizer))
    library.end_save(pending)
    without += [train(library.model, library.optimizer) for _ in range(count)]
    alone = statistics.median(without)
    return {
        "step_s": alone,
        "step_after/step": beside[0] / alone,
        "steps_beside/step": statistics.mean(beside) / alone,
        "num_steps_beside": len(beside),
    }


def everywhere(done: bool) -> bool:
    """Whether it is so on all ranks."""
    flag = torch.tensor(int(done))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def one_round(library: Peer, step: int, num_steps: int) -> dict[str, float]:
    """Save, load, and save in the background, once; ``num_steps``: and train beside another one."""
    save_s, save_rss, _ = measure(lambda: library.save(step))
    load_s, load_rss, _ = measure(lambda: library.load(step))
    stall_s, _, pending = measure(lambda: library.start_save(step + 1))
    finish_s, _, _ = measure(lambda: library.end_save(pending))
    steps = steps_beside(library, step + 100, num_steps) if num_steps else {}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(library.folder)
    dist.barrier()
    return {
        "save_s": save_s,
        "load_s": load_s,
        "stall_s": stall_s,
        "background_s": stall_s + finish_s,
        "save_extra_rss_mb": save_rss / 1e6,
        "load_extra_rss_mb": load_rss / 1e6,
        **steps,
    }


def cost(gb: float, folder: str) -> None:
    """Print the processor's time of each part of a load, per GiB; the least of five."""
    model, optimizer = build(gb, sharded=False)
    source = open_source(save(folder, model=model, optimizer=optimizer, step=1))
    targets = allocated(matched(source.manifest, model, optimizer, None, 0).targets.values())
    wanted = [(t.key, t.entry, box) for t in targets.values() for box in t.boxes]
    verifier = Verifier(ranks())
    with Reader(source.folder) as reader:
        parts: dict[str, Callable[[], Any]] = {
            "read and checksum, before anything is touched": lambda: verifier.checksums(
                wanted, crc_in(reader)
            ),
            "read and copy, without checksums": lambda: fill(reader, targets.values()),
            "read, copy, and checksum the live state": lambda: fill_and_prove(
                verifier, "filling", reader, targets
            ),
        }
        for what, part in parts.items():
            print(
                f"{what:48}{min(seconds(part) for _ in range(5)) / source.manifest.nbytes * 2**30:8.3f} s/GiB"
            )


def seconds(work: Callable[[], Any]) -> float:
    """The processor's time for ``work``."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def report(figures: dict[str, dict[str, list[float]]], nbytes: int, args: argparse.Namespace) -> None:
    medians = {name: {k: statistics.median(v) for k, v in found.items()} for name, found in figures.items()}
    for found in medians.values():
        found["save_mb_s"] = nbytes / 1e6 / found["save_s"]
        found["load_mb_s"] = nbytes / 1e6 / found["load_s"]
    names = list(medians)
    print(f"{nbytes / 1e9:.2f} GB of state, {args.ranks} ranks, medians of {args.rounds} rounds")
    print(f"{'':24}" + "".join(f"{name:>14}" for name in names) + f"{'ours / DCP':>14}")
    for key in medians[names[0]]:
        ours, peer = (medians[name][key] for name in names)
        ratio = f"{ours / peer:14.2f}" if peer else f"{'-':>14}"
        print(f"{key:24}{ours:14.2f}{peer:14.2f}{ratio}")
    if args.json:
        Path(args.json).write_text(
            json.dumps({"nbytes": nbytes, "medians": medians, "all": figures}, indent=1)
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state in 1e9 bytes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="training steps to compare with; 0: none")
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="where to write; its disk is what is measured"
    )
    parser.add_argument("--cost", action="store_true", help="only what the parts of a load cost")
    parser.add_argument("--json", default="", help="also write the figures to this file")
    add_toy(parser, gb=0.01, rounds=1, steps=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.cost:
            cost(args.gb, folder)
            return
        mp.spawn(one_rank, (args, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
