"""A run whose gradients become infinite or NaN stops in time, or as its recipe says."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import latest
from shardwright.train.norms import clip
from tests.ranks.pool import on_ranks
from tests.ranks.test_train import place, rows, run

__all__ = ["place"]

WILD = ("--optimizer.lr=1e9", "--optimizer.warmup_steps=6", "--checkpoint.every=2", "--training.steps=12")


@pytest.mark.each_case
@pytest.mark.parametrize("way", ["stop", "skip", "go on"])
def test_a_run_that_diverges_does_what_its_recipe_says(place, way):
    folder = place / way.replace(" ", "-")
    code, _, err = run(place, *WILD, f"--training.on_nonfinite={way}", "--run.folder", str(folder))
    losses = [loss for (loss,) in rows(folder, "loss") if loss is not None]
    finite = [loss for loss in losses if loss == loss]
    if way == "stop":
        assert code == 1
        assert "the norm of the gradients of step " in err and ", first in 'embedding.weight'" in err
        assert 'training.on_nonfinite = "skip"' in err
        newest = latest(folder / "checkpoint")
        saved = [] if newest is None else load_all(newest)
        assert all(tensor.isfinite().all() for tensor in saved)
        assert len(losses) < 12
        return
    assert code == 0, err
    assert len(losses) == 12
    weights = load_file(folder / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values()) is (way == "skip")
    assert (len(finite) == 12) is (way == "skip")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 12


def load_all(checkpoint):
    return [tensor for path in checkpoint.glob("*.safetensors") for tensor in load_file(path).values()]


@on_ranks(2)
def test_the_norm_and_its_clipping_are_torchs_bit_for_bit(rank):
    torch.manual_seed(0)
    models = [fully_shard(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model(torch.full((2, 7), rank + 1.0)).square().sum().backward()
    norms = clip(models[0], 0.1)
    total = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
    assert norms.total() == float(total.full_tensor()) and norms.first_nonfinite() == ""
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
    models[0][2].weight.grad.to_local()[:, :1].fill_(float("inf") if rank == 0 else 1.0)
    assert clip(models[0], 0.1).first_nonfinite() == "2.weight"
