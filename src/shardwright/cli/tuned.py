"""What ``sample``, ``chat``, ``export`` and ``merge`` do with a fine-tuned run: with its folder, one of its
exported/step-N, or an adapter of peft's.
"""

import argparse
import sys
from pathlib import Path

from shardwright.finetune import afterwards
from shardwright.finetune.generate import Wanted, tokens_of
from shardwright.finetune.talk import Speaker
from shardwright.finetune.tuned import Tuned, find_tuned


def run_merge(known: argparse.Namespace) -> int:
    """Write the base with its adapter added."""
    tuned = find_tuned(Path(known.run), known.base, known.build)
    afterwards.merge(tuned, Path(known.out))
    how = "" if tuned.quantise == "none" else f", decoded from {tuned.quantise}"
    print(f"{known.out}: {tuned.base}{how}, with the adapter of {tuned.folder}")
    return 0


def run_export(known: argparse.Namespace) -> int:
    """Copy what a run has trained."""
    tuned = find_tuned(Path(known.run))
    afterwards.export(tuned, Path(known.folder))
    what = f"the adapter of {tuned.base}, for peft" if tuned.is_adapter else "the whole model"
    print(f"{known.folder}: {tuned.folder}, {what}")
    return 0


def run_sample(known: argparse.Namespace) -> int:
    """Print what the model writes after a prompt."""
    tuned = find_tuned(Path(known.run), trusted=known.build)
    speaker = Speaker(tuned)
    prompt = tuned.recipe.sample.prompt if known.prompt is None else known.prompt
    print(prompt + speaker.write(tokens_of(prompt, speaker.tokenizer), _wanted(known, tuned)))
    return 0


def run_chat(known: argparse.Namespace) -> int:
    """Answer lines of stdin until it ends."""
    tuned = find_tuned(Path(known.run), known.base, known.build)
    speaker = Speaker(tuned)
    if sys.stdin.isatty():
        print("Ctrl-D ends it, /new begins a new conversation, Ctrl-C drops an answer")
    speaker.chat(_wanted(known, tuned), known.system, _ask, lambda line: print(line, file=sys.stderr))
    return 0


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def _wanted(known: argparse.Namespace, tuned: Tuned) -> Wanted:
    sample = tuned.recipe.sample
    number = sample.num_bytes if known.num_bytes is None else known.num_bytes
    heat = sample.temperature if known.temperature is None else known.temperature
    return Wanted(number, heat, known.seed)


RUN = {"sample": run_sample, "chat": run_chat, "export": run_export, "merge": run_merge}
"""By the command."""
