"""``shardwright sample``, ``chat``, ``export`` and ``merge``: what becomes of a trained model.

shardwright sample RUN [--prompt TEXT] [--num-bytes N] [--temperature T] [--seed S] [--build M:F]
shardwright chat RUN [--system TEXT] [--num-tokens N] [--temperature T] [--seed S] [--base FOLDER]
                [--build M:F]
shardwright export RUN FOLDER
shardwright merge RUN OUT [--base FOLDER] [--build M:F]

What is done with a fine-tuned run is in :mod:`shardwright.cli.tuned`, which needs an extra.
"""

import argparse
import importlib
import math
from pathlib import Path
from typing import Any

from shardwright.cli.verb import add_verb
from shardwright.extras import require
from shardwright.train.llama import export_llama
from shardwright.train.sample import generate, load_run, readable

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
    sample.add_argument("run", metavar="RUN", help=_RUN)
    sample.add_argument("--prompt", help="text to continue (default: the recipe's)")
    sample.add_argument(
        "--num-bytes", "--num-tokens", type=_count, help="bytes, or tokens, to write (default: the recipe's)"
    )
    sample.set_defaults(call=run_sample)
    chat = add_verb(
        commands,
        "chat",
        "Talk with a fine-tuned model in the terminal, or with one question per line of standard input.",
        'shardwright chat runs/finetune-qlora --system "Answer in one sentence."',
    )
    chat.add_argument("run", metavar="RUN", help=_TUNED)
    chat.add_argument("--system", default="", metavar="TEXT", help="the system message")
    chat.add_argument(
        "--num-tokens",
        dest="num_bytes",
        type=_count,
        default=512,
        help="of an answer, at most (default: 512)",
    )
    chat.set_defaults(call=run_chat)
    for verb in (sample, chat):
        verb.add_argument(
            "--temperature", type=_temperature, help="0: always the likeliest (default: the recipe's)"
        )
        verb.add_argument("--seed", type=_seed, default=1, help="of what is drawn at random (default: 1)")
    export = add_verb(
        commands,
        "export",
        "Write a trained model as transformers reads it, or the adapter of a run as peft reads it.",
        "shardwright export runs/quickstart models/quickstart",
    )
    export.add_argument("run", metavar="RUN", help=_RUN)
    export.add_argument("folder", metavar="FOLDER", help="where to; must not exist yet")
    export.set_defaults(call=run_export)
    merge = add_verb(
        commands,
        "merge",
        "Add a run's adapter to its base, and write the whole model as transformers saves it.",
        "shardwright merge runs/finetune-qlora models/merged",
    )
    merge.add_argument("run", metavar="RUN", help=_TUNED)
    merge.add_argument("out", metavar="OUT", help="where to; must not exist yet")
    merge.set_defaults(call=run_merge)
    for verb in (sample, chat, merge):
        verb.add_argument("--build", metavar="MODULE:FUNCTION", default="", help=_BUILD)
    for verb in (chat, merge):
        verb.add_argument("--base", metavar="FOLDER", type=Path, help="of its base, where that has moved")


def run_sample(known: argparse.Namespace) -> int:
    """Print what a trained model writes."""
    if _is_tuned(known.run):
        return _tuned().run_sample(known)
    resolved, model = load_run(Path(known.run))
    given = {key: getattr(known, key) for key in ("num_bytes", "temperature", "prompt")}
    wanted = resolved.recipe.sample.model_copy(update={key: v for key, v in given.items() if v is not None})
    text = generate(model, wanted, resolved.recipe.training.sequence_length, known.seed)
    print(wanted.prompt + readable(text))
    return 0


def run_chat(known: argparse.Namespace) -> int:
    """Answer lines of stdin until it ends."""
    return _tuned().run_chat(known)


def run_export(known: argparse.Namespace) -> int:
    """Write a trained model as a folder of Hugging Face."""
    if _is_tuned(known.run):
        return _tuned().run_export(known)
    export_llama(Path(known.run), Path(known.folder))
    print(f"{known.folder}: {', '.join(sorted(path.name for path in Path(known.folder).iterdir()))}")
    return 0


def run_merge(known: argparse.Namespace) -> int:
    """Write the base with its adapter added."""
    return _tuned().run_merge(known)


def _is_tuned(run: str) -> bool:
    """Whether it is a run of fine-tuning, or what one has left."""
    return any(Path(run, name).exists() for name in ("exported", "adapter_config.json", "config.json"))


def _tuned() -> Any:
    """What does it to a fine-tuned run."""
    require("hf", "transformers")
    return importlib.import_module("shardwright.cli.tuned")


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 or more, and less than 2 ** 63")
    return int(text)


def _temperature(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0 or more, and no infinity")
    return float(text)
