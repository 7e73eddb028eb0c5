"""An XLA model trains as plain torch does, on 1, 2 and 4 devices."""

import copy

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

import torch
from torch import nn

from shardwright import xla
from shardwright.errors import InputError
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


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", MODELS)
def test_training_equals_plain_torch(kind, optimizer, world):
    loss, state = train(kind, optimizer, world)
    assert loss < 5e-6  # of about 2: a few units in the last place
    assert state < 1e-6


def decay_of_matrices(name, shape):
    return len(shape) > 1


def test_decay_may_be_for_some_parameters_and_the_norm_is_that_of_all_shards_of_one_copy():
    model = MODELS["mlp"]()
    plain = copy.deepcopy(model)
    parameters = list(plain.parameters())
    decayed = [[p for p in parameters if (p.ndim > 1) is kind] for kind in (True, False)]
    groups = [{"params": decayed[0], "weight_decay": 0.5}, {"params": decayed[1], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    xla.fully_shard(model, (2, 2), UNITS["mlp"])
    ours = xla.AdamW(1e-2, weight_decay=0.5, eps=1e-3, decayed=decay_of_matrices)
    step = xla.make_train_step(model, loss_fn, ours, clip_norm=0.1)
    torch.manual_seed(1)
    for _ in range(STEPS):
        rows = batch("mlp")
        step(*rows)
        plain.zero_grad()
        torch.stack([loss_fn(plain, *(t.chunk(4)[i] for t in rows)) for i in range(4)]).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        theirs.step()
        assert float(step.grad_norm) == pytest.approx(norm.item(), rel=1e-5)
    assert difference(xla.full_state_dict(model), plain) < 1e-6


CHOICES = {
    "plain": ("SGD", {}),
    "nesterov": ("SGD", {"momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
    "betas": ("AdamW", {"betas": (0.7, 0.8), "eps": 0.1, "weight_decay": 0.0}),
}


@pytest.mark.parametrize(("name", "options"), CHOICES.values(), ids=CHOICES)
def test_each_option_of_an_optimizer_is_that_of_torch(name, options):
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    optimizer = getattr(torch.optim, name)(plain.parameters(), 0.1, **options)
    ours = getattr(xla, name)(0.1, **options)
    step = xla.make_train_step(xla.fully_shard(model, 2), lambda m, x: m(x).square().mean(), ours)
    for _ in range(STEPS):
        x = torch.randn(4, 3)
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
        step(x)
    assert difference(xla.full_state_dict(model), plain) < 1e-6


def test_one_flat_array_is_decayed_as_a_whole_or_not():
    model = xla.fully_shard(MODELS["mlp"](), 2, flatten_parameters=True)
    step = xla.make_train_step(model, loss_fn, xla.AdamW(decayed=decay_of_matrices))
    with pytest.raises(InputError, match="flatten_parameters"):
        step(*batch("mlp"))


OPTIONS = {
    "kept": {"reshard_after_forward": False},
    "flat": {"flatten_parameters": True},
    "rows": {"shard_param_on_dim_0": True},
    "rows_flat": {"shard_param_on_dim_0": True, "flatten_parameters": True},
    "rows_fp32": {"shard_param_on_dim_0": True, "compute_dtype": torch.float32, "fp32_reduce_scatter": True},
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


@pytest.mark.parametrize("kind", ["mlp", "convnet"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_rows_train_as_plain_torch(kind, optimizer):
    loss, state = train(kind, optimizer, 4, shard_param_on_dim_0=True)
    assert loss < 5e-6
    assert state < 1e-6


def test_rows_of_a_flat_unit_are_the_flat_unit_and_both_are_torchs():
    states = []
    for options in (
        {"flatten_parameters": True},
        {"flatten_parameters": True, "shard_param_on_dim_0": True},
        {},
    ):
        model = MODELS["convnet"]()
        xla.fully_shard(model, 4, UNITS["convnet"], **options)
        step = xla.make_train_step(model, loss_fn, xla.SGD(0.1, 0.9, 1e-2))
        torch.manual_seed(1)
        for _ in range(STEPS):
            step(*batch("convnet"))
        states.append((xla.stats(model).at_rest_nbytes, xla.full_state_dict(model)))
    (flat, first), (flat_rows, second), _ = states
    assert flat == flat_rows
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert max(float((first[name] - states[2][1][name]).abs().max()) for name in first) < 1e-6


@pytest.mark.parametrize(
    "options", [{}, {"shard_param_on_dim_0": True}, {"flatten_parameters": True}], ids=str
)
def test_bf16_parameters_train_as_plain_torch(options):
    model = MODELS["convnet"]().to(torch.bfloat16)
    plain = copy.deepcopy(model)
    ours, theirs = optimizers("sgd", plain)
    xla.fully_shard(model, 2, UNITS["convnet"], **options)
    step = xla.make_train_step(model, loss_fn, ours)
    torch.manual_seed(1)
    for _ in range(STEPS):
        x, y = batch("convnet")
        expected = reference_step(plain, theirs, (x.to(torch.bfloat16), y), 2)
        assert float(step(x.to(torch.bfloat16), y)) == pytest.approx(expected, abs=2e-2)
    state = xla.full_state_dict(model)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16, torch.int64}
    assert difference(state, plain) < 2e-2


class Aside(nn.Module):
    """Its second layer is called, and nothing comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.detached = (nn.Linear(10, 10) for _ in range(3))
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return self.head(self.used(x) + self.detached(x).detach())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("options", [{}, {"shard_param_on_dim_0": True}], ids=str)
def test_a_called_module_that_the_loss_does_not_depend_on_stays_as_it_is(options, accumulation):
    torch.manual_seed(0)
    model = Aside()
    plain = copy.deepcopy(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ours, theirs = optimizers("sgd", plain)  # decays
    xla.fully_shard(model, 2, (nn.Linear,), **options)
    step = xla.make_train_step(model, loss_fn, ours, accumulation=accumulation)
    for _ in range(STEPS):
        rows = batch("mlp")
        reference_step(plain, theirs, rows, 2 * accumulation)
        step(*rows)
    state = xla.full_state_dict(model)
    assert difference(state, plain) < 1e-6
    for name in state:
        assert torch.equal(state[name], before[name]) is name.startswith(("unused", "detached"))


def doubled(linear: nn.Linear) -> None:
    linear.forward = lambda x: 2 * nn.functional.linear(x, linear.weight, linear.bias).tanh()


def test_a_forward_that_was_replaced_is_trained():
    models = [MODELS["mlp"](), MODELS["mlp"]()]
    for model in models:
        doubled(model[0])
    ours, theirs = optimizers("adamw", models[1])
    xla.fully_shard(models[0], 4, (nn.Linear,))
    step = xla.make_train_step(models[0], loss_fn, ours)
    torch.manual_seed(1)
    for _ in range(STEPS):
        rows = batch("mlp")
        assert float(step(*rows)) == pytest.approx(reference_step(models[1], theirs, rows, 4), abs=5e-6)
    assert difference(xla.full_state_dict(models[0]), models[1]) < 1e-6


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
