"""What users of the original would do next, and would be lost without a word, is refused."""

import copy

import pytest

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

import torch
from torch import nn

import shardwright
from shardwright import xla
from shardwright.checkpoint import load, save
from shardwright.errors import ShardwrightError, StageError


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def squared(model, x):
    return model(x).square().mean()


@pytest.fixture
def model() -> nn.Module:
    return xla.fully_shard(plain(), 4, (nn.Linear,))


SILENT = {
    "state_dict": (lambda m: m.state_dict(), "xla.full_state_dict"),
    "state_dict of a layer": (lambda m: m[1].state_dict(), "xla.full_state_dict"),
    "save": (lambda m: torch.save([*m.parameters()], "/dev/null"), "xla.full_state_dict"),
    "load_state_dict": (lambda m: m.load_state_dict(plain().state_dict()), "xla.load_full_state_dict"),
    "edit": (lambda m: nn.init.ones_(m[0].weight), "xla.load_full_state_dict"),
    "data": (lambda m: m[0].weight.data.zero_(), "xla.load_full_state_dict"),
    "read": (lambda m: m[0].weight.norm(), "xla.full_state_dict"),
    "cast": (lambda m: m.bfloat16(), "compute_dtype"),
    "move": (lambda m: m.to("cpu"), "compute_dtype"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), "xla.materialize"),
    "freeze": (lambda m: m[0].requires_grad_(False), "before xla.fully_shard"),
    "freeze one": (lambda m: setattr(m[0].weight, "requires_grad", False), "before xla.fully_shard"),
    "hook": (lambda m: m[0].weight.register_hook(print), "make_train_step"),
    "post hook": (lambda m: m[0].weight.register_post_accumulate_grad_hook(print), "make_train_step"),
    "optimizer": (lambda m: torch.optim.SGD(m.parameters(), 0.1).step(), "make_train_step"),
    "eager": (lambda m: shardwright.fully_shard(m), "xla"),
}


@pytest.mark.parametrize(("act", "remedy"), SILENT.values(), ids=SILENT)
def test_what_would_do_nothing_is_refused_with_what_to_do(model, act, remedy):
    before = xla.full_state_dict(model)
    with pytest.raises(StageError, match=remedy):
        act(model)
    after = xla.full_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert float(xla.make_train_step(model, squared, xla.SGD(0.1))(torch.randn(8, 4))) > 0


def test_the_eager_checkpoints_name_those_of_xla(model, tmp_path):
    with pytest.raises(ShardwrightError, match="save_xla"):
        save(tmp_path / "a", model=model, step=1)
    save(tmp_path / "b", model=plain(), step=1)
    with pytest.raises(ShardwrightError, match="load_xla"):
        load(tmp_path / "b", model=model)


def test_an_optimizer_from_before_the_sharding_is_refused():
    module = plain()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    xla.fully_shard(module, 4)
    with pytest.raises(StageError, match="make_train_step"):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("no_sync", "accumulation="),
        ("clip_grad_norm_", "clip_norm="),
        ("set_gradient_divide_factors", "scale the loss"),
        ("get_shard_metadata", "save_rank_files"),
        ("get_original_names_and_sharded_parameters", "full_state_dict"),
    ],
)
def test_methods_of_the_original_say_what_stands_for_them(model, name, remedy):
    with pytest.raises(AttributeError, match=remedy):
        getattr(model, name)
    assert not hasattr(model, name)


def test_what_needs_no_values_goes_on_working(model):
    assert [(p.shape, p.dtype, p.ndim, p.numel(), p.requires_grad) for p in model.parameters()] == [
        (p.shape, p.dtype, p.ndim, p.numel(), p.requires_grad) for p in plain().parameters()
    ]
    assert model.requires_grad_(True) is model
    model.zero_grad()
    assert "Linear" in repr(model)
    assert "[4, 4]" in f"{model[0].weight}"
    assert list(model.state_dict(keep_vars=True)) == list(plain().state_dict())


def test_a_copy_has_values_of_its_own(model):
    x = torch.randn(8, 4)
    step = xla.make_train_step(model, squared, xla.SGD(0.1))
    step(x)
    other = copy.deepcopy(model)
    theirs = xla.make_train_step(other, squared, xla.SGD(0.1))
    expected = float(step(x))
    assert float(theirs(x)) == expected
    with pytest.raises(StageError, match="full_state_dict"):
        other.state_dict()
