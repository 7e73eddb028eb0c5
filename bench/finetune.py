"""Fine-tuning on a few ranks of this host: tokens/s, bytes at rest, peak memory, bytes on the wire.

python bench/finetune.py                                   every way that can run here (see adapted.py)
python bench/finetune.py --systems lora,qlora --steps 3    some; --layers 2 --width 128 ... for a small model

Each way has new processes, one thread each, and trains the same batches with AdamW. Times are medians of
the steps after the first two; bytes on the wire are those that loopback carried, divided by the ranks; the
peak is of the whole process over what it held when its imports were done.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from bench.adapted import SYSTEMS, held_nbytes, load, missing  # noqa: E402
from bench.model import Size, tokens  # noqa: E402
from bench.rank import memory_nbytes  # noqa: E402
from bench.toy import add_toy  # noqa: E402

WARM_UP_STEPS = 2
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


@dataclass(frozen=True)
class Row:
    """One way of fine-tuning; sizes in MiB per rank, wire per step. loss: of the last step, of all ranks."""

    system: str
    tokens_per_s: float
    at_rest_mib: float
    peak_mib: float
    wire_mib: float
    loss: float


def main() -> None:
    """Measures each system in turn, prints the table in Markdown; with ``--out`` writes the rows as JSON."""
    options = _parse()
    if options.rank is not None:
        print(json.dumps(_train(options)))
        return
    rows = []
    for system in options.systems.split(","):
        lacking = missing(system)
        if lacking:
            print(f"{system}: skipped, {' and '.join(lacking)} not installed", file=sys.stderr)
            continue
        rows.append(_measure(options, system))
        print(f"{system}: {rows[-1].tokens_per_s:.0f} tokens/s", file=sys.stderr)
        if options.out:
            options.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    size = _size(options)
    print(f"{options.world} ranks, {options.steps} steps, {size}, torch {torch.__version__}:\n")
    print("| system | tokens/s | MiB at rest | peak MiB | MiB on the wire a step | loss |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = f"{row.tokens_per_s:.0f} | {row.at_rest_mib:.1f} | {row.peak_mib:.0f} | {row.wire_mib:.1f}"
        print(f"| {row.system} | {cells} | {row.loss:.4f} |")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="counted ones, after two others")
    parser.add_argument("--out", type=Path)
    for field in fields(Size):
        default = {"layers": 4, "batch": 2}.get(field.name, field.default)
        parser.add_argument(f"--{field.name}", type=int, default=default)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    add_toy(parser, steps=1, layers=1, width=256, vocab=256, sequence=32, batch=1)
    options = parser.parse_args()
    unknown = sorted(set(options.systems.split(",")) - SYSTEMS.keys())
    if unknown or options.steps < 1 or options.world < 1:
        parser.error(f"unknown systems {unknown}; choose from {list(SYSTEMS)}, --steps and --world from 1")
    return options


def _size(options: argparse.Namespace) -> Size:
    return Size(**{field.name: getattr(options, field.name) for field in fields(Size)})


def _measure(options: argparse.Namespace, system: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        size = [f"--{field.name}={getattr(options, field.name)}" for field in fields(Size)]
        words = [f"--world={options.world}", f"--steps={options.steps}", f"--systems={system}", *size]
        command = [sys.executable, __file__, *words, f"--store={folder}/store"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, f"--rank={rank}"], env=env, stdout=subprocess.PIPE, text=True)
            for rank in range(options.world)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"bench: {system}: a rank ended with an error (above)")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    step_s = median([max(times) for times in zip(*(each["step_s"] for each in found), strict=True)])
    per_step = options.batch * options.sequence * options.world
    mean = {key: fmean(each[key] for each in found) for key in ("at_rest", "peak", "wire", "loss")}
    sizes = [mean[key] / 2**20 for key in ("at_rest", "peak", "wire")]
    return Row(system, per_step / step_s, *sizes, loss=mean["loss"])


def _train(options: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)
    load(options.systems)
    base_nbytes = memory_nbytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here, not during the imports
    store, limit = dist.FileStore(options.store, options.world), timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.world, timeout=limit)
    size = _size(options)
    model = SYSTEMS[options.systems](size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    step_s, sent, loss = [], [], torch.zeros(())
    for step in range(WARM_UP_STEPS + options.steps):
        batch = tokens(size, options.rank, step)
        dist.barrier()
        before, begin = int(LOOPBACK.read_text()), time.perf_counter()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s.append(time.perf_counter() - begin)
        dist.barrier()
        sent.append((int(LOOPBACK.read_text()) - before) / options.world)
    total = loss.detach().float()
    dist.all_reduce(total)
    found = {
        "step_s": step_s[WARM_UP_STEPS:],
        "at_rest": held_nbytes(model, optimizer),
        "peak": memory_nbytes("VmHWM") - base_nbytes,
        "wire": median(sent[WARM_UP_STEPS:]),
        "loss": total.item() / options.world,
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
