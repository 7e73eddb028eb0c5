"""Rows of bars over seconds, with bytes below them: one HTML file, or a picture.

A drawing knows nothing of where its bars come from: what a plan expects and what a step did are drawn alike.
"""

import html
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from shardwright.errors import InputError

COLOURS = {
    "compute": "#1f77b4",
    "gather": "#2a9d5c",
    "reduce": "#d9822b",
    "all-reduce": "#8e5bb5",
    "copies": "#a0614f",
    "host": "#7f7f7f",
    "states": "#4c5b8c",
    "unsharded": "#2a9d5c",
    "gradients": "#d9822b",
    "activations": "#1f77b4",
    "head": "#6baed6",
    "transport": "#c0567a",
}
"""By row, and by category of memory: what a lane fills has its colour."""
OTHER = "#7f7f7f"
_SQUASHED = 2.0  # a device so many times larger than what is held isn't drawn: one would see nothing else


class Bar(NamedTuple):
    """What a row did from ``start`` to ``end``, in seconds. Rows named as lanes of a step have their colours,
    others are grey."""

    row: str
    label: str
    start: float
    end: float


class Level(NamedTuple):
    """Bytes by category, from ``at`` (seconds) until the next level; ``label``: where in the step that is."""

    at: float
    nbytes: Mapping[str, int]
    label: str = ""


@dataclass(frozen=True)
class Drawing:
    """``save`` writes it. bars: rows of known lanes stand first, others in the order in which they come.
    levels: in the order of time; none: no memory is drawn. capacity_nbytes: of the device, a line above them.
    """

    title: str
    bars: tuple[Bar, ...]
    levels: tuple[Level, ...] = ()
    capacity_nbytes: int | None = None

    @property
    def rows(self) -> list[str]:
        """Names of the rows, in their order."""
        named = dict.fromkeys(bar.row for bar in self.bars)
        return [row for row in COLOURS if row in named] + [row for row in named if row not in COLOURS]

    @cached_property
    def categories(self) -> list[str]:
        """What levels are made of, in the order in which they are stacked."""
        return list(dict.fromkeys(str(name) for level in self.levels for name in level.nbytes))

    @property
    def line_nbytes(self) -> int | None:
        """Of the device, where what is held comes near to it."""
        most = max((sum(level.nbytes.values()) for level in self.levels), default=0)
        near = self.capacity_nbytes is not None and self.capacity_nbytes <= _SQUASHED * most
        return self.capacity_nbytes if near else None

    def save(self, path: str | Path) -> None:
        """Write ``.html`` (one file that opens from disk and zooms, without a network), ``.png`` or ``.svg``.

        Raises: InputError for another ending, or for a picture where matplotlib isn't installed.
        """
        path = Path(path)
        if path.suffix == ".html":
            path.write_text(self._html(), encoding="utf-8")
        elif path.suffix in (".png", ".svg"):
            importlib.import_module("shardwright.observe.plot").draw(self, path)
        else:
            raise InputError(f"a drawing is saved as .html, .png or .svg, got {str(path)!r}")

    def _html(self) -> str:
        number = {row: place for place, row in enumerate(self.rows)}
        data = {
            "rows": [[row, COLOURS.get(row, OTHER)] for row in self.rows],
            "bars": [[number[bar.row], bar.label, float(bar.start), float(bar.end)] for bar in self.bars],
            "categories": [[name, COLOURS.get(name, OTHER)] for name in self.categories],
            "levels": [[float(x.at), self.amounts(x), x.label] for x in self.levels],
            "line_nbytes": self.line_nbytes,
        }
        text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # it stands inside of a script
        page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        return page.replace("__TITLE__", html.escape(self.title)).replace("__DATA__", text)

    def amounts(self, level: Level) -> list[int]:
        """Its bytes in the order of ``categories``."""
        return [int(level.nbytes.get(name, 0)) for name in self.categories]
