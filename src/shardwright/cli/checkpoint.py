"""Looks at checkpoints, checks, compares and exports them."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.checkpoint import tools
from shardwright.checkpoint.tools import Format, convert
from shardwright.extras import from_extra
from shardwright.train.report import as_json, open_console
from shardwright.xla import files

with from_extra("train"):
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


def run(known: argparse.Namespace) -> int:
    """Do what was asked for; returns the exit code."""
    console = open_console()
    if known.verb == "convert":
        with _bar("converting") as advance:
            out = convert(known.src, known.dst, Format(known.to), ranks=known.ranks, progress=advance)
        _lines(console, [str(out)])
        return 0
    if known.verb == "consolidate":
        return _consolidate(console, known)
    if known.verb == "seal":
        with _bar("sealing") as advance:
            is_new = tools.seal(known.path, progress=advance)
        _lines(console, [f"{known.path}: " + ("sealed" if is_new else "sealed before, nothing has changed")])
        return 0
    found = _find(known)
    if known.json:
        print(as_json(found))
        return found.exit_code
    return {"inspect": _inspect, "verify": _verify, "diff": _diff}[known.verb](console, found)


def _find(known: argparse.Namespace) -> Any:
    if known.verb == "inspect":
        return tools.inspect(known.path, values=not known.no_values)
    if known.verb == "diff":
        return tools.diff(known.a, known.b)
    with _bar("verifying") as advance:
        return tools.verify(known.path, progress=advance)


def _consolidate(console: Console, known: argparse.Namespace) -> int:
    if known.ckpt_prefix is not None:
        _lines(console, [str(files.consolidate(known.ckpt_prefix, known.ckpt_suffix, known.save_path))])
        return 0
    with _bar("writing") as advance:
        written = tools.consolidate(
            known.path,
            known.out,
            dtype=known.dtype and getattr(torch, known.dtype),
            max_file_nbytes=known.max_file_bytes,
            tied_copies=known.tied_copies,
            progress=advance,
        )
    _lines(console, map(str, written))
    return 0


def _inspect(console: Console, found: tools.Inspection) -> int:
    _lines(console, [f"{found.path}, step {found.step}"])
    table = Table()
    for column in ("tensor", "shape", "dtype", "bytes", "pieces", "also known as"):
        table.add_column(column, justify="right" if column in ("bytes", "pieces") else "left")
    for t in found.tensors:
        names = ", ".join(t.aliases)
        table.add_row(t.key, str(list(t.shape)), t.dtype, f"{t.nbytes:,}", str(t.num_pieces), names)
    console.print(table)
    console.print(
        f"{len(found.files)} file(s), {sum(found.files.values()):,} bytes; written by "
        + ", ".join(f"{name} {value}" for name, value in found.written_by.items())
    )
    _lines(console, (f"passed over: {reason}" for reason in found.skipped))
    _lines(console, (f"suspicious: {what}" for what in found.suspicious))
    return found.exit_code


def _verify(console: Console, found: tools.Verification) -> int:
    _lines(console, found.faults)
    line = f"{found.path}: {found.num_tensors} tensors, {found.nbytes:,} bytes, {len(found.faults)} fault(s)"
    if found.num_unchecked:
        line += f", {found.num_unchecked} piece(s) have no checksum (shardwright checkpoint seal writes them)"
    _lines(console, [line])
    return found.exit_code


def _diff(console: Console, found: tools.Difference) -> int:
    _lines(console, (f"only in the first: {key}" for key in found.only_a))
    _lines(console, (f"only in the second: {key}" for key in found.only_b))
    _lines(console, (f"changed: {key}: {how}" for key, how in found.changed.items()))
    _lines(console, (f"other state: {key}" for key in found.state))
    console.print(f"{found.num_equal} tensor(s) equal, {len(found.changed)} changed")
    return found.exit_code


def _lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """What is told how much is done, and of how much. It shows that on stderr, and on a terminal only: stdout
    is for what was found."""
    console = open_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
