"""The same model planned otherwise: larger groups, or blocks computed again in the backward. Pure.

What ``search`` tries, without going through the model again.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from shardwright.plan.workload import GroupSize, Stretch, Workload
from shardwright.schedule.schedule import BEGINS, Event, EventKind, Phase

Entries = tuple[tuple[Event, Stretch], ...]


def joined(first: Stretch, second: Stretch) -> Stretch:
    """One after the other."""
    before, saved = max(first.saved_nbytes, 0), first.saved_nbytes + second.saved_nbytes
    peaks = (
        before + first.transient_nbytes,
        first.saved_nbytes + max(second.saved_nbytes, 0) + second.transient_nbytes,
    )
    head = first.head or second.head
    return Stretch(first.ops + second.ops, saved, max(peaks) - max(saved, 0), head)


def merged(workload: Workload, parts: Sequence[Collection[int]]) -> Workload:
    """The workload with groups put together: each of ``parts`` becomes one, numbered by its place.

    A merged group begins where the first of its members does and ends where the last one does. Its backward
    has no end where that of a member has none, as of an embedding, whose inputs have no gradient. Every group
    is in one part; one that is cut off another stays so where both are alone in theirs.
    """
    number = {group: place for place, part in enumerate(parts) for group in part}
    groups = tuple(
        GroupSize(
            "+".join(workload.groups[group].name for group in part),
            sum(workload.groups[group].numel for group in part),
            sum(workload.groups[group].trained for group in part),
            max(workload.groups[group].entry_nbytes for group in part),
            tuple(param for group in part for param in workload.groups[group].params),
            part_of=_part_of(workload, part, number),
            frozen=_added(workload.groups[group].frozen for group in part),
            coded=_added(workload.groups[group].coded for group in part),
            per_use=max(workload.groups[group].per_use for group in part),
            elsewhere=sum(workload.groups[group].elsewhere for group in part),
        )
        for part in parts
    )
    phases = {phase: _merged(entries, number) for phase, entries in workload.phases.items()}
    root = None if workload.root is None else number[workload.root]
    earlier = None if workload.earlier is None else merged(workload.earlier, parts)
    return replace(workload, groups=groups, phases=phases, root=root, earlier=earlier)


def _added(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    firsts, seconds = zip(*pairs, strict=True)
    return sum(firsts), sum(seconds)


def coded(workload: Workload) -> Workload:
    """The workload whose frozen weights are codes of NF4, which a group decodes as it is unsharded."""
    return replace(workload, groups=tuple(group._replace(coded=group.frozen) for group in workload.groups))


def _part_of(workload: Workload, part: Collection[int], number: dict[int, int]) -> int | None:
    whole = workload.groups[next(iter(part))].part_of
    return None if whole is None else number[whole]


def _merged(entries: Entries, number: dict[int, int]) -> Entries:
    firsts: dict[Event, int] = {}
    lasts: dict[Event, int] = {}
    renamed = [
        Event(event.kind, number[event.group] if event.group >= 0 else event.group) for event, _ in entries
    ]
    for place, event in enumerate(renamed):
        firsts.setdefault(event, place)
        lasts[event] = place
    ended = {event.group for event, _ in entries if event.kind is EventKind.BACKWARD_END}
    for group in number.keys() - ended:
        lasts.pop(Event(EventKind.BACKWARD_END, number[group]), None)
    found: list[tuple[Event, Stretch]] = []
    for place, (event, (_, stretch)) in enumerate(zip(renamed, entries, strict=True)):
        if (firsts if event.kind in BEGINS else lasts).get(event) == place or not found:
            found.append((event, stretch))
        else:
            found[-1] = (found[-1][0], joined(found[-1][1], stretch))
    return tuple(found)


def whole_groups(workload: Workload) -> list[int]:
    """The groups that a forward begins, in that order, without those that are cut off others."""
    return [group for group in workload.ran if workload.groups[group].part_of is None]


def cut_off(workload: Workload, group: int) -> list[int]:
    """The groups that are cut off it."""
    return [number for number, each in enumerate(workload.groups) if each.part_of == group]


def numel_of(workload: Workload, group: int) -> int:
    """Parameters of it, and of what is cut off it."""
    return sum(workload.groups[each].numel for each in (group, *cut_off(workload, group)))


def neighbours(workload: Workload, count: int) -> list[list[int]]:
    """About ``count`` parts for ``merged``: groups that a forward begins one after another, together about
    as large as every other part. The root's group stays by itself. What is cut off a group is in its part,
    where that has other groups as well: the runtime cuts no group of several modules."""
    order = [group for group in whole_groups(workload) if group != workload.root]
    least = sum(numel_of(workload, group) for group in order) / max(count, 1)
    together: list[list[int]] = []
    filled = 0.0
    for group in order:
        if not together or filled >= least * len(together) * (1 - 1e-9):
            together.append([])
        together[-1].append(group)
        filled += numel_of(workload, group)
    for part in together:
        if len(part) > 1:
            part += [each for group in part for each in cut_off(workload, group)]
    absent = set(range(len(workload.groups))) - {group for part in together for group in part}
    return together + [[group] for group in sorted(absent)]


def first_blocks(workload: Workload, share: float) -> tuple[int, ...]:
    """The groups of the first blocks that a forward runs, of all but the last, with what is cut off them:
    what runs last is needed first in the backward, so that to compute it again would win nothing."""
    blocks = [
        group
        for group in whole_groups(workload)
        if group != workload.root and workload.groups[group].entry_nbytes
    ][:-1]
    return _first(workload, blocks, share)


def kept_groups(workload: Workload, share: float) -> tuple[int, ...]:
    """The first of the groups that a backward gathers, with what is cut off them: of all groups these are
    unsharded for the shortest time from their forward on. The root's stays in any case."""
    begun = (event.group for event, _ in workload.phases[Phase.BACKWARD] if event.kind in BEGINS)
    needed = [
        group
        for group in dict.fromkeys(begun)
        if group not in workload.of_root and workload.groups[group].part_of is None
    ]
    return _first(workload, needed, share)


def _first(workload: Workload, groups: Sequence[int], share: float) -> tuple[int, ...]:
    """The first of ``groups``, of which they are this share, with what is cut off them."""
    chosen = groups[: round(share * len(groups))]
    return tuple(each for group in chosen for each in (group, *cut_off(workload, group)))


def recomputes(workload: Workload) -> bool:
    """Whether the model itself computes something again in its backward."""
    return any(event.kind is EventKind.RECOMPUTE for event, _ in workload.phases[Phase.BACKWARD])


def recomputed(workload: Workload, groups: Collection[int]) -> Workload:
    """The workload in which the forward of these groups keeps its inputs alone; their backward repeats it.

    Of groups that begin and end once in each phase, and of no group around others.
    """
    ahead = {
        event.group: stretch
        for event, stretch in workload.phases[Phase.FORWARD]
        if event.kind is EventKind.FORWARD_BEGIN
    }

    def changed(event: Event, stretch: Stretch) -> Stretch:
        if event.group not in groups or event.kind not in BEGINS:
            return stretch
        forward, size = ahead[event.group], workload.groups[event.group]
        entry = size.entry_nbytes if size.part_of is None else 0  # the inputs of the whole are enough
        dropped = max(forward.saved_nbytes - entry, 0)
        widest = int(max((op.nbytes for op in forward.ops), default=0))
        if event.kind is EventKind.FORWARD_BEGIN:
            return forward._replace(
                saved_nbytes=forward.saved_nbytes - dropped,
                # what a forward that keeps nothing holds at most: what one operation reads and writes
                transient_nbytes=min(forward.transient_nbytes + dropped, widest),
            )
        return Stretch(
            forward.ops + stretch.ops,
            stretch.saved_nbytes + dropped,
            dropped + max(forward.transient_nbytes, stretch.transient_nbytes),
            stretch.head,
        )

    phases = {
        phase: tuple((event, changed(event, stretch)) for event, stretch in entries)
        for phase, entries in workload.phases.items()
    }
    return replace(workload, phases=phases)
