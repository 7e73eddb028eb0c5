"""What the recorder holds of real steps: by names, without a gap, and alike on all ranks."""

import itertools
import time

import pytest
import torch

from shardwright import fully_shard, set_transport
from shardwright.observe.steps.clocks import offsets
from shardwright.observe.steps.recording import ring
from shardwright.schedule.schedule import Schedule
from shardwright.transport.process import span
from tests.ranks.models import Run, batches, build, loss_of, shard_decoder
from tests.ranks.pool import on_ranks, run_ranks

NAMES = {"Decoder", "blocks.0", "blocks.1", "blocks.2"}
LATE_S = 0.15


def trained(rank, world, transport, steps=4, late=-1):
    set_transport(transport)
    run = Run.of(shard_decoder(build(), fully_shard))
    for step in range(steps):
        with span("data"):
            tokens = batches(step, world)[rank]
            time.sleep(LATE_S if rank == late and step else 0)
        for part in tokens.chunk(2):
            loss_of(run.model, part).backward()
        run.step()
    return ring(), str(run.model.schedule()), str(run.model.trace())


def tiles(found):
    """What the training thread did, one after another."""
    return [each for each in found.records if each.kind in ("compute", "outside", "span", "runtime")]


@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
def test_the_time_of_a_step_is_booked_whole_and_once(transport):
    found = run_ranks(2, trained, transport)[0][0]
    own = tiles(found)
    for before, after in itertools.pairwise(own):
        assert after.start == pytest.approx(before.end, abs=1e-9), (before, after)
    assert own[0].start == found.steps[0].start
    assert [each.number for each in found.steps] == [1, 2, 3, 4, 5]  # microbatches are none of their own
    kinds = {(each.kind, each.action) for each in own}
    assert {("span", "data"), ("span", "optimizer"), ("compute", ""), ("outside", "loss")} <= kinds
    for each in found.records:
        if each.kind in ("action", "wait"):
            around = [one for one in own if one.start <= each.start and each.end <= one.end + 1e-9]
            assert around, each


@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
def test_collectives_have_numbers_names_and_bytes_alike_on_all_ranks(transport):
    rings = [found for found, *_ in run_ranks(2, trained, transport)]
    made = [
        {(r.transport, r.number): (r.action, r.groups, r.nbytes, r.phase) for r in each.records if r.number}
        for each in rings
    ]
    assert made[0] == made[1]
    of_groups = [each for each in made[0].values() if each[0] != "words"]
    assert {name for _, groups, *_ in of_groups for name in groups} == NAMES
    assert all(nbytes > 0 for *_, nbytes, _ in of_groups)
    assert {action for action, *_ in of_groups} == {"all-gather", "reduce-scatter"}
    for each in rings[0].records:
        assert each.issue <= each.end and each.start <= each.end


@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
def test_a_wait_leads_to_the_rank_that_was_late(transport):
    rings = [found for found, *_ in run_ranks(2, trained, transport, 4, 1)]
    waits = [each for each in rings[0].records if each.kind == "wait" and each.end - each.start > LATE_S / 2]
    assert len(waits) >= 3
    for wait in waits[-3:]:
        issued = [
            next(
                one.issue
                for one in each.records
                if one.kind == "collective" and (one.transport, one.number) == (wait.transport, wait.number)
            )
            for each in rings
        ]
        assert issued[1] > issued[0] + LATE_S / 2
        assert wait.start < issued[1] <= wait.end


@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
def test_clocks_of_ranks_of_one_host_are_found_to_be_the_same(transport):
    found = offsets([each for each, *_ in run_ranks(3, trained, transport)])
    for rank in (1, 2):
        assert abs(found[rank].offset_s) <= found[rank].error_s < 0.1


def test_schedule_and_trace_name_groups_by_their_modules():
    _, schedule, trace = run_ranks(2, trained, "auto")[0]
    assert "unshard blocks.1" in schedule and "F+ blocks.0" in schedule
    assert "wait blocks.1" in trace and "Decoder" in trace
    assert not any(word.isdigit() for word in schedule.split())


def dawdle():
    time.sleep(0.6)


@on_ranks(2)
def test_code_that_nobody_marked_is_named_by_its_line(rank, world):
    run = Run.of(shard_decoder(build(), fully_shard))
    for step in range(3):
        dawdle()
        loss_of(run.model, batches(step, world)[rank]).backward()
        run.step()
    found = [each for each in ring().records if each.kind == "outside" and each.end - each.start > 0.5]
    assert len(found) >= 2
    assert all("test_recorder.py" in each.note and "in dawdle" in each.note for each in found[-2:])


@on_ranks(2)
def test_the_text_of_a_schedule_with_names_parses_back(rank, world):
    model = shard_decoder(build(), fully_shard)
    for step in range(2):  # the first one is recorded, and the second planned from it
        loss_of(model, batches(step, world)[rank]).backward()
    schedule = model.schedule()
    assert Schedule.parse(str(schedule), schedule.names) == schedule
    assert model.trace().schedule() == schedule
    assert torch.is_grad_enabled()
