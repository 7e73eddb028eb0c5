"""The schedule: which collective is issued, waited for or dropped at which event of a step. Pure data.

A step is two *phases*, forward and backward (and a third for evaluation, a forward without gradients).
Each phase is a list of :class:`ScheduleEntry` s: an :class:`Event`, and the :class:`Action` s that the
runtime takes there, in order. The text form is what ``print`` shows, and it parses back::

    forward
      F+ 0 : unshard 0, unshard 1, wait 0
      F- 0 : reshard 0
      F+ 1 : wait 1
    backward
      B+ 1 : unshard 0
      G  1 : reduce 1
      B- 1 : reshard 1
      B+ 0 : wait 0
      G  0 : reduce 0
      B- 0 : reshard 0
      E  : wait-reduce 1, wait-reduce 0

Events: ``F+``/``F-`` forward of a group begins/ends, ``B+``/``B-`` its backward begins/ends, ``R+`` a
recomputation (activation checkpointing) enters it, ``G`` all its gradients of this backward are there,
``E`` the backward has ended. Where a schedule knows the names of its groups they stand in place of numbers.

Small groups share collectives: ``unshard 1+2+3`` is one all-gather for three groups, each waited for at its
own event. ``hold 3`` puts gradients aside, and ``reduce 3+2+1`` reduces them with those of groups 2 and 1.
``step 3`` steps the parameters of a group whose optimizer runs inside of the backward. ``reshard 1/smaller``
keeps shards of group 1 over a smaller world; ``unshard 1/smaller``, seen in a trace, gathers from those.

``scheduler`` decides the actions, ``check`` proves that a schedule is right.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from shardwright.errors import InputError


class EventKind(StrEnum):
    """What happens in a step; the value is its text form."""

    FORWARD_BEGIN = "F+"
    FORWARD_END = "F-"
    BACKWARD_BEGIN = "B+"
    RECOMPUTE = "R+"
    GRADS_READY = "G"
    BACKWARD_END = "B-"
    STEP_END = "E"


_WORDS = {
    EventKind.FORWARD_BEGIN: "the forward of",
    EventKind.FORWARD_END: "the end of the forward of",
    EventKind.RECOMPUTE: "the recomputation of",
    EventKind.BACKWARD_BEGIN: "the backward of",
    EventKind.BACKWARD_END: "the end of the backward of",
    EventKind.GRADS_READY: "the gradients of",
    EventKind.STEP_END: "the end of the backward",
}


def event_in_words(kind: EventKind, name: str) -> str:
    """An event of the group that is called ``name``; "": of none."""
    return f"{_WORDS[kind]} {name}".strip()


class ActionKind(StrEnum):
    """What the runtime does at an event; the value is its text form.

    Those of a schedule: UNSHARD issues an all-gather, WAIT waits for it, RESHARD frees what it brought. HOLD
    takes gradients for a later REDUCE, which issues a reduce-scatter (while they are accumulated it issues
    nothing, and they stay on this rank); WAIT_REDUCE waits for it, ALL_REDUCE issues the sum over copies of
    the shards, STEP steps the optimizers inside of the backward.

    Two are decided as a step runs: PARTICIPATE launches an all-gather for other ranks, into memory that
    nobody reads. FINALIZE gives the shards the gradients of the step.
    """

    UNSHARD = "unshard"
    PARTICIPATE = "participate"
    WAIT = "wait"
    RESHARD = "reshard"
    HOLD = "hold"
    REDUCE = "reduce"
    WAIT_REDUCE = "wait-reduce"
    ALL_REDUCE = "all-reduce"
    STEP = "step"
    FINALIZE = "finalize"


class Phase(StrEnum):
    """The part of a step that a list of entries belongs to."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"


class Event(NamedTuple):
    """``kind`` at ``group`` (its index in the runtime; -1 for the end of a step)."""

    kind: EventKind
    group: int = -1

    def text(self, names: tuple[str, ...] = ()) -> str:
        """The text form, with the group's name where names are given."""
        return f"{self.kind:<2}" if self.group < 0 else f"{self.kind:<2} {_called(self.group, names)}"

    def __str__(self) -> str:
        return self.text()


class Action(NamedTuple):
    """``kind`` done to ``groups``, in one collective where it is one.

    smaller: over the smaller world, for kinds of ``ACROSS``: RESHARD keeps shards over it, UNSHARD and
        PARTICIPATE gather from those. Otherwise over all ranks.
    grads: of FINALIZE, bits of the parameters that have a gradient on some rank; None: not known yet.
    """

    kind: ActionKind
    groups: tuple[int, ...]
    smaller: bool = False
    grads: int | None = None

    @property
    def group(self) -> int:
        """The first of its groups."""
        return self.groups[0]

    def text(self, names: tuple[str, ...] = ()) -> str:
        """The text form, with the groups' names where names are given."""
        groups = (" + " if names else "+").join(_called(group, names) for group in self.groups)
        more = f"/{SMALLER}" if self.smaller else "" if self.grads is None else f"/{self.grads}"
        return " ".join(filter(None, (str(self.kind), groups))) + more

    def __str__(self) -> str:
        return self.text()


class ScheduleEntry(NamedTuple):
    """An event and what is done there, in order."""

    event: Event
    actions: tuple[Action, ...]

    def text(self, names: tuple[str, ...] = ()) -> str:
        """The text form, with the groups' names where names are given."""
        actions = ", ".join(each.text(names) for each in self.actions)
        return f"{self.event.text(names)} : {actions}".rstrip(" :")

    def __str__(self) -> str:
        return self.text()


def _called(group: int, names: tuple[str, ...]) -> str:
    """The name of a group; its number where it has none."""
    return names[group] if group < len(names) else str(group)


@dataclass(frozen=True)
class GroupSpec:
    """What the scheduler knows of a group.

    reshard_after_forward: False keeps it unsharded from its forward to its backward, and after an evaluation
        to whatever comes next; None: see ``keeps``. is_root: it is the outermost module's.
    nbytes: bytes of its unsharded parameters; 0 before they were laid out, which the first unshard does.
    grad_nbytes: of those that are trained.
    bucket_key: groups with the same key may share collectives (those on one transport); None: it shares none.
    ahead_in_forward, ahead_in_backward: groups to gather when it begins, instead of the next ones.
    no_prefetch: gathered when it is used, never ahead: what is to be gathered is known only then.
    reshard_after_backward: False keeps it unsharded into the next forward. unshard_in_backward: False says
        that its backward doesn't read its parameters (``check`` takes both for True).
    steps: its parameters are stepped in the backward. needs_copies_reduced: their gradients are complete only
        at its end, after an all-reduce over copies that runs beside the rest of it.
    smaller_world: after a forward its shards are kept over a smaller world, from which the backward gathers,
        and after a backward whose gradients aren't reduced, for the next forward.
    part_of: the first group of the same modules, with whose backward this one's begins.
    words_wait: its bytes go the way of ranks' words, which would wait for them: it isn't gathered before
        ranks have met.
    """

    reshard_after_forward: bool | None = None
    is_root: bool = False
    nbytes: int = 0
    grad_nbytes: int = 0
    bucket_key: int | None = None
    no_prefetch: bool = False
    ahead_in_forward: tuple[int, ...] | None = None
    ahead_in_backward: tuple[int, ...] | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    steps: bool = False
    needs_copies_reduced: bool = False
    smaller_world: bool = False
    part_of: int | None = None
    words_wait: bool = False

    def keeps(self, phase: Phase, chosen: bool = False) -> bool:
        """Whether it stays unsharded after its part of ``phase``. That is decided here alone: the scheduler
        plans by it, and the follower acts by it where no schedule says what to do.

        chosen: it is among the first that the backward needs, which the policy keeps (``kept_for_backward``).
        """
        if phase is Phase.BACKWARD:
            return not self.reshard_after_backward
        if self.is_open:
            return chosen and phase is Phase.FORWARD
        # None is the root here. It stays after an evaluation too, as in torch: to decode the next token then
        # needs no all-gather.
        return not self.reshard_after_forward

    @property
    def is_open(self) -> bool:
        """Whether the policy may keep it for the backward: the caller has said nothing, and it isn't the
        root's."""
        return self.reshard_after_forward is None and not self.is_root

    def reads(self, kind: EventKind) -> bool:
        """Whether what begins with an event of ``kind`` needs it unsharded."""
        return kind is not EventKind.BACKWARD_BEGIN or self.unshard_in_backward

    def shifted(self, by: int) -> "GroupSpec":
        """The same with every group's number raised, for a model that became part of another."""
        listed = (self.ahead_in_forward, self.ahead_in_backward)
        forward, backward = (None if groups is None else tuple(g + by for g in groups) for groups in listed)
        part_of = None if self.part_of is None else self.part_of + by
        return replace(self, ahead_in_forward=forward, ahead_in_backward=backward, part_of=part_of)


@dataclass(frozen=True)
class Schedule:
    """The entries of each phase, in order. Compare, print, ``parse`` or ``check`` it; it holds no tensors.

    names: of the groups, by number: the text has them in place of numbers. Schedules compare without them.
    """

    phases: dict[Phase, tuple[ScheduleEntry, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        lines = []
        for phase, entries in self.phases.items():
            lines.append(str(phase))
            lines.extend(f"  {entry.text(self.names)}" for entry in entries)
        return "\n".join(lines)

    @staticmethod
    def parse(text: str, names: tuple[str, ...] = ()) -> "Schedule":
        """The schedule that prints as ``text``; names: of its groups, where it has them. Raises: InputError
        naming the line that doesn't parse."""
        phases: dict[Phase, list[ScheduleEntry]] = {}
        entries: list[ScheduleEntry] | None = None
        for number, line in enumerate(text.splitlines(), 1):
            try:
                if line.strip() in list(Phase):
                    entries = phases.setdefault(Phase(line.strip()), [])
                elif line.strip():
                    if entries is None:
                        raise ValueError(f"an entry before its phase; first a line with one of {[*Phase]}")
                    entries.append(_parse_entry(line, names))
            except ValueError as error:
                raise InputError(
                    f"line {number} of the schedule doesn't parse: {line!r} ({error}); a line is a phase, "
                    "or an entry as str(schedule) prints it"
                ) from error
        return Schedule({phase: tuple(entries) for phase, entries in phases.items()}, names)


def _parse_entry(line: str, names: tuple[str, ...]) -> ScheduleEntry:
    numbers = {name: number for number, name in enumerate(names)}

    def number_of(word: str) -> int:
        return numbers[word] if word in numbers else int(word)

    head, _, tail = line.partition(":")
    moment, *group = head.split()
    event = Event(EventKind(moment), number_of(group[0]) if group else -1)
    actions = []
    for part in filter(None, (part.strip() for part in tail.split(","))):
        text, _, which = part.partition("/")
        verb, *targets = text.split()
        if verb.endswith("-post-forward"):
            raise ValueError(f"{verb!r} is written {verb.removesuffix('-post-forward')} GROUP/{SMALLER} now")
        kind = ActionKind(verb)
        if (not targets) != (kind is ActionKind.FINALIZE):
            raise ValueError(f"{part!r} is not a kind of action and its groups")
        if which and kind is not ActionKind.FINALIZE and not (which == SMALLER and kind in ACROSS):
            raise ValueError(f"{part!r}: /{SMALLER} goes with {', '.join(ACROSS)}, a number with finalize")
        joined = targets[::2] if names else [each for target in targets for each in target.split("+")]
        groups = tuple(map(number_of, joined))
        grads = int(which) if which and kind is ActionKind.FINALIZE else None
        actions.append(Action(kind, groups, which == SMALLER, grads))
    return ScheduleEntry(event, tuple(actions))


BEGINS = (EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN, EventKind.RECOMPUTE)
ENDS = (EventKind.FORWARD_END, EventKind.BACKWARD_END)
ACROSS = (ActionKind.UNSHARD, ActionKind.PARTICIPATE, ActionKind.RESHARD)
SMALLER = "smaller"
"""In the text form, behind the groups of an action over the smaller world (``reshard 1/smaller``)."""
