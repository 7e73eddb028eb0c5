"""Which modules become groups, from what a model says of itself: names and classes in, names out."""

import fnmatch
from collections.abc import Collection, Mapping, Sequence
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


@dataclass(frozen=True)
class Node:
    """A module as the grouping sees it. ``nbytes``: of the parameters in its tree that no group has yet.

    runs: it has a forward of its own, so that there is a moment to unshard its parameters at.
    """

    name: str
    kind: str
    nbytes: int
    runs: bool
    children: tuple["Node", ...] = ()


def repeated(node: Node, mixed: bool = False) -> list[str]:
    """The members of every list (or sequence) of at least two modules of one class, the outermost only.
    mixed: of any classes, where at least two have parameters."""
    members = node.children
    is_list = not node.runs or node.kind == "Sequential"
    found = [member.name for member in members if member.nbytes and member.runs]
    one_class = len(members) > 1 and len({member.kind for member in members}) == 1
    if is_list and (one_class or (mixed and len(found) > 1)):
        return found
    return [name for member in members for name in repeated(member, mixed)]


def leftovers(root: Node, grouped: Collection[str]) -> list[list[Node]]:
    """What no group has, as runs of neighbours in the order of definition: a grouped module ends a run.

    A member is the outermost module that holds no grouped one and runs by itself. Parameters that lie right
    in a module around grouped ones are in no run: only that module's own forward reads them.
    """
    runs: list[list[Node]] = [[]]

    def walk(node: Node, is_root: bool) -> None:
        if node.name in grouped and not is_root:
            runs.append([])
            return
        inside = [name for name in grouped if name.startswith(f"{node.name}." if node.name else "")]
        if not is_root and node.runs and not inside:
            if node.nbytes:
                runs[-1].append(node)
            return
        for child in node.children:
            walk(child, False)

    walk(root, True)
    return [run for run in runs if run]


def joined(nodes: Sequence[Node], least_nbytes: int) -> list[list[str]]:
    """Neighbours together until they hold ``least_nbytes``; a rest that is too small joins the one before."""
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and sum(member.nbytes for member in groups[-1]) < least_nbytes:
            groups[-1].append(node)
        else:
            groups.append([node])
    if len(groups) > 1 and sum(member.nbytes for member in groups[-1]) < least_nbytes:
        rest = groups.pop()
        groups[-1] += rest
    return [[node.name for node in group] for group in groups]
