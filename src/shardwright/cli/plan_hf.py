"""``shardwright plan FOLDER --trace``: a folder's model, traced as transformers makes it."""

import argparse
from pathlib import Path

import torch

from shardwright.cli.plan_choice import changed
from shardwright.hf.library import CONFIG, build
from shardwright.plan.predict import Choice
from shardwright.plan.subject import Subject, of_model


def asked(known: argparse.Namespace, size: tuple[int, int]) -> tuple[Subject, Choice]:
    """The causal model of the folder, whose parameters are float32 at rest.
    size: rows and tokens of a microbatch. Raises: InputError, MissingExtra."""
    path = Path(known.model)
    model = build(path.parent if path.name == CONFIG else path, torch.float32)
    tokens = torch.empty(size, dtype=torch.int64, device="meta")
    sample = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    choice = changed(Choice(), known)
    return of_model(model, sample, choice), choice
