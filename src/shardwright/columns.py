"""Text for people: in columns, and bytes with their unit."""

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_words(nbytes: float) -> str:
    """``nbytes`` with a binary unit: 12.3 MiB."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.{0 if unit == 0 else 1}f} {_UNITS[unit]}"


def in_columns(rows: Sequence[Sequence[str]], aligned: str) -> list[str]:
    """Lines of a table whose columns are as wide as they must be, two spaces between them.

    Args:
        rows: cells, as many in each row.
        aligned: "<" or ">" for each column, as in a format; the last one stands for all that follow.
    """
    aligned = aligned.ljust(len(rows[0]), aligned[-1])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{to}{width}}" for cell, to, width in zip(row, aligned, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
