"""Sizes of a mesh: whether they make up the ranks that there are, and whether a model can be shared so.

Pure: torch isn't imported for it, so a command can say what is wrong before it starts a rank.
"""

from collections.abc import Callable
from math import prod

from shardwright.errors import InputError

AXES = ("pp", "replicate", "dp", "cp", "tp")
"""From the slowest links to the fastest: ranks that differ in the last axis alone are neighbours."""


def fill(sizes: dict[str, int], world: int) -> None:
    """Replace -1 in ``sizes`` by what is left of the world.

    Raises: InputError where they don't make up the world, or ep doesn't divide it; it says what would fit.
    """
    free = [name for name in AXES if sizes[name] == -1]
    if len(free) > 1:
        raise InputError(f"mesh: {' and '.join(free)} are -1, but only one can be what is left")
    others = prod(sizes[name] for name in AXES if sizes[name] != -1)
    known = " x ".join(f"{name}={sizes[name]}" for name in AXES if sizes[name] > 1) or "dp=1"
    if free and world % others:
        raise InputError(
            f"mesh: {known} needs a multiple of {others} ranks, but the world has {world}: a product of "
            f"{_any_of(_divisors(world))} would fit"
        )
    if free:
        sizes[free[0]] = world // others
    elif others != world:
        raise InputError(
            f"mesh: {known} is {others} ranks, but the world has {world}: start {others} ranks, or leave dp "
            "out, which is then what the others leave"
        )
    _check_experts(sizes)


def _check_experts(sizes: dict[str, int]) -> None:
    cp, ep, ranks = sizes["cp"], sizes["ep"], sizes["dp"] * sizes["cp"]
    fits = [size for size in _divisors(ranks) if size % cp == 0 or cp % size == 0]
    if ep not in fits:
        raise InputError(
            f"mesh: ep={ep} doesn't divide the {ranks} ranks of dp={sizes['dp']} x cp={cp}, or is neither a "
            f"multiple nor a divisor of cp: {_any_of(fits)} would fit"
        )


def check_model(sizes: dict[str, int], number: Callable[..., int | None], of: str = "") -> None:
    """Whether ranks can share a model's heads, experts and layers.

    number: what the model's configuration has under the first of several names; None where it has none. of:
    for messages, the model. Raises: InputError that says what would fit.
    """

    def check(name: str, what: str, count: int | None) -> None:
        if count is not None and count % sizes[name]:
            fits = _any_of(_divisors(count))
            raise InputError(f"mesh: {name}={sizes[name]} doesn't divide {count} {what}{of}: {fits} would")

    heads = number("num_attention_heads", "n_head")
    check("tp", "heads", heads)
    check("tp", "key/value heads", number("num_key_value_heads"))
    # Key/value heads that cp doesn't divide are repeated: `_Ulysses.to_heads`.
    tp = sizes["tp"]
    check("cp", f"heads of each of tp={tp} ranks" if tp > 1 else "heads", heads and heads // tp)
    check("ep", "experts", number("num_local_experts", "num_experts", "n_routed_experts"))
    layers, pp = number("num_hidden_layers", "n_layer"), sizes["pp"]
    if layers is not None and pp > layers:
        raise InputError(f"mesh: pp={pp} is more than {layers} layers{of}: 1 to {layers} would fit")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _any_of(sizes: list[int]) -> str:
    """``"1, 2 or 4"``."""
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last
