"""On a CPU predicted live bytes equal counted ones, at every event of a step."""

import gc
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from unittest import mock

import pytest
import torch
from torch import nn

from shardwright import SchedulePolicy, fully_shard
from shardwright.engine.groups import group as groups
from shardwright.engine.step.runtime import Runtime
from shardwright.params.binding import Buffer
from shardwright.plan.predict import Choice, workload_of
from shardwright.plan.presets import preset, schedule
from tests.ranks.live import counted_at_events, storages_here
from tests.ranks.planned import MODELS, loss_of
from tests.ranks.pool import run_ranks
from tests.ranks.predicted import Rank, live_bytes

POLICIES = {
    "default": (SchedulePolicy(), None),
    "stays unsharded": (SchedulePolicy(bucket_cap_mb=0.0), False),
    "two ahead": (SchedulePolicy(depth=2, bucket_cap_mb=0.0), None),
    "on demand": (
        SchedulePolicy(forward_prefetch=False, backward_prefetch="none", keep_last=0, bucket_cap_mb=0.0),
        None,
    ),
}


def step(model, x):
    out = model(x)
    loss = loss_of(out)
    loss.backward()


@cache
def traced(name, reshard):
    case = MODELS[name]
    choice = Choice("shardwright", case.groups, case.precision, reshard is not False)
    return workload_of(case.make(), case.inputs(), choice, loss_of)


def predicted(name, policy, reshard, rank):
    workload = traced(name, reshard)
    planned = schedule(workload, replace(preset("shardwright"), policy=policy), reshard is not False)
    return [(held.at, held.total) for held in live_bytes(planned, workload, rank)]


def count(rank, world, names, policies, step=step):
    """What is alive at each event of a third step; by model and policy."""
    fully_shard(nn.Linear(1, 1))  # makes what a process has once
    others = storages_here()
    gc.collect()
    gc.freeze()  # what is there by now isn't looked through again
    found = []
    for name in names:
        case = MODELS[name]
        for policy, reshard in (POLICIES[each] for each in policies):
            model, x = case.make(), case.inputs()
            fully_shard(model, groups=case.groups, mp_policy=case.precision, reshard_after_forward=reshard)
            model.set_schedule_policy(policy)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            for _ in range(2):
                step(model, x)
                optimizer.step()
                optimizer.zero_grad()
            with counted_at_events(others) as rows:
                step(model, x)
            found.append((rows, str(replace(model.schedule(), names=()))))
            freed = weakref.ref(model)
            del model, x, optimizer
            collect(freed)
    return found


def collect(freed):
    """Until it is freed: the watch thread, which may read the recorder now, holds its groups for a moment."""
    end = time.monotonic() + 10
    while freed() is not None and time.monotonic() < end:
        gc.collect()


def check(world, names, policies, counting=count):
    """Raises: AssertionError with the events at which what is alive isn't what was predicted."""
    cases = [(name, policy) for name in names for policy in policies]
    for rank, found in enumerate(run_ranks(world, counting, names, policies)):
        for (name, policy), (counted, planned) in zip(cases, found, strict=True):
            expected = predicted(name, *POLICIES[policy], Rank(rank, world, MODELS[name].precision))
            rows = [row for row in zip_longest(counted, expected) if row[0] != row[1]]
            table = "\n".join(f"counted {row[0]}, predicted {row[1]}" for row in rows)
            assert not rows, f"{name}, {policy}, rank {rank} of {world}:\n{table}\n{planned}"


def count_with_a_late_free(rank, world, names, policies):
    """One buffer, of the first reshard that there is, is freed after the next event."""
    late, due, steps = [], [], [0]
    free = Buffer.free

    def free_late(buffer):
        if late or not buffer.allocated_nbytes:
            free(buffer)
        else:
            late.append(buffer)
            due.append(buffer)

    def step_late(model, x):
        counting, steps[0] = Runtime.at, steps[0] + 1

        def at_late(runtime, *event):
            before = list(due)
            counting(runtime, *event)
            for buffer in before:
                free(buffer)
                due.remove(buffer)

        patched = mock.patch.object(Buffer, "free", free_late), mock.patch.object(Runtime, "at", at_late)
        unseen = mock.patch.object(groups, "moved_memory", lambda *_: None)  # which would tell it at once
        with nullcontext() if steps[0] < 3 else patched[0], patched[1], unseen:
            step(model, x)

    found = count(rank, world, names, policies, step_late)
    assert len(late) == 1
    return found


def test_a_buffer_that_is_freed_one_event_late_is_seen():
    lines = r"after F- 0[^\n]*\n *counted \('before F\+ 1[^\n]*\n *counted \('after F\+ 1[^\n]*\n *forward"
    with pytest.raises(AssertionError, match=lines):
        check(1, ["mlp"], ["on demand"], count_with_a_late_free)


def test_predicted_live_bytes_are_those_that_are_counted_at_every_event():
    check(2, ["mlp", "transformer", "mixed precision", "cut block"], ["default", "on demand"])


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_they_are_for_every_kind_of_model_and_policy(world, policy):
    check(world, list(MODELS), [policy])
