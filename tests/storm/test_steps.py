"""Whatever ranks leave out, reorder, repeat and fail at: launches are alike, sums exact, and none waits for
ever. Each night is one seed's (weather.py); ``python -m tests.storm steps --seed N`` shows it."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright import clock
from shardwright.engine.step import consensus
from shardwright.errors import Diverged
from shardwright.policy import SchedulePolicy
from shardwright.schedule.following import Mode
from shardwright.schedule.schedule import ActionKind, Event, EventKind, GroupSpec, Phase
from shardwright.transport.process import process_state
from tests.storm import explore
from tests.storm.__main__ import DEPTHS, fresh
from tests.storm.steps import ALONE, DIVERGES, HEALTHY, Broken, Plan, run
from tests.storm.weather import STEP, backward, draw, forward, night, train

ROOT = Path(__file__).parents[2]
FRESH_S = 3.0
A, B, C, TOP = 0, 1, 2, 3
SPEC = GroupSpec(nbytes=1)


def job(*programs, mode=Mode.AGREED, specs=(SPEC,) * 4, expects=HEALTHY, forget_after=100, **options):
    """The ranks of these programs, when nothing more comes of them."""
    entries = (frozenset(range(len(specs))), frozenset({A, len(specs) - 1}))
    told = tuple(map(tuple, programs))
    return run(Plan(0, mode, SchedulePolicy(**options), specs, entries, told, expects, forget_after))


def launched(night, kind, group):
    return sum(action.kind is kind and group in action.groups for action, *_ in night.launches)


# ---- random faults


@pytest.mark.parametrize("tens", range(12))
def test_nights_of_kept_seeds_keep_every_promise(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        night(seed)


@pytest.mark.parametrize("seed", [573501922, 728849083, 1791232546, 2053768355])
def test_nights_that_have_failed_keep_every_promise(seed):
    """The caller has a group gathered that was to stay unsharded; a forward that failed on one rank alone; a
    backward within a forward, with no agreement; a forward of which the caller has unsharded all."""
    night(seed)


def test_a_rank_alone_is_exact_whatever_it_runs_and_asks_nobody():
    alone = [seed for seed in range(400) if draw(seed).mode is Mode.LOCAL]
    for seed in alone:
        assert not night(seed).rounds
    assert len(alone) > 30
    assert consensus.channel_of([SimpleNamespace(comm=SimpleNamespace(world=1), replicate=None)]) is None


@pytest.mark.exhaustive
def test_nights_of_fresh_seeds_keep_every_promise():
    start = clock.monotonic()
    failed = {
        seed: error
        for seed, _, error in fresh(DEPTHS["steps"], lambda _: clock.monotonic() - start > FRESH_S)
        if error
    }
    assert not failed, "python -m tests.storm steps --seed N shows each"


def test_every_kind_of_fault_is_among_the_kept_seeds():
    plans = [draw(seed) for seed in range(120)]
    ops = {instruction[0] for plan in plans for program in plan.programs for instruction in program}
    assert {"raise", "raise after", "die", "join", "set", "rest", "do", "replan", "forget", "enter"} <= ops
    assert {plan.expects for plan in plans} == {HEALTHY, DIVERGES, ALONE}
    assert {plan.mode for plan in plans} == {Mode.AGREED, Mode.LOCAL}
    assert any(plan.restarts for plan in plans)


TOLD = """
import hashlib
from tests.storm.weather import night
history = []
for seed in range(12): night(seed, history)
print(hashlib.sha256("\\n".join(history).encode()).hexdigest())
"""


def test_a_seed_has_one_history_in_every_process(monkeypatch):
    monkeypatch.setattr(process_state, "step", 12)  # as after other tests
    history = []
    for seed in range(12):
        night(seed, history)
    told = {hashlib.sha256("\n".join(history).encode()).hexdigest()}
    for hash_seed in ("1", "2"):
        paths = os.pathsep.join(filter(None, sys.path))
        env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
        command = [sys.executable, "-c", TOLD]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        told.add(run.stdout.strip())
    assert len(told) == 1


# ---- every way of small jobs


def test_every_way_of_two_ranks_keeps_every_promise():
    assert sum(explore.explore(plan) for plan in explore.plans(2, 2)) > 10_000


@pytest.mark.parametrize("fault", ["die", "raise"])
def test_every_way_with_one_fault_anywhere_keeps_every_promise(fault):
    assert sum(explore.explore(plan, fault) for plan in explore.plans(2, 1)) > 5_000


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "die", "raise"])
@pytest.mark.parametrize(("world", "longest"), [(2, 3), (3, 1)])
def test_every_way_of_larger_jobs_keeps_every_promise(world, longest, fault):
    for plan in explore.plans(world, longest):
        explore.explore(plan, fault)


# ---- what ranks ask


def skipping(rank, step):
    return [A, C] if (step + rank) % 3 else [A, B, C]


CASES = {
    "the same on all": [[[A, B, C]] * 6] * 3,
    "one rank skips in turn": [[skipping(rank, step) for step in range(6)] for rank in range(3)],
    "nobody uses a group": [[[A, B, C], [A, C], [A, C], [A, B, C]] * 2] * 2,
    "late": [[[A, C]] * 3 + [[A, B, C] if (n + r) % 2 else [A, C] for n in range(6)] for r in range(2)],
    "other order": [[[A, B, C]] * 6, [[C, B, A]] * 6],
    "shared layers": [[[A, B, A, B]] * 6, [[A, C, B]] * 6],
}


def asked(steps, **options):
    """A night in which rank ``r`` goes ``steps[r]``; how often each step of the first rank asked."""
    programs = []
    for rank, routes in enumerate(steps):
        program = []
        for number, route in enumerate(routes):
            program += [*train(TOP, route, 1 << 200 * number + 8 * rank), ("mark",)]
        programs.append(program)
    night = job(*programs, **options)
    marks = [rank.marks for rank in night.ranks]
    assert all(each == marks[0] for each in marks)
    return night, [after - before for before, after in zip((0, *marks[0]), marks[0], strict=False)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_stop_asking_once_the_schedule_has_all_their_orders(name):
    _, counts = asked(CASES[name])
    assert counts[0] > 0
    assert counts[-1] == 0


def test_ranks_stop_asking_though_what_was_detached_has_no_backward():
    def program(rank):
        for step in range(6):
            used = [C, A] if (step + rank) % 2 else [C, B, A]
            yield from (
                *forward(TOP, [A, B, C]),
                *backward(TOP, used, 1 << 32 * step + 8 * rank),
                STEP,
                ("mark",),
            )

    for rank in job(program(0), program(1)).ranks:
        assert rank.marks[0] > 0
        assert rank.marks[-1] == rank.marks[-2]


def test_a_group_that_nobody_uses_any_more_is_gathered_until_it_is_forgotten():
    steps = [[A, B, C], *[[A, C]] * 6, [A, B, C], [A, B, C]]
    _, counts = asked([steps] * 3, forget_after=4, bucket_cap_mb=0)
    assert [count > 0 for count in counts] == [True, *[False] * 6, True, False]
    night, _ = asked([steps[:7]] * 3, forget_after=4, bucket_cap_mb=0)
    # Two steps without it, in forward and backward.
    assert launched(night, ActionKind.UNSHARD, A) - launched(night, ActionKind.UNSHARD, B) == 2 * 2


def test_what_one_rank_no_longer_holds_is_gathered_by_all_without_asking():
    def program(rank):
        for step in range(6):
            yield from (("mark",), *forward(TOP, [A, B, C]))
            yield from (("do", ActionKind.RESHARD, group) for group in range(4) if rank == 0)
            yield from (*backward(TOP, [C, B, A], 1 << 32 * step + 8 * rank), STEP)

    night = job(*map(program, range(3)), specs=(GroupSpec(False, nbytes=1),) * 4)
    assert [rank.num_asked - rank.marks[-1] for rank in night.ranks] == [0, 0, 0]


# ---- what ranks hold


def held(night):
    return [rank.local(Phase.FORWARD).held for rank in night.ranks]


def test_a_group_of_which_not_all_modules_ran_is_at_rest_after_the_forward_of_a_rank_alone():
    begun = [("begin", Phase.FORWARD, 0), ("at", Event(EventKind.FORWARD_BEGIN, A)), ("end",)]
    assert held(job(begun, mode=Mode.LOCAL)) == [0]


def test_an_evaluation_leaves_nothing_unsharded():
    program = [("do", ActionKind.UNSHARD, B), *forward(TOP, [A, B], Phase.EVALUATION)]
    assert held(job(program, program)) == [0, 0]


UNSHARDED = [("do", ActionKind.UNSHARD, group) for group in range(4)]


def test_a_forward_that_finds_all_unsharded_keeps_it_through_a_backward_inside_of_it():
    def program(rank):
        outer = forward(TOP, [A, B, A])
        inner = [("enter", Phase.BACKWARD, 0), *backward(A, [], 1 << rank)[1:]]
        return [*UNSHARDED, *outer[:4], *inner, *outer[4:], *backward(TOP, [A, B, A], 16 << 8 * rank), STEP]

    job(program(0), program(1))


def test_ranks_that_have_evaluated_differently_hold_the_same_once_all_have_joined():
    specs = (*(SPEC,) * 3, GroupSpec(is_root=True, nbytes=1))
    program = [*forward(TOP, [A], Phase.EVALUATION), ("join",), *UNSHARDED]
    job(program, program[-5:], specs=specs)


def test_ranks_that_have_evaluated_differently_agree_on_the_backward_of_what_is_unsharded_by_hand():
    part = [("begin", Phase.EVALUATION, 1), *forward(TOP, [A], Phase.EVALUATION)[1:]]

    def program(rank):
        return [*part * rank, ("join",), ("rest",), *UNSHARDED, *train(TOP, [A, B], 1 << 8 * rank)]

    job(program(0), program(1))


def test_a_late_wait_for_what_was_unsharded_by_hand_does_not_pass_for_an_unshard():
    def program(rank):
        outer = forward(TOP, [A, A])
        return [*outer[:4], ("do", ActionKind.WAIT, A), *outer[4:], *backward(TOP, [A], 1 << 8 * rank), STEP]

    job(program(0), program(1))


# ---- what ranks reduce


def test_what_nobody_uses_is_not_reduced():
    night, _ = asked(CASES["nobody uses a group"])
    assert launched(night, ActionKind.REDUCE, B) == 4
    assert launched(night, ActionKind.REDUCE, A) == 8


def test_a_rank_that_is_killed_leaves_no_step_of_the_others_settled():
    program = [*train(TOP, [A, B], 1), *train(TOP, [A, B], 1 << 32)]
    killed = [*program[:-9], ("die",)]
    night = job(program, program, killed, expects=ALONE)
    assert [rank.num_settled for rank in night.ranks] == [1, 1, 1]


def test_ranks_in_different_calls_are_told_so_with_one_rank_of_each_kind():
    begin = [[("begin", phase, entry)] for phase, entry in ((Phase.FORWARD, 1), (Phase.BACKWARD, 0))]
    night = job([("set", "reduce", 0), STEP, *begin[0]], begin[1], [("join",)], begin[1], expects=DIVERGES)
    for rank in night.ranks:
        assert isinstance(rank.error, Diverged)
        assert str(rank.error).splitlines()[:-1] == [
            "ranks are in different calls (one rank of each kind is shown):",
            "  rank 0: the forward of part, after 1 steps of optimizers, of pass 0 (program)",
            "  rank 1: the backward, reducing 4 of 4 groups, 4 trainable parameters, of pass 0 (program)",
            "  rank 2: join_evaluations, of pass 0 (program)",
        ]


def test_a_rank_that_left_a_step_of_its_optimizer_out_is_told_at_the_next_forward():
    begin = ("begin", Phase.FORWARD, 0)
    night = job([STEP, begin], [begin], specs=(SPEC,), expects=DIVERGES)
    assert [str(rank.error).count("after 1 steps of optimizers") for rank in night.ranks] == [1, 1]


def test_the_line_of_a_call_is_the_users(monkeypatch):
    assert consensus._user_line() == f"{__file__}:{sys._getframe().f_lineno}"
    monkeypatch.setattr(consensus, "_OURS", (*consensus._OURS, "concurrent"))
    with ThreadPoolExecutor() as pool:
        assert pool.submit(consensus._user_line).result() == "a thread of autograd's"


def test_what_all_keep_over_a_smaller_world_is_gathered_from_there():
    specs = (GroupSpec(True, nbytes=1, smaller_world=True), *(SPEC,) * 3)
    night = job(*[train(TOP, [A, B], 1 << 8 * rank) for rank in range(2)], specs=specs)
    assert sum(action.smaller for action, *_ in night.launches) == 1


# ---- what breaks a promise is seen


def test_gradients_that_one_rank_loses_are_seen(monkeypatch):
    own = run.__globals__["Group"].hold

    def hold(self, *told):
        if self.rank == 1 and self.number == B:
            self.grad = None
        own(self, *told)

    monkeypatch.setattr(run.__globals__["Group"], "hold", hold)
    with pytest.raises(Broken, match="of group 1 there is 2 not"):
        job(train(TOP, [A, B], 1), train(TOP, [A, B], 1 << 8))
