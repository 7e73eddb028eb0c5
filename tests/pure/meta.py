"""The bench's model and a batch for it, without data."""

import torch

from bench import model as bench_model


def on_meta(size):
    with torch.device("meta"):
        return bench_model.Transformer(size)


def sample(size):
    return torch.empty(size.batch, size.sequence + 1, dtype=torch.int64, device="meta")
