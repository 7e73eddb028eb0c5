"""The way of a module through a plain ``fully_shard(model)``: to which files it is handed, and how often it
goes from one of them back up, to a file that imports it."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

import shardwright
from shardwright import fully_shard
from tests.pure.house import edges, module_name
from tests.ranks.pool import run_ranks

PACKAGE = Path(shardwright.__file__).parent
MOST_FILES, MOST_CLIMBS = 10, 3


def arguments_of(frame: FrameType) -> list[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return [frame.f_locals.get(name) for name in code.co_varnames[:count]]


def is_it(value: Any, module: nn.Module) -> bool:
    """Whether it is the module, or a list that has it."""
    return value is module or (isinstance(value, list | tuple) and any(each is module for each in value))


def way(rank: int, world: int) -> tuple[list[str], bool]:
    """The files that get the root as it is sharded, in order; and whether it is sharded then."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4))
    fully_shard(model[1])
    files: list[str] = []

    def notice(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        ours = event == "call" and path.is_relative_to(PACKAGE)
        if ours and any(is_it(value, model) for value in arguments_of(frame)):
            files.append(module_name(path.relative_to(PACKAGE).as_posix()))

    sys.setprofile(notice)
    try:
        fully_shard(model)
    finally:
        sys.setprofile(None)
    return files, isinstance(model, shardwright.FSDPModule)


def importers() -> dict[str, set[str]]:
    """Of each file those that import it, whether directly or by others; at their top, not when it is used."""
    package = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    lines = {module_name(name): text.splitlines() for name, text in package.items()}
    direct: dict[str, set[str]] = {}
    for edge in edges(package):
        if not lines[edge.source][edge.line - 1].startswith(" "):
            direct.setdefault(edge.target, set()).add(edge.source)

    def above(name: str, seen: set[str]) -> Iterator[str]:
        for each in direct.get(name, set()) - seen:
            seen.add(each)
            yield each
            yield from above(each, seen)

    return {name: set(above(name, set())) for name in direct}


def test_a_plain_call_hands_the_module_through_few_files_and_seldom_back_up():
    files, is_sharded = run_ranks(2, way)[0]
    above = importers()
    climbs = [(low, high) for low, high in pairwise(files) if high in above.get(low, ())]
    assert is_sharded
    assert len({*files}) <= MOST_FILES, sorted({*files})
    assert len(climbs) <= MOST_CLIMBS, climbs
