"""The picture of what a step costs over the speed of the link, from result files of step.py.

.venv/bin/python bench/links_figure.py 100mbit.json 1gbit.json 10gbit.json --out docs/pictures/links.svg

Each file is what ``step.py --link ... --out FILE`` wrote; all of the same model, ranks and precision. A point
is the median of the pairs' ratios, its bar the 90% interval. Both axes are logarithmic.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

from bench.links import BITS_PER_S
from bench.report import Row, interval, loads

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

matplotlib.rcParams["svg.hashsalt"] = "links"  # the same file of the same results

SYSTEMS = {
    "fsdp2": ("PyTorch FSDP2", "#d62728", "s", (6, 5)),
    "ddp": ("PyTorch DDP (not sharded)", "#7f7f7f", "^", (-28, -3)),
    "shardwright": ("Shardwright", "#1f77b4", "o", (6, 6)),
    "shardwright-auto": ('Shardwright, wire="auto"', "#2ca02c", "D", (6, -12)),
}
"""System of step.py -> label, colour, marker and where its figures stand; in the order of the legend."""
NOT_EQUAL = ("world", "precision", "size")
Points = dict[str, list[tuple[float, Row]]]


def main() -> None:
    """Reads the files, draws, and prints the points as a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="results of step.py --out, one for each link")
    parser.add_argument("--out", type=Path, default=Path("links.svg"), help="the picture; .svg or .png")
    options = parser.parse_args()
    try:
        machine, asked, points = read(options.files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(str(error))
    draw(machine, asked, points, options.out)
    print("| link, Gbit/s | system | step / local, 90% interval | MiB sent |\n|---:|---|---:|---:|")
    for system, found in points.items():
        for bits_per_s, row in found:
            low, high = interval(row.block_ratios)
            ratio = f"{row.ratio:.2f} ({low:.2f}-{high:.2f})"
            print(f"| {bits_per_s / 1e9:g} | {system} | {ratio} | {row.sent_mib:.0f} |")


def read(files: list[Path]) -> tuple[dict[str, Any], dict[str, Any], Points]:
    """Machine, options, and by system its row at each speed. Raises: ValueError for files that don't go
    together or have no shaped link."""
    points: Points = {system: [] for system in SYSTEMS}
    machine: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for file in files:
        machine, options, rows = loads(file.read_text())
        first = first or options
        for name in NOT_EQUAL:
            if options.get(name) != first.get(name):
                raise ValueError(f"{file}: {name} is {options.get(name)}, of {files[0]} {first.get(name)}")
        if options["link"] not in BITS_PER_S:
            raise ValueError(
                f"{file}: the link {options['link']} has no speed; known are {', '.join(BITS_PER_S)}"
            )
        for row in rows:
            if row.system in points:
                points[row.system].append((BITS_PER_S[options["link"]], row))
    if not any(points.values()):
        raise ValueError(f"no file has one of {', '.join(SYSTEMS)}")
    return (
        machine,
        first,
        {system: sorted(found, key=lambda point: point[0]) for system, found in points.items() if found},
    )


def draw(machine: dict[str, Any], options: dict[str, Any], points: Points, out: Path) -> None:
    """Write the picture."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for system, found in points.items():
        label, colour, marker, beside = SYSTEMS[system]
        speeds, ratios = [bits_per_s for bits_per_s, _ in found], [row.ratio for _, row in found]
        bounds = [interval(row.block_ratios) for _, row in found]
        below = [max(0.0, ratio - low) for ratio, (low, _) in zip(ratios, bounds, strict=True)]
        above = [max(0.0, high - ratio) for ratio, (_, high) in zip(ratios, bounds, strict=True)]
        style: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "label": label,
            "capsize": 2,
            "linewidth": 1.6,
        }
        axes.errorbar(speeds, ratios, yerr=(below, above), **style)
        for speed, ratio in zip(speeds, ratios, strict=True):
            written: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": colour}
            axes.annotate(f"{ratio:.2f}", (speed, ratio), beside, **written)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.09)
    highest = max(row.ratio for found in points.values() for _, row in found)
    axes.yaxis.set_major_locator(
        FixedLocator([tick for tick in (1, 1.5, 2, 3, 5, 8, 12, 20) if tick <= 1.3 * highest])
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    speeds = sorted({speed for found in points.values() for speed, _ in found})
    axes.xaxis.set_major_locator(FixedLocator(speeds))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _speed(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("link between the ranks")
    axes.set_ylabel("step / step without communication")
    precision, cores = options.get("precision", "fp32"), machine["cores"]
    title = f"{options['world']} ranks, {precision}, {cores} CPU cores, torch {machine['torch']}"
    axes.set_title(title, fontsize=9)
    axes.grid(True, alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else {})


def _speed(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:g} Mbit/s"


if __name__ == "__main__":
    main()
