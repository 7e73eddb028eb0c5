"""The command ``shardwright``: parses, calls, prints. One file per room that it opens.

Exit codes: 0 done (or stopped and saved), 1 failed or found damaged, 2 wrong usage or configuration (nothing
was started).
"""

import argparse
import sys
from collections.abc import Sequence

from shardwright.cli import checkpoint, top, train
from shardwright.errors import ConfigError, ShardwrightError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on ``arguments`` (default: those of the process) and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="shardwright", description="Fully sharded training on PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    train.add_commands(commands)
    checkpoint.add_commands(commands)
    top.add_command(commands)
    known, rest = parser.parse_known_args(given)
    try:
        if known.command == "train":
            return train.run_train(known, rest, given)
        if rest:
            raise ConfigError(
                f"shardwright {known.command}: unknown argument(s) {' '.join(rest)}; "
                f"see: shardwright {known.command} --help"
            )
        if known.command == "top":
            return top.run_top(known)
        if known.command == "export":
            return train.run_export(known)
        return train.run_sample(known) if known.command == "sample" else checkpoint.run(known)
    except ShardwrightError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
