"""A rank is killed by SIGKILL: what the other ranks of a job of torchrun print, as a terminal.

Lines are drawn as printed; frames of tracebacks and torchrun's own are left out, paths are shortened.
"""

import html
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from bench.pictures.ranks import ROOT, finished, start

WORLD, KILLED, STEPS = 3, 1, 30
WIDTH = 118  # characters
_CHARACTER, _LINE, _MARGIN = 7.23, 17, 14


def record(folder: Path) -> dict[str, Any]:
    """Run the job, kill a rank, and return the lines of the terminal."""
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    words = ["--standalone", "--nproc-per-node", str(WORLD), "train.py"]
    job = start(["torch.distributed.run", *words], folder, unbuffered=True)
    before: list[str] = []
    assert job.stdout is not None
    while not any(f"step {STEPS}:" in line for line in before):
        line = job.stdout.readline()
        if not line:
            raise RuntimeError("the job ended before it was killed:\n" + "".join(before))
        before.append(line)
    pid = int((folder / f"rank-{KILLED}.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    wrote = finished(job, fails=True)
    return {
        "command": " ".join(["torchrun", *words]),
        "before": said("".join(before), folder),
        "kill": f"kill -KILL {pid}   # rank {KILLED}, in another terminal",
        "after": said(wrote, folder),
        "ended_s": round(time.monotonic() - killed, 1),
    }


def said(wrote: str, folder: Path) -> list[str]:
    """The lines of ranks, without torchrun's, paths of this machine shortened."""
    lines = []
    for line in wrote.splitlines():
        if re.match(r"[WEI]\d{4} |\*{5}|={5}|-{5}|Setting OMP", line):
            continue
        lines.append(line.replace(f"{folder}/", "").replace(f"{ROOT}/", ""))
    return lines


def draw(found: dict[str, Any], out: Path) -> None:
    """Text on a dark ground; lines too long for it go on in the next one."""
    rows = [("prompt", f"$ {found['command']}")]
    rows += [("", line) for line in found["before"]]
    rows += [("prompt", f"$ {found['kill']}")]
    rows += [("verdict" if "rank" in line else "", line) for line in told(found["after"])]
    shown = [(kind, part) for kind, line in rows for part in folded(line)]
    width = 2 * _MARGIN + WIDTH * _CHARACTER
    height = 2 * _MARGIN + len(shown) * _LINE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}">',
        "<style>text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d8dee4;"
        "white-space:pre}.prompt{fill:#7ee787}.verdict{fill:#ffb86b}</style>",
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#161b22"/>',
    ]
    for place, (kind, text) in enumerate(shown):
        named = f' class="{kind}"' if kind else ""
        at = f'x="{_MARGIN}" y="{_MARGIN + place * _LINE + 12}"'
        lines.append(f'<text {at}{named} xml:space="preserve">{html.escape(text)}</text>')
    out.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")


def told(lines: list[str]) -> list[str]:
    """What ranks say: without the frames of a traceback, and without the launcher's report that ends it."""
    if "Traceback (most recent call last):" in lines:
        lines = lines[: lines.index("Traceback (most recent call last):")]
    kept, inside = [], False
    for line in lines:
        inside = inside and re.match(r"\[rank\d+\]:  ", line) is not None
        if not inside:
            kept.append(line)
        if line.endswith("Traceback (most recent call last):"):
            inside = True
            kept.append(line.partition(" ")[0] + "   ...")
    return kept


def folded(line: str) -> list[str]:
    """A line in parts that fit, at spaces where there are some."""
    parts = []
    while len(line) > WIDTH:
        place = line.rfind(" ", WIDTH // 2, WIDTH)
        place = WIDTH if place < 0 else place
        parts.append(line[:place])
        line = "    " + line[place:].lstrip()
    return [*parts, line]
