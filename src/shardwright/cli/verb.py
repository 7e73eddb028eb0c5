"""The parser of one command: its purpose, its arguments, and examples at the end of its ``--help``."""

import argparse
import shutil
import textwrap
from typing import Any

from shardwright.cli import VERBS


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
