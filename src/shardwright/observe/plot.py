"""A drawing as a picture, by matplotlib."""

from pathlib import Path
from typing import Any

from shardwright.extras import from_extra
from shardwright.observe.drawing import COLOURS, OTHER, Drawing

with from_extra("plots"):
    from matplotlib.figure import Figure

_GIB = 2**30


def draw(drawing: Drawing, path: Path) -> None:
    """Write it as the ending of ``path`` says."""
    heights = [0.45 * len(drawing.rows) + 0.2, 3.0] if drawing.levels else [0.45 * len(drawing.rows) + 0.2]
    figure = Figure(figsize=(11, sum(heights) + 1.0), layout="constrained")
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for place, row in enumerate(drawing.rows):
        spans = [(bar.start, bar.end - bar.start) for bar in drawing.bars if bar.row == row]
        axes[0].broken_barh(spans, (place - 0.38, 0.76), color=COLOURS.get(row, OTHER), ec="white", lw=0.3)
    axes[0].set_yticks(range(len(drawing.rows)), drawing.rows)
    axes[0].invert_yaxis()
    axes[0].set_title(drawing.title, loc="left")
    if drawing.levels:
        _memory(drawing, axes[1])
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=120)


def _memory(drawing: Drawing, axes: Any) -> None:
    end = max([bar.end for bar in drawing.bars], default=drawing.levels[-1].at)
    times = [level.at for level in drawing.levels] + [end]
    stacked = list(zip(*(drawing.amounts(level) for level in drawing.levels), strict=True))
    below = [0.0] * len(drawing.levels)
    for name, amounts in zip(drawing.categories, stacked, strict=True):
        above = [low + nbytes / _GIB for low, nbytes in zip(below, amounts, strict=True)]
        axes.stairs(above, times, baseline=below, fill=True, color=COLOURS.get(name, OTHER), label=name)
        below = above
    if drawing.line_nbytes is not None:
        axes.axhline(drawing.line_nbytes / _GIB, color="#d62728", linestyle="--", label="device")
    axes.set_ylabel("GiB")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
