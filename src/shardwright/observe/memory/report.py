"""What is alive on a rank, by what it is for and by group: at one moment, and over a step."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwright.columns import in_columns

if TYPE_CHECKING:
    from shardwright.observe.steps.drawing import Drawing

NO_GROUP = "(no group)"
"""Stands for a group where bytes belong to none, or where it isn't known to which one."""


class Category(StrEnum):
    """What bytes are for.

    STATES: shards and the optimizer's. UNSHARDED: gathered parameters. GRADIENTS: unsharded, and of shards.
    ACTIVATIONS: kept for the backward, and what a stretch needs besides. HEAD: those of the loss. TRANSPORT:
    buffers of collectives. OTHER: whatever else the process holds; plans have none of it.
    """

    STATES = "states"
    UNSHARDED = "unsharded"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    HEAD = "head"
    TRANSPORT = "transport"
    OTHER = "other"


class Amount(NamedTuple):
    """Bytes of one category that belong to one group, which is named by its modules."""

    category: Category
    group: str
    nbytes: int


@dataclass(frozen=True)
class MemoryReport:
    """What is alive on one rank, in bytes. ``print`` shows a table with a row for each group.

    at: the moment, as "after the forward of layers.3"; "" outside of a recorded step. amounts: one for each
    category and group that holds anything. is_complete: False where the process can't say how much it holds
    in all, so that activations and what is other aren't known.
    """

    at: str
    amounts: tuple[Amount, ...]
    is_complete: bool = True

    @property
    def total_nbytes(self) -> int:
        """Of all categories."""
        return sum(amount.nbytes for amount in self.amounts)

    @property
    def by_category(self) -> dict[Category, int]:
        """Bytes of every category, also of those that hold nothing."""
        return {each: sum(a.nbytes for a in self.amounts if a.category is each) for each in Category}

    @property
    def by_group(self) -> dict[str, int]:
        """Bytes of every group that holds anything."""
        found: Counter[str] = Counter()
        for amount in self.amounts:
            found[amount.group] += amount.nbytes
        return dict(found)

    def __str__(self) -> str:
        cells: Counter[tuple[str, str]] = Counter()
        for amount in self.amounts:
            for row in (amount.group, "all"):
                for column in (amount.category, "all"):
                    cells[row, column] += amount.nbytes
        columns = [*(each for each, nbytes in self.by_category.items() if nbytes), "all"]
        rows = [*self.by_group, "all"]
        table = [["MiB", *columns], *([row, *(_mib(cells[row, c]) for c in columns)] for row in rows)]
        lines = in_columns(table, "<>")
        if not self.is_complete:
            lines.append(
                "activations and other: not known, since this process can't say what it holds in all"
            )
        return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}" if nbytes else "-"


@dataclass
class MemoryLog:
    """A step's memory, from ``model.record_memory()``: a report before and after the actions of each event.

    moments: each with its seconds since the recording began. ``print`` shows the moment at which most is
    held; ``save`` draws them all.
    """

    moments: list[tuple[float, MemoryReport]] = field(default_factory=list)

    @property
    def peak(self) -> MemoryReport:
        """The moment at which most is held; an empty report before the first event."""
        reports = [report for _, report in self.moments]
        return max(reports, key=lambda report: report.total_nbytes, default=MemoryReport("", ()))

    def drawing(self, by: str = "category") -> "Drawing":
        """The bytes over the seconds of the step. by: "category" or "group"."""
        from shardwright.observe.steps.drawing import Bar, Drawing, Level  # noqa: PLC0415 a drawing

        levels = [Level(at_s, _parts(report, by), report.at) for at_s, report in self.moments]
        ends = [level.at for level in levels[1:]] + [level.at for level in levels[-1:]]
        bars = [Bar("events", level.label, level.at, end) for level, end in zip(levels, ends, strict=True)]
        peak = self.peak
        title = f"Memory of a step by {by}: {_mib(peak.total_nbytes)} MiB at most, {peak.at}"
        return Drawing(title, tuple(bars), tuple(levels))

    def save(self, path: str | Path, by: str = "category") -> None:
        """Write the drawing as ``.html``, ``.png`` or ``.svg``. Raises: InputError as ``Drawing.save``."""
        self.drawing(by).save(path)

    def __str__(self) -> str:
        return f"{self.peak.at}, where most is held:\n{self.peak}"


def _parts(report: MemoryReport, by: str) -> dict[str, int]:
    if by == "group":
        return report.by_group
    return {str(category): nbytes for category, nbytes in report.by_category.items()}


def merged(amounts: Iterable[Amount]) -> tuple[Amount, ...]:
    """One amount for each category and group that has bytes, in the order in which they come."""
    found: Counter[tuple[Category, str]] = Counter()
    for amount in amounts:
        found[amount.category, amount.group] += amount.nbytes
    return tuple(Amount(*key, nbytes) for key, nbytes in found.items() if nbytes)
