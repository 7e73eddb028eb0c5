"""What an XLA model saves can be continued elsewhere, and the other way round, bit by bit."""

import copy
from pathlib import Path

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

import torch

from shardwright import xla
from shardwright.checkpoint import load, save
from shardwright.checkpoint.xla import load_xla, save_xla
from shardwright.errors import CheckpointError
from shardwright.xla.checkpoint import load_rank_files, named_state, save_rank_files
from shardwright.xla.files import read
from tests.xla.models import MODELS, UNITS, batch, difference, loss_fn, optimizers, reference_step


def trained(kind, optimizer, world, *, steps=1, seed=1, **options):
    """``(model, step)`` after some steps on the rows that ``seed`` draws."""
    model = MODELS[kind]()
    ours, _ = optimizers(optimizer, model)
    xla.fully_shard(model, world, UNITS[kind], **options)
    step = xla.make_train_step(model, loss_fn, ours)
    torch.manual_seed(seed)
    for _ in range(steps):
        step(*batch(kind))
    return model, step


def equal(a, b) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


LAYOUTS = {"each": {}, "flat": {"flatten_parameters": True}, "rows": {"shard_param_on_dim_0": True}}


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", ["transformer", "convnet"])
def test_rank_files_round_trip_to_another_layout_and_world(tmp_path, kind, options):
    model, step = trained(kind, "adamw", 4, **options)
    prefix = str(tmp_path / "ckpt")
    paths = save_rank_files(prefix, model, step)
    assert [path.name for path in paths] == [f"ckpt_rank-{r:08d}-of-00000004.pth" for r in range(4)]
    expected = xla.full_state_dict(model)
    found = read(prefix)
    named = {name: value for name, value in expected.items() if name in found.model}
    assert found.model.keys() == named.keys()
    assert equal(found.model, {name: named[name] for name in found.model})
    other, other_step = trained(kind, "adamw", 2, seed=9)
    load_rank_files(prefix, other, other_step)
    assert equal(xla.full_state_dict(other), expected)
    torch.manual_seed(5)
    rows = batch(kind)
    if kind == "transformer":  # without BatchNorm the number of devices doesn't matter
        assert float(step(*rows)) == pytest.approx(float(other_step(*rows)), abs=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_plain_torch_goes_on_from_an_xla_run(tmp_path, optimizer):
    model, step = trained("transformer", optimizer, 4, steps=2)
    save_xla(tmp_path, model=model, train_step=step, step=2)
    plain = MODELS["transformer"]()
    _, theirs = optimizers(optimizer, plain)
    assert load(tmp_path, model=plain, optimizer=theirs).step == 2
    assert equal(xla.full_state_dict(model), plain.state_dict())
    rows = batch("transformer")
    assert reference_step(plain, theirs, rows, 4) == pytest.approx(float(step(*rows)), abs=5e-6)
    assert difference(xla.full_state_dict(model), plain) < 1e-6


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_xla_run_goes_on_from_plain_torch(tmp_path, optimizer):
    plain = MODELS["transformer"]()
    _, theirs = optimizers(optimizer, plain)
    torch.manual_seed(2)
    reference_step(plain, theirs, batch("transformer"), 1)
    save(tmp_path, model=plain, optimizer=theirs, step=1)
    before = copy.deepcopy(plain.state_dict())
    model, step = trained("transformer", optimizer, 4, steps=1, flatten_parameters=True)
    load_xla(tmp_path, model=model, train_step=step)
    assert equal(xla.full_state_dict(model), before)
    rows = batch("transformer")
    assert float(step(*rows)) == pytest.approx(reference_step(plain, theirs, rows, 4), abs=5e-6)
    assert difference(xla.full_state_dict(model), plain) < 1e-6


def test_an_xla_run_goes_on_bit_equal_on_the_same_devices(tmp_path):
    model, step = trained("convnet", "adamw", 4, steps=2)
    save_xla(tmp_path, model=model, train_step=step, step=2)
    other, other_step = trained("convnet", "adamw", 4, steps=1, seed=7)
    load_xla(tmp_path, model=other, train_step=other_step)
    rows = batch("convnet")
    assert float(step(*rows)) == float(other_step(*rows))
    assert equal(xla.full_state_dict(model), xla.full_state_dict(other))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4)])
def test_weights_and_state_are_bit_equal_on_other_devices_and_in_another_layout(tmp_path, before, after):
    model, step = trained("mlp", "adamw", before, steps=2)
    save_xla(tmp_path, model=model, train_step=step, step=2)
    other, other_step = trained("mlp", "adamw", after, seed=7, flatten_parameters=True)
    assert load_xla(tmp_path, model=other, train_step=other_step).step == 2
    assert equal(xla.full_state_dict(model), xla.full_state_dict(other))
    ours, theirs = ({(n, k): v for n, k, v in named_state(s)} for s in (step, other_step))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    "make", [xla.SGD, lambda lr: xla.SGD(lr, 0.9), xla.AdamW], ids=["plain", "sgd", "adamw"]
)
def test_a_schedule_goes_on_where_it_was(tmp_path, make):
    def begin():
        model = xla.fully_shard(MODELS["mlp"](), 2)
        return model, xla.make_train_step(model, loss_fn, make(lambda count: 0.1 * 0.3**count))

    torch.manual_seed(4)
    rows = batch("mlp")
    model, step = begin()
    for _ in range(2):
        step(*rows)
    save_xla(tmp_path, model=model, train_step=step, step=2)
    other, other_step = begin()
    load_xla(tmp_path, model=other, train_step=other_step)
    assert [float(step(*rows)) for _ in range(2)] == [float(other_step(*rows)) for _ in range(2)]


def test_state_of_another_optimizer_is_refused_and_nothing_changes(tmp_path):
    model, step = trained("mlp", "sgd", 2)
    save_xla(tmp_path, model=model, train_step=step, step=1)
    other, other_step = trained("mlp", "adamw", 2, seed=3)
    before = xla.full_state_dict(other)
    with pytest.raises(CheckpointError, match="state of SGD, the step uses AdamW"):
        load_xla(tmp_path, model=other, train_step=other_step)
    save_rank_files(str(tmp_path / "ckpt"), model, step)
    with pytest.raises(CheckpointError, match="no exp_avg of"):
        load_rank_files(str(tmp_path / "ckpt"), other, other_step)
    assert equal(xla.full_state_dict(other), before)


FIXTURES = Path(__file__).parent / "fixtures"
ORIGINAL = {"params": {}, "flat": {"flatten_parameters": True}, "rows": {"shard_param_on_dim_0": True}}


def as_lists(tree):
    """Sizes are tuples where one saves with torch.save and lists where with torch_xla's own save."""
    if isinstance(tree, dict):
        return {key: as_lists(value) for key, value in tree.items()}
    return [as_lists(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


@pytest.mark.parametrize(("layout", "options"), ORIGINAL.items(), ids=ORIGINAL)
def test_files_of_the_original_load_here_and_are_written_alike(tmp_path, layout, options):
    """Read what torch_xla wrote (fixtures/make.py), write it again: the same tensors under the same names."""
    block = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh())
    model = torch.nn.Sequential(block, torch.nn.Linear(7, 3, bias=False))
    xla.fully_shard(block, 2, **options)
    xla.fully_shard(model, 2, **options)
    step = xla.make_train_step(model, lambda m, x: m(x).square().mean(), xla.SGD(lr=0.1, momentum=0.9))
    load_rank_files(str(FIXTURES / f"{layout}_rank"), model, step)
    theirs = torch.load(FIXTURES / f"{layout}_consolidated.pth", weights_only=True)["model"]
    found = xla.full_state_dict(model)
    for name, value in theirs.items():
        assert torch.equal(found[name], value), name
    save_rank_files(str(tmp_path / layout), model, step)
    for rank in range(2):
        name = f"{layout}_rank-{rank:08d}-of-00000002.pth"
        ours, original = (torch.load(folder / name, weights_only=True) for folder in (tmp_path, FIXTURES))
        assert as_lists(ours["shard_metadata"]) == as_lists(original["shard_metadata"])
        assert ours["model"].keys() == original["model"].keys()
        for key, value in original["model"].items():
            if "running_" not in key:  # rank 0's statistics were loaded on both
                assert torch.equal(ours["model"][key], value), key
        for number, state in original["optimizer"]["state"].items():
            momentum = ours["optimizer"]["state"][number]["momentum_buffer"]
            assert torch.equal(momentum, state["momentum_buffer"]), number
