"""The parameters that a call of ``fully_shard`` finds, and that no other has taken; what it makes of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from shardwright.engine.unit import Unit, owner_of, remember_replaced, sharded_from, units_in
from shardwright.errors import InputError
from shardwright.params.flat_param import NAME as FLAT_NAME
from shardwright.params.flat_param import FlatParam, check_flat
from shardwright.params.param import ParamSite, ShardedParam
from shardwright.params.placement import Split
from shardwright.params.subclass import ExtendedParam, is_extended
from shardwright.torch_private import parameters_of

Found = dict[nn.Parameter, tuple[str, list[ParamSite]]]
"""Parameter -> its name in the tree, and the places that show it."""


def _named_sites(modules: Sequence[nn.Module]) -> Iterator[tuple[str, ParamSite, nn.Parameter]]:
    """Every place in the trees that shows a parameter, tied ones each time, with its name in the tree."""
    seen: set[tuple[int, str]] = set()
    for root in modules:
        for prefix, m in root.named_modules():
            for name, param in parameters_of(m).items():
                if param is not None and (id(m), name) not in seen:
                    seen.add((id(m), name))
                    yield f"{prefix}.{name}" if prefix else name, ParamSite(m, name), param


def numbered_without(modules: Sequence[nn.Module], ignored: set[int]) -> dict[str, str]:
    """Names of parameters, and what they would be if lists had no modules that are ignored as a whole.

    Ranks may ignore different numbers of modules; what comes after them in a list has other numbers then.
    """
    found: dict[str, str] = {}

    def visit(module: nn.Module, path: str, counted: str) -> None:
        for name in parameters_of(module):
            found.setdefault(path + name, counted + name)
        skipped = 0
        for name, child in module.named_children():
            params = list(child.parameters())
            if params and all(id(param) in ignored for param in params):
                skipped += 1
            else:
                number = str(int(name) - skipped) if name.isdecimal() else name
                visit(child, f"{path}{name}.", f"{counted}{number}.")

    for module in modules:
        visit(module, "", "")
    return found


def find_params(modules: Sequence[nn.Module], ignored: set[int]) -> Found:
    """Parameters that no nested call has taken, with the places that show them."""
    taken = {
        id(param.sharded)
        for m in modules
        for unit in units_in(m)
        for group in unit.groups
        for param in group.params
    }
    found: Found = {}
    for fqn, site, param in _named_sites(modules):
        if id(param) not in taken and id(param) not in ignored:
            found.setdefault(param, (fqn, []))[1].append(site)
    return found


def shard_params(
    found: Found, splits: dict[nn.Parameter, Split], unit: Unit
) -> tuple[list[ShardedParam], tuple[Unit, ...]]:
    """Shard what is found. Parameters that another unit has sharded (tied weights) are shown, not taken."""
    params: list[ShardedParam] = []
    shared_owners: dict[Unit, None] = {}
    for param, (fqn, sites) in found.items():
        owner, sharded = owner_of(param), sharded_from(param)
        if owner is not None and sharded is not None:
            sharded.sites.extend(sites)
            sharded.show(sharded.sharded)
            owner.deferred = None  # what is read at the new places is not seen
            shared_owners[owner] = None
            continue
        kind = ExtendedParam if is_extended(param) else ShardedParam
        sharded = kind(fqn, sites, param, splits[param])
        remember_replaced(param, unit, sharded)
        params.append(sharded)
    return params, tuple(shared_owners)


def check_shared_flat(found: Found, flat: bool) -> None:
    """Raises: InputError for a parameter that can't lie in a flat one, or that lies in another unit's."""
    if flat:
        check_flat(found)
    for param, (fqn, _) in found.items():
        owner, sharded = owner_of(param), sharded_from(param)
        if owner is not None and (flat or (sharded is not None and sharded.members)):
            raise InputError(
                f"use_orig_params=False: {fqn!r} is shared with {owner.name!r}, which was wrapped before; "
                "wrap the module that holds both as one, or leave the argument out"
            )


def flatten(found: Found, splits: dict[nn.Parameter, Split], unit: Unit) -> list[ShardedParam]:
    """One flat parameter for all that is found; one for each dtype, and apart for
    frozen ones and those that are never cast."""
    kinds: dict[Any, Found] = {}
    for param, places in found.items():
        kinds.setdefault((param.dtype, param.requires_grad, splits[param].keeps_dtype), {})[param] = places
    flats: list[ShardedParam] = []
    for place, members in enumerate(kinds.values()):
        site = ParamSite(unit.modules[0], f"{FLAT_NAME}_{place}" if place else FLAT_NAME)
        flats.append(FlatParam(site, members, replace(splits[next(iter(members))], dim=0)))
        for param in members:
            remember_replaced(param, unit, flats[-1])
    return flats
