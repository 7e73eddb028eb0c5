"""Plans are sound for any order of groups, and print as text that parses back."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.plan.schedule import (
    BEGINS,
    Action,
    ActionKind,
    Event,
    EventKind,
    GroupFacts,
    Phase,
    Schedule,
    Stop,
    check,
    plan,
)
from shardwright.policy import BackwardPrefetch, SchedulePolicy

POLICIES = st.builds(
    SchedulePolicy,
    backward_prefetch=st.sampled_from(BackwardPrefetch),
    forward_prefetch=st.booleans(),
    depth=st.integers(0, 4),
    budget_nbytes=st.none() | st.integers(0, 30),
    max_gathers=st.none() | st.integers(1, 4),
    max_reductions=st.integers(1, 4),
    keep_last=st.integers(0, 3),
)


@st.composite
def steps(draw) -> tuple[dict, tuple[GroupFacts, ...]]:
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
    facts = st.builds(GroupFacts, st.sampled_from([True, False, None]), st.integers(1, 20), listed, listed)
    return orders, tuple(draw(st.lists(facts, min_size=num_groups + 1, max_size=num_groups + 1)))


@given(steps(), POLICIES)
def test_any_plan_is_sound_and_has_an_end(step, policy):
    orders, facts = step
    schedule = plan(orders, policy, facts.__getitem__)
    check(schedule)
    for phase, order in orders.items():
        assert tuple(stop.event for stop in schedule.phases[phase]) == order


@given(steps(), POLICIES)
def test_a_schedule_prints_as_text_that_parses_back(step, policy):
    orders, facts = step
    schedule = plan(orders, policy, facts.__getitem__)
    assert Schedule.parse(str(schedule)) == schedule


@given(steps(), POLICIES)
def test_prefetch_and_reductions_stay_within_their_limits(step, policy):
    orders, facts = step
    schedule = plan(orders, policy, facts.__getitem__)
    for phases in ((Phase.EVALUATION,), (Phase.FORWARD, Phase.BACKWARD)):
        reducing: set[int] = set()
        in_flight: set[int] = set()
        for phase, (event, actions) in ((p, stop) for p in phases for stop in schedule.phases[p]):
            issued = [a.group for a in actions if a.kind is ActionKind.UNSHARD and a.group != event.group]
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
                    in_flight.add(action.group)
                    if action.group != event.group:
                        held = sum(facts[g].nbytes for g in in_flight - {event.group})
                        assert policy.budget_nbytes is None or held <= policy.budget_nbytes
                        assert policy.max_gathers is None or len(in_flight) <= policy.max_gathers
                elif action.kind in (ActionKind.WAIT, ActionKind.RESHARD):
                    in_flight.discard(action.group)
                elif action.kind is ActionKind.REDUCE:
                    reducing.add(action.group)
                    assert len(reducing) <= policy.max_reductions
                else:
                    reducing.remove(action.group)


def chain(num_groups: int) -> dict[Phase, tuple[Event, ...]]:
    forward, backward = [], []
    for group in range(num_groups):
        forward += [Event(EventKind.FORWARD_BEGIN, group), Event(EventKind.FORWARD_END, group)]
    for group in reversed(range(num_groups)):
        backward += [Event(k, group) for k in (EventKind.BACKWARD_BEGIN, EventKind.GRADS_READY)]
        backward.append(Event(EventKind.BACKWARD_END, group))
    return {Phase.FORWARD: tuple(forward), Phase.BACKWARD: (*backward, Event(EventKind.STEP_END))}


def test_each_group_is_issued_exactly_one_use_ahead():
    schedule = plan(chain(5), SchedulePolicy(), lambda _: GroupFacts())
    for phase, last in ((Phase.FORWARD, 4), (Phase.BACKWARD, 0)):
        begins = [stop for stop in schedule.phases[phase] if stop.event.kind in BEGINS]
        for stop, following in pairwise(begins):
            assert Action(ActionKind.UNSHARD, following.event.group) in stop.actions
        assert begins[-1].event.group == last


def test_no_prefetch_issues_each_gather_when_its_group_is_needed():
    policy = SchedulePolicy(backward_prefetch="none", forward_prefetch=False)
    schedule = plan(chain(4), policy, lambda _: GroupFacts())
    for stops in schedule.phases.values():
        for event, actions in stops:
            assert all(a.group == event.group for a in actions if a.kind is ActionKind.UNSHARD)


def test_the_last_group_stays_unsharded_for_its_backward_unless_told_otherwise():
    for reshard, kept in ((None, True), (True, False), (False, True)):
        schedule = plan(chain(3), SchedulePolicy(), lambda _, r=reshard: GroupFacts(r))
        last = schedule.phases[Phase.FORWARD][-1]
        assert (Action(ActionKind.RESHARD, 2) not in last.actions) == kept


def stops(*lines: str) -> Schedule:
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
        (("backward", "E: wait-reduce 3"), "not in flight"),
        (("evaluation", "F- 0: reshard 0"), "at rest"),
    ],
)
def test_check_finds_each_kind_of_unsound_schedule(lines, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check(stops(*lines))


@pytest.mark.parametrize("line", ["F+ x: wait 0", "F+ 0: fetch 0", "F+ 0: wait", "Q 0"])
def test_text_that_is_not_a_schedule_is_refused_by_line(line):
    with pytest.raises(ValueError, match="line 2 of the schedule"):
        Schedule.parse(f"forward\n{line}")


def test_a_stop_prints_its_event_and_actions():
    stop = Stop(
        Event(EventKind.FORWARD_BEGIN, 3), (Action(ActionKind.UNSHARD, 4), Action(ActionKind.WAIT, 3))
    )
    assert str(stop) == "F+ 3 : unshard 4, wait 3"


@pytest.mark.parametrize("options", [{"depth": -1}, {"max_reductions": 0}, {"backward_prefetch": 1.5}])
def test_a_policy_refuses_what_makes_no_sense(options):
    with pytest.raises(InputError, match=next(iter(options))):
        SchedulePolicy(**options)
