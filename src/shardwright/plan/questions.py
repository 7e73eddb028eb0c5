"""The inverse questions: what is the most that fits, on how few devices, and which lever frees most.

By bisection over ``price``: of what is asked for, more takes more.
"""

from collections.abc import Callable
from math import lcm
from typing import Any, NamedTuple

from shardwright.errors import InputError
from shardwright.plan.cluster import GIB, Cluster
from shardwright.plan.predict import Choice, Estimate, price
from shardwright.plan.search import space_of
from shardwright.plan.subject import Subject

_MOST = 2**24
"""Rows, tokens or ranks that are looked at."""


class Fitting(NamedTuple):
    """value: the last that fits. estimate: of it. beyond: of the next one, which doesn't fit."""

    value: int
    estimate: Estimate
    beyond: Estimate | None


class Saving(NamedTuple):
    """What a lever frees: of its values the one that holds least, beside the plain candidate."""

    lever: str
    value: Any
    nbytes: int
    seconds: float


def largest_batch(
    subject: Subject, cluster: Cluster, choice: Choice | None = None, *, budget: float | None = None
) -> Fitting:
    """The largest number of rows of a microbatch on one rank that fits on the devices.

    Args:
        subject: the model and a sample; see ``of_model``.
        cluster: the devices.
        choice: how it is trained; None: the defaults of ``Choice``.
        budget: bytes of each device that may be used; None: all but a reserve (``Cluster.room_nbytes``).

    Returns:
        The number of rows, its estimate, and that of one row more.

    Raises:
        InputError: one row is too much already, or the ranks can't be divided as asked.
        ConfigError: the runtime isn't known.
    """

    def at(rows: int) -> Estimate:
        return price(subject.at(rows, subject.sequence), within, choice or Choice())

    within = cluster.within(budget)
    return _most(at, within, 1, "rows of a microbatch")


def longest_sequence(
    subject: Subject,
    cluster: Cluster,
    choice: Choice | None = None,
    *,
    budget: float | None = None,
    multiple: int = 128,
) -> Fitting:
    """The largest number of tokens of a row that fits on the devices.

    Args:
        subject: the model and a sample of shape [rows, tokens]; see ``of_model``.
        cluster: the devices.
        choice: how it is trained; None: the defaults of ``Choice``.
        budget: bytes of each device that may be used; None: all but a reserve (``Cluster.room_nbytes``).
        multiple: the number of tokens is a multiple of this.

    Returns:
        The number of tokens, its estimate, and that of ``multiple`` tokens more.

    Raises:
        InputError: ``multiple`` tokens are too much already, the sample has no tokens, or the ranks can't be
            divided as asked.
        ConfigError: the runtime isn't known.
    """
    if subject.sequence is None:
        raise InputError(
            "longest_sequence: the sample's rows have no tokens; pass one of shape [rows, tokens]"
        )

    def at(tokens: int) -> Estimate:
        return price(subject.at(subject.rows, tokens), within, choice or Choice())

    within = cluster.within(budget)
    return _most(at, within, multiple, "tokens of a row")


def fewest_ranks(
    subject: Subject, cluster: Cluster, choice: Choice | None = None, *, budget: float | None = None
) -> Fitting:
    """The smallest number of devices on which the microbatch fits: devices of one host, or whole hosts.

    Args:
        subject: the model and a sample; see ``of_model``.
        cluster: the kind of device and host; its number of ranks is ignored.
        choice: how it is trained; None: the defaults of ``Choice``.
        budget: bytes of each device that may be used; None: all but a reserve (``Cluster.room_nbytes``).

    Returns:
        The number of devices, its estimate, and that of the next fewer.

    Raises:
        InputError: no number of devices is enough, or the ranks can't be divided as asked.
        ConfigError: the runtime isn't known.
    """
    host, within = cluster.ranks_per_host, cluster.within(budget)
    together = (choice or Choice()).sharing
    inside, hosts = host // together, lcm(host, together)

    def at(place: int) -> Estimate:
        more = place - inside + (inside * together == hosts)
        ranks = place * together if place <= inside else more * hosts
        return price(subject.workload, within.of(ranks), choice or Choice())

    place, seen = _first(at, lambda found: found.fits, _MOST // hosts)
    if place is None:
        last = max(seen)
        raise InputError(
            f"no number of devices is enough: on {seen[last].cluster.ranks:,} each holds "
            f"{_short(seen[last])}; ask for a smaller microbatch, or recompute blocks "
            "(Choice.recompute, --recompute 1)"
        )
    return Fitting(seen[place].cluster.ranks, seen[place], seen.get(place - 1))


def savings(subject: Subject, cluster: Cluster, choice: Choice | None = None) -> list[Saving]:
    """The bytes that each setting of ``search`` frees alone, and the seconds that it costs.

    Args:
        subject: the model and a sample; see ``of_model``.
        cluster: the devices.
        choice: how it is trained; None: the defaults of ``Choice``.

    Returns:
        For each setting that frees any the value that holds least, with bytes and seconds; the one that frees
            most comes first.

    Raises:
        InputError: the ranks can't be divided as asked.
        ConfigError: the runtime isn't known.
    """
    space = space_of(subject, cluster, choice or Choice())
    base, found = space.price(space.plain), []
    for lever, others in space.values.items():
        tried = [space.price(space.plain._replace(**{lever: value})) for value in others[1:]]
        if tried:
            best = min(tried, key=lambda one: (one.nbytes, one.step_s))
            value = getattr(best.candidate, lever)
            found.append(Saving(lever, value, base.nbytes - best.nbytes, best.step_s - base.step_s))
    return sorted((each for each in found if each.nbytes > 0), key=lambda saving: -saving.nbytes)


def _most(at: Callable[[int], Estimate], cluster: Cluster, unit: int, what: str) -> Fitting:
    """The last multiple of ``unit`` that fits. Raises: InputError."""
    place, seen = _first(lambda n: at(n * unit), lambda found: not found.fits, _MOST // unit)
    if place == 1:
        raise InputError(
            f"{what}: {unit} is too much already, {_short(seen[1])} on each of {cluster.ranks} x "
            f"{cluster.device.name}; take more devices, or recompute blocks (Choice.recompute, --recompute 1)"
        )
    last = max(seen) if place is None else place - 1
    return Fitting(last * unit, seen[last], None if place is None else seen[place])


def _first(
    at: Callable[[int], Estimate], wanted: Callable[[Estimate], bool], most: int
) -> tuple[int | None, dict[int, Estimate]]:
    """The first number from 1 to ``most`` of which ``wanted`` is true, as of all after it; and what was
    estimated, of that number and of the one before it too."""
    seen = {1: at(1)}
    low, high = 0, 1
    while not wanted(seen[high]):
        if high == most:
            return None, seen
        low, high = high, min(2 * high, most)
        seen[high] = at(high)
    while high - low > 1:
        middle = (low + high) // 2
        seen[middle] = at(middle)
        low, high = (low, middle) if wanted(seen[middle]) else (middle, high)
    return high, seen


def _short(found: Estimate) -> str:
    return f"{found.peak.total / GIB:.1f} of {found.cluster.room_nbytes / GIB:.1f} GiB"
