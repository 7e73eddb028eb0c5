"""``shardwright checkpoint``: look at checkpoints, check, compare and export them. One process, no model.

    shardwright checkpoint inspect PATH [--no-values] [--json]
    shardwright checkpoint verify PATH [--json]
    shardwright checkpoint diff A B [--json]
    shardwright checkpoint consolidate PATH OUT [--dtype bfloat16] [--max-file-bytes N] [--tied-copies]
    shardwright checkpoint convert SRC DST --to FORMAT [--ranks N]
    shardwright checkpoint consolidate --ckpt-prefix PREFIX [--ckpt-suffix SUFFIX] [--save-path FILE]

The last one joins the per-rank files of XlaFullyShardedDataParallel, optimizer state included.
PATH is one checkpoint, a folder of them (then its latest complete one), or one that others wrote.
Exit codes for scripts: 0 all is well, 1 it is not (damage, differences, NaNs, or it can't be opened).
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch

from shardwright.checkpoint import tools
from shardwright.checkpoint.convert import Format, convert
from shardwright.cli.verb import add_verb
from shardwright.errors import ConfigError
from shardwright.extras import from_extra
from shardwright.train.report import as_json, open_console
from shardwright.xla import files

with from_extra("train"):
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PATH = "a checkpoint, a folder of them (then its latest complete one), or the URL of either"
_JSON = "print one object instead"
_CODES = "Exit code 1: damage, NaN or differences were found, or it can't be opened."


def add_commands(commands: Any) -> None:
    """Add ``checkpoint`` and what it can do to the subparsers of the command."""
    parser = add_verb(
        commands,
        "checkpoint",
        f"Inspect, verify, compare, convert or export checkpoints. {_CODES}",
        "shardwright checkpoint verify runs/quickstart/checkpoint",
        "shardwright checkpoint verify --help",
    )
    parser.set_defaults(call=run)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for add in (_add_inspect, _add_verify, _add_diff, _add_convert, _add_consolidate):
        add(verbs)


def _add_inspect(verbs: Any) -> None:
    inspect = add_verb(
        verbs,
        "inspect",
        f"List the tensors of a checkpoint, and which of them hold NaN or one value only. {_CODES}",
        "shardwright checkpoint inspect runs/quickstart/checkpoint",
        purpose="list what is in it, with NaN and constant tensors",
    )
    inspect.add_argument("path", metavar="PATH", help=_PATH)
    inspect.add_argument("--no-values", action="store_true", help="list only; don't read the tensors")
    inspect.add_argument("--json", action="store_true", help=_JSON)


def _add_verify(verbs: Any) -> None:
    verify = add_verb(
        verbs,
        "verify",
        f"Read every byte of a checkpoint, and compare every checksum. {_CODES}",
        "shardwright checkpoint verify runs/quickstart/checkpoint",
        purpose="read every byte, compare every checksum",
    )
    verify.add_argument("path", metavar="PATH", help=_PATH)
    verify.add_argument("--json", action="store_true", help=_JSON)


def _add_diff(verbs: Any) -> None:
    diff = add_verb(
        verbs,
        "diff",
        f"Compare two checkpoints, bit by bit, however many ranks wrote each. {_CODES}",
        "shardwright checkpoint diff runs/first/checkpoint runs/second/checkpoint",
        purpose="compare two, bit by bit, whatever their pieces",
    )
    diff.add_argument("a", metavar="A", help=_PATH)
    diff.add_argument("b", metavar="B", help="the other one")
    diff.add_argument("--json", action="store_true", help=_JSON)


def _add_convert(verbs: Any) -> None:
    convert = add_verb(
        verbs,
        "convert",
        "Write the weights of a checkpoint in the format of another library.",
        "shardwright checkpoint convert runs/quickstart/checkpoint dcp --to dcp",
        purpose="write the weights in another format",
    )
    convert.add_argument("src", metavar="SRC", help=_PATH)
    convert.add_argument("dst", metavar="DST", help="a folder, or a file for torch, that doesn't exist yet")
    convert.add_argument("--to", required=True, choices=[str(to) for to in Format])
    convert.add_argument("--ranks", type=int, default=1, help="number of per-rank files (fairscale, xla)")


def _add_consolidate(verbs: Any) -> None:
    consolidate = add_verb(
        verbs,
        "consolidate",
        "Write the weights of a checkpoint as plain safetensors, whole; or join the files of ranks that "
        "XlaFullyShardedDataParallel has left.",
        "shardwright checkpoint consolidate runs/quickstart/checkpoint weights --dtype bfloat16",
        purpose="write the weights as plain safetensors",
    )
    consolidate.add_argument("path", metavar="PATH", nargs="?", help=_PATH)
    consolidate.add_argument("out", metavar="OUT", nargs="?", help="a folder that doesn't exist yet")
    consolidate.add_argument("--dtype", choices=sorted(_DTYPES), help="convert floating weights to it")
    consolidate.add_argument("--max-file-bytes", type=int, default=tools.MAX_FILE_NBYTES)
    consolidate.add_argument("--tied-copies", action="store_true", help="store tied weights under each name")
    xla = consolidate.add_argument_group("per-rank files of XlaFullyShardedDataParallel, instead of PATH OUT")
    # The original spells them with underscores.
    xla.add_argument("--ckpt-prefix", "--ckpt_prefix", help="what their paths begin with")
    xla.add_argument("--ckpt-suffix", "--ckpt_suffix", default="*.pth", help="the rest (default: *.pth)")
    xla.add_argument("--save-path", "--save_path", default="", help="default: PREFIX_consolidated.pth")


def run(known: argparse.Namespace) -> int:
    """Do what was asked for; returns the exit code."""
    console = open_console()
    if known.verb == "convert":
        with _bar() as bar:
            task = bar.add_task("converting")
            out = convert(
                known.src,
                known.dst,
                Format(known.to),
                ranks=known.ranks,
                progress=lambda done, total: _advance(bar, task, done, total),
            )
        _lines(console, [str(out)])
        return 0
    if known.verb == "consolidate":
        return _consolidate(console, known)
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
    with _bar() as bar:
        task = bar.add_task("verifying")
        return tools.verify(known.path, progress=lambda done, total: _advance(bar, task, done, total))


def _consolidate(console: Console, known: argparse.Namespace) -> int:
    if known.ckpt_prefix is not None and known.path is None:
        _lines(console, [str(files.consolidate(known.ckpt_prefix, known.ckpt_suffix, known.save_path))])
        return 0
    if known.out is None or known.ckpt_prefix is not None:
        raise ConfigError("consolidate takes PATH OUT, or --ckpt-prefix PREFIX for per-rank files")
    if known.max_file_bytes < 1:
        raise ConfigError(f"--max-file-bytes is {known.max_file_bytes}, expected at least 1")
    with _bar() as bar:
        task = bar.add_task("writing")
        written = tools.consolidate(
            known.path,
            known.out,
            dtype=_DTYPES.get(known.dtype),
            max_file_nbytes=known.max_file_bytes,
            tied_copies=known.tied_copies,
            progress=lambda done, total: _advance(bar, task, done, total),
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
    unchecked = f", {found.num_unchecked} piece(s) have no checksum" if found.num_unchecked else ""
    console.print(
        f"{found.path}: {found.num_tensors} tensors, {found.nbytes:,} bytes, "
        f"{len(found.faults)} fault(s){unchecked}"
    )
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


def _bar() -> Progress:
    """On stderr, and on a terminal only: stdout is for what was found."""
    console = open_console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _advance(bar: Progress, task: Any, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)
