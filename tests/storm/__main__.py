"""Nights of random faults, each of one seed.

python -m tests.storm steps --seed 17      that night, with its history
python -m tests.storm disk --seconds 60    fresh seeds; prints those whose night breaks a promise
python -m tests.storm engine --count 100   so many of them
python -m tests.storm                      all depths, as many seconds each
python -m tests.storm scale --ranks 1024 --faults 100    what a job of many ranks takes, and its verdicts
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from random import SystemRandom
from typing import NamedTuple

from shardwright import clock
from tests.storm import checkpoints, nights, verdicts, weather


class Depth(NamedTuple):
    """How much of a job is real. what: in words. run: the night of a seed, with its history where that is
    wanted; returns how many steps were trained, and raises where a promise is broken."""

    what: str
    run: Callable[[int, list[str] | None], int]


def _steps(seed: int, history: list[str] | None) -> int:
    return max(rank.num_settled for rank in weather.night(seed, history).ranks)


def _engine(seed: int, history: list[str] | None, flips: bool = False) -> int:
    plan = nights.drawn(seed)
    night = nights.Night(nights.with_a_flipped_bit(plan) if flips else plan)
    try:
        night.run()
    finally:
        if history is not None:
            history.append(nights.told(night.history))
    return night.steps


def _disk(seed: int, history: list[str] | None) -> int:
    told = checkpoints.night(seed)
    if history is not None:
        history += told
    return 0


DEPTHS = {
    "steps": Depth("followers, schedules and consensus, on simulated groups and transports", _steps),
    "engine": Depth("all of a rank, on a simulated clock, network and store", _engine),
    "bits": Depth("the same, where one bit flips on the way between two ranks", partial(_engine, flips=True)),
    "disk": Depth("checkpoints, on a disk that crashes, fills up and refuses", _disk),
}


def fresh(depth: Depth, until: Callable[[int], bool]) -> Iterator[tuple[int, int, Exception | None]]:
    """Seeds that nobody has seen, until so many are enough: the seed, its steps, what was broken."""
    num = 0
    while not until(num):
        num, seed = num + 1, SystemRandom().getrandbits(32)
        try:
            yield seed, depth.run(seed, None), None
        except Exception as error:  # of any kind: the others are still to be seen
            yield seed, 0, error


def main() -> int:
    """The command (see above)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "; ".join(f"{name}: {depth.what}" for name, depth in DEPTHS.items())
    parser.add_argument("depth", choices=[*DEPTHS, "scale"], nargs="?", help=what)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256], help="of scale: a row for each")
    parser.add_argument("--faults", type=int, default=100, help="of scale: how many, of random kinds")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int)
    options = parser.parse_args()
    if options.depth == "scale":
        for line in verdicts.report(options.ranks, options.faults, options.seed or 0):
            print(line, flush=True)
        return 0
    if options.seed is not None:
        if options.depth is None:
            parser.error("--seed needs a depth")
        return _replay(DEPTHS[options.depth], options.seed)
    names = [options.depth] if options.depth else list(DEPTHS)
    return max([_try(name, options.seconds / len(names), options.count) for name in names])


def _try(name: str, limit_s: float, count: int | None) -> int:
    depth, start = DEPTHS[name], clock.monotonic()

    def until(num: int) -> bool:
        return clock.monotonic() - start > limit_s if count is None else num >= count

    num_nights = steps = failed = 0
    for seed, taken, error in fresh(depth, until):
        num_nights, steps = num_nights + 1, steps + taken
        if error is not None:
            failed += 1
            print(f"{name} --seed {seed}: {type(error).__name__}: {error}", flush=True)
    seconds = clock.monotonic() - start
    print(f"{name}: {num_nights} nights, {steps} steps, {steps / seconds:.0f} a second; {failed} have failed")
    return min(failed, 1)


def _replay(depth: Depth, seed: int) -> int:
    history: list[str] = []
    try:
        depth.run(seed, history)
    finally:
        print("\n".join(history), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
