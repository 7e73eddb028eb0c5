"""What the follower does at each event, as text (fixtures/follower.txt), of one rank.

A line of the text is what happens, and after the colon what the follower makes of it: actions, and in
brackets what it asks the other ranks, or its own. After an arrow, where that is something else, the entries
of the schedule that a trace shows. ``others ...`` is what they say to the next question. Where
that is to be something else: ``python -m tests.pure.test_follower_steps`` writes the text again.
"""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import StageError
from shardwright.policy import SchedulePolicy
from shardwright.schedule import recorded as recorded_schedules
from shardwright.schedule.check import check
from shardwright.schedule.follower import DONE, Follower
from shardwright.schedule.following import Mode
from shardwright.schedule.recorded import RecordedSchedules, bits, supersequence
from shardwright.schedule.schedule import ActionKind, Event, EventKind, GroupSpec, Phase, Schedule
from shardwright.schedule.sync import (
    AllReduceMin,
    Broadcast,
    ConsensusResult,
    Describe,
    Diverge,
    Inspect,
    Local,
    Recorded,
    RecordedOrder,
    Synchronize,
    SyncPoint,
)

K = ActionKind


class Played:
    """One rank, played line by line."""

    def __init__(self, specs, mode, policy):
        self.follower = Follower(policy, specs, mode)
        self.specs = specs
        self.held, self.smaller, self.unreduced, self.accumulating = set(), set(), set(), set()
        self.mask = 0
        self.held_back = set()
        self.stays = set()  # groups whose gradients no reduction takes
        self.num_asked = 0
        self.points, self.missing, self.used = SyncPoint(0), 0, 0
        self.codes, self.told = [], []

    @property
    def local(self):
        return Local(*map(bits, (self.held, self.smaller, self.unreduced, self.accumulating)))

    def play(self, line):
        """What is made of it, in words."""
        word, *numbers = line.split()
        follower, number = self.follower, int(numbers[-1]) if numbers and numbers[-1].isdigit() else -1
        if word == "others":
            self.hear(*numbers)
            return ""
        if word in {*Phase, "held"}:
            held, word = word == "held", numbers[0] if word == "held" else word
            step = follower.begin(Phase(word), number, self.local, held)
        elif word in {"end", "failed"}:
            step = follower.end(failed=word == "failed")
        elif word == "join":
            step = follower.join_evaluations(self.local)
        elif word in {"unshard", "wait", "reshard"}:
            step = follower.call(K(word), number)
        elif word in {"G", "G="}:  # gradients are there; "=": to be kept here
            (self.accumulating if word == "G=" else self.unreduced).add(number)
            event = Event(EventKind.GRADS_READY, number)
            return self.run(follower.on(event), event)
        elif word in {*EventKind}:
            event = Event(EventKind(word), number)
            return self.run(follower.on(event), event)
        else:
            assert word in {"hold", "abandon", "unsettled", "replan"}, line
            if word == "hold":
                follower.hold(number)
            elif word == "abandon":
                follower.abandon()
            elif word == "replan":
                follower.replan(follower.recorded.policy, self.specs)
            else:
                follower.settles = False
            return ""
        return self.run(step)

    def hear(self, what, *words):
        numbers = [int(word) for word in words if word.isdigit()]
        if what == "need":
            self.codes.append(1 << 32 | numbers[0])
        elif what == "reduce":
            self.codes.append(numbers[0])
        elif what == "miss":
            self.missing = bits(numbers)
        elif what == "use":
            self.used = bits(numbers)
        elif what == "tell":
            events = tuple(Event(EventKind.FORWARD_BEGIN, group) for group in numbers[1:])
            self.told.append(RecordedOrder(numbers[0], Phase(words[0]), events))
        else:
            self.points |= SyncPoint[what.upper()]

    def run(self, step, event=None):
        said, done = [], []
        while True:
            for action in step.actions:
                self.do(action)
                said.append(str(action))
            done += step.actions
            if step.sync is None:
                self.check()
                assert step.taken or event is None
                own = event and [entry.event for entry in step.taken] == [event]
                own = own and [*step.taken[0].actions] == done
                more = "" if own or not step.taken else f" <- {'; '.join(map(str, step.taken))}"
                return ", ".join(said) + more
            asked, answer = self.answer(step.sync)
            said.append(f"[{asked}]")
            if answer is None:
                return ", ".join(said)
            step = self.follower.resume(answer)

    def check(self):
        """What the follower derives is what is so, and a copy of it is the same."""
        copied = copy.copy(self.follower)
        assert copied.snapshot() == self.follower.snapshot()
        copied._leave_exact()
        assert copied.groups.states.held == self.local.held
        assert {*copied.groups.states.held_back} == self.held_back

    def do(self, action):
        groups = set(action.groups)
        if action.kind is K.UNSHARD:
            self.held |= groups
        if action.kind in (K.UNSHARD, K.PARTICIPATE) and action.smaller:
            assert groups <= self.smaller
            self.smaller -= groups
        if action.kind is K.RESHARD:
            self.held -= groups
            self.smaller |= groups if action.smaller else set()
        if action.kind is K.HOLD:
            self.held_back |= groups
        if action.kind is K.REDUCE:
            self.held_back -= groups
        if action.kind in (K.HOLD, K.REDUCE):
            self.mask |= bits(groups)
            self.unreduced -= groups - self.stays
            self.accumulating -= groups
        if action.kind is K.FINALIZE:
            self.mask = 0

    def answer(self, sync):
        every = (1 << len(self.specs)) - 1
        if isinstance(sync, Synchronize):
            quiet = sync.point is SyncPoint.DEVIATES
            assert sync[1:] == (0, 0, 0) if quiet else sync.digest == self.follower.recorded.digest
            points = self.points | sync.point
            self.points = SyncPoint(0)
            local, used = self.local, self.used | sync.used
            missing = self.missing | every & ~local.held
            result = ConsensusResult(points, sync.entry, missing, every & ~local.smaller, used, self.mask)
            used = "+".join(str(group) for group in range(len(self.specs)) if used >> group & 1)
            return f"{sync.point.name.lower().replace('_', '-')}{f' used {used}' if used else ''}", result
        if isinstance(sync, AllReduceMin):
            self.num_asked += 1
            code = min(sync.code, *(self.codes[:1] or [DONE]))
            del self.codes[:1]
            return f"ask {asked(sync.code)}" + (f", {asked(code)}" if code != sync.code else ""), code
        if isinstance(sync, Broadcast):
            orders = {*self.told, *([sync.order] if sync.order else [])}
            self.told = []
            events = " ".join(map(str, sync.order.events)) if sync.order else "nothing"
            return f"tell {events}", Recorded(tuple(sorted(orders)), self.follower.recorded.specs)
        if isinstance(sync, Describe):
            return "describe", Recorded((sync.order,), self.follower.recorded.specs)
        if isinstance(sync, Inspect):
            return "inspect", self.local
        assert isinstance(sync, Diverge)
        return f"diverge at {sync.point.name.lower()} {sync.entry}", None


def asked(code):
    if code == DONE:
        return "done"
    return f"{'need' if code >> 32 else 'reduce'} {code & 0xFFFFFFFF}"


TEXT = Path(__file__).parent / "fixtures/follower.txt"
FORWARD = "forward 9; F+ 0; F+ 1; F- 1; F+ 2; F- 2; F- 0; end; "
BACKWARD = "backward 9; B+ 0; B+ 2; G 2; B- 2; B+ 1; G 1; B- 1; B- 0; G 0; E; end; "
STEP, EVALUATION = FORWARD + BACKWARD, FORWARD.replace("forward", "evaluation")
WITHOUT_1 = "forward 9; F+ 0; F+ 2; F- 2; F- 0; end; backward 9; B+ 0; B+ 2; G 2; B- 2; B- 0; G 0; E; end; "
WITHOUT_2 = WITHOUT_1.replace("2", "1")
INNER = "forward 9; F+ 0; forward 5; F+ 1; F- 1; end; F+ 2; F- 2; F- 0; end; "
INNER += "backward 9; B+ 0; B+ 2; G 2; B- 2; backward 5; B+ 1; G 1; B- 1; E; end; B- 0; G 0; E; end; "
HELD = "unshard 0; unshard 1; unshard 2; held forward 9; F+ 0; F+ 1; F- 1; F+ 2; F- 2; F- 0; end; "
SWAPPED = "forward 9; F+ 0; F+ 2; F- 2; F+ 1; F- 1; F- 0; end; "
SWAPPED += "backward 9; B+ 0; B+ 1; G 1; B- 1; B+ 2; G 2; B- 2; B- 0; G 0; E; end; "
RECOMPUTED = "backward 9; B+ 0; R+ 1; F- 1; B+ 1; G 1; B- 1; R+ 2; F- 2; B+ 2; G 2; B- 2; B- 0; G 0; E; end; "
PLAIN, KEPT, SMALLER = GroupSpec(), GroupSpec(False), GroupSpec(True, smaller_world=True)
UNREAD, STAYS = GroupSpec(unshard_in_backward=False), GroupSpec(reshard_after_backward=False)
COPIED, STEPPED = GroupSpec(needs_copies_reduced=True, steps=True), GroupSpec(steps=True)
SMALL = GroupSpec(nbytes=1, grad_nbytes=1, bucket_key=0)
ONE_BY_ONE = SchedulePolicy(bucket_cap_mb=0)
SEVERAL = {
    "two steps": STEP + STEP,
    "a group is left out": f"~{STEP}~" + WITHOUT_1 + WITHOUT_2 + STEP,
    "another order": f"~{STEP}~" + SWAPPED + STEP,
    "the first group is left out": f"~{STEP}~forward 9; F+ 1; F- 1; F+ 2; F- 2; end; "
    "backward 9; B+ 2; G 2; B- 2; B+ 1; G 1; B- 1; E; end; ",
    "ends without a begin": f"~{STEP}~forward 9; F+ 0; F+ 1; F- 1; F- 1; F- 2; F+ 2; F- 2; F- 0; end",
    "a part runs inside of the whole": f"~{STEP}~" + INNER + INNER + STEP,
    "the caller has unsharded all": f"~{STEP}~" + HELD + BACKWARD + HELD.replace("forward", "evaluation"),
    "a part runs inside of the whole at once": INNER,
    "the caller holds a part": f"~{STEP}~forward 9; F+ 0; held forward 5; forward 6; F+ 1; F- 1; "
    f"end; end; F+ 2; F- 2; F- 0; end; {BACKWARD}",
    "the caller has unsharded all for an evaluation": f"~{STEP}~{WITHOUT_1[: WITHOUT_1.index('backward')]}"
    f"{HELD.replace('forward', 'evaluation')}{WITHOUT_1[WITHOUT_1.index('backward') :]}",
    "nothing runs any more": f"~{STEP}~forward 9; end; forward 9; end",
    "a forward ends early": f"~{STEP}~forward 9; F+ 0; F+ 1; F- 1; end; {STEP}",
    "a part runs where the caller holds": "unshard 0; held forward 9; F+ 0; forward 5; F+ 1; F- 1; end; "
    "F- 0; end",
    "calls between phases": f"unshard 1; wait 1; {FORWARD}unshard 2; {BACKWARD}reshard 1; "
    f"{FORWARD}reshard 0; {BACKWARD}",
    "calls within phases": f"~{STEP}~forward 9; F+ 0; F+ 1; reshard 2; F- 1; unshard 1; F+ 2; F- 2; "
    f"F- 0; end; hold 2; {BACKWARD}forward 9; F+ 0; hold 1; F+ 1; F- 1; F+ 2; F- 2; F- 0; end; {BACKWARD}",
    "gradients are accumulated": f"~{FORWARD}~{BACKWARD.replace('G ', 'G= ')}~{FORWARD}~"
    f"{BACKWARD.replace('G ', 'G= ')}~{FORWARD}~{BACKWARD}",
    "reductions stay in flight": f"unsettled; ~{STEP}{FORWARD}~{BACKWARD}~{FORWARD}~{BACKWARD}",
    "phases are abandoned": f"~{STEP}~forward 9; F+ 0; F+ 1; abandon; {FORWARD}backward 9; B+ 0; B+ 2; G 2; "
    f"abandon; {STEP}forward 9; F+ 0; failed; {STEP}",
    "two forwards and a backward": f"~{FORWARD}{STEP}~" + FORWARD + STEP + STEP,
    "forwards of two modules": f"~{STEP}~{FORWARD}{FORWARD.replace('9', '8')}{BACKWARD}"
    f"{FORWARD.replace('9', '8')}{BACKWARD}{FORWARD}{FORWARD.replace('9', '8')}{BACKWARD}",
    "gradients twice": f"~{FORWARD}~backward 9; B+ 0; G 2; G 2; G 1; G 0; E; end; ~{FORWARD}~"
    "backward 9; B+ 0; G 2; G 2; G 1; G 1; G 0; E; end",
    "recomputed": f"~{FORWARD}~{RECOMPUTED}{FORWARD}{RECOMPUTED}",
    "planned anew": f"~{STEP}~forward 9; F+ 0; F+ 1; replan; F- 1; F+ 2; F- 2; F- 0; end; replan; {BACKWARD}",
    "an evaluation between": f"~{STEP}{EVALUATION}~{EVALUATION}{STEP}",
    "an evaluation in the middle of a step": f"~{STEP}{EVALUATION}~{FORWARD}{EVALUATION}{BACKWARD}",
}
"""Scripts by name: with ranks that agree, and alone. Between two ``~`` it isn't written down."""
KINDS = {
    "kept": (PLAIN, KEPT, GroupSpec(True)),
    "over a smaller world": (SMALLER,) * 3,
    "not read in the backward, or staying": (PLAIN, UNREAD, STAYS),
    "steps in the backward, of copies": (PLAIN, COPIED, STEPPED),
    "in buckets": (SMALL,) * 3,
}
"""Groups by name."""
AGREED = {
    "others deviate": "others deviates; others need 2; others need 1; others tell forward 9 0 2 1; "
    f"{FORWARD}others deviates; others reduce 1; others use 1; {BACKWARD}{FORWARD}",
    "others deviate at the end": f"~{STEP}~{FORWARD.removesuffix('end; ')}others deviates; others need 1; "
    f"others tell forward 9 0 2 1 2; end; {BACKWARD.removesuffix('E; end; ')}others deviates; "
    f"others reduce 2; others reduce 2; E; end; {FORWARD}",
    "others need the same": "forward 9; others need 0; F+ 0; others need 0; F+ 1; F- 1; others need 2; "
    "others reduce 0; F+ 2; F- 2; F- 0; end",
    "others evaluate": f"~{EVALUATION}~others evaluation; {STEP}others evaluation; join; join",
    "others are elsewhere": "others backward; forward 9",
    "others are elsewhere in a backward": "others forward; backward 9",
    "others evaluate and are elsewhere": "others evaluation; others forward_end; forward 9",
    "others are elsewhere beside a join": "others backward_end; join",
    "an evaluation beside a forward": f"~{STEP}~others forward; evaluation 9; F+ 0",
    "others used more": f"~{STEP}~{WITHOUT_1[: WITHOUT_1.index('backward')]}others use 1; {BACKWARD}",
}
MISSING = {
    "others miss what is kept": (
        f"~{STEP}~others miss 1; {FORWARD}others miss 0; {BACKWARD}",
        (PLAIN, KEPT, PLAIN),
    ),
    "others miss what is there": (f"~{STEP}{FORWARD}~others miss 0; {BACKWARD}", (PLAIN, KEPT, PLAIN)),
    "others miss what an evaluation has kept": (
        f"~{STEP}{EVALUATION}~others miss 1; {FORWARD}{BACKWARD}{EVALUATION}others miss 1; {EVALUATION}",
        (PLAIN, KEPT, PLAIN),
    ),
    "others need in a backward what is kept over a smaller world": (
        f"~{FORWARD}~backward 9; B+ 0; others need 1; B+ 2; G 2; B- 2; B+ 1; G 1; B- 1; B- 0; G 0; E; end",
        (PLAIN, SMALLER, PLAIN),
    ),
    "others need it over a smaller world": (
        f"~{STEP}{FORWARD}~others deviates; others need 1; others need 2; {BACKWARD}",
        (SMALLER,) * 3,
    ),
    "a small one goes with a large one in buckets": (
        f"~{STEP}{FORWARD}~{BACKWARD}",
        (SMALL, GroupSpec(nbytes=9 << 20, grad_nbytes=9 << 20, bucket_key=0), SMALL),
    ),
    "calls on a smaller world": (
        "unshard 0; reshard 0; forward 9; F+ 0; unshard 1; reshard 1; unshard 2; reshard 2; F- 0; end",
        (SMALLER, SMALLER, PLAIN),
    ),
}
POLICIES = {
    "one reduction at a time": (f"~{STEP}~others deviates; others reduce 1; {STEP}", {"max_reductions": 1}),
    "forgotten": (f"~{STEP}~{WITHOUT_1}{WITHOUT_1}{STEP}", {}),
    "nothing ahead": (f"~{STEP}~{STEP}", {"forward_prefetch": False, "backward_prefetch": "none"}),
}


FORGET_AFTER = recorded_schedules.FORGET_AFTER


@pytest.fixture(autouse=True)
def two_backwards_without_it_forget_a_group(monkeypatch):
    monkeypatch.setattr(recorded_schedules, "FORGET_AFTER", 2)


def scenarios():
    """``(script, specs, mode, policy)`` by name."""
    found = {}
    for mode in (Mode.AGREED, Mode.LOCAL):
        for name, script in SEVERAL.items():
            found[f"{mode}: {name}"] = script, (PLAIN,) * 3, mode, ONE_BY_ONE
        for name, specs in KINDS.items():
            script = f"~{STEP}~{STEP}~{EVALUATION}~{EVALUATION}{FORWARD}reshard 1; "
            script += f"{BACKWARD}{WITHOUT_1}{HELD}{BACKWARD}"
            policy = SchedulePolicy() if name == "in buckets" else ONE_BY_ONE
            found[f"{mode}: {name}"] = script, specs, mode, policy
    for name, script in AGREED.items():
        found[name] = script, (PLAIN,) * 3, Mode.AGREED, ONE_BY_ONE
    for name, (script, specs) in MISSING.items():
        policy = SchedulePolicy() if "in buckets" in name else ONE_BY_ONE
        found[name] = script, specs, Mode.AGREED, policy
    for name, (script, options) in POLICIES.items():
        found[name] = script, (PLAIN,) * 3, Mode.AGREED, SchedulePolicy(bucket_cap_mb=0, **options)
    return found


def played(script, specs, mode, policy):
    """A line for each thing that happens, with what the follower makes of it."""
    rank, lines = Played(specs, mode, policy), []
    for number, part in enumerate(script.split("~")):
        for line in filter(None, map(str.strip, part.split(";"))):
            made = rank.play(line)
            if number % 2 == 0:
                lines.append(f"{line} : {made}" if made else line)
    return "\n".join(lines)


def written():
    """By scenario the text that is written down."""
    parts = TEXT.read_text().removeprefix("# ").split("\n# ")
    return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}


@pytest.mark.parametrize("name", scenarios())
def test_each_event_leads_to_the_actions_and_questions_that_are_written_down(name):
    assert played(*scenarios()[name]) == written()[name]


def test_no_scenario_is_written_down_that_is_not_played():
    assert [*written()] == [*scenarios()]


def test_a_group_is_forgotten_after_so_many_backwards_without_it_also_where_none_has_used_it():
    recorded = RecordedSchedules(SchedulePolicy(), (PLAIN,) * 2)
    order = tuple(Event(EventKind.FORWARD_BEGIN, group) for group in (0, 1))
    recorded.replace(Recorded((RecordedOrder(9, Phase.FORWARD, order),), recorded.specs))
    seen = []
    for used in (0b01, 0b01, 0b00, 0b00):
        recorded.note_used(used)
        seen.append([event.group for event in recorded.planned(9, Phase.FORWARD).events])
    assert seen == [[0, 1], [0], [0], []]


def test_a_group_that_is_used_each_hundredth_time_is_not_forgotten(monkeypatch):
    monkeypatch.setattr(recorded_schedules, "FORGET_AFTER", FORGET_AFTER)
    recorded = RecordedSchedules(SchedulePolicy(), (PLAIN,))
    order = (Event(EventKind.FORWARD_BEGIN, 0),)
    recorded.replace(Recorded((RecordedOrder(9, Phase.FORWARD, order),), recorded.specs))
    for used in (*[0] * 99, 1, *[0] * 99):
        recorded.note_used(used)
        assert recorded.planned(9, Phase.FORWARD).events == order
    recorded.note_used(0)
    assert recorded.planned(9, Phase.FORWARD).events == ()


def test_a_digest_has_63_bits_and_differs_where_schedules_do():
    digests = {RecordedSchedules(ONE_BY_ONE, (PLAIN,) * num).digest for num in range(1, 9)}
    assert len(digests) == 8 and max(digests).bit_length() == 63


def test_gradients_that_two_reductions_have_not_taken_are_an_error_and_not_asked_about_for_ever():
    rank = Played((PLAIN,) * 3, Mode.AGREED, ONE_BY_ONE)
    for line in filter(None, f"{FORWARD}backward 9; B+ 0".split("; ")):
        rank.play(line)
    rank.stays, rank.num_asked = {2}, 0
    with pytest.raises(StageError, match=r"group 2 .* still holds gradients after two reductions"):
        rank.play("G 2")
    assert rank.num_asked == 2


def test_the_schedule_of_a_module_is_what_was_planned_of_its_phases():
    rank = Played((PLAIN,) * 3, Mode.LOCAL, ONE_BY_ONE)
    for line in filter(None, STEP.split("; ")):
        rank.play(line)
    recorded = rank.follower.recorded
    assert [*recorded.schedule(9).phases] == [Phase.FORWARD, Phase.BACKWARD]
    assert recorded.schedule(8) == Schedule()
    check(recorded.schedule(9))


def test_followers_that_would_go_on_differently_have_different_snapshots():
    follower = Follower(ONE_BY_ONE, [PLAIN], Mode.LOCAL)
    seen = [follower.snapshot()]
    follower.begin(Phase.FORWARD, 9, Local(), held=False)
    seen.append(follower.snapshot())
    follower.on(Event(EventKind.FORWARD_BEGIN, 0))
    assert len({*seen, follower.snapshot()}) == 3


def test_that_nothing_more_is_needed_is_the_largest_word_that_ranks_exchange():
    assert torch.iinfo(torch.int64).max == DONE


ITEMS = st.lists(st.integers(0, 4), max_size=9)


def contains(whole, part):
    left = iter(whole)
    return all(item in left for item in part)


@given(ITEMS, ITEMS)
def test_a_supersequence_has_both_and_is_the_shortest(first, second):
    merged = supersequence(first, second)
    assert contains(merged, first)
    assert contains(merged, second)
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, x in enumerate(first):
        for j, y in enumerate(second):
            both = lengths[i][j] + 1
            lengths[i + 1][j + 1] = both if x == y else max(lengths[i][j + 1], lengths[i + 1][j])
    assert len(merged) == len(first) + len(second) - lengths[-1][-1]


def test_orders_too_different_to_compare_are_put_end_to_end():
    first, second = list(range(2001)), list(range(3000, 5001))
    assert supersequence([-1, *first, -2], [-1, *second, -2]) == (-1, *first, *second, -2)


def test_orders_of_as_many_pairs_as_may_be_are_compared(monkeypatch):
    monkeypatch.setattr(recorded_schedules, "_MAX_CELLS", 12)
    assert supersequence([1, 2, 3], [4, 2, 5, 6]) == (1, 4, 2, 3, 5, 6)
    assert supersequence([1, 2, 3], [4, 2, 5, 6, 7]) == (1, 2, 3, 4, 2, 5, 6, 7)


if __name__ == "__main__":
    recorded_schedules.FORGET_AFTER = 2
    TEXT.write_text("\n\n".join(f"# {name}\n{played(*given)}" for name, given in scenarios().items()) + "\n")
