"""``shardwright sample``, ``chat``, ``export`` and ``merge``: what becomes of a trained model.

shardwright sample RUN [--prompt TEXT] [--num-bytes N] [--temperature T] [--seed S] [--build M:F]
shardwright chat RUN [--system TEXT] [--num-tokens N] [--temperature T] [--seed S] [--base FOLDER]
                [--build M:F]
shardwright export RUN FOLDER
shardwright merge RUN OUT [--base FOLDER] [--build M:F]
"""

import argparse
import math
from pathlib import Path
from typing import Any

from shardwright.cli.outputs import check_folder
from shardwright.cli.verb import add_verb, at_least_1, check_exists, work

_RUN = "the folder of a finished run, as runs/quickstart"
_TUNED = "the folder of a run, one of its exported/step-N, or an adapter in peft's form"

_BUILD = (
    "the function that makes the model, where the run's recipe names one (base.build): a run folder may come "
    "from others, so its code is run only if you name it too"
)


def add_commands(commands: Any) -> None:
    """Add the four to the subparsers of the command."""
    sample = add_verb(
        commands,
        "sample",
        "Print text that a trained or fine-tuned model writes.",
        'shardwright sample runs/quickstart --prompt "def main("',
    )
    sample.add_argument("--prompt", help="text to continue (default: the recipe's)")
    sample.add_argument(
        "--num-bytes",
        "--num-tokens",
        type=at_least_1,
        help="bytes, or tokens, to write (default: the recipe's)",
    )
    chat = add_verb(
        commands,
        "chat",
        "Talk with a fine-tuned model in the terminal, or with one question per line of standard input.",
        'shardwright chat runs/finetune-qlora --system "Answer in one sentence."',
    )
    chat.add_argument("--system", default="", metavar="TEXT", help="the system message")
    chat.add_argument(
        "--num-tokens",
        dest="num_bytes",
        type=at_least_1,
        default=512,
        help="of an answer, at most (default: 512)",
    )
    for verb in (sample, chat):
        verb.add_argument("--temperature", type=_temperature, help="0: the likeliest (default: the recipe's)")
        verb.add_argument("--seed", type=_seed, default=1, help="of what is drawn at random (default: 1)")
    export = add_verb(
        commands,
        "export",
        "Write a trained model as transformers reads it, or the adapter of a run as peft reads it.",
        "shardwright export runs/quickstart models/quickstart",
    )
    merge = add_verb(
        commands,
        "merge",
        "Add a run's adapter to its base, and write the whole model as transformers saves it.",
        "shardwright merge runs/finetune-qlora models/merged",
    )
    for verb, run in ((sample, _RUN), (chat, _TUNED), (export, _RUN), (merge, _TUNED)):
        verb.add_argument("run", metavar="RUN", help=run)
        verb.set_defaults(call=work("afterwards", _check))
    export.add_argument("folder", metavar="FOLDER", help="where to; must not exist yet")
    merge.add_argument("out", metavar="OUT", help="where to; must not exist yet")
    for verb in (sample, chat, merge):
        verb.add_argument("--build", metavar="MODULE:FUNCTION", default="", help=_BUILD)
    for verb in (chat, merge):
        verb.add_argument("--base", metavar="FOLDER", type=Path, help="of its base, where that has moved")


def _check(known: argparse.Namespace) -> None:
    check_exists(known.run, "RUN", "the folder of a run")
    check_exists(getattr(known, "base", None), "--base")
    for out in ("folder", "out"):
        if hasattr(known, out):
            check_folder(getattr(known, out))


def _seed(text: str) -> int:
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 or more, and less than 2 ** 63")
    return int(text)


def _temperature(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 or more, and no infinity")
    return float(text)
