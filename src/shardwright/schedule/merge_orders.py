"""One order of events that holds the orders of several ranks: each of them by leaving some events out."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MAX_CELLS = 4_000_000  # of the table below; a larger middle (two wholly different orders) is put end to end


def supersequence(first: Sequence[T], second: Sequence[T]) -> tuple[T, ...]:
    """The shortest sequence that has both as subsequences; the same for the same arguments.

    Where they differ the part of ``first`` comes first. What begins and ends alike is cut off beforehand;
    what lies between costs the product of its lengths, and is put end to end where that is too much.
    """
    start = 0
    while start < min(len(first), len(second)) and first[start] == second[start]:
        start += 1
    tail = 0
    while tail < min(len(first), len(second)) - start and first[-1 - tail] == second[-1 - tail]:
        tail += 1
    ours, theirs = first[start : len(first) - tail], second[start : len(second) - tail]
    return (*first[:start], *_merged(ours, theirs), *first[len(first) - tail :])


def _merged(first: Sequence[T], second: Sequence[T]) -> list[T]:
    if not first or not second or len(first) * len(second) > _MAX_CELLS:
        return [*first, *second]
    shared = _shared_lengths(first, second)
    merged: list[T] = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] == second[j]:
            merged.append(first[i])
            i, j = i + 1, j + 1
        elif shared[i + 1][j] >= shared[i][j + 1]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return [*merged, *first[i:], *second[j:]]


def _shared_lengths(first: Sequence[T], second: Sequence[T]) -> list[list[int]]:
    """At ``[i][j]``: the length of the longest common subsequence of ``first[i:]`` and ``second[j:]``."""
    rows = [[0] * (len(second) + 1)]
    for item in reversed(first):
        below, row, best = rows[-1], [0] * (len(second) + 1), 0
        for j in range(len(second) - 1, -1, -1):
            best = below[j + 1] + 1 if item == second[j] else max(below[j], best)
            row[j] = best
        rows.append(row)
    return rows[::-1]
