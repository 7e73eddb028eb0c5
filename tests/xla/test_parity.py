"""An XLA model trains as plain torch does, on 1, 2 and 4 devices."""

import copy

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

import torch
from torch import nn

from shardwright import xla
from tests.xla.models import MODELS, UNITS, batch, difference, loss_fn, optimizers, reference_step

STEPS = 3


def train(kind, optimizer, world, *, steps=STEPS, clip_norm=None, **options):
    """``(largest difference of a loss, of a parameter or buffer)`` to plain torch after some steps."""
    model = MODELS[kind]()
    plain = copy.deepcopy(model)
    ours, theirs = optimizers(optimizer, plain)
    accumulation = options.pop("accumulation", 1)
    mesh = options.pop("mesh", world)
    xla.fully_shard(model, mesh, UNITS[kind], **options)
    step = xla.make_train_step(model, loss_fn, ours, clip_norm=clip_norm, accumulation=accumulation)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        rows = batch(kind)
        expected = reference_step(plain, theirs, rows, world * accumulation, clip_norm)
        losses.append(abs(float(step(*rows)) - expected))
    return max(losses), difference(xla.full_state_dict(model), plain)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", MODELS)
def test_training_equals_plain_torch(kind, optimizer, world):
    loss, state = train(kind, optimizer, world)
    assert loss < 5e-6  # of about 2: a few units in the last place
    assert state < 1e-6


OPTIONS = {
    "kept": {"reshard_after_forward": False},
    "flat": {"flatten_parameters": True},
    "rows": {"shard_param_on_dim_0": True},
    "rows_flat": {"shard_param_on_dim_0": True, "flatten_parameters": True},
    "unpadded": {"pad_multiple": 1},
    "recomputed": {"checkpoint_activations": True},
    "groups": {"sharding_groups": [[0, 2], [1, 3]]},
    "hybrid": {"mesh": (2, 2)},
    "clipped": {"clip_norm": 0.1},
    "accumulated": {"accumulation": 2},
    "fp32": {"compute_dtype": torch.float32, "fp32_reduce_scatter": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["transformer"])
def test_every_option_trains_as_plain_torch(kind, options):
    loss, state = train(kind, "sgd", 4, **options)
    assert loss < 5e-6  # of about 2: a few units in the last place
    assert state < 1e-6


@pytest.mark.parametrize("options", [{"mesh": (2, 2)}, {"checkpoint_activations": True}], ids=str)
def test_batchnorm_statistics_are_carried(options):
    _, state = train("convnet", "sgd", 4, **options)
    assert state < 1e-6


def test_batchnorm_can_stay_apart_and_counts_every_microbatch():
    """Without synchronisation the statistics of the first device are the state, as in the original."""
    model, x = nn.BatchNorm1d(3), torch.randn(8, 3)
    xla.fully_shard(model, 4)
    step = xla.make_train_step(
        model, lambda m, x: m(x).square().mean(), xla.SGD(0.1), accumulation=1, sync_buffers=False
    )
    step(x)
    expected = nn.BatchNorm1d(3)
    expected(x[:2])
    state = xla.full_state_dict(model)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(state[name], getattr(expected, name))
    step = xla.make_train_step(model, lambda m, x: m(x).square().mean(), xla.SGD(0.1), accumulation=2)
    step(torch.randn(16, 3))
    assert xla.full_state_dict(model)["num_batches_tracked"] == 3


@pytest.mark.parametrize(("kind", "wide"), [(kind, kind != "mlp") for kind in MODELS] + [("mlp", True)])
def test_bf16_compute_stays_near_fp32(kind, wide):
    loss, state = train(kind, "sgd", 4, compute_dtype=torch.bfloat16, fp32_reduce_scatter=wide)
    assert 0 < loss < 0.05
    assert 0 < state < 0.05
