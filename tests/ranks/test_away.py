"""States that the caller puts on the host between two phases of training, and what is refused meanwhile."""

import pytest
import torch

from shardwright import (
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    offload_states,
    reload_states,
)
from shardwright.errors import InputError, StageError
from tests.ranks.models import Run, batches, build, loss_of, shard_decoder
from tests.ranks.pool import on_ranks


def refused(call, *words):
    with pytest.raises(StageError, match="reload_states") as caught:
        call()
    assert all(word in str(caught.value) for word in words)


def trained(world, rank):
    run = Run.of(shard_decoder(build(), fully_shard), torch.optim.AdamW, lr=1e-2)
    tokens = batches(0, world)[rank]
    loss_of(run.model, tokens).backward()
    run.step()
    loss_of(run.model, tokens).backward()
    return run, tokens


@on_ranks(2)
def test_what_needs_parameters_that_are_away_is_refused_and_names_reload_states(rank, world, tmp_path):
    folder = str(tmp_path)
    run, tokens = trained(world, rank)
    model = run.model
    offload_states(model, grads=False)
    refused(lambda: loss_of(model, tokens), "this forward", "parameters of group")
    with torch.no_grad():
        refused(lambda: model(tokens), "this evaluation")
    refused(run.optimizer.step, "a step of AdamW")
    refused(model.unshard)
    refused(model.state_dict)
    refused(lambda: full_state_dict(model))
    refused(lambda: model.load_state_dict({}))
    refused(lambda: model.to(torch.float64))
    refused(lambda: checkpoint.save(folder, model=model, step=1))
    clip_grad_norm_(model.parameters(), 1.0)
    reload_states(model, params=False)
    refused(run.optimizer.step)
    reload_states(model)
    run.step()
    twin, _ = trained(world, rank)
    clip_grad_norm_(twin.model.parameters(), 1.0)
    twin.step()
    pairs = zip(model.parameters(), twin.model.parameters(), strict=True)
    assert all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)


@on_ranks(2)
def test_what_needs_gradients_that_are_away_is_refused_until_they_are_dropped(rank, world):
    run, tokens = trained(world, rank)
    model = run.model
    loss = loss_of(model, tokens)
    offload_states(model, params=False)
    with torch.no_grad():
        model(tokens)
    refused(lambda: loss_of(model, tokens), "this forward", "gradients")
    refused(loss.backward, "this backward")
    refused(run.optimizer.step)
    refused(lambda: clip_grad_norm_(model.parameters(), 1.0), "clip_grad_norm_")
    run.optimizer.zero_grad()  # what was dropped there is needed no more
    loss_of(model, tokens).backward()
    run.step()
    reload_states(model)


@on_ranks(2)
def test_without_the_optimizers_state_a_model_runs_and_is_saved_and_only_a_step_is_refused(
    rank, world, tmp_path
):
    folder = str(tmp_path)
    run, tokens = trained(world, rank)
    before = {id(param): dict(state) for param, state in run.optimizer.state.items()}
    offload_states(run.model, run.optimizer, params=False, grads=False)
    loss_of(run.model, tokens).backward()
    refused(run.optimizer.step, "optimizer state")
    checkpoint.save(folder, model=run.model, optimizer=run.optimizer, step=1)
    reload_states(run.model, params=False, grads=False)
    run.step()
    for param, state in run.optimizer.state.items():
        assert all(value is before[id(param)][key] for key, value in state.items())


@on_ranks(2)
def test_states_go_away_between_steps_alone_and_on_any_rank_by_itself(rank, world):
    run, tokens = trained(world, rank)
    model = run.model
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: offload_states(model))
    with pytest.raises(StageError, match="inside a forward"):
        model(tokens)
    handle.remove()
    run.optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens).backward()
    with pytest.raises(StageError, match="microbatches"):
        offload_states(model)
    model.set_requires_gradient_sync(True)
    loss_of(model, tokens).backward()
    if rank == 0:  # by itself, and as often as one likes
        for _ in range(2):
            offload_states(model, run.optimizer)
        reload_states(model)
        reload_states(model)
    run.step()
    with pytest.raises(InputError, match="fully_shard"):
        offload_states(build())
    with pytest.raises(InputError, match="fully_shard"):
        reload_states(build())
