"""What becomes of a trained model. Of a fine-tuned one that is in ``tuned``, which needs an extra."""

import argparse
import importlib
from pathlib import Path

from shardwright.extras import require
from shardwright.recipe.resolve import resolve
from shardwright.train.folder import RunFolder
from shardwright.train.llama import export_llama
from shardwright.train.sample import generate, load_run, readable


def run(known: argparse.Namespace) -> int:
    """What the verb says. What is done to a fine-tuned run needs an extra."""
    if known.command in ("chat", "merge") or _is_tuned(known.run):
        require("hf", "transformers")
        return importlib.import_module("shardwright.cli.tuned").RUN[known.command](known)
    return {"sample": _sample, "export": _export}[known.command](known)


def _sample(known: argparse.Namespace) -> int:
    """Print what a trained model writes."""
    resolved, model = load_run(Path(known.run))
    given = {key: getattr(known, key) for key in ("num_bytes", "temperature", "prompt")}
    wanted = resolved.recipe.sample.model_copy(update={key: v for key, v in given.items() if v is not None})
    text = generate(model, wanted, resolved.recipe.training.sequence_length, known.seed)
    print(wanted.prompt + readable(text))
    return 0


def _export(known: argparse.Namespace) -> int:
    """Write a trained model as a folder of Hugging Face."""
    export_llama(Path(known.run), Path(known.folder))
    print(f"{known.folder}: {', '.join(sorted(path.name for path in Path(known.folder).iterdir()))}")
    return 0


def _is_tuned(run: str) -> bool:
    """Whether it is a run of fine-tuning, or what one has left."""
    config = RunFolder(Path(run)).config
    return any(Path(run, name).exists() for name in ("exported", "adapter_config.json", "config.json")) or (
        config.is_file() and bool(resolve(config).recipe.base.folder)
    )
