"""What a sharded training step costs, over a step without any communication, on real links.

    python bench/step.py --link loopback --systems local,ddp,fsdp2,shardwright --world 2 --blocks 8 --out FILE
    python bench/step.py --link 1gbit --groupings all --world 4     one model, grouped in different ways

Each system runs in new processes, one compute thread per rank: first its step and a local step alternate
in blocks of a few steps that include the completion of everything in flight (the ratio of a pair is what
counts: the machine's noise meets both), then once alone for peak memory. Links other than loopback need root:
see links.py.
"""

import argparse
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console

from bench.links import BITS_PER_S, LINKS, LinkError, Place, places
from bench.model import PRECISIONS, Size
from bench.rank import Job
from bench.report import MODEL_PER_RANK, Row, disagreements, dumps, screen_table, summarise
from bench.systems import GROUPINGS, OPTIONAL, SYSTEMS, unavailable
from bench.toy import add_toy

ROOT = Path(__file__).resolve().parents[1]
MAX_WORLD = 8


@dataclass(frozen=True)
class Options:
    """What to measure; checks itself."""

    link: str
    systems: tuple[str, ...]
    world: int
    blocks: int
    steps: int
    pin: bool
    limit_s: float
    out: Path | None
    size: Size = field(default_factory=Size)
    precision: str = "fp32"
    compiles: bool = False

    def __post_init__(self) -> None:
        known = [*SYSTEMS, *OPTIONAL]
        unknown = [name for name in self.systems if name not in known]
        if unknown or not self.systems:
            raise ValueError(f"--systems has {', '.join(unknown) or 'no name'}; known are {', '.join(known)}")
        if not 1 <= self.world <= MAX_WORLD:
            raise ValueError(f"--world is {self.world}, expected 1 to {MAX_WORLD}")
        if self.world == 1 and self.link != "loopback":
            raise ValueError(f"--link {self.link} joins ranks, but --world is 1; use --link loopback")
        for name in ("blocks", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}, expected at least 1")
        if self.out is not None and not self.out.absolute().parent.is_dir():
            raise ValueError(f"--out {self.out}: no such folder: {self.out.absolute().parent}")


class RankError(RuntimeError):
    """A rank ended with an error or ran past the limit."""


def parse(arguments: list[str]) -> Options:
    """Options from the command line; exits with the message and the usage if they can't be used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--link", choices=list(LINKS), default="loopback")
    parser.add_argument(
        "--systems",
        default="local,ddp,fsdp2,shardwright",
        help=f"all, or of {', '.join([*SYSTEMS, *OPTIONAL])}",
    )
    parser.add_argument(
        "--groupings", help=f"compare groupings of one model instead: all, or of {', '.join(GROUPINGS)}"
    )
    parser.add_argument("--world", type=int, default=2, help="number of ranks, 1 to 8")
    parser.add_argument("--blocks", type=int, default=6, help="measured pairs of blocks per system")
    parser.add_argument("--steps", type=int, default=3, help="steps per block")
    parser.add_argument(
        "--precision",
        choices=list(PRECISIONS),
        default="fp32",
        help="dtypes of compute and of sums over ranks",
    )
    parser.add_argument(
        "--compile",
        dest="compiles",
        action="store_true",
        help="torch.compile each block, the local step's too",
    )
    parser.add_argument("--pin", action="store_true", help="pin each rank to a core of its own")
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="longest time for one system, in seconds"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON to this file")
    parser.add_argument("--short", action="store_true", help="the 2-3 minute form: 2 blocks of 2 steps")
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of the model; default {default}")
    add_toy(parser, blocks=1, steps=1, layers=2, width=64, vocab=256, sequence=32, batch=2)
    given = vars(parser.parse_args(arguments))
    given.pop("toy")
    try:
        size = Size(**{name: given.pop(name) for name in asdict(Size())})
        if given.pop("short"):
            given |= {"blocks": 2, "steps": 2}
        named, groupings = given.pop("systems"), given.pop("groupings")
        names = [*SYSTEMS, *OPTIONAL] if named == "all" else named.split(",")
        if groupings is not None:
            listed = GROUPINGS if groupings == "all" else groupings.split(",")
            names = [f"grouping-{name.strip()}" for name in listed]
        systems = tuple(name.strip() for name in names if name.strip())
        return Options(systems=systems, size=size, **given)
    except ValueError as error:
        parser.error(str(error))


class Ranks:
    """One process per rank, in its place, for the whole run; each job is measured in a fork of it."""

    def __init__(self, homes: list[Place]) -> None:
        self.homes = homes
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Ranks":
        try:
            self._start()
        except BaseException:  # Ctrl-C between two ranks: the first may not stay
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        for home in self.homes:
            # A session of its own: Ctrl-C reaches only this process, which then ends its ranks.
            process = subprocess.Popen(
                [*home.prefix, sys.executable, str(ROOT / "bench/rank.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                text=True,
            )
            self.processes.append(process)

    def __exit__(self, *_: object) -> None:
        """Ends every rank and what it has forked, by the process group that it leads."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def perform(self, jobs: list[Job], limit_s: float) -> list[dict[str, Any]]:
        """Every rank performs its job; returns what each measured, in rank order.

        Raises:
            RankError: a rank failed or ran past the limit; shows the end of what it wrote.
        """
        waiting = {}
        for job, process in zip(jobs, self.processes, strict=True):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(job.dumps() + "\n")
            process.stdin.flush()
            waiting[process.stdout] = job
        deadline = time.monotonic() + limit_s
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(_story(next(iter(waiting.values())), f"ran past {limit_s:g} s (--limit-s)"))
            for pipe in ready:
                job = waiting.pop(pipe)
                if pipe.readline().strip() != "0":
                    raise RankError(_story(job, "ended with an error"))
        return [json.loads(Path(f"{job.stem}.json").read_text()) for job in jobs]


def _story(job: Job, what: str) -> str:
    log = Path(f"{job.stem}.log")
    text = log.read_text(errors="replace")[-4000:] if log.exists() else "(it wrote nothing)"
    return f"{job.system}, {job.mode} run: rank {job.rank} {what}:\n{text}"


def measure(options: Options, system: str, ranks: Ranks, folder: str) -> Row:
    """One system: its paired run, then its solo run."""
    found = {}
    for mode in ("paired", "solo"):
        jobs = [
            Job(
                mode=mode,
                system=system,
                rank=rank,
                world=options.world,
                interface=home.interface,
                num_sharing=home.num_sharing,
                blocks=options.blocks,
                steps=options.steps,
                pin=options.pin,
                folder=folder,
                size=options.size,
                precision=options.precision,
                compiles=options.compiles,
            )
            for rank, home in enumerate(ranks.homes)
        ]
        found[mode] = ranks.perform(jobs, options.limit_s)
    row = summarise(system, found["paired"], found["solo"])
    if options.link not in BITS_PER_S or row.communication_ms is None:
        return row
    link_ms = 1e3 * row.sent_mib * 2**23 / BITS_PER_S[options.link]
    return replace(row, bound=max(1.0, link_ms / row.local_ms))


def machine_facts() -> dict[str, Any]:
    """What must be known to compare figures: cores, versions, date, commit, and how busy it was."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        commit = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        commit = ""
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "load": round(os.getloadavg()[0], 2),
    }


def run(options: Options, console: Console) -> list[Row]:
    """Measures every system that can run here; prints the table and writes the file."""
    machine, rows = machine_facts(), []
    asked = {**asdict(options), "out": None}
    with (
        tempfile.TemporaryDirectory() as folder,
        places(options.link, options.world) as homes,
        Ranks(homes) as ranks,
    ):
        for system in options.systems:
            reason = unavailable(system)
            if reason:
                console.print(f"[yellow]{system}: skipped: {reason}[/yellow]")
                continue
            begin = time.monotonic()
            rows.append(measure(options, system, ranks, folder))
            if options.out is not None:  # after each, so that an interrupted run keeps what it has
                options.out.write_text(dumps(machine, asked, rows))
            console.print(f"{system}: {rows[-1].ratio:.3f} ({time.monotonic() - begin:.0f} s)")
    console.print(screen_table(machine, asked, rows))
    differing = disagreements(rows, options.precision)
    common = [row.system for row in rows if row.system not in MODEL_PER_RANK]
    if differing:
        console.print("[red]losses differ:[/red] " + "; ".join(differing))
    elif len(common) > 1:
        console.print(f"losses of {len(rows[-1].losses)} steps are equal: {', '.join(common)}")
    if options.out is not None:
        console.print(f"written: {options.out}")
    if differing:
        raise RankError("the systems did not compute the same: " + "; ".join(differing))
    return rows


def main(arguments: list[str]) -> None:
    """Runs the bench; exits 1 with the reason when it can't, 130 after Ctrl-C."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the clean-up
    try:
        # Off a terminal (a file, a log) the table would be squeezed into 80 columns.
        run(options, Console(width=None if sys.stdout.isatty() else 140))
    except (LinkError, RankError) as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
