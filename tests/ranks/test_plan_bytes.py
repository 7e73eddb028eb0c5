"""On a CPU predicted live bytes equal counted ones, at every event of a step."""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from shardwright import MixedPrecisionPolicy, SchedulePolicy, fully_shard
from shardwright.engine.runtime import Runtime
from shardwright.params.buffer import Buffer
from shardwright.plan.host import Rank, live_bytes
from shardwright.plan.predict import Choice, workload_of
from shardwright.plan.presets import preset, schedule
from tests.ranks.live import counted_at_events, storages_here
from tests.ranks.pool import run_ranks


def mlp():
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(10, 30), nn.GELU(), nn.Linear(30, 10)) for _ in range(3))
    return nn.Sequential(nn.Linear(7, 10), *layers, nn.Linear(10, 3))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


MODELS = {
    "mlp": (mlp, lambda: numbers(5, 7), [["0"], ["1"], ["2"], ["3"], ["4"]], MixedPrecisionPolicy()),
}
POLICIES = {
    "default": (SchedulePolicy(), None),
    "stays unsharded": (SchedulePolicy(bucket_cap_mb=0.0), False),
    "two ahead": (SchedulePolicy(depth=2, bucket_cap_mb=0.0), None),
    "on demand": (
        SchedulePolicy(forward_prefetch=False, backward_prefetch="none", keep_last=0, bucket_cap_mb=0.0),
        None,
    ),
}


def squared(out):
    return out.square().mean()


def step(model, x):
    out = model(x)
    loss = squared(out)
    loss.backward()


def predicted(model, x, choice, policy, rank):
    workload = workload_of(model, x, choice, squared)
    runs = replace(preset("shardwright"), policy=policy)
    planned = schedule(workload, runs, choice.reshard_after_forward)
    return [(held.at, held.total) for held in live_bytes(planned, workload, rank)]


def check(rank, world, models, policies, step=step):
    fully_shard(nn.Linear(1, 1))  # makes what a process has once
    for name in models:
        make, inputs, groups, precision = MODELS[name]
        for policy, reshard in (POLICIES[each] for each in policies):
            others = storages_here()
            model, x = make(), inputs()
            fully_shard(model, groups=groups, mp_policy=precision, reshard_after_forward=reshard)
            model.set_schedule_policy(policy)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            for _ in range(2):
                step(model, x)
                optimizer.step()
                optimizer.zero_grad()
            with counted_at_events(others) as counted:
                step(model, x)
            choice = Choice(groups=groups, mp_policy=precision, reshard_after_forward=reshard is not False)
            expected = predicted(make(), x, choice, policy, Rank(rank, world, precision))
            if counted != expected:
                rows = zip(counted, expected, strict=False)
                table = "\n".join(
                    f"{a[0]}: {a[1]} counted; {b[0]}: {b[1]} predicted" for a, b in rows if a != b
                )
                raise AssertionError(f"{name} world {world} {policy}\n{table}\n{model.schedule()}")


def check_that_a_late_free_is_seen(rank, world):
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

        def at_late(runtime, kind, group=None):
            before = list(due)
            counting(runtime, kind, group)
            for buffer in before:
                free(buffer)
                due.remove(buffer)

        patched = mock.patch.object(Buffer, "free", free_late), mock.patch.object(Runtime, "at", at_late)
        with nullcontext() if steps[0] < 3 else patched[0], patched[1]:
            step(model, x)

    with pytest.raises(AssertionError, match=r"after F- 0.*\n.*before F\+ 1"):
        check(rank, world, ["mlp"], ["on demand"], step_late)


def test_a_buffer_that_is_freed_one_event_late_is_seen():
    run_ranks(2, check_that_a_late_free_is_seen)


@pytest.mark.parametrize("world", [1, 2])
def test_predicted_live_bytes_are_those_that_are_counted_at_every_event(world):
    run_ranks(world, check, ["mlp"], list(POLICIES))
