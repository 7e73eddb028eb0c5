"""State of a wrapped model and its optimizer: whole, sharded, local; whole parameters for a while."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import checkpoint
from shardwright.errors import InputError, StageError
from shardwright.wrapper import (
    FSDP,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
    TrainingState,
)
from tests.ranks.models import batches, build, full, loss_of
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.wrapped import nested, same_state, stepped


@on_ranks(2, 3)
def test_full_sharded_and_local_states_go_into_another_model(rank, world):
    model, _ = stepped(rank, world)
    whole = model.state_dict()
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in build().state_dict().items()}
    assert not any(isinstance(t, DTensor) for t in whole.values())
    build().load_state_dict(whole)  # a plain model takes it
    settings = FSDP.get_state_dict_type(model)
    for kind in StateDictType:
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
            other = nested(build(1))
            FSDP.set_state_dict_type(other, kind)
            assert not other.load_state_dict(state).missing_keys
        if kind is StateDictType.SHARDED_STATE_DICT:
            assert isinstance(state["head.weight"], DTensor)
        if kind is StateDictType.LOCAL_STATE_DICT:
            assert state["head.weight"].shape == model.head.weight.to_local().shape
        FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
        same_state(other.state_dict(), whole)
    assert FSDP.get_state_dict_type(model) == settings
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
        first = model.state_dict()
    if rank:
        assert first == {}
    else:
        same_state(first, whole)
    with pytest.raises(InputError, match="FullStateDictConfig"):
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, FullStateDictConfig())
    tied = FSDP(build(tied=True))
    with torch.no_grad():
        tied.embedding.weight.zero_()
    tied.load_state_dict(build(tied=True).state_dict())
    same_state(tied.state_dict(), build(tied=True).state_dict())


@on_ranks(2)
def test_optimizer_states_by_name_go_into_another_optimizer_and_a_plain_one(rank, world):
    model, optimizer = stepped(rank, world)
    exact = {}
    for kind in StateDictType:
        with FSDP.state_dict_type(model, kind):
            state = FSDP.optim_state_dict(model, optimizer)
            other, fresh = nested(build(1)), None
            fresh = torch.optim.Adam(other.parameters(), lr=0.5)
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, state))
        exact[kind] = state
        assert fresh.param_groups[0]["lr"] == 0.01
        for ours, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
            assert isinstance(theirs["exp_avg"], DTensor)
            same_state(ours, theirs)
    whole = exact[StateDictType.FULL_STATE_DICT]
    assert whole["state"]["head.weight"]["exp_avg"].shape == build().head.weight.shape
    plain = build()
    numbered = FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, plain)
    torch.optim.Adam(plain.parameters()).load_state_dict(numbered)
    named = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, plain)
    assert named["state"].keys() == whole["state"].keys()
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        assert bool(FSDP.optim_state_dict(model, optimizer)) == (rank == 0)
    assert bool(FSDP.full_optim_state_dict(model, optimizer)) == (rank == 0)
    full_state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    ready = FSDP.shard_full_optim_state_dict(full_state, model, optim=optimizer)
    optimizer.load_state_dict(ready)
    with pytest.raises(InputError, match="not the model's"):
        FSDP.optim_state_dict(model, torch.optim.Adam(build().parameters()))


@on_ranks(1, 2, 3)
def test_whole_parameters_for_a_while_with_edits_kept_or_not(rank, world):
    model = nested(build())
    loss_of(model, batches(0, world)[rank]).backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    before = model.state_dict()
    with FSDP.summon_full_params(model, with_grads=True):
        assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, param in model.named_parameters():
            assert type(param) is nn.Parameter
            assert torch.equal(param, before[name])
            assert torch.equal(param.grad, grads[name])
        with torch.no_grad():
            model.head.weight.add_(1)
            model.blocks[1].up.weight.grad.mul_(2)
        with pytest.raises(StageError, match="inside of itself"), FSDP.summon_full_params(model):
            pass
    assert model.training_state is TrainingState.IDLE
    assert torch.equal(full(model.head.weight), before["head.weight"] + 1)
    assert torch.equal(full(model.blocks[1].up.weight.grad), 2 * grads["blocks.1.up.weight"])
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        assert isinstance(model.head.weight, DTensor) == (rank != 0)
        if rank == 0:
            model.head.weight.data.zero_()
    assert torch.equal(full(model.head.weight), before["head.weight"] + 1)
    with FSDP.summon_full_params(model, recurse=False):
        assert not isinstance(model.head.weight, DTensor)
        assert isinstance(model.blocks[0].up.weight, DTensor)
    with pytest.raises(InputError, match="different edits"), FSDP.summon_full_params(model, rank0_only=True):
        pass
    model.apply(lambda m: m.weight.data.fill_(3) if isinstance(m, nn.Linear) else None)
    assert all((full(m.weight) == 3).all() for m in model.modules() if isinstance(m, nn.Linear))
    loss_of(
        model, batches(0, world)[rank]
    ).backward()  # a change after wrapping is seen, and training goes on


def saved(rank, world, folder):
    model, optimizer = stepped(rank, world)
    checkpoint.save(folder, model=model, optimizer=optimizer, step=1)
    other = nested(build(1))
    fresh = torch.optim.Adam(other.parameters(), lr=0.5)
    checkpoint.load(folder, model=other, optimizer=fresh)
    same_state(other.state_dict(), model.state_dict())
    for ours, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        same_state(ours, theirs)


def test_a_checkpoint_takes_a_wrapped_model_under_its_plain_names(tmp_path):
    run_ranks(2, saved, str(tmp_path / "checkpoint"))


@on_ranks(2)
def test_meta_modules_are_made_ranks_are_made_equal_and_what_is_ignored_is_left(rank):
    calls = []

    def init(module):
        calls.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 0.5 + rank)

    with torch.device("meta"):
        meta = build()
    model = nested(meta, param_init_fn=init, sync_module_states=True)
    assert calls
    assert {t.unique().item() for t in model.state_dict().values()} == {0.5}
    with torch.device("meta"):
        linear = nn.Linear(4, 4)
    assert not FSDP(linear).weight.to_local().is_meta
    with torch.device("meta"), pytest.raises(InputError, match=r"no reset_parameters"):
        FSDP(build())
    apart = nested(build(rank), sync_module_states=True)
    same_state(apart.state_dict(), build(0).state_dict())
    own = build()
    kept = own.head.weight
    model = FSDP(own, ignored_modules=[own.blocks[0]], ignored_states=[kept])
    assert model.head.weight is kept
    assert type(model.blocks[0].up.weight) is nn.Parameter
    assert isinstance(model.blocks[1].up.weight, DTensor)
    with pytest.warns(UserWarning, match="every parameter is left as it is"):
        whole = FSDP(own := build(), ignored_modules=[own])
    assert not any(isinstance(param, DTensor) for param in whole.parameters())


@on_ranks(2)
def test_a_plain_module_around_wrappers_loads_what_it_saves():
    """A plain module with wrappers inside: what it saves it loads, of every kind."""
    torch.manual_seed(0)
    whole = nn.Sequential(FSDP(nn.Linear(5, 3)), nn.Linear(3, 3), nested(build())).state_dict()
    for kind in StateDictType:
        for flat in (False, True):
            torch.manual_seed(1)
            wrapped = (FSDP(nn.Linear(5, 3), use_orig_params=not flat) for _ in range(2))
            other = nn.Sequential(next(wrapped), nn.Linear(3, 3), nested(build(1)))
            again = nn.Sequential(next(wrapped), nn.Linear(3, 3), nested(build(2)))
            with FSDP.state_dict_type(other, kind), FSDP.state_dict_type(again, kind):
                saved = {name: value.detach().clone() for name, value in other.state_dict().items()}
                assert not any(again.load_state_dict(saved))
            same_state(again.state_dict(), other.state_dict())
    assert not any(other.load_state_dict(whole))
    same_state(other.state_dict(), whole)
