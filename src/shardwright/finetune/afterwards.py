"""A fine-tuned run as folders that other tools read."""

import shutil
from pathlib import Path

from shardwright.checkpoint.folder import published
from shardwright.errors import InputError
from shardwright.finetune.tuned import Tuned, build, reading
from shardwright.hf.export import copy_tokenizer, write_pretrained


def merge(tuned: Tuned, out: Path) -> None:
    """Write the base with its adapter added, and the tokenizer, as a folder that ``from_pretrained`` loads.

    One process; host memory: the adapter and two tensors. The weights are those of
    peft's ``merge_and_unload`` on the base as it was in training: in 4 bits, decoded. They are added in
    float32 and rounded once to the base's dtype. ``out`` must not exist and appears when it is complete.
    Raises: InputError for a model without an adapter; CheckpointError as ``reading``, and where ``out``
        exists or can't be written.
    """
    if not tuned.is_adapter:
        raise InputError(
            f"{tuned.folder} is a whole model already, which transformers loads as it is; copy it with "
            "shardwright export"
        )
    model = build(tuned)
    with reading(tuned, model) as read:
        write_pretrained(model, out, read, tuned.base)


def export(tuned: Tuned, out: Path) -> None:
    """Copy what was trained, the model or its adapter in peft's form, with the tokenizer, to ``out``, which
    must not exist and appears when it is complete.

    Raises: CheckpointError where it exists or can't be written.
    """
    with published(out) as torn:
        shutil.copytree(tuned.folder, torn)
        copy_tokenizer(tuned.base, torn)
