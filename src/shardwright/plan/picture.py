"""A plan as a drawing: what each lane does above what is held, by the names of modules."""

import re
from collections.abc import Sequence

from shardwright.observe.steps.drawing import Bar, Drawing, Level
from shardwright.plan.memory import HeldBytes
from shardwright.plan.simulate import Interval
from shardwright.schedule.schedule import ActionKind, EventKind

_WORDS: dict[str, str] = {
    EventKind.FORWARD_BEGIN: "forward of",
    EventKind.FORWARD_END: "after the forward of",
    EventKind.BACKWARD_BEGIN: "backward of",
    EventKind.BACKWARD_END: "after the backward of",
    EventKind.GRADS_READY: "with the gradients of",
    EventKind.STEP_END: "at the end of the backward",
    ActionKind.UNSHARD: "all-gather",
    ActionKind.REDUCE: "reduce-scatter",
}


def drawing_of(
    title: str,
    intervals: Sequence[Interval],
    held: Sequence[HeldBytes],
    names: Sequence[str],
    capacity_nbytes: int | None = None,
) -> Drawing:
    """intervals: of a timeline. held: at the events of one microbatch, in their order. names: of groups, by
    number; "" is the model itself."""
    bars = [Bar(lane, named(label, names), float(a), float(b)) for lane, label, a, b in intervals if b > a]
    moments = {moment.at for moment in held}
    stretches = [each for each in intervals if each.lane == "compute" and each.label in moments]
    levels: dict[float, Level] = {}
    place = 0
    while place < len(stretches):  # a microbatch
        waiting: list[HeldBytes] = []
        for moment in held:
            waiting.append(moment)
            if place < len(stretches) and stretches[place].label == moment.at:
                start = float(stretches[place].start)
                levels[start] = _level(start, moment, names)
                place, waiting = place + 1, []
        if waiting:
            end = float(stretches[place - 1].end)
            levels[end] = _level(end, waiting[-1], names)
    return Drawing(title, tuple(bars), tuple(levels.values()), capacity_nbytes)


def _level(at: float, moment: HeldBytes, names: Sequence[str]) -> Level:
    nbytes = {str(category): amount for category, amount in moment.nbytes.items()}
    return Level(at, nbytes, named(moment.at, names))


def named(label: str, names: Sequence[str]) -> str:
    """``label`` of an event, an action, or both, in words. names: of groups, by number."""
    words = []
    for word in label.split():
        if re.fullmatch(r"\d+(\+\d+)*(/\d+)?", word):
            groups = word.partition("/")[0].split("+")
            words.append(", ".join(names[int(group)] or "the model itself" for group in groups))
        else:
            words.append(_WORDS.get(word, word))
    return " ".join(words)
