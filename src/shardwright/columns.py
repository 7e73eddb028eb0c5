"""Text in columns."""

from collections.abc import Sequence


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
