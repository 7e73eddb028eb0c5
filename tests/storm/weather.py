"""What one seed draws: a model, a policy, and the programs of ranks that skip, reorder and repeat modules,
evaluate unevenly, freeze, accumulate and fail."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from shardwright.policy import SchedulePolicy
from shardwright.schedule.following import Mode
from shardwright.schedule.schedule import BEGINS, ENDS, ActionKind, Event, EventKind, GroupSpec, Phase
from tests.storm.steps import ALONE, DIVERGES, HEALTHY, Night, Plan, run

Program = list[tuple[Any, ...]]
STEP = ("step",)
_TRAINING = (Phase.FORWARD, Phase.BACKWARD)


# ---- plain programs


def forward(root: int, route: Iterable[int], phase: Phase = Phase.FORWARD) -> Program:
    """A forward or evaluation along a route, inside of the root."""
    begin, end = EventKind.FORWARD_BEGIN, EventKind.FORWARD_END
    inside = [_at(kind, group) for group in route for kind in (begin, end)]
    return [("begin", phase, 0), _at(begin, root), *inside, _at(end, root), ("end",)]


def backward(root: int, used: Iterable[int], grad: int) -> Program:
    """A backward of groups in this order. grad: what the root brings; each of the others twice as much."""
    begin = _at(EventKind.BACKWARD_BEGIN, root)
    program: Program = [("begin", Phase.BACKWARD, 0), begin, ("bring", root, grad)]
    for place, group in enumerate(used, 1):
        program += [_at(EventKind.BACKWARD_BEGIN, group), ("bring", group, grad << place)]
        program += [_at(EventKind.GRADS_READY, group), _at(EventKind.BACKWARD_END, group)]
    return [*program, ("left",), _at(EventKind.STEP_END), ("end",)]


def train(root: int, route: Sequence[int], grad: int) -> Program:
    """A forward along a route, its backward, and the optimizer's step."""
    return [*forward(root, route), *backward(root, route[::-1], grad), STEP]


# ---- what a seed draws


def night(seed: int, history: list[str] | None = None) -> Night:
    """The night of a seed, from begin to end. Raises: Broken."""
    return run(draw(seed), history)


def draw(seed: int) -> Plan:
    """The night of a seed."""
    return _Weather(seed).plan()


class _Weather:
    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.mode = Mode.LOCAL if self.chance(0.1) else Mode.AGREED
        # Ranks that don't agree must run the same; one alone may run anything.
        self.alike = self.mode is Mode.LOCAL and self.chance(0.5)
        self.world = 1 if self.mode is Mode.LOCAL and not self.alike else self.pick([2, 2, 2, 3, 3, 4])
        self.world = self.random.randint(5, 8) if self.world == 4 and self.chance(0.1) else self.world
        self.num_groups = self.random.randint(2, 5)
        self.wild = self.pick([0, 0.1, 0.3, 1])  # how often a rank takes another route than all
        self.specs = tuple(self.spec(number) for number in range(self.num_groups))
        part = [self.root, *self.route()] if self.num_groups > 2 else [self.root]
        everything = frozenset(range(self.num_groups))
        self.entries = (everything, frozenset(part), everything)
        self.habit = self.route()
        # With copies a backward inside of a forward may wait for ranks that wait for it.
        self.may_nest = self.chance(0.4) and not any(spec.needs_copies_reduced for spec in self.specs)
        self.fault = self.pick(_FAULTS) if self.mode is Mode.AGREED else ""

    @property
    def root(self) -> int:
        return self.num_groups - 1

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, items: Sequence[Any]) -> Any:
        return items[int(self.random.random() * len(items))]

    def plan(self) -> Plan:
        """All that is drawn."""
        steps = [self.step() for _ in range(self.random.randint(2, 12))]
        # Once more the same: whatever can be known beforehand is known by then.
        # A backward inside of a forward is always asked for.
        again = not self.may_nest and self.mode is Mode.AGREED and not self.fault and self.chance(0.3)
        programs = [[each for step in steps for each in step[rank]] for rank in range(self.world)]
        expects = HEALTHY
        if again:
            last = self.step(calm=True)
            for rank, program in enumerate(programs):
                program += [*last[rank], *last[rank], ("mark",), *last[rank], ("asks nobody",)]
        if self.fault:
            expects = self.strike(programs)
        ends = () if expects == DIVERGES else (("join",),)
        if self.alike:
            programs = [[self.anew(each) for each in programs[0]] for _ in programs]
        told = tuple((*program, *ends) for program in programs)
        forget_after = self.pick([2, 3, 100]) if not again else 100
        restarts = draw(self.seed + 10**9) if self.fault == "killed" and self.chance(0.5) else None
        model = (self.mode, self.policy(), self.specs, self.entries)
        return Plan(self.seed, *model, told, expects, forget_after, restarts)

    # ---- the model

    def policy(self) -> SchedulePolicy:
        """Any."""
        return SchedulePolicy(
            backward_prefetch=self.pick(["none", "pre", "post"]),
            forward_prefetch=self.chance(0.7),
            depth=self.random.randint(0, 3),
            budget_nbytes=self.random.randint(0, 9) if self.chance(0.1) else None,
            max_reductions=self.random.randint(1, 3),
            keep_last=self.random.randint(0, 2),
            bucket_cap_mb=self.random.randint(0, 6) / 2**20,
        )

    def spec(self, number: int) -> GroupSpec:
        """Any, of which most are plain."""
        keeps = self.pick([None, None, None, True, False])
        smaller = self.chance(0.1)
        listed = [self.random.randrange(self.num_groups) for _ in range(self.random.randint(0, 2))]
        spec = GroupSpec(
            True if smaller else keeps,
            nbytes=number + 1,
            grad_nbytes=number + 1,
            bucket_key=self.pick([None, 7, 7]),
            is_root=number == self.root and self.chance(0.5),
            smaller_world=smaller,
        )
        if self.chance(0.75):
            return spec
        flags = {"no_prefetch": True, "steps": True, "needs_copies_reduced": True}
        reads = {"reshard_after_backward": False, "unshard_in_backward": False}
        ahead = {"ahead_in_forward": tuple(listed), "ahead_in_backward": tuple(listed)}
        name, value = self.pick([*(flags | reads | ahead | {"part_of": max(number - 1, 0)}).items()])
        return replace(spec, **{name: value})

    # ---- routes

    def route(self) -> list[int]:
        """Groups in the order in which they run, but for the root."""
        num = self.random.randint(0, 4)
        return [self.random.randrange(self.root) for _ in range(num)]

    def turned(self, route: Sequence[int]) -> list[int]:
        """A route like this one: with one less, or one twice, or in another order; or wholly another."""
        route, how = [*route], self.random.random()
        if how < 0.4 and route:
            del route[self.random.randrange(len(route))]
        elif how < 0.6 and route:
            route.insert(self.random.randrange(len(route)), self.pick(route))
        elif how < 0.8:
            self.random.shuffle(route)
        else:
            route = self.route()
        return route

    def routes(self, calm: bool = False) -> list[list[int]]:
        """Of every rank."""
        base = self.turned(self.habit) if self.chance(self.wild) else self.habit
        wild = 0 if self.alike else self.wild
        return [self.turned(base) if self.chance(wild) and not calm else base for _ in range(self.world)]

    # ---- programs, of every rank

    def step(self, calm: bool = False) -> list[Program]:
        """Evaluations, microbatches of forwards and a backward, and the optimizer's step."""
        programs: list[Program] = [[] for _ in range(self.world)]
        is_unsharded = not calm and self.before(programs)
        num = self.pick([1, 1, 1, 1, 1, 1, 2, 3])
        quiet = self.pick(["sync", "last", "neither"])
        for left in reversed(range(num)):
            forwards, entries = 1 if is_unsharded else self.pick([1, 1, 1, 1, 1, 1, 2]), []
            for _ in range(forwards):
                nests = 0.1 if self.may_nest and not calm else 0
                entries.append((1 if self.chance(0.1) else 0, self.routes(), self.chance(nests)))
            for rank, program in enumerate(programs):
                program += [
                    ("set", "reduce", left == 0 or quiet != "sync"),
                    ("last", not left or quiet != "last"),
                ]
                ran: list[int] = []
                rooted = True
                for entry, routes, nests in entries:
                    route = [g for g in routes[rank] if g in self.entries[entry]]
                    rooted = self.alike or not self.chance(0.03)
                    # No other rank hears of a forward that finds all unsharded: there all must do the same.
                    nests = nests and (is_unsharded or self.chance(0.7))
                    program += self.forward(Phase.FORWARD, entry, route, rooted, nests)
                    ran += route
                if not calm and self.chance(0.05) and not self.alike:
                    program.append(("do", ActionKind.RESHARD, self.random.randrange(self.num_groups)))
                program += self.backward(ran, rooted)
        if not calm and not is_unsharded and self.chance(0.08):
            programs = self.called(programs[0])
        for program in programs:
            program.append(STEP)
        return programs

    def called(self, program: Program) -> list[Program]:
        """The same on all ranks, with a call of the user inside of a phase, of a group that doesn't run."""
        # Not while all is unsharded by hand, which needs it so.
        start = max((place for place, each in enumerate(program) if each == ("rest",)), default=0)
        place = self.pick([place for place, each in enumerate(program) if each[0] == "at" and place > start])
        idle = {*range(self.num_groups)}
        for event in (each[1] for each in program[:place] if each[0] == "at" and each[1].group >= 0):
            idle -= {event.group} if event.kind in BEGINS else set()
            idle |= {event.group} if event.kind in ENDS else set()
        if idle:
            kind = self.pick([ActionKind.UNSHARD, ActionKind.WAIT, ActionKind.RESHARD])
            program.insert(place, ("do", kind, self.pick(sorted(idle))))
        return [[("join",), ("rest",), *map(self.anew, program)] for _ in range(self.world)]

    def before(self, programs: list[Program]) -> bool:
        """What comes before a step: evaluations, settings, calls. Whether it leaves all unsharded."""
        # First, so that none is left out where ranks raise in an evaluation that others take part in.
        if self.chance(0.1):
            group, trains = self.random.randrange(self.num_groups), int(self.chance(0.5))
            _all(programs, [("set", "trainable", trains, group)])
        # With all unsharded by hand, when nobody hears of a forward.
        generates = self.fault != "diverges" and self.chance(0.08)
        if self.chance(0.5 if generates else 0.1):
            self.evaluate(programs)
        if self.chance(0.03):
            _all(programs, [("join",), ("replan", self.policy())])
        if self.chance(0.02):
            _all(programs, [("join",), ("rest",), ("forget",)])
        if generates:
            unsharded = [("do", ActionKind.UNSHARD, group) for group in range(self.num_groups)]
            _all(programs, [("join",), *([("rest",)] if self.chance(0.3) else []), *unsharded])
            if self.chance(0.5):
                return True
            self.evaluate(programs)
            _all(programs, [("rest",)])
        return False

    def evaluate(self, programs: list[Program]) -> None:
        """Each rank as often as it likes."""
        for program, route in zip(programs, self.routes(), strict=True):
            for _ in range(self.random.randint(0, 2)):
                program += self.forward(Phase.EVALUATION, 0, route)

    def forward(
        self, phase: Phase, entry: int, route: Sequence[int], rooted: bool = True, nests: bool = False
    ) -> Program:
        """A forward or evaluation along a route. nests: with a backward inside of it."""
        begin, end = EventKind.FORWARD_BEGIN, EventKind.FORWARD_END
        program: Program = [("begin", phase, entry)]
        program += [_at(begin, self.root)] if rooted else []
        inside: list[int] = []
        for group in route:
            if group in inside:
                continue
            program.append(_at(begin, group))
            # Of a module that has begun a part hasn't run, or others run inside of it.
            if self.chance(0.03) or (self.chance(0.1) and not self.alike):
                inside.append(group)
            else:
                unseen = phase is Phase.FORWARD and self.chance(0.03)
                program.append((*_at(end, group), *(["holds"] if unseen else [])))
            if nests:
                program += self.inner([each for each in route if each not in inside])
                nests = False
        program += self.inner([]) if nests else []
        # A forward ends with the end of a module.
        program += [_at(end, group) for group in reversed(inside) if not rooted or self.chance(0.8)]
        program += [_at(end, self.root)] if rooted else []
        return [*program, ("end",)]

    def inner(self, groups: Sequence[int]) -> Program:
        """A backward inside of a forward (gradients that the forward itself reads)."""
        program: Program = [("enter", Phase.BACKWARD, 0)]
        for group in self.random.sample(groups, min(len(groups), 2)):
            program += [_at(EventKind.BACKWARD_BEGIN, group), self.bring(group)]
            program += [_at(EventKind.GRADS_READY, group), _at(EventKind.BACKWARD_END, group)]
        return [*program, ("left",), _at(EventKind.STEP_END), ("end",)]

    def backward(self, ran: Sequence[int], rooted: bool = True) -> Program:
        """The backward of what ran, or of a part of it."""
        program: Program = [("begin", Phase.BACKWARD, 0)]
        program += [_at(EventKind.BACKWARD_BEGIN, self.root), self.bring(self.root)] if rooted else []
        used = [*reversed(ran)]
        if self.chance(0.3 * self.wild) and not self.alike:
            used = used[self.random.randint(0, 2) :]
            self.random.shuffle(used)
        recomputes, late = self.chance(0.1), self.chance(0.1)
        for group in used:
            if recomputes:
                program += [_at(EventKind.RECOMPUTE, group), _at(EventKind.FORWARD_END, group)]
            program += [_at(EventKind.BACKWARD_BEGIN, group), self.bring(group)]
            program += [] if late else [_at(EventKind.GRADS_READY, group)]
            program += [_at(EventKind.BACKWARD_END, group)] if self.chance(0.95) else []
        program += [_at(EventKind.BACKWARD_END, self.root)] if rooted and self.chance(0.3) else []
        return [*program, ("left",), _at(EventKind.STEP_END), ("end",)]

    def bring(self, group: int) -> tuple[Any, ...]:
        """A gradient that nothing else brings."""
        return ("bring", group, self.random.getrandbits(40) + 1)

    def anew(self, instruction: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same for another rank."""
        return self.bring(instruction[1]) if instruction[0] == "bring" else instruction

    # ---- what goes wrong

    def strike(self, programs: list[Program]) -> str:
        """Put the fault into the programs; what the night comes to then."""
        hit = self.random.randrange(self.world)
        program = programs[hit]
        if self.fault == "all raise":
            self.all_raise(programs)
            return HEALTHY
        if self.fault == "killed":
            program.insert(self.random.randrange(len(program)), ("die",))
            return ALONE
        if self.fault == "one raises":
            places = [i for i, each in enumerate(program) if each[0] in ("begin", "at", "bring")]
            place = self.pick([p for p in places if program[p] != _at(EventKind.STEP_END)])
            program.insert(place, ("raise",))
            return ALONE
        return self.diverge(programs, hit)

    def all_raise(self, programs: list[Program]) -> None:
        """In the same action, which all ranks come to, since what they launch is alike, whatever they run. Or
        between two phases, of which ranks may have run different things."""
        within = self.chance(0.5)
        instruction = ("raise after", self.random.randint(1, 12)) if within else ("raise",)
        places = [_starts(each) if within else self.ends(each) for each in programs]
        num = self.random.randrange(min(map(len, places)))
        for program, own in zip(programs, places, strict=True):
            program.insert(own[num], instruction)
            # What was unsharded by hand, or for a backward that didn't come, is still so.
            program.insert(program.index(STEP, own[num]) + 1, ("rest",))

    def ends(self, program: Program) -> list[int]:
        """Where training phases of a program begin."""
        return [i for i, each in enumerate(program) if each[0] == "begin" and each[1] in _TRAINING]

    def diverge(self, programs: list[Program], hit: int) -> str:
        """Have one rank make another call than the others, or have other settings."""
        program = programs[hit]
        begins = self.ends(program)
        place = self.pick(begins)
        depth = [(each[0] in ("begin", "enter")) - (each == ("end",)) for each in program[place:]]
        stop = place + 1 + next(i for i in range(len(depth)) if not sum(depth[: i + 1]))
        how = self.random.randrange(5)
        if how == 0:  # a phase less
            if program[place][1] is Phase.BACKWARD:
                stop = program.index(STEP, place) + 1
            del program[place:stop]
            if not any(each[0] == "begin" for each in program[place:]):
                return ALONE
        elif how == 1 and program[place][1] is Phase.FORWARD:
            program[place] = ("begin", Phase.FORWARD, 2)
        elif how == 2:
            backward = next(i for i in begins if i >= place and program[i][1] is Phase.BACKWARD)
            group = self.random.randrange(self.num_groups)
            program.insert(backward, ("set", "trainable", 1 - self.trains(program[:backward], group), group))
        elif how == 3:
            program.insert(place, ("replan", replace(self.policy(), max_reductions=9)))
        else:
            program.insert(place, ("join",))
        return DIVERGES

    def trains(self, program: Program, group: int) -> int:
        """Whether the group was last said to train."""
        said = [each[2] for each in program if each[:2] == ("set", "trainable") and each[3] == group]
        return said[-1] if said else 1


_FAULTS = [""] * 12 + ["all raise"] * 3 + ["killed", "one raises", "diverges", "diverges"]


def _at(kind: EventKind, group: int = -1) -> tuple[Any, ...]:
    return ("at", Event(kind, group))


def _all(programs: Iterable[Program], more: Program) -> None:
    for program in programs:
        program += more


def _starts(program: Program) -> list[int]:
    """Where its steps begin."""
    return [0, *(place + 1 for place, each in enumerate(program) if each == STEP)][:-1]
