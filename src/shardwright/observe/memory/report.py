"""What is alive on a rank at one moment, by what it is for and by group."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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
        from shardwright.columns import in_columns  # noqa: PLC0415 printed reports

        cells: Counter[tuple[str, str]] = Counter()
        for amount in self.amounts:
            for row in (amount.group, "all"):
                for column in (amount.category, "all"):
                    cells[row, column] += amount.nbytes
        columns = [*(each for each, nbytes in self.by_category.items() if nbytes), "all"]
        rows = [*self.by_group, "all"]
        table = [["MiB", *columns], *([row, *(in_mib(cells[row, c]) for c in columns)] for row in rows)]
        lines = in_columns(table, "<>")
        if not self.is_complete:
            lines.append(
                "activations and other: not known, since this process can't say what it holds in all"
            )
        return "\n".join(lines)


def in_mib(nbytes: int) -> str:
    """As a cell of a table has it."""
    return f"{nbytes / 2**20:.1f}" if nbytes else "-"


def merged(amounts: Iterable[Amount]) -> tuple[Amount, ...]:
    """One amount for each category and group that has bytes, in the order in which they come."""
    found: Counter[tuple[Category, str]] = Counter()
    for amount in amounts:
        found[amount.category, amount.group] += amount.nbytes
    return tuple(Amount(*key, nbytes) for key, nbytes in found.items() if nbytes)
