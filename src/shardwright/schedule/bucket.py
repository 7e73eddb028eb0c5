"""Which small tensors share a collective: the rule of the planner, and of ``ReduceScatterBucketer``. Pure."""

from collections.abc import Iterable


def fits(held: Iterable[int], more: int, cap: int) -> bool:
    """Whether one of size ``more`` may join those of sizes ``held``: together at most ``cap``, in one unit.

    A cap of 0: nothing is joined.
    """
    return cap > 0 and sum(held) + more <= cap
