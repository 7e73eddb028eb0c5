"""The command ``shardwright``: parses, calls, prints. One file per room that it opens, imported when its verb
is given: importing torch takes seconds, and ``--help``, ``--version`` and ``recipe`` don't need it.

Exit codes: 0 done (or stopped and saved), 1 failed or found damaged, 2 wrong usage or configuration (nothing
was started).
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from shardwright.errors import ConfigError, MissingExtra, ShardwrightError

_VERBS = {
    "train": ("train", "train the model of a recipe"),
    "sample": ("train", "let a trained model write"),
    "export": ("train", "write a trained model, or adapter, for transformers and peft"),
    "merge": ("tuned", "add a run's adapter to its base, as a whole model"),
    "chat": ("tuned", "talk with a fine-tuned model"),
    "recipe": ("recipe", "list the recipes that come with the package, or print one"),
    "checkpoint": ("checkpoint", "inspect, verify, compare or export checkpoints"),
    "plan": ("plan", "predict step times and memory of runs, before anything is rented"),
    "bench": ("bench", "measure this cluster for plans: its devices, its links"),
    "preflight": ("preflight", "whether a job can train on these hosts, in ten seconds"),
    "top": ("top", "what the ranks of a running job wait for, or do"),
    "trace": ("trace", "the last steps of all ranks as a page: who waited for whom, and why"),
}
"""Verb -> the file here that has it, and what ``--help`` says of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on ``arguments`` (default: those of the process) and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="shardwright", description="Fully sharded training on PyTorch.")
    parser.add_argument("--version", action="version", version=_versions() if "--version" in given else "")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    try:
        if given and given[0] in _VERBS:
            import_module(f"{__name__}.{_VERBS[given[0]][0]}").add_commands(commands)
        else:
            for verb, (_, says) in _VERBS.items():
                commands.add_parser(verb, help=says)
        known, rest = parser.parse_known_args(given)
        if rest and known.command != "train":
            raise ConfigError(
                f"shardwright {known.command}: unknown argument(s) {' '.join(rest)}; "
                f"see: shardwright {known.command} --help"
            )
        return known.call(argparse.Namespace(**vars(known), given=given, rest=rest))
    except ShardwrightError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | MissingExtra) else 1


def _versions() -> str:
    return (
        f"shardwright {version('shardwright')} (torch {version('torch')}, Python {platform.python_version()})"
    )
