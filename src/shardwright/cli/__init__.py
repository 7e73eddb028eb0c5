"""The command ``shardwright``: parses, calls, prints. One file per room that it opens, imported when its verb
is given: importing torch takes seconds, and ``--help``, ``--version`` and ``recipe`` don't need it.

Exit codes: 0 done (or stopped and saved), 1 failed or found damaged, 2 wrong usage or configuration (nothing
was started), 141 whoever read the output has closed the pipe, as ``head`` does.
"""

import argparse
import os
import platform
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from shardwright.cli.words import checked
from shardwright.errors import ConfigError, MissingExtra, ShardwrightError
from shardwright.train.launch import CLOSED_PIPE


class Verb(NamedTuple):
    """A command: the file here that has it, and what ``--help`` says of it."""

    file: str
    purpose: str


SECTIONS = {
    "train and fine-tune": {
        "init": Verb("init", "write a recipe with a comment on every key, to change and to train"),
        "recipe": Verb("recipe", "list the recipes that come with the package, or print one"),
        "train": Verb("arguments.train", "train or fine-tune the model of a recipe"),
    },
    "afterwards": {
        "sample": Verb("arguments.afterwards", "print text that a trained model writes"),
        "chat": Verb("arguments.afterwards", "talk with a fine-tuned model"),
        "export": Verb("arguments.afterwards", "write a trained model or adapter, for transformers and peft"),
        "merge": Verb("arguments.afterwards", "add a run's adapter to its base, as a whole model"),
    },
    "plan": {
        "plan": Verb("arguments.plan", "predict step times and memory of runs, before anything is rented"),
        "bench": Verb("arguments.bench", "measure this cluster for plans: its devices, its links"),
    },
    "look": {
        "top": Verb("arguments.top", "show what the ranks of a running job wait for, or do"),
        "trace": Verb("arguments.trace", "draw the last steps of all ranks: which waited for which, and why"),
    },
    "check": {
        "preflight": Verb("arguments.preflight", "find out in ten seconds if a job can train on these hosts"),
        "checkpoint": Verb(
            "arguments.checkpoint", "inspect, verify, seal, diff, convert or consolidate checkpoints"
        ),
    },
    "set up": {
        "completion": Verb("completion", "print what makes bash, zsh or fish complete this command"),
        "schema": Verb("schema", "print the JSON schema of recipes, for editors"),
    },
}
"""The commands as ``--help`` groups them, by name."""

VERBS = {name: verb for section in SECTIONS.values() for name, verb in section.items()}
"""All of them, by name."""

_EXAMPLES = """\
examples:
  shardwright init mine.toml && shardwright train mine.toml
  shardwright init qlora.toml --kind qlora --base.folder models/llama --data.path chats.jsonl
  shardwright plan models/llama --device H100 --ranks 64 --search
  shardwright COMMAND --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on ``arguments`` (default: those of the process) and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with _ends_with_its_pipe():
        return _run(given)


def _run(given: list[str]) -> int:
    if given[:1] in (["top"], ["trace"]) and "torch" not in sys.modules:
        # They say in a line that a job has ended. Before it torch would print the C++ stack of its store.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        parser = command_parser(given[:1])
        if "--version" in given[:1]:
            print(_versions())
            return 0
        known, rest = parser.parse_known_args(checked(parser, given))
        if rest:
            raise ConfigError(
                f"shardwright {known.command}: unknown argument(s) {' '.join(rest)}; "
                f"see: shardwright {known.command} --help"
            )
        return known.call(argparse.Namespace(**vars(known), given=given))
    except ShardwrightError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | MissingExtra) else 1


@contextmanager
def _ends_with_its_pipe() -> Iterator[None]:
    """Where nobody reads stdout any more, end without a word, with the code of SIGPIPE, as Unix tools do."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is buffered
        sys.exit(CLOSED_PIPE)


def _stdout_is_closed() -> bool:
    """Whether stdout is a pipe that has no reader; False where the system can't say."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def command_parser(verbs: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of the command, with the arguments of those of ``verbs`` that there are; of the others it
    knows the names. Raises: MissingExtra for one whose packages aren't installed."""
    parser = argparse.ArgumentParser(
        prog="shardwright",
        usage="shardwright COMMAND [ARGUMENT ...]",
        description=_overview(),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the versions that are installed")
    # Its own list of commands has no sections, so the description has them.
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="shardwright", help=argparse.SUPPRESS
    )
    files = {VERBS[verb].file for verb in verbs if verb in VERBS}
    for file in sorted(files):
        import_module(f"{__name__}.{file}").add_commands(commands)
    for name, verb in VERBS.items():
        if verb.file not in files:
            commands.add_parser(name, help=verb.purpose)
    return parser


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = ["Train and fine-tune models larger than one device, fully sharded, on PyTorch."]
    for section, verbs in SECTIONS.items():
        lines += ["", f"{section}:", *(f"  {name:{width}}  {verb.purpose}" for name, verb in verbs.items())]
    return "\n".join(lines)


def _versions() -> str:
    return (
        f"shardwright {version('shardwright')} (torch {version('torch')}, Python {platform.python_version()})"
    )
