"""What can't be done is refused by name, and odd models are sharded rightly."""

import copy
import inspect
import subprocess
import sys
import threading

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

import torch
from torch import nn

from shardwright import xla
from shardwright.errors import InputError, StageError


def squared(model, x):
    return model(x).square().mean()


def test_a_mesh_larger_than_the_devices_is_refused():
    with pytest.raises(
        InputError, match=r"needs 64 devices, jax sees 4 .*force_host_platform_device_count=64"
    ):
        xla.fully_shard(nn.Linear(2, 2), 64)


@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 1], [1, 2]], [[0, 1]]])
def test_groups_must_cover_the_mesh_in_equal_parts(groups):
    with pytest.raises(InputError, match="sharding_groups"):
        xla.fully_shard(nn.Linear(2, 2), 4, sharding_groups=groups)


def test_containers_and_sharded_modules_are_refused():
    with pytest.raises(InputError, match="ModuleList has no forward"):
        xla.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    model = xla.fully_shard(nn.Linear(2, 2))
    with pytest.raises(InputError, match="sharded already"):
        xla.fully_shard(model)
    with pytest.raises(InputError, match="isn't sharded"):
        xla.make_train_step(nn.Linear(2, 2), squared, xla.SGD())


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": torch.int32},
        {"pad_multiple": 0},
        {"flatten_parameters": "yes"},
        {"auto_wrap_policy": [1]},
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_changes(options):
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=next(iter(options))):
        xla.fully_shard(model, **options)
    assert type(model) is nn.Linear
    assert not model.weight.is_meta


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: xla.SGD(lr=-1), "lr=-1"),
        (lambda: xla.SGD(nesterov=True), "momentum"),
        (lambda: xla.AdamW(betas=(0.9, 1.0)), "betas"),
        (lambda: step_of(optimizer=torch.optim.SGD([torch.zeros(1)])), "optimizer is a SGD"),
        (lambda: step_of(clip_norm=-1), "clip_norm"),
        (lambda: step_of(accumulation=0), "accumulation"),
    ],
)
def test_bad_steps_are_refused(make, match):
    with pytest.raises(InputError, match=match):
        make()


def step_of(model=None, loss_fn=squared, optimizer=None, **options):
    model = xla.fully_shard(nn.Linear(2, 2) if model is None else model, 4)
    return xla.make_train_step(model, loss_fn, optimizer or xla.SGD(0.1), **options)


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(InputError, match="6 rows, which can't be split over 4 devices"):
        step_of()(torch.zeros(6, 2))
    with pytest.raises(InputError, match="batch item 0 is float"):
        step_of()(0.5)


def test_backward_names_the_step():
    model = xla.fully_shard(nn.Linear(2, 2), 4)
    with pytest.raises(StageError, match="make_train_step"):
        model(torch.zeros(4, 2)).sum().backward()


def test_an_unsupported_operator_is_named_with_its_module():
    class Inverse(nn.Module):
        def forward(self, x):
            return torch.special.airy_ai(x)

    with pytest.raises(InputError, match=r"module '1' \(Inverse\) can't run on XLA: .*airy_ai"):
        step_of(nn.Sequential(nn.Linear(2, 2), Inverse()))(torch.zeros(4, 2))


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Constant(nn.Module):
    def forward(self, x):
        return x * torch.ones(2)


class Borrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.owner = nn.Linear(2, 2)

    def forward(self, x):
        return x @ self.owner.weight


@pytest.mark.parametrize(
    ("module", "match"),
    [(Branch(), "reads a value"), (Constant(), "make constants buffers"), (Borrow(), "of another unit")],
)
def test_what_a_traced_program_can_not_do_is_named_with_its_module(module, match):
    model = nn.Sequential(nn.Linear(2, 2), module)
    xla.fully_shard(model, 4, (nn.Linear,))
    with pytest.raises(
        InputError, match=rf"module '1' \({type(module).__name__}\) can't run on XLA: .*{match}"
    ):
        xla.make_train_step(model, squared, xla.SGD(0.1))(torch.zeros(4, 2))


def test_modules_that_would_train_silently_wrong_are_refused():
    with pytest.raises(InputError, match=r"module '0' \(LSTM\) is not supported"):
        xla.fully_shard(nn.Sequential(nn.LSTM(2, 2)))
    with pytest.raises(InputError, match=r"^weight is torch.float64"):
        xla.fully_shard(nn.Linear(2, 2).double())


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(InputError, match="one scalar tensor"):
        step_of(loss_fn=lambda model, x: model(x))(torch.zeros(4, 2))


def test_a_model_without_values_says_so_and_gets_them():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    step = step_of(model)
    with pytest.raises(StageError, match="materialize"):
        step(torch.zeros(8, 2))
    torch.manual_seed(0)
    xla.materialize(model)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    state = xla.full_state_dict(model)
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert float(step(torch.randn(8, 2))) > 0


def test_a_module_that_can_not_be_initialised_is_named():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))

        def forward(self, x):
            return x * self.scale

    model = xla.fully_shard(Custom())
    with pytest.raises(InputError, match="Custom: no reset_parameters"):
        xla.materialize(model)
    xla.load_full_state_dict(model, {"scale": torch.ones(3)})
    with pytest.raises(InputError, match="missing scale\n  unexpected other"):
        xla.load_full_state_dict(model, {"other": torch.ones(3)})


def test_a_shared_weight_is_stored_once_by_the_unit_around_both_uses():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    weight = model[0].weight.detach().clone()
    xla.fully_shard(model, 4, (nn.Linear,))
    stats = xla.stats(model)
    assert (stats.num_units, stats.num_arrays, stats.param_numel) == (1, 1, 16)
    assert list(xla.full_state_dict(model)) == ["0.weight", "2.weight"]
    x = torch.randn(4, 4)
    assert torch.allclose(model(x), torch.relu(x @ weight.T) @ weight.T, atol=1e-6)


def test_frozen_parameters_and_units_without_gradient_stay_bit_equal():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "frozen": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["frozen"](self.parts["used"](x))

    net = Net()
    net.parts["frozen"].requires_grad_(False)
    xla.fully_shard(net, 4, (nn.Linear,))
    before = xla.full_state_dict(net)
    step = xla.make_train_step(net, squared, xla.AdamW(0.1, weight_decay=0.5))
    step(torch.randn(4, 4))
    after = xla.full_state_dict(net)
    changed = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"used"}


def test_a_forward_that_was_replaced_on_the_module_still_runs():
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight.detach().clone()
    model.forward = lambda x: x @ model.weight.T + 1
    xla.fully_shard(model, 4)
    x = torch.randn(4, 4)
    assert torch.allclose(model(x), x @ weight.T + 1, atol=1e-6)


def test_dropout_draws_anew_for_each_step_and_device():
    model = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5))
    xla.fully_shard(model, 4)
    rows = model(torch.ones(4, 1)) == 0
    assert 0 < rows.float().mean() < 1
    assert len({tuple(row.tolist()) for row in rows}) == 4
    step = xla.make_train_step(model, squared, xla.SGD(0.0))
    assert float(step(torch.ones(4, 1))) != float(step(torch.ones(4, 1)))
    model.eval()
    assert not (model(torch.ones(4, 1)) == 0).any()


def test_two_models_train_in_two_threads_without_disturbing_each_other():
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        step = step_of(model)
        return [float(step(torch.randn(4, 4, generator=generator))) for _ in range(3)]

    expected = [run(1), run(2)]
    found = [None, None]
    threads = [threading.Thread(target=lambda i=i: found.__setitem__(i, run(i + 1))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_pin_layout_is_accepted_with_one_warning():
    code = (
        "import warnings; from torch import nn; from shardwright import xla\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('default')\n"
        "    for _ in range(2): xla.fully_shard(nn.Linear(2, 2), pin_layout_in_collective_ops=True)\n"
        "print(len([w for w in caught if 'pin_layout' in str(w.message)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1", done.stderr


def test_defaults_are_those_of_the_original():
    """Of torch_xla 2.9.0, but for buffer_dtype (docs/xla.md)."""
    found = {name: p.default for name, p in inspect.signature(xla.fully_shard).parameters.items()}
    for name, default in {
        "auto_wrap_policy": None,
        "reshard_after_forward": True,
        "flatten_parameters": False,
        "shard_param_on_dim_0": False,
        "pad_multiple": 128,
        "fp32_reduce_scatter": False,
        "sharding_groups": None,
    }.items():
        assert found[name] == default, name


def test_policies_choose_the_units():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(8, 8), nn.Linear(2, 2)), nn.Linear(2, 2))
    xla.fully_shard(model, 4, xla.size_based_policy(60))
    assert xla.stats(model).num_units == 2  # Linear(8, 8), and the root with the rest
    with pytest.raises(InputError, match="auto_wrap_policy"):
        xla.fully_shard(nn.Linear(2, 2), 4, [])


class Average(nn.Module):
    """Buffers changed in place, replaced, and shared with another module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.linear(x)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.steps = self.steps + 1
        return x + self.mean


def test_buffers_that_a_module_changes_itself_are_carried():
    model = nn.Sequential(Average(), Average())
    model[1].mean = model[0].mean
    plain = copy.deepcopy(model)
    xla.fully_shard(model, 1, (Average,))
    step = xla.make_train_step(model, squared, xla.SGD(0.1))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(4, 3)
        loss = squared(plain, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(step(x)) == pytest.approx(loss.item(), abs=1e-6)
    state = xla.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-6), name
