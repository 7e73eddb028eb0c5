"""What is asked of all shards together on cards: whole weights, checkpoints, clipping, a changing model."""

import copy

import pytest
import torch
from torch import nn

from shardwright import CPUOffloadPolicy, clip_grad_norm_, full_state_dict, fully_shard, stats
from shardwright.checkpoint import load, save
from tests.gpu.cards import NEEDS_CARDS, WORLDS, result, run_on_cards
from tests.ranks.models import Run, assert_same, batches, build, loss_of, shard_decoder

pytestmark = NEEDS_CARDS


def beside_one_process(device, rank, world):
    """Three clipped steps; the reference sees all ranks' batches on the same card. Bytes that are left."""
    reference = build()
    model = shard_decoder(copy.deepcopy(reference), fully_shard)
    place = next(model.parameters()).device
    ours, theirs = Run.of(model), Run.of(reference.to(place))
    for step in range(3):
        tokens = batches(step, world).to(place)
        loss_of(model, tokens[rank]).backward()
        torch.stack([loss_of(reference, rows) for rows in tokens]).mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert norm.item() == pytest.approx(expected.item(), abs=1e-4, rel=1e-4)
        ours.step()
        theirs.step()
        assert_same(model, reference, 1e-4)
    return place.type, stats(model).unsharded_nbytes


def whole_weights(device, rank, world):
    model = shard_decoder(build(), fully_shard)
    found, expected = full_state_dict(model), build().state_dict()
    if rank:
        return found == {}
    on_host = all(value.device.type == "cpu" for value in found.values())
    return on_host and all(torch.equal(found[name], value) for name, value in expected.items())


def saved_and_read_back(device, rank, world, folder, offload):
    """The second model goes on from the first one's file; the losses of both, of the same two steps."""
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=not device.simulated)} if offload else {}

    def losses(run, steps):
        found = []
        for step in steps:
            loss = loss_of(run.model, batches(step, world)[rank].to(device.kind))
            loss.backward()
            run.step()
            found.append(loss.item())
        return found

    first = Run.of(shard_decoder(build(), fully_shard, **options), torch.optim.AdamW, lr=1e-2)
    second = Run.of(shard_decoder(build(seed=1), fully_shard, **options), torch.optim.AdamW, lr=1e-2)
    losses(first, range(2))
    save(folder, model=first.model, optimizer=first.optimizer, step=2)
    assert load(folder, model=second.model, optimizer=second.optimizer).step == 2
    return losses(first, range(2, 4)), losses(second, range(2, 4))


def steady_steps(device, rank, world):
    """Two steps after three others, in which CUDA raises an error where the host waits for it."""
    run = Run.of(shard_decoder(build(), fully_shard), torch.optim.AdamW, lr=1e-2)
    tokens = [batches(step, world)[rank].to(device.kind) for step in range(5)]
    for step in range(5):
        if step == 3 and device.kind == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        loss_of(run.model, tokens[step]).backward()
        run.step()
    if device.kind == "cuda":
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module", params=WORLDS, ids="{} cards".format)
def found(request, tmp_path_factory):
    """What ranks return, by the job."""
    jobs = {
        "beside one process": (beside_one_process, ()),
        "whole": (whole_weights, ()),
        "steady": (steady_steps, ()),
        "saved": (saved_and_read_back, (str(tmp_path_factory.mktemp("saved")), False)),
        "saved from the host": (saved_and_read_back, (str(tmp_path_factory.mktemp("offloaded")), True)),
    }
    return run_on_cards(request.param, jobs)


def test_clipped_steps_are_those_of_one_process_and_leave_nothing_unsharded(found):
    for _, left_nbytes in result(found, "beside one process"):
        assert left_nbytes == 0


def test_full_state_dict_gives_rank_0_the_weights_to_the_bit(found):
    assert all(result(found, "whole"))


def test_the_host_waits_for_nothing_in_steady_steps(found):
    result(found, "steady")


@pytest.mark.parametrize("name", ["saved", "saved from the host"])
def test_a_checkpoint_is_read_back_to_the_bit(found, name):
    for ours, theirs in result(found, name):
        assert ours == theirs
