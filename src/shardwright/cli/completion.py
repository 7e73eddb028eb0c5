"""``shardwright completion``: a script by which a shell completes the command, made by shtab."""

import argparse
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from shardwright.cli import VERBS, command_parser
from shardwright.cli.verb import add_verb
from shardwright.extras import require

_SHELLS = ("bash", "zsh", "fish")
_PATHS = {"CSV", "DST", "FILE", "FOLDER", "JOB", "MODEL", "OUT", "PATH", "RECIPE", "RUN", "SRC"}
"""What is completed with the names of files, by what ``--help`` calls it."""


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    completion = add_verb(
        commands,
        "completion",
        "Print a script by which a shell completes commands, options, keys of a recipe and their values. It "
        "is made of what is installed, and starts nothing while you type. For zsh, fpath+=~/.zfunc has to "
        "stand in ~/.zshrc before compinit.",
        "shardwright completion bash > ~/.local/share/bash-completion/completions/shardwright",
        "shardwright completion zsh > ~/.zfunc/_shardwright",
        "shardwright completion fish > ~/.config/fish/completions/shardwright.fish",
    )
    completion.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    completion.set_defaults(call=run)


def run(known: argparse.Namespace) -> int:
    """Print the script. Raises: MissingExtra."""
    require("train", "shtab")
    shtab = import_module("shtab")
    parser = command_parser(VERBS)
    for action in _actions(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if isinstance(action.choices, dict):
            action.help = ""  # else a command's commands aren't completed
            for said in action._get_subactions():  # type: ignore[attr-defined]  # as shtab does
                action.choices[said.dest].description = said.help  # in one line, beside what is completed
        elif metavar.startswith("{"):
            action.choices = metavar[1:-1].split(",")
        elif metavar in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks
    print(shtab.complete(parser, known.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser, and of its commands. argparse has no public list of them; shtab reads
    the same one."""
    for action in parser._actions:
        yield action
        for command in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _actions(command)
