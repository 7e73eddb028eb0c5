"""Which modules become groups, from what a model says of itself: names and classes in, names out."""

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass

KEEP = "keep_full_weight"
"""In a plan of transformers: parameters that stay unsharded between forward and backward."""


@dataclass(frozen=True)
class Hints:
    """What a model of transformers says of itself.

    no_split: names of classes whose modules belong together (``_no_split_modules``).
    plan: pattern of names -> ``free_full_weight`` or ``keep_full_weight`` (``_fsdp_plan``).
    embedding, head: names of the input embedding and of the output head, where there are such modules.
    """

    no_split: Collection[str]
    plan: Mapping[str, str]
    embedding: str | None = None
    head: str | None = None


@dataclass(frozen=True)
class NamedGroups:
    """``apart``: modules that are a group each, inner ones first. ``last``: modules that form one group, used
    at the end of the forward and first in the backward. What is in neither is the root's."""

    apart: tuple[str, ...]
    last: tuple[str, ...]


def groups_from_hints(classes: Mapping[str, str], hints: Hints) -> NamedGroups:
    """Choose groups for a model whose modules are ``classes`` (name -> class name, in the model's order).

    A module of a class in ``no_split``, or one that the plan would free, is a group of its own, and so is the
    embedding; what the plan would keep (the last norm and the head) shares one group. Patterns that match
    nothing are passed over: several models inherit a plan that names modules they don't have.
    """
    kept = [name for name in classes if _strategy(name, hints.plan) == KEEP]
    freed = [name for name in classes if _strategy(name, hints.plan) not in (None, KEEP)]
    blocks = [name for name, kind in classes.items() if kind in hints.no_split]
    blocks = [name for name in blocks if not any(name.startswith(f"{outer}.") for outer in freed)]
    apart = {*blocks, *freed, *_present(hints.embedding, classes)}
    last = {*kept, *_present(hints.head, classes)}
    order = {name: place for place, name in enumerate(classes)}
    inner_first = sorted((n for n in apart if n not in last), key=lambda n: (-n.count("."), order[n]))
    outermost = [n for n in last if not any(n.startswith(f"{other}.") for other in last)]
    return NamedGroups(tuple(inner_first), tuple(sorted(outermost, key=order.__getitem__)))


def _present(name: str | None, classes: Mapping[str, str]) -> tuple[str, ...]:
    return (name,) if name is not None and name in classes else ()


def _strategy(name: str, plan: Mapping[str, str]) -> str | None:
    """What the plan says of ``name``; ``*`` in a pattern stands for one part of a name."""
    for pattern, strategy in plan.items():
        if name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern):
            return strategy
    return None
