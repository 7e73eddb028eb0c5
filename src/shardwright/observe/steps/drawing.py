"""Rows of bars over seconds, with bytes below them: one HTML file, or a picture.

A drawing knows nothing of where its bars come from: what a plan expects and what a step did are drawn in the
same way.
"""

import html
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from shardwright.errors import InputError
from shardwright.extras import from_extra

COLOURS = {
    "plan": "#4c5b8c",
    "compute": "#1f77b4",
    "gather": "#2a9d5c",
    "reduce": "#d9822b",
    "all-reduce": "#8e5bb5",
    "exchange": "#7a9e3b",
    "copies": "#a0614f",
    "host": "#7f7f7f",
    "states": "#4c5b8c",
    "unsharded": "#2a9d5c",
    "gradients": "#d9822b",
    "activations": "#3fb6c6",
    "head": "#6baed6",
    "transport": "#c0567a",
    "wait": "#c0392b",
    "optimizer": "#8e5bb5",
    "data": "#b8860b",
    "save": "#5f8f8f",
    "loss": "#6baed6",
    "user": "#9a9a9a",
    "gc": "#d65f9e",
    "other": "#c9b37e",
}
"""By row, and by category of memory: what a lane fills has its colour."""
OTHER = "#7f7f7f"
_EXPOSED = "#f7d9d9"
_LINE, _NAME = 120, 24  # characters that fit into the width of a picture, and beside its axes
_LINE_HEIGHT = 0.17  # inches
_SQUASHED = 2.0  # a device so many times larger than what is held isn't drawn: one would see nothing else


class Bar(NamedTuple):
    """What a row did from ``start`` to ``end``, in seconds. Rows named as lanes of a step ("compute", "rank 3
    gather") have their colours, others are grey. kind: whose colour the bar has, where not its row's."""

    row: str
    label: str
    start: float
    end: float
    kind: str = ""


class Arrow(NamedTuple):
    """From ``start`` seconds in one row to ``end`` seconds in another."""

    label: str
    row: str
    start: float
    to_row: str
    end: float


class Shade(NamedTuple):
    """``start`` to ``end`` seconds, in all rows from the first to the last."""

    first: str
    last: str
    start: float
    end: float


class Level(NamedTuple):
    """Bytes by category, from ``at`` (seconds) until the next level; ``label``: where in the step that is."""

    at: float
    nbytes: Mapping[str, int]
    label: str = ""


def savable(path: str | Path) -> Path:
    """Where a drawing is saved. Raises: InputError for another ending."""
    path = Path(path)
    if path.suffix not in (".html", ".png", ".svg"):
        raise InputError(f"a drawing is saved as .html, .png or .svg, got {str(path)!r}")
    return path


@dataclass(frozen=True)
class Drawing:
    """``save`` writes it. bars: rows of known lanes stand first, others in the order in which they come.
    levels: in the order of time; none: no memory is drawn. capacity_nbytes: of the device, a line above them.
    lanes: all rows in their order, where they have another. notes: lines of text below the title.
    """

    title: str
    bars: tuple[Bar, ...]
    levels: tuple[Level, ...] = ()
    capacity_nbytes: int | None = None
    lanes: tuple[str, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    shades: tuple[Shade, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> list[str]:
        """Names of the rows, in their order."""
        if self.lanes:
            return [*self.lanes]
        named = dict.fromkeys(bar.row for bar in self.bars)
        return [row for row in COLOURS if row in named] + [row for row in named if row not in COLOURS]

    @cached_property
    def categories(self) -> list[str]:
        """What levels are made of, in the order in which they are stacked."""
        return list(dict.fromkeys(str(name) for level in self.levels for name in level.nbytes))

    @property
    def kinds(self) -> list[str]:
        """Those of bars that haven't their row's colour."""
        return list(dict.fromkeys(bar.kind for bar in self.bars if bar.kind))

    @property
    def coloured(self) -> list[tuple[str, str]]:
        """The categories, each with the colour of its first word; of what has none neighbours differ."""
        palette = list(dict.fromkeys(COLOURS.values()))
        return [
            (name, COLOURS.get(name.partition(" ")[0], palette[place % len(palette)]))
            for place, name in enumerate(self.categories)
        ]

    @property
    def line_nbytes(self) -> int | None:
        """Of the device, where what is held comes near to it."""
        most = max((sum(level.nbytes.values()) for level in self.levels), default=0)
        near = self.capacity_nbytes is not None and self.capacity_nbytes <= _SQUASHED * most
        return self.capacity_nbytes if near else None

    def save(self, path: str | Path) -> None:
        """Write ``.html`` (one file that opens from disk and zooms, without a network), ``.png`` or ``.svg``.

        Raises: InputError for another ending; MissingExtra for a picture where matplotlib isn't installed.
        """
        path = savable(path)
        if path.suffix == ".html":
            path.write_text(self._html(), encoding="utf-8")
        else:
            figure_of(self).savefig(path, dpi=120)

    def _html(self) -> str:
        number = {row: place for place, row in enumerate(self.rows)}
        data = {
            "rows": [[row, colour_of(row)] for row in self.rows],
            "bars": [
                [
                    number[bar.row],
                    bar.label,
                    float(bar.start),
                    float(bar.end),
                    *([colour_of(bar.kind)] if bar.kind else []),
                ]
                for bar in self.bars
            ],
            "arrows": [
                [each.label, number[each.row], each.start, number[each.to_row], each.end]
                for each in self.arrows
            ],
            "shades": [[number[each.first], number[each.last], each.start, each.end] for each in self.shades],
            "notes": self.notes,
            "kinds": [[kind, colour_of(kind)] for kind in self.kinds],
            "categories": [list(pair) for pair in self.coloured],
            "levels": [[float(x.at), self.amounts(x), x.label] for x in self.levels],
            "line_nbytes": self.line_nbytes,
        }
        text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # it stands inside of a script
        page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        return page.replace("__TITLE__", html.escape(self.title)).replace("__DATA__", text)

    def amounts(self, level: Level) -> list[int]:
        """Its bytes in the order of ``categories``."""
        return [int(level.nbytes.get(name, 0)) for name in self.categories]


def colour_of(name: str) -> str:
    """Of a kind, or of a row by its last word."""
    return COLOURS.get(name.rpartition(" ")[2], OTHER)


def figure_of(drawing: Drawing) -> Any:
    """A figure of matplotlib's. Text is folded, so that bars have most of the width whatever names are.

    Raises: MissingExtra where matplotlib isn't installed.
    """
    with from_extra("plots"):
        figures, patches = (importlib.import_module(f"matplotlib.{name}") for name in ("figure", "patches"))
    heights = [0.45 * len(drawing.rows) + 0.2, 3.0] if drawing.levels else [0.45 * len(drawing.rows) + 0.2]
    lines = [line for text in (drawing.title, *drawing.notes) for line in wrap(text, _LINE)]
    head, below = _LINE_HEIGHT * len(lines) + 0.1, sum(heights) + 0.8
    figure = figures.Figure(figsize=(11, head + below), layout="constrained")
    figure.get_layout_engine().set(rect=(0.0, 0.0, 1.0, below / (head + below)))
    figure.text(0.01, 1 - 0.05 / (head + below), "\n".join(lines), va="top", parse_math=False)
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    _plot_rows(drawing, axes[0])
    if drawing.kinds:
        keys = [patches.Patch(color=colour_of(kind), label=_folded(kind)) for kind in drawing.kinds]
        keys.append(patches.Patch(color=_EXPOSED, label=_folded("exposed communication")))
        axes[0].legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    if drawing.levels:
        _plot_memory(drawing, axes[1])
    axes[-1].set_xlabel("seconds")
    return figure


def _folded(name: str) -> str:
    """A name beside the axes, as one or two lines of few characters."""
    short = name if len(name) <= 2 * _NAME else f"{name[: 2 * _NAME - 4]}..."
    return "\n".join(wrap(short, _NAME))


def _plot_rows(drawing: Drawing, axes: Any) -> None:
    places = {row: place for place, row in enumerate(drawing.rows)}
    for shade in drawing.shades:
        top, bottom = places[shade.first] - 0.5, places[shade.last] + 0.5
        axes.broken_barh([(shade.start, shade.end - shade.start)], (top, bottom - top), color=_EXPOSED)
    for row, place in places.items():
        bars = [bar for bar in drawing.bars if bar.row == row]
        spans = [(bar.start, bar.end - bar.start) for bar in bars]
        colours = [colour_of(bar.kind or row) for bar in bars]
        axes.broken_barh(spans, (place - 0.38, 0.76), color=colours, ec="white", lw=0.2)
    for arrow in drawing.arrows:
        ends = (arrow.end, places[arrow.to_row]), (arrow.start, places[arrow.row])
        axes.annotate("", *ends, arrowprops={"arrowstyle": "-|>", "lw": 0.8, "shrinkA": 0, "shrinkB": 0})
    axes.set_yticks(range(len(drawing.rows)), map(_folded, drawing.rows))
    axes.invert_yaxis()


def _plot_memory(drawing: Drawing, axes: Any) -> None:
    end = max([bar.end for bar in drawing.bars], default=drawing.levels[-1].at)
    times = [level.at for level in drawing.levels] + [end]
    stacked = list(zip(*(drawing.amounts(level) for level in drawing.levels), strict=True))
    below = [0.0] * len(drawing.levels)
    most = max(sum(drawing.amounts(level)) for level in drawing.levels)
    scale, unit = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    for (name, colour), amounts in zip(drawing.coloured, stacked, strict=True):
        above = [low + nbytes / scale for low, nbytes in zip(below, amounts, strict=True)]
        axes.stairs(above, times, baseline=below, fill=True, color=colour, label=_folded(name))
        below = above
    if drawing.line_nbytes is not None:
        axes.axhline(drawing.line_nbytes / scale, color="#d62728", linestyle="--", label="device")
    axes.set_ylabel(unit)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
