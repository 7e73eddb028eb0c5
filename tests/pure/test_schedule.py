"""Plans are sound for any order of groups, and print as text that parses back."""

import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.policy import BackwardPrefetch, SchedulePolicy
from shardwright.schedule.check import check
from shardwright.schedule.schedule import (
    BEGINS,
    Action,
    ActionKind,
    Event,
    EventKind,
    GroupSpec,
    Phase,
    Schedule,
    ScheduleEntry,
    event_in_words,
)
from shardwright.schedule.scheduler import fits, kept_for_backward, scheduled

POLICIES = st.builds(
    SchedulePolicy,
    backward_prefetch=st.sampled_from(BackwardPrefetch),
    forward_prefetch=st.booleans(),
    depth=st.integers(0, 4),
    budget_nbytes=st.none() | st.integers(0, 30),
    max_reductions=st.integers(1, 4),
    keep_last=st.integers(0, 3),
    bucket_cap_mb=st.integers(0, 40).map(lambda nbytes: nbytes / 2**20),
)


@st.composite
def steps(draw) -> tuple[dict, tuple[GroupSpec, ...]]:
    """Orders of a step as hooks report them: shared groups, a backward in any order, recomputation."""
    num_groups = draw(st.integers(1, 8))
    used = draw(st.lists(st.integers(0, num_groups - 1), min_size=1, max_size=14))
    root = draw(st.booleans())
    forward = [Event(EventKind.FORWARD_BEGIN, num_groups)] if root else []
    for group in used:
        forward += [Event(EventKind.FORWARD_BEGIN, group), Event(EventKind.FORWARD_END, group)]
    if root:
        forward.append(Event(EventKind.FORWARD_END, num_groups))
    backward = []
    for group in draw(st.permutations(used)):
        backward.append(Event(EventKind.BACKWARD_BEGIN, group))
        if draw(st.booleans()):
            backward.append(Event(EventKind.RECOMPUTE, group))
        if draw(st.booleans()):
            backward.append(Event(EventKind.GRADS_READY, group))
        if draw(st.booleans()):
            backward.append(Event(EventKind.BACKWARD_END, group))
    backward.append(Event(EventKind.STEP_END))
    orders = {
        Phase.FORWARD: tuple(forward),
        Phase.EVALUATION: tuple(forward),
        Phase.BACKWARD: tuple(backward),
    }
    listed = st.none() | st.lists(st.integers(0, num_groups), max_size=3).map(tuple)
    facts = st.builds(
        GroupSpec,
        reshard_after_forward=st.sampled_from([True, False, None]),
        nbytes=st.integers(1, 20),
        grad_nbytes=st.integers(0, 20),
        bucket_key=st.sampled_from([None, 7, 7, 8]),
        no_prefetch=st.sampled_from([False, False, True]),
        ahead_in_forward=listed,
        ahead_in_backward=listed,
        steps=st.booleans(),
        needs_copies_reduced=st.booleans(),
    )
    return orders, tuple(draw(st.lists(facts, min_size=num_groups + 1, max_size=num_groups + 1)))


def all_of(kind: ActionKind, entries: Iterable[ScheduleEntry]) -> list[tuple[Event, Action]]:
    """The actions of a kind, each with its event."""
    return [(event, action) for event, actions in entries for action in actions if action.kind is kind]


@given(steps(), POLICIES)
def test_any_plan_is_sound_and_has_an_end(step, policy):
    orders, facts = step
    schedule = scheduled(orders, policy, facts.__getitem__)
    check(schedule)
    for phase, order in orders.items():
        assert tuple(entry.event for entry in schedule.phases[phase]) == order


@given(steps(), POLICIES)
def test_each_reduced_group_is_stepped_as_soon_as_it_may_where_its_optimizer_is_in_the_backward(step, policy):
    orders, facts = step
    stepped = 0
    for event, actions in scheduled(orders, policy, facts.__getitem__).phases[Phase.BACKWARD]:
        for action, following in pairwise((*actions, Action(ActionKind.HOLD, (0,)))):
            landed = action.groups if action.kind is ActionKind.WAIT_REDUCE else ()
            ready = tuple(
                group for group in landed if facts[group].steps and not facts[group].needs_copies_reduced
            )
            assert not ready or following == Action(ActionKind.STEP, ready)
        taken = [group for action in actions if action.kind is ActionKind.STEP for group in action.groups]
        assert all(facts[group].steps for group in taken)
        assert event.kind is EventKind.STEP_END or not any(
            facts[group].needs_copies_reduced for group in taken
        )
        stepped += len(taken)
    trained = {event.group for event in orders[Phase.BACKWARD] if event.kind is EventKind.GRADS_READY}
    assert stepped >= sum(facts[group].steps for group in trained)


@given(steps(), POLICIES)
def test_a_schedule_prints_as_text_that_parses_back(step, policy):
    orders, facts = step
    schedule = scheduled(orders, policy, facts.__getitem__)
    assert Schedule.parse(str(schedule)) == schedule


@given(steps(), POLICIES)
def test_prefetch_and_reductions_stay_within_their_limits(step, policy):
    orders, facts = step
    schedule = scheduled(orders, policy, facts.__getitem__)
    for phases in ((Phase.EVALUATION,), (Phase.FORWARD, Phase.BACKWARD)):
        reducing: list[tuple[int, ...]] = []
        in_flight: dict[int, int] = {}  # group, not waited for -> number of its all-gather
        landed: set[int | None] = set()  # all-gathers of which a group has been waited for
        number = 0
        for phase, (event, actions) in ((p, entry) for p in phases for entry in schedule.phases[p]):
            issued = [a for a in actions if a.kind is ActionKind.UNSHARD and a.group != event.group]
            assert not any(facts[group].no_prefetch for action in issued for group in action.groups)
            listed = facts[event.group].ahead_in_backward if phase is Phase.BACKWARD else None
            listed = facts[event.group].ahead_in_forward if phase is not Phase.BACKWARD else listed
            assert len(issued) <= (policy.depth if listed is None else len(listed))
            if phase is Phase.BACKWARD:
                at = {
                    BackwardPrefetch.PRE: EventKind.BACKWARD_BEGIN,
                    BackwardPrefetch.POST: EventKind.BACKWARD_END,
                }
                assert not issued or event.kind is at[policy.backward_prefetch]
            else:
                assert not issued or policy.forward_prefetch
            for action in actions:
                if action.kind is ActionKind.UNSHARD:
                    number += 1
                    in_flight |= dict.fromkeys(action.groups, number)
                    if action.group != event.group:
                        held = sum(facts[g].nbytes for g in in_flight.keys() - {event.group})
                        assert policy.budget_nbytes is None or held <= policy.budget_nbytes
                elif action.kind in (ActionKind.WAIT, ActionKind.RESHARD):
                    landed.add(in_flight.pop(action.group, None))
                elif action.kind is ActionKind.REDUCE:
                    reducing.append(action.groups)
                    assert len(reducing) <= policy.max_reductions
                elif action.kind is ActionKind.WAIT_REDUCE:
                    reducing.remove(action.groups)


@given(steps(), POLICIES)
def test_what_shares_a_collective_is_small_and_of_one_bucket_key(step, policy):
    orders, facts = step
    for _, actions in chain.from_iterable(scheduled(orders, policy, facts.__getitem__).phases.values()):
        for action in actions:
            if action.kind is ActionKind.UNSHARD:
                assert sum(facts[g].nbytes for g in action.groups[1:]) <= policy.bucket_cap_nbytes
            elif action.kind is ActionKind.REDUCE:
                # All but the last were held back for it.
                assert sum(facts[g].grad_nbytes for g in action.groups[:-1]) <= policy.bucket_cap_nbytes
            if action.groups[1:] and action.kind in (ActionKind.UNSHARD, ActionKind.REDUCE):
                assert len({facts[g].bucket_key for g in action.groups}) == 1
                assert facts[action.group].bucket_key is not None


NAMES = ("embedding", "blocks.0", "blocks.1", "head")


def test_a_schedule_with_names_parses_back_too():
    text = """\
forward
  F+ embedding : unshard embedding, unshard blocks.0 + blocks.1 + head, wait embedding
backward
  G  head : hold head, unshard blocks.0 + blocks.1/smaller
  E  : reduce head + blocks.0, finalize/5"""
    schedule = Schedule.parse(text, NAMES)
    assert str(schedule) == text
    assert schedule.phases[Phase.FORWARD][0].actions[1].groups == (1, 2, 3)
    assert schedule.phases[Phase.BACKWARD][0].actions[1] == Action(ActionKind.UNSHARD, (1, 2), smaller=True)
    assert schedule.phases[Phase.BACKWARD][1].actions[1] == Action(ActionKind.FINALIZE, (), grads=5)
    assert schedule == Schedule.parse(str(Schedule(schedule.phases)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (EventKind.FORWARD_BEGIN, "the forward of head"),
        (EventKind.GRADS_READY, "the gradients of head"),
        (EventKind.RECOMPUTE, "the recomputation of head"),
    ],
)
def test_an_event_is_said_in_words(kind, words):
    assert event_in_words(kind, "head") == words
    assert event_in_words(EventKind.STEP_END, "") == "the end of the backward"


def test_numbers_of_groups_are_raised_where_their_model_becomes_part_of_another():
    spec = GroupSpec(ahead_in_forward=(1, 2), part_of=0, nbytes=7)
    assert spec.shifted(3) == GroupSpec(ahead_in_forward=(4, 5), part_of=3, nbytes=7)
    assert GroupSpec(ahead_in_backward=(0,)).shifted(3) == GroupSpec(ahead_in_backward=(3,))


def blocks(num_groups: int) -> dict[Phase, tuple[Event, ...]]:
    forward, backward = [], []
    for group in range(num_groups):
        forward += [Event(EventKind.FORWARD_BEGIN, group), Event(EventKind.FORWARD_END, group)]
    for group in reversed(range(num_groups)):
        backward += [Event(k, group) for k in (EventKind.BACKWARD_BEGIN, EventKind.GRADS_READY)]
        backward.append(Event(EventKind.BACKWARD_END, group))
    return {Phase.FORWARD: tuple(forward), Phase.BACKWARD: (*backward, Event(EventKind.STEP_END))}


def test_each_group_is_issued_exactly_one_use_ahead():
    schedule = scheduled(blocks(5), SchedulePolicy(), lambda _: GroupSpec())
    for phase, last in ((Phase.FORWARD, 4), (Phase.BACKWARD, 0)):
        begins = [entry for entry in schedule.phases[phase] if entry.event.kind in BEGINS]
        for entry, following in pairwise(begins):
            assert Action(ActionKind.UNSHARD, (following.event.group,)) in entry.actions
        assert begins[-1].event.group == last


def test_post_prefetch_issues_each_gather_at_the_end_of_the_backward_before_it():
    policy = SchedulePolicy(backward_prefetch=BackwardPrefetch.POST)
    schedule = scheduled(blocks(5), policy, lambda _: GroupSpec())
    gathers = all_of(ActionKind.UNSHARD, schedule.phases[Phase.BACKWARD])
    found = [(event.kind, event.group, action.group) for event, action in gathers]
    assert found == [(EventKind.BACKWARD_END, group, group - 1) for group in (4, 3, 2, 1)]


def test_no_prefetch_issues_each_gather_when_its_group_is_needed():
    policy = SchedulePolicy(backward_prefetch=BackwardPrefetch.NONE, forward_prefetch=False)
    schedule = scheduled(blocks(4), policy, lambda _: GroupSpec())
    for entries in schedule.phases.values():
        assert all(action.group == event.group for event, action in all_of(ActionKind.UNSHARD, entries))


def test_the_last_group_stays_unsharded_for_its_backward_unless_told_otherwise():
    for reshard, kept in ((None, True), (True, False), (False, True)):
        schedule = scheduled(blocks(3), SchedulePolicy(), lambda _, r=reshard: GroupSpec(r))
        last = schedule.phases[Phase.FORWARD][-1]
        assert (Action(ActionKind.RESHARD, (2,)) not in last.actions) == kept


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.EVALUATION])
def test_the_root_stays_unsharded_after_a_forward_and_an_evaluation_unless_told_otherwise(phase):
    for reshard, kept in ((None, True), (True, False), (False, True)):
        spec = GroupSpec(reshard, is_root=True)
        assert spec.keeps(phase) == kept and not spec.keeps(Phase.BACKWARD)
        orders = {phase: blocks(3)[Phase.FORWARD]}
        entries = scheduled(orders, SchedulePolicy(keep_last=0), lambda _, s=spec: s).phases[phase]
        resharded = {group for _, a in all_of(ActionKind.RESHARD, entries) for group in a.groups}
        assert resharded == (set() if kept else {0, 1, 2})


@pytest.mark.parametrize(("phase", "resharded"), [(Phase.FORWARD, False), (Phase.EVALUATION, True)])
def test_what_was_gathered_ahead_and_not_used_stays_for_a_backward_alone(phase, resharded):
    specs = [GroupSpec(ahead_in_forward=(1,)), GroupSpec(reshard_after_forward=False)]
    order = (Event(EventKind.FORWARD_BEGIN, 0), Event(EventKind.FORWARD_END, 0))
    last = scheduled({phase: order}, SchedulePolicy(), specs.__getitem__).phases[phase][-1]
    assert (Action(ActionKind.RESHARD, (1,)) in last.actions) == resharded


def test_the_policy_keeps_the_first_groups_that_the_backward_needs_besides_the_root():
    orders = blocks(3)
    kept = kept_for_backward(orders, SchedulePolicy(), lambda group: GroupSpec(is_root=group == 2))
    assert kept == {1}


def tiny(policy: SchedulePolicy, num_groups: int = 7) -> Schedule:
    """Groups of a third of the cap on one transport."""
    nbytes = policy.bucket_cap_nbytes // 3
    return scheduled(
        blocks(num_groups), policy, lambda _: GroupSpec(nbytes=nbytes, grad_nbytes=nbytes, bucket_key=0)
    )


def test_small_groups_share_collectives_and_each_is_waited_for_at_its_own_event():
    assert (
        str(tiny(SchedulePolicy(keep_last=0), 6))
        == """\
forward
  F+ 0 : unshard 0, unshard 1+2+3+4, wait 0
  F- 0 : reshard 0
  F+ 1 : unshard 5, wait 1
  F- 1 : reshard 1
  F+ 2 : wait 2
  F- 2 : reshard 2
  F+ 3 : wait 3
  F- 3 : reshard 3
  F+ 4 : wait 4
  F- 4 : reshard 4
  F+ 5 : wait 5
  F- 5 : reshard 5
backward
  B+ 5 : unshard 5, unshard 4+3+2+1, wait 5
  G  5 : hold 5
  B- 5 : reshard 5
  B+ 4 : unshard 0, wait 4
  G  4 : hold 4
  B- 4 : reshard 4
  B+ 3 : wait 3
  G  3 : hold 3
  B- 3 : reshard 3
  B+ 2 : wait 2
  G  2 : reduce 5+4+3+2
  B- 2 : reshard 2
  B+ 1 : wait 1
  G  1 : hold 1
  B- 1 : reshard 1
  B+ 0 : wait 0
  G  0 : hold 0
  B- 0 : reshard 0
  E  : reduce 1+0, wait-reduce 5+4+3+2, wait-reduce 1+0"""
    )


def test_without_a_cap_every_group_has_its_own_collectives():
    schedule = tiny(SchedulePolicy(bucket_cap_mb=0))
    kinds = [action for entries in schedule.phases.values() for _, actions in entries for action in actions]
    assert not any(action.groups[1:] or action.kind is ActionKind.HOLD for action in kinds)


def test_a_small_gradient_goes_with_the_next_large_one():
    facts = [GroupSpec(grad_nbytes=nbytes, bucket_key=0) for nbytes in (9 << 20, 100, 9 << 20)]
    backward = scheduled(blocks(3), SchedulePolicy(), facts.__getitem__).phases[Phase.BACKWARD]
    reductions = [action for _, action in all_of(ActionKind.REDUCE, backward)]
    assert reductions == [Action(ActionKind.REDUCE, (2,)), Action(ActionKind.REDUCE, (1, 0))]


def test_the_last_groups_stay_for_the_backward():
    for keep_last, kept in ((0, set()), (1, {4}), (2, {3, 4}), (9, {0, 1, 2, 3, 4})):
        schedule = scheduled(blocks(5), SchedulePolicy(keep_last=keep_last), lambda _: GroupSpec(nbytes=10))
        resharded = {a.group for _, a in all_of(ActionKind.RESHARD, schedule.phases[Phase.FORWARD])}
        assert {0, 1, 2, 3, 4} - resharded == kept


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, ["1", "2", "3", "4", ""]),
        ({"depth": 0}, ["", "", "", "", ""]),
        ({"depth": 2}, ["1 2", "3", "4", "", ""]),
        ({"depth": 4, "budget_nbytes": 9}, ["", "", "", "", ""]),
        ({"depth": 4, "budget_nbytes": 19}, ["1", "2", "3", "4", ""]),
        ({"depth": 4, "budget_nbytes": 20}, ["1 2", "3", "4", "", ""]),
    ],
)
def test_so_many_groups_are_gathered_ahead_as_limits_allow(options, ahead):
    schedule = scheduled(blocks(5), SchedulePolicy(**options), lambda _: GroupSpec(nbytes=10))
    assert gathered_ahead(schedule) == ahead


def gathered_ahead(schedule: Schedule) -> list[str]:
    """At each begin of a forward the groups that are gathered for later."""
    return [
        " ".join(str(a.group) for a in actions if a.kind is ActionKind.UNSHARD and a.group != event.group)
        for event, actions in schedule.phases[Phase.FORWARD]
        if event.kind is EventKind.FORWARD_BEGIN
    ]


def test_of_modules_that_are_cut_in_two_the_second_group_is_gathered_with_the_first():
    specs = [GroupSpec(), GroupSpec(), GroupSpec(), GroupSpec(part_of=2), GroupSpec()]
    ahead = gathered_ahead(scheduled(blocks(5), SchedulePolicy(), specs.__getitem__))
    assert ahead == ["1", "2 3", "", "4", ""]
    specs[0] = GroupSpec(ahead_in_forward=(2,))  # the first of them alone
    ahead = gathered_ahead(scheduled(blocks(5), SchedulePolicy(), specs.__getitem__))
    assert ahead == ["2", "3", "", "4", ""]


@pytest.mark.parametrize(
    ("nbytes", "cap", "shared"),
    [(3, 6, "1+2+3"), (4, 6, "1+2"), (7, 6, "1"), (1, 1, "1+2"), (0, 1, "1+2+3+4"), (1, 0, "1")],
)
def test_groups_join_a_collective_of_another_one_up_to_the_cap(nbytes, cap, shared):
    assert fits([1, 2], 3, 6) and not fits([1, 2], 4, 6) and not fits([], 0, 0) and fits([], 1, 1)
    policy = SchedulePolicy(bucket_cap_mb=cap / 2**20)
    first, *_ = scheduled(blocks(5), policy, lambda _: GroupSpec(nbytes=nbytes, bucket_key=0)).phases[
        Phase.FORWARD
    ]
    issued = [action for action in first.actions if action.kind is ActionKind.UNSHARD]
    assert str(issued[1]) == f"unshard {shared}"


def schedule_of(*lines: str) -> Schedule:
    return Schedule.parse("\n".join(lines))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (("forward", "F+ 0: unshard 0"), "used before its wait"),
        (("forward", "F+ 0: wait 0"), "nothing has unsharded"),
        (("forward", "F+ 0: unshard 0, wait 0", "F- 0: unshard 0"), "unsharded twice"),
        (("forward", "F+ 0: unshard 0, wait 0", "backward", "E:"), "left at the end"),
        (("backward", "G 0: reduce 0", "E:"), "left at the end"),
        (("backward", "G 0: reduce 0", "G 0: reduce 0"), "already being reduced"),
        (("backward", "E: wait-reduce 3"), "no reduction in flight"),
        (("backward", "G 0: reduce 0, step 0", "E: wait-reduce 0"), "aren't reduced"),
        (("backward", "G 0: reduce 0", "E: wait-reduce 0, step 0, step 0"), "aren't reduced"),
        (("backward", "G 0: reduce 0, all-reduce 0", "E: wait-reduce 0"), "all-reduces group 0"),
        (("backward", "G 0: hold 0", "E:"), "left at the end"),
        (("backward", "G 0: hold 0", "G 0: hold 0"), "held already"),
        (("backward", "G 0: reduce 0", "G 0: hold 0"), "already being reduced"),
        (("forward", "F+ 0: unshard 0+1, wait 0", "F+ 1: unshard 1"), "group 1 is unsharded twice"),
        (("evaluation", "F- 0: reshard 0"), "at rest"),
        (("evaluation", "F+ 0: unshard 0+1, wait 0", "F- 0: reshard 0"), "left at the end"),
    ],
)
def test_check_finds_each_kind_of_unsound_schedule(lines, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check(schedule_of(*lines))


@pytest.mark.parametrize(
    "lines",
    [
        ("forward", "F+ 0: unshard 0+1, wait 0"),
        ("evaluation", "F+ 0: unshard 0, wait 0"),
        ("backward", "G 0: hold 0", "G 1: reduce 1+0", "E: wait-reduce 1+0, all-reduce 0, step 1"),
    ],
)
def test_what_a_backward_or_another_evaluation_may_still_need_is_sound(lines):
    check(schedule_of(*lines))


@pytest.mark.parametrize(
    "line",
    [
        "F+ x: wait 0",
        "F+ 0: fetch 0",
        "F+ 0: wait",
        "F+ 0: wait 0+",
        "Q 0",
        "F+ 0: wait 0/smaller",
        "F+ 0: unshard 0/1",
        "E: finalize/smaller",
    ],
)
def test_text_that_is_not_a_schedule_is_refused_by_line(line):
    with pytest.raises(ValueError, match="line 2 of the schedule"):
        Schedule.parse(f"forward\n{line}")


@pytest.mark.parametrize("verb", ["unshard", "participate", "reshard"])
def test_the_words_of_older_schedules_are_refused_with_the_new_ones(verb):
    with pytest.raises(ValueError, match=f"'{verb}-post-forward' is written {verb} GROUP/smaller now"):
        Schedule.parse(f"forward\nF- 0: {verb}-post-forward 0")


WITHOUT_ASSERTS = """
from shardwright.errors import InputError, ScheduleError
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.check import check

assert False, "runs without asserts"
for text in ("F+ 0: unshard 0", "forward\\n\\nQ 0"):
    try:
        Schedule.parse(text)
    except InputError as error:
        print(error)
for text in ("F+ 0: unshard 0", "F- 0: reshard 0"):
    try:
        check(Schedule.parse(f"forward\\n{text}"))
    except ScheduleError as error:
        print(error)
"""


def test_without_asserts_schedules_are_parsed_and_checked_alike():
    child = subprocess.run(
        [sys.executable, "-O", "-c", WITHOUT_ASSERTS],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = child.stdout.splitlines()
    assert len(lines) == 4, child.stdout + child.stderr
    assert "line 1 of the schedule" in lines[0] and "before its phase" in lines[0]
    assert "line 3 of the schedule" in lines[1]
    assert lines[2] == "F+ 0 : unshard 0: group 0 is used before its wait"
    assert lines[3] == "F- 0 : reshard 0: reshards group 0, which is at rest"


def test_an_entry_prints_its_event_and_actions():
    entry = ScheduleEntry(
        Event(EventKind.FORWARD_BEGIN, 3), (Action(ActionKind.UNSHARD, (4,)), Action(ActionKind.WAIT, (3,)))
    )
    assert str(entry) == "F+ 3 : unshard 4, wait 3"


@pytest.mark.parametrize(
    "options",
    [
        {"depth": -1},
        {"depth": True},
        {"forward_prefetch": "no"},
        {"max_reductions": 0},
        {"backward_prefetch": 1.5},
        {"keep_last": -1},
        {"bucket_cap_mb": -1},
        {"bucket_cap_mb": float("nan")},
        {"bucket_cap_mb": "1"},
        {"max_gathers": 2},
        {"keep_nbytes": 1},
        {"ahead": {"forward": {"blocks.0": ["blocks.1"]}}},
        {"forget_after": 5},
        {"wire_nbytes": 0},
    ],
)
def test_a_policy_refuses_what_makes_no_sense(options):
    with pytest.raises(InputError, match=next(iter(options))):
        SchedulePolicy(**options)
