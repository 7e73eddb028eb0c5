"""Modules wrapped for activation checkpointing or compiling, around and inside of what is sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from shardwright import fully_shard
from shardwright.wrapper import FSDP, ModuleWrapPolicy, OptimStateKeyType, StateDictType, TrainingState
from tests.ranks.models import Block, Run, batches, build, loss_of, shard_decoder, train_by
from tests.ranks.pool import on_ranks
from tests.ranks.wrapped import same_state


def checkpointed(model, *classes):
    """The model with each module of these classes wrapped for recomputation."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, classes))
    return model


def by_block(model, **options):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


WAYS = {
    "around": lambda model, **options: checkpointed(by_block(model, **options), Block),
    "inside": lambda model, **options: by_block(checkpointed(model, nn.Linear), **options),
    "between": lambda model, **options: FSDP(checkpointed(model, Block), **options),
}


def stepped(model, tokens):
    run = Run.of(model, torch.optim.Adam, lr=0.01)
    train_by(run, [loss_of(model, tokens)])
    return run.optimizer


@pytest.mark.parametrize("flat", [False, True], ids=["apart", "flat"])
@on_ranks(2)
def test_a_checkpoint_wrapper_changes_no_name_no_number_and_no_method(rank, world, flat):
    options = {"use_orig_params": not flat}
    tokens = batches(0, world)[rank]
    expected_model = by_block(build(), **options)
    expected_optimizer = stepped(expected_model, tokens)
    expected = expected_model.state_dict()
    expected_state = FSDP.optim_state_dict(expected_model, expected_optimizer)
    for way in WAYS.values():
        model = way(build(), **options)
        optimizer = stepped(model, tokens)
        assert model.training_state is TrainingState.IDLE
        assert {each.training_state for each in FSDP.fsdp_modules(model)} == {TrainingState.IDLE}
        same_state(model.state_dict(), expected)
        with FSDP.summon_full_params(model, writeback=False):
            assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
            shapes = sorted(tuple(p.shape) for p in model.parameters())
        assert shapes == sorted(tuple(p.shape) for p in build().parameters())
        # Its own state dicts, those of a model that isn't wrapped, and the other way round.
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            other, unwrapped = way(build(1), **options), by_block(build(1), **options)
            for each in (model, other, unwrapped):
                FSDP.set_state_dict_type(each, kind)
            other.load_state_dict(model.state_dict())
            unwrapped.load_state_dict(model.state_dict())
            for each in (model, other, unwrapped):
                FSDP.set_state_dict_type(each, StateDictType.FULL_STATE_DICT)
            same_state(other.state_dict(), expected)
            same_state(unwrapped.state_dict(), expected)
        other = way(build(1), **options)
        other.load_state_dict(build().state_dict())
        same_state(other.state_dict(), build().state_dict())
        build().load_state_dict(model.state_dict())
        # The optimizer's state has the names of the model as it was, both ways.
        state = FSDP.optim_state_dict(model, optimizer)
        assert state["state"].keys() == expected_state["state"].keys()
        for name, entry in state["state"].items():
            same_state(entry, expected_state["state"][name])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, expected_state))
        ready = FSDP.optim_state_dict_to_load(expected_model, expected_optimizer, state)
        expected_optimizer.load_state_dict(ready)

        @torch.no_grad()
        def fill(module):
            for param in module.parameters(recurse=False):
                param.fill_(0.5)

        model.apply(fill)
        assert all((value == 0.5).all() for name, value in model.state_dict().items() if "shift" not in name)


@on_ranks(2)
def test_plain_state_loads_where_checkpoint_wrappers_lie_around_or_inside_of_groups(rank, world):
    expected = build().state_dict()
    tokens = batches(0, world)[rank]

    def around(model):
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(fully_shard(block))
        return fully_shard(model)

    ways = [
        around,
        lambda model: shard_decoder(checkpointed(model, nn.Linear), fully_shard),
        lambda model: fully_shard(checkpointed(model, Block)),
        lambda model: fully_shard(checkpoint_wrapper(model)),
    ]
    for way in ways:
        model = way(build(1))
        model.load_state_dict(expected)
        same_state(model.state_dict(), expected)
        loss_of(model, tokens).backward()
        assert all(param.grad is not None for param in model.parameters())
        again = way(build(1))
        again.load_state_dict(model.state_dict())
        same_state(again.state_dict(), expected)


@pytest.mark.slow
@on_ranks(2)
def test_the_optimizer_state_of_a_compiled_module_has_the_names_without(rank, world):
    def with_compiled_blocks(model):
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="eager")
        return model

    model, plain = FSDP(with_compiled_blocks(build())), FSDP(build())
    tokens = batches(0, world)[rank]
    state = FSDP.optim_state_dict(model, stepped(model, tokens))
    optimizer = stepped(plain, tokens)
    assert state["state"].keys() == FSDP.optim_state_dict(plain, optimizer)["state"].keys()
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(plain, optimizer, state))
    numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model)
    assert numbered["state"].keys() == set(range(len(list(model.parameters()))))
