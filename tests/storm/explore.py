"""Every way in which a small job can go: all routes of a few ranks, all interleavings, one fault anywhere.

What a rank does is seen by others only as a launch or as words. So where a rank's next thing is neither, it
is taken alone: in whatever order others do theirs, what comes of it is the same.
"""

from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from typing import Any

from shardwright.policy import SchedulePolicy
from shardwright.schedule.following import Mode
from shardwright.schedule.schedule import GroupSpec
from tests.storm.steps import ALONE, Night, Plan, doors
from tests.storm.weather import train

_ROOT = 2
_POLICIES = (SchedulePolicy(bucket_cap_mb=0), SchedulePolicy(keep_last=0, max_reductions=1))
_SPEC = GroupSpec(nbytes=1, grad_nbytes=1, bucket_key=7)


def plans(world: int, longest: int) -> Iterator[Plan]:
    """All routes over two groups and a root, up to a length: skips, orders, repeats. The second step has each
    rank go the way that another one has gone."""
    routes = [route for length in range(longest + 1) for route in product(range(_ROOT), repeat=length)]
    for number, taken in enumerate(combinations_with_replacement(routes, world)):
        programs = tuple(
            (*train(_ROOT, taken[rank], 1 << 8 * rank), *train(_ROOT, taken[rank - 1], 1 << 8 * rank + 4))
            for rank in range(world)
        )
        entries = (frozenset(range(_ROOT + 1)),)
        policy = _POLICIES[number % len(_POLICIES)]
        yield Plan(number, Mode.AGREED, policy, (_SPEC,) * (_ROOT + 1), entries, programs)


def explore(plan: Plan, fault: str = "") -> int:
    """Go every way; how many states there are. fault: "die" or "raise", which hits any rank anywhere, once.

    Raises: Broken.
    """
    with doors(plan):
        seen: set[Any] = set()
        waiting = [Night(plan)]
        while waiting:
            night = waiting.pop()
            state = night.state()
            if state in seen:
                continue
            seen.add(state)
            ways = _ways(night)
            if not ways:
                night.judge()
            waiting += ways
            if fault and night.expects != ALONE:
                waiting += _struck(night, fault)
        return len(seen)


def _ways(night: Night) -> list[Night]:
    """What may come next: a thing of each rank that can go on; one alone where others don't see it."""
    ways = []
    for number in range(night.world):
        after = night.after(number)
        if after.advance(after.ranks[number]):
            if after.progress == night.progress:
                return [after]
            ways.append(after)
    return ways


def _struck(night: Night, fault: str) -> Iterator[Night]:
    for number, rank in enumerate(night.ranks):
        if not rank.is_over:
            struck = night.after(number)
            struck.expects = ALONE
            if fault == "die":
                struck.ranks[number].has_ended = True
            else:
                struck.ranks[number].fail(struck, within=True)
            yield struck
