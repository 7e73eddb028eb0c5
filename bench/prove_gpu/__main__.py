"""Proves on the accelerators of this machine what can only be shown there, and writes one page of results.

    make prove-gpu                  1, 2, 4 or 8 cards, as many as there are; at most 22 minutes
    make prove-gpu DEVICE=sim       each section at toy size on the CPU, to see whether it works
    python -m bench.prove_gpu --share-card 2    so many ranks on one card, over NCCL: times mean nothing then

Each section runs in processes of its own, started by torchrun once for each number of ranks, and is ended
with all its children at its time limit. One that fails doesn't stop the others: its error stands in the page.
The exit status is 1 where one failed.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from bench.prove_gpu.device import SHARED, Device
from bench.prove_gpu.page import page

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    {},
    {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    {"TORCH_NCCL_HIGH_PRIORITY": "1"},
)
TOTAL_S = 22 * 60 - 30
_ADOPTS_ORPHANS = 36  # prctl's PR_SET_CHILD_SUBREAPER


@dataclass
class Section:
    """One module of this folder.

    limit_s: of all its runs together. num_worlds: in how many of the device's worlds it is run by torchrun,
    the most important first; 0: it is run as it is. settings: of the environment; it is run with each.
    """

    module: str
    title: str
    limit_s: float
    num_worlds: int = 4
    settings: tuple[dict[str, str], ...] = ({},)
    tables: dict[str, list[dict]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    took_s: float = 0.0


def sections(simulated: bool) -> list[Section]:
    """In the order in which they run."""
    few, settings = (1, SETTINGS[1:2]) if simulated else (2, SETTINGS)
    return [
        Section("suite", "The device suite", 330, num_worlds=0),
        Section("losses", "Losses beside one process", 120),
        Section("beside_fsdp2", "Blocks of a 7B model beside FSDP2", 280),
        Section("four_bit", "Memory of a 4-bit base", 140, num_worlds=few),
        Section("finetune", "Fine-tuning beside peft, bitsandbytes and torchao", 100, num_worlds=few),
        Section("offload", "Offload", 100, num_worlds=few),
        Section("failures", "Ranks that are killed or sleep", 120, num_worlds=0),
        Section("allocator", "Settings of the allocator and of NCCL", 100, num_worlds=1, settings=settings),
    ]


def run(section: Section, device: str, worlds: list[int], limit_s: float, keep: Path | None = None) -> None:
    """All runs of a section; what they leave is added to it.

    keep: a folder for rows, and for what each rank prints.
    """
    began = time.monotonic()
    for world, setting in product(worlds[: section.num_worlds] or [0], section.settings):
        left_s = began + limit_s - time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            if keep is not None:
                folder = keep / "-".join([section.module, str(world or "alone"), *setting.values()])
                folder.mkdir(parents=True, exist_ok=True)
            rows, log = Path(folder, "rows"), Path(folder, "log")
            for file in (rows, log):
                file.write_text("")
            words = ["-m", f"bench.prove_gpu.{section.module}", "--device", device, "--rows", str(rows)]
            if world:
                of_ranks = [] if keep is None else [f"--log-dir={folder}", "--tee=3"]
                launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
                words = [*launcher, *of_ranks, *words]
            said = [f"with {world} ranks"] if world else ["alone"]
            where = ", ".join(said + [f"{name}={value}" for name, value in setting.items()])
            print(f"prove-gpu: {section.module} {where}", flush=True)
            status = _run(words, log, left_s, setting, python_of(section.module))
            found = [json.loads(line) for line in rows.read_text().splitlines()]
            for each in found:
                if "row" in each:
                    section.tables.setdefault(each["table"], []).append(each["row"])
            errors = [each["error"] for each in found if "error" in each]
            if status or errors:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                shown = errors[: 1 if world else None] or [last]  # other ranks fail of the first one's error
                section.errors.append(f"{where}: {status}\n" + "\n\n".join(shown))
                print(f"prove-gpu: {section.module} {section.errors[-1]}", flush=True)
    section.took_s = time.monotonic() - began


def python_of(module: str, root: Path = ROOT) -> str:
    """That of ``make setup-hf`` for fine-tuning, if it is there and this one is that of ``make setup``: then
    both have the same torch. Else this one."""
    others = root / ".venv-hf"
    if module != "finetune" or Path(sys.prefix) != root / ".venv" or not (others / ".installed").exists():
        return sys.executable
    return str(others / "bin" / "python")


def _run(
    words: list[str], log: Path, limit_s: float, setting: dict[str, str], python: str = sys.executable
) -> str:
    """Run Python; empty if it ended well, else what happened. No process that it started is left."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    environment |= setting
    if limit_s <= 0:
        return "its time was over before it began"
    with log.open("w") as file:
        process = subprocess.Popen(
            [python, *words], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(limit_s)
            return f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            return f"ended: over its time limit ({limit_s:.0f} s)"
        finally:
            _end_children()


def _end_children() -> None:
    """End all that this process has started, also what has a session of its own, as torchrun's ranks have."""
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)  # its own children are adopted by this process
        for child in children:
            os.waitpid(child, 0)


def _children() -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has ended since
            parent = file.read_text().rpartition(")")[2].split()[1]
            found += [int(file.parent.name)] if int(parent) == os.getpid() else []
    return found


def main() -> None:
    """Parse, run the sections, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="accelerator", choices=["accelerator", "sim"])
    parser.add_argument("--page", type=Path, default=Path("runs/prove-gpu.md"))
    parser.add_argument("--share-card", type=int, metavar="RANKS", help="so many ranks on the first card")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps rows, and what each rank prints")
    names = [section.module for section in sections(simulated=True)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION")
    parser.add_argument(
        "--limit-s", nargs=2, action="append", default=[], metavar=("SECTION", "SECONDS"), dest="limits"
    )
    options = parser.parse_args()
    limits = {name: float(seconds) for name, seconds in options.limits}
    if unknown := limits.keys() - set(names):
        parser.error(f"--limit-s names {sorted(unknown)}, expected one of {names}")
    if options.share_card:
        os.environ[SHARED] = str(options.share_card)
    device = Device.of(options.device)
    ctypes.CDLL(None).prctl(_ADOPTS_ORPHANS, 1, 0, 0, 0)
    chosen = [each for each in sections(device.simulated) if each.module in options.only]
    ends, about = time.monotonic() + TOTAL_S, device.described()
    for section in chosen:
        limit_s = min(limits.get(section.module, section.limit_s), ends - time.monotonic())
        run(section, options.device, device.worlds, limit_s, options.keep and options.keep.resolve())
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(device, about, chosen))  # after each section: whatever comes, it stays
    print(options.page.read_text())
    print(f"prove-gpu: the page is {options.page}")
    sys.exit(any(section.errors for section in chosen))


if __name__ == "__main__":
    main()
