"""What the measured numbers say: medians of paired ratios, overlap efficiency, and the tables.

python bench/report.py FILE...      the Markdown table of one or more result files of step.py
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import sub
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

MODEL_PER_RANK = ("local", "local-met", "local-qlora")
"""Systems in which each rank trains a model of its own."""
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "bf16-reduced": 2e-2}
"""Relative; sums in another order differ by about 1e-6 after a few steps of AdamW, in bf16 as it rounds."""


@dataclass(frozen=True)
class Row:
    """One system on one link. Times in ms per step, sizes in MiB per rank; None: has no meaning here.

    bound: least ratio at which the bytes that were sent pass the link, if all of it is hidden. excess_ms: of
    each block, what a step takes longer than a local one.
    """

    system: str
    ratio: float
    block_ratios: list[float]
    step_ms: float
    local_ms: float
    cpu_ms: float
    local_cpu_ms: float
    sent_mib: float
    peak_mib: float
    exposed_ms: float | None
    unsharded_mib: float | None
    communication_ms: float | None
    overlap: float | None
    losses: list[float]
    at_rest_mib: float | None = None
    bound: float | None = None
    excess_ms: list[float] | None = None


def summarise(system: str, paired: list[dict[str, list[float]]], solo: list[dict[str, Any]]) -> Row:
    """One row from what every rank measured (see rank.py).

    A block's ratio is the mean over ranks of (step / local step) in the same process and block; the row's is
    the median over blocks.
    """
    blocks = list(zip(*(_divided(rank["step_s"], rank["local_step_s"]) for rank in paired), strict=True))
    block_ratios = [fmean(ratios) for ratios in blocks]
    more = zip(*(map(sub, rank["step_s"], rank["local_step_s"]) for rank in paired), strict=True)
    step_ms, local_ms = _median_ms(paired, "step_s"), _median_ms(paired, "local_step_s")
    alone = [rank["communication_s"] for rank in solo]
    exposed_ms = _median_ms(paired, "exposed_s")
    unsharded, at_rest = ([rank[key] for rank in solo] for key in ("unsharded_nbytes", "at_rest_nbytes"))
    communication_ms = None if None in alone else 1e3 * fmean(alone)
    return Row(
        system=system,
        ratio=median(block_ratios),
        block_ratios=block_ratios,
        step_ms=step_ms,
        local_ms=local_ms,
        cpu_ms=_median_ms(paired, "cpu_s"),
        local_cpu_ms=_median_ms(paired, "local_cpu_s"),
        sent_mib=median(fmean(sent) for sent in zip(*(rank["sent_nbytes"] for rank in paired), strict=True))
        / 2**20,
        peak_mib=fmean(rank["peak_nbytes"] for rank in solo) / 2**20,
        exposed_ms=None if math.isnan(exposed_ms) else exposed_ms,
        unsharded_mib=None if None in unsharded else fmean(unsharded) / 2**20,
        communication_ms=communication_ms,
        overlap=overlap(local_ms, communication_ms, step_ms),
        losses=solo[0]["losses"],
        at_rest_mib=None if None in at_rest else fmean(at_rest) / 2**20,
        excess_ms=[1e3 * fmean(seconds) for seconds in more],
    )


def overlap(compute: float, communication: float | None, step: float) -> float | None:
    """``(compute + communication - step) / min(compute, communication)``: 1 all that can hide does.

    0: nothing is hidden. None where communication is nothing, or under a hundredth of the compute: there
    noise would decide.
    """
    if communication is None or communication < 0.01 * compute:
        return None
    return (compute + communication - step) / min(compute, communication)


def disagreements(rows: list[Row], precision: str = "fp32") -> list[str]:
    """Losses that differ between the systems that train one common model."""
    common = [row for row in rows if row.system not in MODEL_PER_RANK]
    found = []
    for row in common[1:]:
        for step, (got, expected) in enumerate(zip(row.losses, common[0].losses, strict=True)):
            if not abs(got - expected) <= LOSS_TOLERANCE[precision] * abs(expected):
                found.append(f"step {step}: {row.system} {got:.6f}, {common[0].system} {expected:.6f}")
    return found


def interval(ratios: list[float]) -> tuple[float, float]:
    """Where their median lies with a probability of 90% or more, whatever their distribution: between two of
    them, by the binomial distribution of how many lie below it. All of them where there are few."""
    ordered, n = sorted(ratios), len(ratios)
    outside, below = 0.0, 0  # how many are left out at each end
    while below < n // 2:
        outside += 2 * math.comb(n, below) / 2**n
        if outside > 0.1:
            break
        below += 1
    below = max(below - 1, 0)
    return ordered[below], ordered[n - 1 - below]


COLUMNS = (
    "system",
    "step / local",
    "(interval)",
    "step ms",
    "local ms",
    "CPU ms, local",
    "MiB sent",
    "peak RSS MiB",
    "unsharded MiB",
    "exposed ms",
    "comm. alone ms",
    "overlap",
    "bound",
)


def cells(row: Row) -> list[str]:
    """One row of the table, a text per column of ``COLUMNS``."""
    return [
        row.system,
        f"{row.ratio:.3f}",
        "{:.2f}-{:.2f}".format(*interval(row.block_ratios)),
        f"{row.step_ms:.0f}",
        f"{row.local_ms:.0f}",
        f"{row.cpu_ms:.0f}, {row.local_cpu_ms:.0f}",
        f"{row.sent_mib:.0f}",
        f"{row.peak_mib:.0f}",
        "-" if row.unsharded_mib is None else f"{row.unsharded_mib:.0f}",
        "-" if row.exposed_ms is None else f"{row.exposed_ms:.0f}",
        "-" if row.communication_ms is None else f"{row.communication_ms:.0f}",
        "-" if row.overlap is None else f"{row.overlap:.2f}",
        "-" if row.bound is None else f"{row.bound:.2f}",
    ]


def dumps(machine: dict[str, Any], options: dict[str, Any], rows: list[Row]) -> str:
    """A result file: the machine, how it was asked, and a row per system."""
    result = {"machine": machine, "options": options, "rows": [asdict(row) for row in rows]}
    return json.dumps(result, indent=2) + "\n"


def loads(text: str) -> tuple[dict[str, Any], dict[str, Any], list[Row]]:
    """The machine, the options and the rows of a result file."""
    result = json.loads(text)
    return result["machine"], result["options"], [Row(**row) for row in result["rows"]]


def heading(machine: dict[str, Any], options: dict[str, Any]) -> str:
    """One line: link and ranks, then the machine."""
    return (
        f"{options['link']}, {options['world']} ranks, {options.get('precision', 'fp32')}, "
        f"{'each block compiled, ' if options.get('compiles') else ''}"
        f"{options['blocks']} blocks of {options['steps']} steps; "
        f"{machine['cores']} cores, torch {machine['torch']}, {machine['date']}, commit {machine['commit']}"
    )


def screen_table(machine: dict[str, Any], options: dict[str, Any], rows: list[Row]) -> Table:
    """The rows as a ``rich`` table."""
    table = Table(title=heading(machine, options))
    table.add_column(COLUMNS[0], no_wrap=True)
    for column in COLUMNS[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown(text: str) -> str:
    """The Markdown table of one result file, its heading above it; then the trade of time for memory."""
    machine, options, rows = loads(text)
    parts = [f"{heading(machine, options)}:", _markdown(COLUMNS, [cells(row) for row in rows])]
    traded = trade(rows)
    return "\n\n".join([*parts, *([_markdown(TRADE_COLUMNS, traded)] if len(traded) > 1 else [])])


def _markdown(columns: Sequence[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TRADE_COLUMNS = (
    "system",
    "step ms",
    "over the first",
    "exposed ms",
    "unsharded MiB",
    "with shards, gradients and Adam's state",
    "over the first",
)


def trade(rows: list[Row]) -> list[list[str]]:
    """Time against memory that the runtime counts, of the rows that count it, each over the first of them."""
    counted = [row for row in rows if row.unsharded_mib is not None and row.at_rest_mib is not None]
    lines = []
    for row in counted:
        first, held = counted[0], (row.unsharded_mib or 0) + (row.at_rest_mib or 0)
        before = (first.unsharded_mib or 0) + (first.at_rest_mib or 0)
        lines.append(
            [
                row.system,
                f"{row.step_ms:.0f}",
                f"{row.step_ms / first.step_ms - 1:+.0%}",
                "-" if row.exposed_ms is None else f"{row.exposed_ms:.0f}",
                f"{row.unsharded_mib:.1f}",
                f"{held:.0f}",
                f"{held / before - 1:+.1%}",
            ]
        )
    return lines


def _divided(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _median_ms(paired: list[dict[str, list[float]]], key: str) -> float:
    return 1e3 * fmean(median(rank[key]) for rank in paired)


def main(files: list[str]) -> None:
    """Prints the tables of the given result files."""
    if not files:
        sys.exit("usage: python bench/report.py FILE...   (result files of bench/step.py --out)")
    print("\n\n".join(markdown(Path(file).read_text()) for file in files))


if __name__ == "__main__":
    main(sys.argv[1:])
