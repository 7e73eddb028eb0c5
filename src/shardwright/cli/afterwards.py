"""What becomes of a trained model. Of a fine-tuned one that is in ``tuned``, which needs an extra."""

import argparse
import importlib
from pathlib import Path
from typing import Any

from shardwright.extras import require
from shardwright.train.folder import RunFolder
from shardwright.train.llama import export_llama
from shardwright.train.resolve import resolve
from shardwright.train.sample import generate, load_run, readable


def run(known: argparse.Namespace) -> int:
    """What the verb says."""
    return {"sample": _sample, "chat": _chat, "export": _export, "merge": _merge}[known.command](known)


def _sample(known: argparse.Namespace) -> int:
    """Print what a trained model writes."""
    if _is_tuned(known.run):
        return _tuned().run_sample(known)
    resolved, model = load_run(Path(known.run))
    given = {key: getattr(known, key) for key in ("num_bytes", "temperature", "prompt")}
    wanted = resolved.recipe.sample.model_copy(update={key: v for key, v in given.items() if v is not None})
    text = generate(model, wanted, resolved.recipe.training.sequence_length, known.seed)
    print(wanted.prompt + readable(text))
    return 0


def _chat(known: argparse.Namespace) -> int:
    """Answer lines of stdin until it ends."""
    return _tuned().run_chat(known)


def _export(known: argparse.Namespace) -> int:
    """Write a trained model as a folder of Hugging Face."""
    if _is_tuned(known.run):
        return _tuned().run_export(known)
    export_llama(Path(known.run), Path(known.folder))
    print(f"{known.folder}: {', '.join(sorted(path.name for path in Path(known.folder).iterdir()))}")
    return 0


def _merge(known: argparse.Namespace) -> int:
    """Write the base with its adapter added."""
    return _tuned().run_merge(known)


def _is_tuned(run: str) -> bool:
    """Whether it is a run of fine-tuning, or what one has left."""
    config = RunFolder(Path(run)).config
    return any(Path(run, name).exists() for name in ("exported", "adapter_config.json", "config.json")) or (
        config.is_file() and bool(resolve(config).recipe.base.folder)
    )


def _tuned() -> Any:
    """What does it to a fine-tuned run."""
    require("hf", "transformers")
    return importlib.import_module("shardwright.cli.tuned")
