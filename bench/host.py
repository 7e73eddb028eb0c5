"""What sharding costs the host of one rank, in a world of any size and without other ranks or a GPU.

    python bench/host.py --worlds 1 8 512
    python bench/host.py --profile 8

This process plays rank 0 (see rankzero.py): this package with its defaults and FSDP2 shard each block of one
Transformer, and then the Transformer. Counted per group and step are the Python calls of functions of the
package, the kernels that a GPU would be given beside the collectives, and the collectives; per step, the
exchanges of control words. "Frames (files)" lie between the hook that torch calls and the collective, where
they are most. The world divides the rows of ``even``, not those of ``uneven`` (one less than ``--width``);
``last dim`` shards every parameter on its last dimension. Below the table stands how many functions an even
step of the last world runs, of how many files, and how many lines of code these functions have;
``tests/ranks/test_ceilings.py`` counts the same on two real ranks.

Timed are forward, backward and ``zero_grad``: milliseconds per group over a local step, the median of
``--pairs`` rounds in which local, FSDP2 and this package alternate, and the median ratio of the pairs with
its 90 % interval. ``--profile`` shows instead where this package's calls and kernels of one world come from.
"""

import argparse
import copy
import gc
import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import comb, inf
from pathlib import Path
from statistics import median
from types import CodeType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwright
from bench import rankzero
from bench.counting import KernelCount, Seen, count_calls, functions_run
from bench.model import Size, build
from bench.toy import add_toy
from shardwright import clock
from shardwright.torch_private import all_gather_of, reduce_scatter_of
from shardwright.transport.device_times import read_device_times
from shardwright.transport.process import process_state
from shardwright.transport.recorder import CALL, LOOK_S

WARM_UP_STEPS = 4  # the fourth step, like the first, the second and the eighth, sees what else is in memory


class System(NamedTuple):
    """shard: ``fully_shard``. folder: its package's. collectives: functions that begin one, by kind."""

    shard: Callable[..., Any]
    folder: str
    collectives: Mapping[str, CodeType]


_TORCH = {"all-gather": all_gather_of(dist), "reduce-scatter": reduce_scatter_of(dist)}
SYSTEMS = {
    "shardwright": System(
        shardwright.fully_shard, os.path.dirname(shardwright.__file__), rankzero.COLLECTIVES
    ),
    "fsdp2": System(
        torch_fsdp.fully_shard,
        os.path.dirname(inspect.unwrap(torch_fsdp.fully_shard).__code__.co_filename),
        {kind: inspect.unwrap(collective).__code__ for kind, collective in _TORCH.items()},
    ),
}


@dataclass(frozen=True)
class Case:
    """Rank 0 of ``world`` trains a Transformer of ``layers`` blocks, sharded on dimension ``dim``."""

    world: int
    width: int = 512
    layers: int = 8
    dim: int = 0

    @property
    def num_groups(self) -> int:
        """A group for each block, and the root's."""
        return self.layers + 1


class Cost(NamedTuple):
    """What one step asks of the host; per group where not said otherwise.

    num_groups: that were made; ours splits a large head off the root, and a large first block in two.
    exchanges: of control words, in the whole step. seen: calls of the package, and frames to a collective.
    counted: kernels and collectives of the whole step. records: that the recorder wrote in it.
    """

    case: Case
    num_groups: int
    exchanges: int
    seen: Seen
    counted: KernelCount
    records: int

    @property
    def calls(self) -> float:
        """Python calls of functions of the package."""
        return self.seen.calls.total() / self.num_groups

    @property
    def kernels(self) -> float:
        """Operations that would be a kernel each, without collectives."""
        return self.counted.kernels.total() / self.num_groups

    @property
    def collectives(self) -> float:
        """All-gathers and reduce-scatters."""
        return self.counted.collectives.total() / self.num_groups


def build_model(case: Case) -> nn.Module:
    """The model of a case, whole. Vocabulary and sequence are as long as a row, so all divide alike."""
    return build(Size(case.layers, case.width, case.width, case.width, 1))


def sharded(name: str, case: Case, local: nn.Module) -> nn.Module:
    """A copy of ``local``, sharded with the defaults of the named system on each block and then whole."""
    model = copy.deepcopy(local)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (case.world,))}
    if case.dim:
        options["shard_placement_fn"] = lambda param: Shard(case.dim % param.ndim)
    for module in [*model.blocks, model]:  # type: ignore[misc]
        SYSTEMS[name].shard(module, **options)
    return model


def backward_of(model: nn.Module, width: int) -> Callable[[], None]:
    """Forward, backward and ``zero_grad`` of a batch of eight tokens."""
    tokens = torch.arange(9).unsqueeze(0) % width

    def run() -> None:
        model(tokens).backward()
        model.zero_grad()

    return run


def cost(name: str, case: Case) -> Cost:
    """Count a steady step of the named system, its optimizer's included."""
    with rankzero.rank_zero_of(case.world):
        model = sharded(name, case, build_model(case))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        tokens = torch.arange(9).unsqueeze(0) % case.width

        def step() -> None:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM_UP_STEPS):
            step()
        gc.collect()  # an optimizer's step goes through all models that there are
        process_state.recorder.look_s = inf  # looks go by the time that a step takes
        folder = SYSTEMS[name].folder
        seen = count_calls(step, folder, SYSTEMS[name].collectives)
        read_device_times()  # which are written down many at once, of some steps together
        with KernelCount(folder) as counted:
            step()
        read_device_times()
        num_groups = len(shardwright.explain(model).groups) if name == "shardwright" else case.num_groups
        records = len(process_state.recorder.steps()[-1][-1]) if name == "shardwright" else 0
        process_state.recorder.look_s = 0.0
    return Cost(case, num_groups, seen.calls[rankzero.EXCHANGE], seen, counted, records)


def times_ms(case: Case, pairs: int) -> dict[str, list[float]]:
    """Milliseconds of each system's steps and a local step's, a round of all three after another."""
    taken: dict[str, list[float]] = {"local": [], **{name: [] for name in SYSTEMS}}
    with rankzero.rank_zero_of(case.world):
        local = build_model(case)
        models = {"local": local, **{name: sharded(name, case, local) for name in SYSTEMS}}
        steps = {name: backward_of(model, case.width) for name, model in models.items()}
        for number in range(WARM_UP_STEPS + pairs):
            names = list(steps)
            for name in names if number % 2 else reversed(names):
                begin = time.perf_counter()
                steps[name]()
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: found[WARM_UP_STEPS:] for name, found in taken.items()}


def interval(values: list[float]) -> tuple[float, float]:
    """Between which two of the values the median lies, with a probability of 90 % or more."""
    ordered, number = sorted(values), len(values)
    below = 0
    while sum(comb(number, each) for each in range(below + 2)) / 2**number <= 0.05:
        below += 1
    return ordered[below], ordered[-1 - below]


def print_counts(options: argparse.Namespace) -> None:
    """The table of what is counted."""
    print(
        "| world | rows | system | calls | kernels | collectives | exchanges | all-gather | reduce-scatter |"
    )
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    cases, widths = {}, {}
    for world in options.worlds:
        even = Case(world, options.width, options.layers)
        cases[world, "even"] = even
        if world > 1:
            cases[world, "uneven"] = replace(even, width=options.width - 1)
            cases[world, "last dim"] = replace(even, dim=-1)
    for (world, rows), case in cases.items():
        for name in SYSTEMS:
            found = cost(name, case)
            if rows == "even":
                widths[name] = functions_run(found.seen.calls)
            ways = (found.seen.ways[kind] for kind in ("all-gather", "reduce-scatter"))
            shown = " | ".join(f"{len(way.frames)} ({way.num_files})" if way.frames else "-" for way in ways)
            print(
                f"| {world} | {rows} | {name} | {found.calls:.0f} | {found.kernels:.1f} | "
                f"{found.collectives:.1f} | {found.exchanges} | {shown} |"
            )
    print()
    for name, functions in widths.items():
        files, lines = {each.file for each in functions}, sum(each.num_lines for each in functions)
        print(
            f"a step of {name} runs {len(functions)} functions of {len(files)} files, {lines} lines of code"
        )


def print_times(options: argparse.Namespace) -> None:
    """The table of what is timed, on a model so narrow that little of a step is computing."""
    print("\n| world | local ms | shardwright ms | fsdp2 ms | shardwright / fsdp2 | 90 % interval |")
    print("| ---: | ---: | ---: | ---: | ---: | --- |")
    for world in options.worlds:
        case = Case(world, options.narrow, options.layers)
        taken = times_ms(case, options.pairs)
        local = taken["local"]
        ours, theirs = (
            [(step - alone) / case.num_groups for step, alone in zip(taken[name], local, strict=True)]
            for name in SYSTEMS
        )
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        low, high = interval(ratios)
        shown = [median(each) for each in ([alone / case.num_groups for alone in local], ours, theirs)]
        print(
            f"| {world} | {' | '.join(f'{each:.3f}' for each in shown)} | {median(ratios):.2f} | "
            f"{low:.2f}-{high:.2f} |"
        )


def print_profile(case: Case) -> None:
    """Where this package's calls and kernels come from, per group and step."""
    folder, found = SYSTEMS["shardwright"].folder, cost("shardwright", case)
    for kind, way in found.seen.ways.items():
        print(f"\nlongest way to {kind}: {len(way.frames)} frames, {way.num_files} files")
        for file, function in way.frames:
            print(f"   {file.removeprefix(folder + '/')} {function}")
    files: Counter[str] = Counter()
    print(f"\n{found.calls:.0f} calls per group and step")
    for code, number in found.seen.calls.most_common():
        file = code.co_filename.removeprefix(folder + "/")
        files[file] += number
        if number >= 4 * found.num_groups:
            print(f"{number / found.num_groups:9.1f} {file}:{code.co_firstlineno} {code.co_qualname}")
    print("\nthe same by file")
    for file, number in files.most_common():
        print(f"{number / found.num_groups:9.1f} {file}")
    print(f"\n{found.kernels:.1f} kernels per group and step")
    for (operation, site), number in found.counted.kernels.most_common():
        print(f"{number / found.num_groups:9.2f} {operation} {site}")


def print_recorder(options: argparse.Namespace) -> None:
    """What the recorder costs: records of a step and nanoseconds of one, and looks at what the kernel counts,
    which a step has as many of as it is long."""
    found = cost("shardwright", Case(8, options.width, options.layers))
    labels = ()

    def write() -> None:
        process_state.recorder.write((CALL, labels, options, labels, start, clock.perf_counter(), 0))

    def look() -> None:
        process_state.recorder.look(start)

    times = {}
    for what, number in ((write, 50_000), (look, 5_000)):
        times[what] = 1.0
        for _ in range(9):
            start = clock.perf_counter()
            for _ in range(number):
                what()
            times[what] = min(
                times[what], (clock.perf_counter() - start) / number
            )  # what other work adds is none of it
            process_state.recorder.turn()
    groups, step_s, looks = 34, 0.2, int(0.2 / LOOK_S)
    records = groups * found.records / found.num_groups
    shares = (records * times[write] / step_s, looks * times[look] / step_s)
    print(
        f"\nrecorder: {found.records / found.num_groups:.1f} records per group and step, "
        f"{times[write] * 1e9:.0f} ns each, and {looks} looks of {times[look] * 1e6:.1f} us: "
        f"{100 * sum(shares):.3f} % of a step of 200 ms with {groups} groups"
    )


def main() -> None:
    """Parse, then count and time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 8, 64, 512])
    parser.add_argument("--width", type=int, default=512, help="of the model that is counted")
    parser.add_argument("--narrow", type=int, default=64, help="width of the model that is timed")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--profile", type=int, metavar="WORLD", help="only show where calls come from")
    add_toy(parser, worlds=[1, 8], width=64, layers=2, pairs=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile is not None:
        print_profile(Case(options.profile, options.width, options.layers))
        return
    print_counts(options)
    print_recorder(options)
    print_times(options)


if __name__ == "__main__":
    main()
