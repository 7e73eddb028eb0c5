"""``use_orig_params=False``: one flat parameter for each wrapper, cut evenly whatever the borders."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import checkpoint, full_state_dict
from shardwright.engine.unit import units_in
from shardwright.errors import InputError
from shardwright.wrapper import FSDP, FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from tests.ranks.models import batches, build, loss_of
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_wrapper_harness import MATRIX, NEVER_MOVED, trains
from tests.ranks.wrapped import Transformer, beside_ddp, everything, nested, root_only, same_state, stepped

FLAT = {"use_orig_params": False}


def flat(shape):
    return partial(shape, **FLAT)


@on_ranks(2, 3)
def test_a_flat_parameter_is_cut_evenly_and_modules_show_shapes_at_rest(rank, world):
    model, plain = flat(nested)(build()), build()
    names = [name for name, _ in model.named_parameters()]
    assert names == [f"{path}_flat_param" for path in ("", "blocks.0.", "blocks.1.", "blocks.1.up.")]
    sizes = [p.to_local().numel() for p in model.parameters()]
    wholes = [p.numel() for p in model.parameters()]
    assert sum(wholes) == sum(p.numel() for p in plain.parameters())
    assert all(-(-whole // world) >= size for whole, size in zip(wholes, sizes, strict=True))
    # Even to the number, scalars and uneven rows too: no rank holds more than ceil(numel / world).
    assert model.head.weight.is_meta
    assert model.head.weight.shape == plain.head.weight.shape
    out = model(batches(0, world)[rank])
    out.sum().backward()
    assert all(unit.group.held_nbytes == 0 for unit in units_in(model) if unit.group)


@pytest.mark.parametrize(
    ("shape", "make", "cases"),
    [(nested, build, MATRIX), (everything, build, NEVER_MOVED), (root_only, Transformer, NEVER_MOVED)],
    ids=["nested", "everything wrapped", "transformer"],
)
@pytest.mark.slow
def test_a_flat_model_trains_as_ddp_in_every_case(shape, make, cases):
    run_ranks(2, trains, flat(shape), make, 2, cases)


@on_ranks(2)
def test_every_strategy_mixed_precision_accumulation_and_copies_work_on_flat_parameters(rank, world):
    for strategy in ShardingStrategy:
        beside_ddp(build, flat(nested)(build(), sharding_strategy=strategy), rank, world, steps=2)
    model = flat(nested)(build(), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    with model.no_sync():
        loss_of(model, batches(0, world)[rank]).backward()
    loss_of(model, batches(1, world)[rank]).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert model.clip_grad_norm_(0.1) > 0.1
    for twin in (copy.deepcopy(model), copy.deepcopy(flat(root_only)(build()))):
        assert all(isinstance(p, DTensor) for p in twin.parameters())
        assert twin.head.weight.is_meta
        loss_of(twin, batches(0, world)[rank]).backward()
    same_state(model.state_dict(), build().state_dict())


@on_ranks(2, 3)
def test_states_go_between_flat_and_original_parameters_and_back(rank, world):
    """Flat and per-parameter models with the same numbers, each loading what the other saved."""
    for ours, theirs in ((FLAT, {}), ({}, FLAT), (FLAT, FLAT)):
        model, optimizer = stepped(rank, world, **ours)
        whole = model.state_dict()
        assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in build().state_dict().items()}
        build().load_state_dict(whole)
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            other = nested(build(1), **theirs)
            fresh = torch.optim.Adam(other.parameters(), lr=0.5)
            FSDP.set_state_dict_type(model, kind)
            FSDP.set_state_dict_type(other, kind)
            state = model.state_dict()
            assert isinstance(state["head.weight"], DTensor) == (kind is StateDictType.SHARDED_STATE_DICT)
            other.load_state_dict(state)
            entry = FSDP.optim_state_dict(model, optimizer)
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, entry))
            found = FSDP.optim_state_dict(other, fresh)
            assert found["state"].keys() == entry["state"].keys()
            for name in entry["state"]:
                same_state(found["state"][name], entry["state"][name])
            FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
            same_state(other.state_dict(), whole)
            loss_of(other, batches(1, world)[rank]).backward()
            fresh.step()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        other = nested(build(1), **FLAT)
        FSDP.set_state_dict_type(other, StateDictType.LOCAL_STATE_DICT)
        local = model.state_dict()
        assert local["_flat_param"].shape == model._flat_param.to_local().shape
        other.load_state_dict(local)
        entry = FSDP.optim_state_dict(model, optimizer)
        fresh = torch.optim.Adam(other.parameters(), lr=0.5)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, entry))
        for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
            same_state(one, two)
    FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
    same_state(other.state_dict(), whole)
    first = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, first):
        found = model.state_dict()
        assert set(found) == (set() if rank else set(whole))
    assert set(full_state_dict(model)) == (set() if rank else set(whole))


@on_ranks(2)
def test_a_checkpoint_takes_flat_parameters_under_the_names_of_the_model(rank, world, tmp_path):
    """Each layout loads what the other saved, optimizer state included."""
    folder = str(tmp_path / "checkpoint")
    for place, (ours, theirs) in enumerate(((FLAT, FLAT), (FLAT, {}), ({}, FLAT))):
        model, optimizer = stepped(rank, world, **ours)
        checkpoint.save(f"{folder}{place}", model=model, optimizer=optimizer, step=1)
        other, fresh = stepped(rank, world, 1, **theirs)
        checkpoint.load(f"{folder}{place}", model=other, optimizer=fresh)
        same_state(other.state_dict(), model.state_dict())
        loss_of(other, batches(1, world)[rank]).backward()
        found = FSDP.full_optim_state_dict(other, fresh, rank0_only=False)["state"]
        expected = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        for name in expected:
            same_state(found[name], expected[name])


@on_ranks(2)
def test_what_does_not_fit_a_flat_parameter_is_refused_by_name(rank, world):
    model = flat(nested)(build())
    state = model.state_dict()
    before = {name: t.clone() for name, t in state.items()}
    short = {name: t for name, t in state.items() if name not in ("blocks.1.down.bias", "norm.weight")}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict") as raised:
        model.load_state_dict(short)
    assert "norm.weight" in str(raised.value)
    assert "blocks.1.down.bias" in str(raised.value)
    assert model.load_state_dict(short, strict=False).missing_keys
    wrong = {**state, "head.weight": torch.zeros(2, 2)}
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
        model.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match=r"Unexpected key"):
        model.load_state_dict({**state, "head.extra": torch.zeros(2)})
    same_state(model.state_dict(), before)
    tied = build(tied=True)
    tied.embedding = FSDP(tied.embedding, **FLAT)
    with pytest.raises(InputError, match=r"'head.weight' is shared with 'Embedding', which was wrapped"):
        FSDP(tied, **FLAT)
    with pytest.warns(UserWarning, match=r"ModuleList.*forward"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]), **FLAT)
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, batches(0, world)[rank]).backward()
    optimizer.step()
    entry = FSDP.optim_state_dict(model, optimizer)
    del entry["state"]["norm.weight"]
    with pytest.raises(InputError, match=r"nothing of \['norm.weight'\]"):
        FSDP.optim_state_dict_to_load(model, optimizer, entry)


@on_ranks(1, 2)
def test_whole_parameters_of_a_flat_model_for_a_while(rank, world):
    model, plain = flat(nested)(build()), build()
    loss_of(model, batches(0, world)[rank]).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert {n for n, _ in model.named_parameters()} == {n for n, _ in plain.named_parameters()}
        assert torch.equal(model.head.weight, plain.head.weight)
        grad = model.blocks[1].up.weight.grad.clone()
        with torch.no_grad():
            model.head.weight.add_(1)
            model.blocks[1].up.weight.grad.mul_(2)
            model.norm.weight.data = torch.full((13,), 3.0)
    assert model.head.weight.is_meta
    with FSDP.summon_full_params(model, with_grads=True, writeback=False, offload_to_cpu=True):
        assert torch.equal(model.head.weight, plain.head.weight + 1)
        assert torch.equal(model.norm.weight, torch.full((13,), 3.0))
        assert torch.equal(model.blocks[1].up.weight.grad, 2 * grad)
        model.head.weight.data.zero_()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        assert model.head.weight.is_meta == (rank != 0)
        if rank == 0:
            assert torch.equal(model.head.weight, plain.head.weight + 1)
    model.apply(lambda m: m.weight.data.fill_(3) if isinstance(m, nn.Linear) else None)
    assert (model.state_dict()["blocks.1.up.weight"] == 3).all()
    with torch.inference_mode():
        model(batches(0, world)[rank])
    loss_of(model, batches(0, world)[rank]).backward()


@pytest.mark.slow
@on_ranks(2)
def test_other_dtypes_and_frozen_parameters_get_flat_parameters_of_their_own():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5).to(torch.bfloat16), nn.Linear(5, 2))
        model[2].requires_grad_(False)
        return model

    model, plain = FSDP(make(), **FLAT), make()
    assert [n for n, _ in model.named_parameters()] == ["_flat_param", "_flat_param_1", "_flat_param_2"]
    for each in (model, plain):
        inner = each.module if each is model else each
        x = torch.ones(2, 3)
        inner.forward = lambda x, m=inner: m[2](m[1](m[0](x).bfloat16()).float())
        each(x).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None, name
            else:
                torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
