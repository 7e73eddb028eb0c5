"""The parser of one command: its purpose, its arguments, and examples at the end of its ``--help``; and what
is looked at before its work, for which torch is imported."""

import argparse
import os
import shutil
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwright.cli import VERBS
from shardwright.errors import ConfigError
from shardwright.train.tasks import take_part

DTYPES = ("bfloat16", "float16", "float32")
"""What is computed in, or stored."""


def add_verb(
    commands: Any, name: str, description: str, *examples: str, purpose: str = ""
) -> argparse.ArgumentParser:
    """Add the command ``name`` to ``commands``, the subparsers of the command or of one of its verbs.

    examples: lines that a user can type. purpose: of a verb's verb, in one line.
    """
    width = shutil.get_terminal_size().columns - 2
    return commands.add_parser(
        name,
        help=purpose or VERBS[name].purpose,
        description=textwrap.fill(description, width),
        epilog="\n  ".join(("example:" if len(examples) == 1 else "examples:", *examples)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def work(name: str, check: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """What a verb does: ``check``, which raises what is wrong with its arguments, and then ``run`` of that
    file of the command, whose imports take seconds."""

    def call(known: argparse.Namespace) -> int:
        check(known)
        return import_module(f"shardwright.cli.{name}").run(known)

    return call


def at_least_1(text: str) -> int:
    """The type of an argument."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return int(text)


def is_first() -> bool:
    """Whether this process is rank 0 of a launcher's, or no rank: it alone writes. Raises: ConfigError."""
    take_part()
    return os.environ.get("RANK", "0") == "0"


def check_exists(path: str | Path | None, argument: str, what: str = "the path of one") -> None:
    """Raise ConfigError where a path was given and nothing is there."""
    if path is not None and not os.path.exists(path):
        raise ConfigError(f"{argument} is {str(path)!r}, and there is no such file or folder; give {what}")


def check_job(job: str) -> None:
    """Raise ConfigError for what is neither HOST:PORT nor a path of something."""
    host, colon, port = job.rpartition(":")
    is_address = bool(colon and host) and port.isdecimal() and 0 < int(port) < 2**16
    if not is_address:
        check_exists(job, "JOB", "the folder of a run, or a job's store: HOST:PORT, or the path of its file")
