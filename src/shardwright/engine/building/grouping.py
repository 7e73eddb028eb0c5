"""``fully_shard(model, groups=...)``: groups named by hand or chosen, and a root that owns nothing.

groups       the caller's lists of names or modules, or those that the model's hints or its lists give
leftovers    runs of neighbours between them, a group each
root         parameters that lie right in modules around groups; most often none
"""

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from shardwright.engine.building.checks import check_foreign, check_modules, has_no_forward
from shardwright.engine.groups.gatherer import looks_up
from shardwright.engine.unit import is_sharded
from shardwright.errors import InputError, warn
from shardwright.policy import Grouping, SchedulePolicy
from shardwright.schedule.grouping import (
    Hints,
    NamedGroups,
    Node,
    groups_from_hints,
    joined,
    leftovers,
    repeated,
)

Entry = str | nn.Module
Groups = str | Grouping | Sequence[Sequence[Entry]]
Shard = Callable[[list[nn.Module], set[int]], None]


def shard_groups(model: Any, groups: Groups, ignored: set[int], shard: Shard) -> None:
    """Call ``shard(modules, ignored)`` for each group, inner ones first, then for the model itself.

    Raises: InputError for a name that the model doesn't have or one listed twice. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"groups= takes one model, got {type(model).__name__}; shard each model by itself")
    check_foreign([model], ignored)
    if isinstance(groups, str | Grouping):
        listed = [list(group) for group in chosen(model, groups, ignored)]
    else:
        listed = [[_named(model, entry) for entry in group] for group in groups]
    entries = [name for group in listed for name in group]
    twice = [name for name in dict.fromkeys(entries) if entries.count(name) > 1]
    if twice or not all(listed):
        what = f"{twice} more than once" if twice else "an empty list"
        raise InputError(f"groups= has {what}; list each module in one group")
    params = dict(model.named_parameters(remove_duplicate=False))
    for group in listed:
        check_modules(_modules_of(model, group, params))
    nested = {name for name, module in model.named_modules() if is_sharded(module)}
    done = {*(name.rpartition(".")[0] if name in params else name for name in entries), *nested}
    runs = leftovers(_node(model, "", ignored), done) if listed else []
    for group in sorted(listed, key=lambda group: -max(name.count(".") for name in group)):
        modules = _modules_of(model, group, params)
        mine = {id(params[name]) for name in group if name in params}
        whole = {
            id(p) for name in group if name not in params for p in model.get_submodule(name).parameters()
        }
        others = {id(p) for m in modules for p in m.parameters()} - mine - whole if mine else set()
        shard(modules, ignored | others)
    for run in runs:
        for members in _large_lookups_apart([model.get_submodule(node.name) for node in run]):
            shard(members, ignored)
    shard([model], ignored)


def _large_lookups_apart(run: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """An embedding that is a group by itself can move only rows in use (``SchedulePolicy.row_wise``)."""
    cap_nbytes = SchedulePolicy().bucket_cap_nbytes
    apart = [m for m in run if looks_up(m) and sum(p.nbytes for p in m.parameters()) > cap_nbytes]
    rest = [m for m in run if m not in apart]
    return [*([m] for m in apart), *([rest] if rest else [])]


def chosen(model: nn.Module, groups: str | Grouping, ignored: set[int]) -> list[list[str]]:
    """The groups that ``"auto"`` or a ``Grouping`` chooses: names of modules. Raises: InputError."""
    if isinstance(groups, str) and groups != "auto":
        raise InputError(f'groups= must be "auto", a Grouping or lists of names, got {groups!r}')
    found = choices(model, groups if isinstance(groups, Grouping) else Grouping(), ignored)
    if not found:
        warn(
            f"nothing in {type(model).__name__} says how to group it: it has no _no_split_modules and no "
            "list of modules, so all of it is gathered at once. Pass groups=Grouping(classes=[...]) or lists "
            "of names, or leave groups out if that is meant",
        )
    return found


def choices(model: nn.Module, policy: Grouping, ignored: Collection[int] = ()) -> list[list[str]]:
    """The groups that ``policy`` chooses; none where nothing in the model says how to group it.

    Raises: InputError where the model has no module of its classes.
    """
    last: tuple[str, ...] = ()
    if policy.classes:
        names = [name for name, m in model.named_modules() if name and isinstance(m, policy.classes)]
        if not names:
            listed = [cls.__name__ for cls in policy.classes]
            there = sorted({type(module).__name__ for module in model.modules()})
            raise InputError(
                f"{type(model).__name__} has no module of {listed}, which Grouping.classes lists; it has "
                f"modules of {there}"
            )
    else:
        suggestion = suggested(model, ignored)
        names, last = list(suggestion.apart), suggestion.last
    nodes = [node for node in _walk(_node(model, "", ignored)) if node.name in names]
    found = [node for node in nodes if node.nbytes and node.runs]
    grouped = joined(found, policy.least_nbytes) if policy.least_nbytes else [[node.name] for node in found]
    return grouped + ([list(last)] if found and last else [])


def suggested(model: nn.Module, ignored: Collection[int] = ()) -> NamedGroups:
    """Groups by what a model says of itself; where none of its blocks is meant by that, the members of its
    lists are the blocks."""
    hints = hints_of(model)
    classes = {name: type(module).__name__ for name, module in model.named_modules() if name}
    found = groups_from_hints(classes, hints)
    if {*found.apart} - {hints.embedding}:
        return found
    taken, node = (*found.apart, *found.last), _node(model, "", ignored)
    lists = [
        name
        for name in repeated(node) or repeated(node, mixed=True)
        if not any(f"{name}.".startswith(f"{outer}.") for outer in taken)
    ]
    return NamedGroups((*lists, *found.apart), found.last)


def hints_of(model: nn.Module) -> Hints:
    """What a model of transformers says of itself, or those inside of it (of a LightningModule, or beneath
    peft's adapters): the embedding and head of the first of them. Of any other model they are empty."""
    names = {id(module): name for name, module in model.named_modules()}
    no_split: set[str] = set()
    strategies: dict[str, str] = {}
    ends: list[str | None] = []
    for part in _that_say(model):
        prefix = f"{names[id(part)]}." if part is not model else ""
        no_split.update(part._no_split_modules or ())
        said = getattr(part, "_fsdp_plan", None) or {}
        strategies |= {prefix + pattern: strategy for pattern, strategy in said.items()}
        for getter in ("get_input_embeddings", "get_output_embeddings"):
            try:
                end = getattr(part, getter)() if hasattr(part, getter) else None
            except NotImplementedError:  # of transformers, where a model has none: CLIP, wav2vec2
                end = None
            ends.append(names.get(id(end)) if end is not None else None)
    return Hints(frozenset(no_split), strategies, *(ends[:2] or (None, None)))


def _that_say(module: nn.Module) -> list[Any]:
    """The outermost modules with hints of their own (peft's models have those of what is inside)."""
    if hasattr(type(module), "_no_split_modules") or "_no_split_modules" in vars(module):
        return [module]
    return [part for child in module.children() for part in _that_say(child)]


def _named(model: nn.Module, entry: Any) -> str:
    """The name of an entry in the model. Raises: InputError for what isn't in it."""
    modules = dict(model.named_modules())
    if isinstance(entry, nn.Module):
        for name, module in modules.items():
            if module is entry and name:
                return name
        raise InputError(f"groups= has a {type(entry).__name__} that is not inside {type(model).__name__}")
    known = [name for name in (*modules, *dict(model.named_parameters(remove_duplicate=False))) if name]
    if entry in known:
        return entry
    near = difflib.get_close_matches(str(entry), known, 3)
    raise InputError(
        f"{type(model).__name__} has no module or parameter {entry!r}, which groups= names"
        + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
    )


def _modules_of(model: nn.Module, group: Sequence[str], params: dict[str, nn.Parameter]) -> list[nn.Module]:
    """The modules around whose forwards a group is unsharded: the listed ones, and owners of parameters."""
    names = [name.rpartition(".")[0] if name in params else name for name in group]
    return [model.get_submodule(name) for name in dict.fromkeys(names)]


def _node(module: nn.Module, name: str, ignored: Collection[int]) -> Node:
    prefix = f"{name}." if name else ""
    return Node(
        name,
        type(module).__name__,
        sum(param.nbytes for param in module.parameters() if id(param) not in ignored),
        not has_no_forward(module),
        tuple(_node(child, prefix + label, ignored) for label, child in module.named_children()),
    )


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _walk(child)
