"""What a fine-tune begins from is there: looked at before transformers is imported, in milliseconds."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.errors import DataError, InputError
from shardwright.files import is_size, parsed
from shardwright.mesh_sizes import check_model
from shardwright.recipe.config import Recipe

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_TOY = "runs/quickstart-llama"


def check_inputs(recipe: Recipe) -> None:
    """Only asks the file system; for each process of a run, or the one that starts it.

    Raises: InputError where ``base.folder`` is no folder, or its model has fewer positions than a sequence,
    or heads, experts or layers that ranks of [mesh] can't share; DataError where the file of a recipe for
    DPO, which nothing of ours makes, isn't there.
    """
    folder, data = recipe.base.folder, recipe.data
    if not Path(folder).is_dir():
        raise InputError(f"base.folder = {folder!r}: no such folder; {_remedy(folder)}")
    config = _config(Path(folder, "config.json"))
    length, positions = recipe.training.sequence_length, _number(config, *_POSITIONS)
    if positions and length > positions:
        raise InputError(
            f"training.sequence_length = {length:,}, but the model of {folder} has {positions:,} positions "
            f"(config.json): set it to {positions:,} or less"
        )
    check_model(recipe.mesh.sizes(), partial(_number, config), f" of {folder}")
    is_file = data.path.endswith(".jsonl") and "://" not in data.path and not data.sources
    if recipe.training.loss == "dpo" and is_file and not Path(data.path).exists():
        raise DataError(
            f"data.path = {data.path!r}: no such file; write it, with an object on each line: "
            '{"prompt": "2 + 2?", "chosen": "4", "rejected": "22"}, the better and the worse answer to a '
            "prompt; or set data.path to preferences that you have"
        )


def _config(path: Path) -> dict[str, Any]:
    """That of a model's text; empty where it can't be read here."""
    try:
        found = parsed(json.loads, path.read_text(encoding="utf-8"))
        return {**found, **(found.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # what reads it for the model says why


def _number(config: dict[str, Any], *names: str) -> int | None:
    """The first of these that says how many; None where none does."""
    return next((each for each in map(config.get, names) if is_size(each)), None)


def _remedy(folder: str) -> str:
    if Path(folder) == Path(_TOY):
        return (
            "it is the quickstart's model as transformers reads it: `make finetune` makes it, or "
            "`shardwright train quickstart` and then `shardwright export runs/quickstart "
            f"{_TOY}`"
        )
    is_id = _HUB_ID.fullmatch(folder) and not Path(folder).parent.is_dir()
    name, target = (folder, Path("models", Path(folder).name)) if is_id else ("ORG/NAME", folder)
    return (
        "it is a local folder with a model's files and its tokenizer. Download one of the Hugging Face Hub "
        f'by `hf download {name} --local-dir {target}` and set base.folder = "{target}", or give the folder '
        "that `shardwright export RUN FOLDER` wrote"
    )
