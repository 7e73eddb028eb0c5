"""``shardwright plan``: what a step takes and holds, before anything is rented.

shardwright plan MODEL --device H100 --ranks 64 [--search] [--out plan.toml]
shardwright plan --runs runs.csv --models models.csv --out predicted.csv
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwright.cli.plan_choice import add_arguments, changed
from shardwright.cli.verb import add_verb
from shardwright.errors import ConfigError, InputError
from shardwright.observe.steps.drawing import savable
from shardwright.plan import runs
from shardwright.plan.cluster import GIB, Cluster, device
from shardwright.plan.configs import architecture, has_numbers, is_config
from shardwright.plan.constants import Constants
from shardwright.plan.predict import Choice, price
from shardwright.plan.questions import (
    Fitting,
    Saving,
    fewest_ranks,
    largest_batch,
    longest_sequence,
    savings,
)
from shardwright.plan.search import fastest, planned
from shardwright.plan.subject import Subject, of_architecture
from shardwright.plan.transformer import Microbatch

_SEQUENCE, _ROWS = 2048, 1


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    plan = add_verb(
        commands,
        "plan",
        "Predict the seconds and bytes of training steps: the schedule of a step is planned and "
        "simulated. No GPU, no weights.",
        "shardwright plan recipes/quickstart.toml --device H100 --ranks 8",
        "shardwright plan models/llama --device H100 --ranks 64 --search --out plan.toml",
        "shardwright plan models/llama --cluster cluster.toml --fewest ranks",
        "shardwright plan models/llama --device H100 --ranks 64 --runtime shardwright --runtime fsdp2",
    )
    plan.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder of Hugging Face or its config.json, a recipe, or the name of a row of --models",
    )
    plan.add_argument(
        "--sequence", type=int, metavar="TOKENS", help=f"tokens in a sequence (default {_SEQUENCE})"
    )
    plan.add_argument(
        "--batch", type=int, metavar="ROWS", help=f"sequences in a microbatch on one rank (default {_ROWS})"
    )
    plan.add_argument(
        "--trace", action="store_true", help="a folder's model itself, by transformers (extra hf)"
    )
    plan.add_argument("--models", metavar="CSV", help="a model's architecture in each row")
    where = plan.add_argument_group("the cluster")
    where.add_argument("--device", metavar="NAME", help="of the library of devices, as H100")
    where.add_argument("--ranks", type=int, metavar="N", help="how many devices; 8 in a host")
    where.add_argument("--cluster", metavar="FILE", help="in place of both: a cluster (docs/plan.md)")
    add_arguments(plan)
    asked = plan.add_argument_group("what is asked", "without any: the seconds and bytes of a step")
    asked.add_argument("--search", action="store_true", help="find the fastest way to do it that fits")
    asked.add_argument("--largest", choices=("batch", "sequence"), help="the largest that fits")
    asked.add_argument("--fewest", choices=("ranks",), help="the fewest devices that it fits on")
    asked.add_argument("--savings", action="store_true", help="what each lever of --search frees by itself")
    asked.add_argument("--budget", type=float, metavar="GIB", help="of each device; default: all it has")
    asked.add_argument("--price", type=float, metavar="PER_HOUR", help="of a device, for the cost of tokens")
    asked.add_argument("--runs", metavar="CSV", help="a run in each row (docs/plan.md)")
    shown = plan.add_argument_group("output")
    shown.add_argument("--draw", metavar="FILE", help="a step's timeline above its memory: .html, .png, .svg")
    shown.add_argument("--out", metavar="FILE", help="the plan (TOML); with --runs: the predictions (CSV)")
    plan.set_defaults(call=run)


def run(known: argparse.Namespace) -> int:
    """Predict what is asked for, and print it. Raises: ConfigError, InputError."""
    if (known.model is None) == (known.runs is None):
        raise ConfigError("shardwright plan takes a MODEL or --runs CSV; see: shardwright plan --help")
    return _predict_table(known) if known.model is None else _predict_model(known)


def _predict_table(known: argparse.Namespace) -> int:
    """Every row. One that can't be predicted stays empty, and standard error says why."""
    if known.models is None or known.out is None:
        raise ConfigError("shardwright plan --runs needs --models CSV and --out CSV as well")
    flags = [word.partition("=")[0] for word in known.given if word.startswith("--")]
    others = [flag for flag in flags if flag not in ("--runs", "--models", "--out")]
    if others:
        raise ConfigError(
            f"{', '.join(others)}: of no effect with --runs, which takes --models and --out alone; leave it "
            "out (each run's row has its own devices, sizes and policies)"
        )
    rows, models, found = runs.read(known.runs, runs.RUN_COLUMNS), {}, []
    for row in runs.read(known.models, runs.MODEL_COLUMNS):
        with _refusals_told():
            models.update(runs.architectures([row]))
    runs.write(known.out, [])  # that it can be written is known before anything is priced
    for row in rows:
        found.append({"row_id": row["row_id"]})
        with _refusals_told():
            found[-1] = runs.predict(runs.setup(row, models), Constants())
    runs.write(known.out, found)
    print(f"{sum(len(each) > 1 for each in found)} of {len(found)} runs predicted: {known.out}")
    return 0


@contextmanager
def _refusals_told() -> Iterator[None]:
    """On standard error, in place of ending the command."""
    try:
        yield
    except (ConfigError, InputError) as error:
        print(f"shardwright plan: {error}", file=sys.stderr)


def _predict_model(known: argparse.Namespace) -> int:
    for name in ("ranks", "sequence", "batch", "microbatches", "shards", "budget", "price"):
        value = getattr(known, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name} must be more than 0, got {value}")
    asked = [name for name in ("search", "largest", "fewest", "savings") if getattr(known, name)]
    if len(asked) > 1 or (known.out is not None and asked not in ([], ["search"])):
        raise ConfigError(
            f"--{asked[0]} goes with none of --{', --'.join([*asked[1:], 'out'])}: ask one by one"
        )
    if known.budget is not None and asked in ([], ["savings"]):
        raise ConfigError(
            "--budget goes with --search, --largest or --fewest: give one of them, or leave it out"
        )
    for path in (known.draw and savable(known.draw), known.out and Path(known.out)):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{path} can't be written: there is no folder {path.parent}; make it first")
    if len(known.runtime or []) > 1:
        return _predict_runtimes(known, asked)
    subject, choice = _asked(known)
    if choice.base != "plain" and not any(group.frozen[0] for group in subject.workload.groups):
        raise ConfigError(f"--base {choice.base}: {known.model} has no frozen weights, so none would be in 4 "
                          "bits; give a recipe with adapters, or ask shardwright.plan.estimate")  # fmt: skip
    cluster = _cluster(known)
    budget = None if known.budget is None else known.budget * GIB
    if known.savings:
        return _print_savings(savings(subject, cluster, choice))
    if known.largest or known.fewest:
        ask = _QUESTIONS[known.largest or known.fewest]
        return _print_answer(known, ask(subject, cluster, choice, budget=budget))
    if known.search:
        plan = fastest(subject, cluster, choice, budget)
        found, text = plan.estimate, str(plan).partition("\n\n")[2]
    else:
        found = price(subject.workload, cluster, choice)
        text = found.by_phase()
        plan = planned(found, subject.modules)
    work = subject.workload
    print(f"{'model':22} {known.model}, {work.numel:,} parameters; on each rank "
          f"{found.choice.microbatches} x {found.tokens:,} tokens a step")  # fmt: skip
    print(found.table(known.price), *([text] if text else []), sep="\n\n" if text else "\n")
    if not found.fits and not known.search:
        print("\nIt doesn't fit as it is: --search looks for a way that does.")
    if known.draw is not None:
        found.drawing().save(known.draw)
    if known.out is not None:
        plan.save(known.out)
        print(f'\n{known.out}: fully_shard(model, plan="{known.out}") applies it')
    return 0


def _predict_runtimes(known: argparse.Namespace, asked: list[str]) -> int:
    """One table below the other."""
    if asked or known.draw or known.out:
        given = asked or [name for name in ("draw", "out") if getattr(known, name)]
        raise ConfigError(f"--{given[0]} is of one --runtime: give --runtime once")
    for place, name in enumerate(known.runtime):
        one = copy(known)
        one.runtime = [name]
        if place:
            print()
        _predict_model(one)
    return 0


_QUESTIONS = {"batch": largest_batch, "sequence": longest_sequence, "ranks": fewest_ranks}


def _print_answer(known: argparse.Namespace, answer: Fitting) -> int:
    which = f"largest {known.largest}" if known.largest else f"fewest {known.fewest}"
    print(f"{which:22} {answer.value:,}")
    if answer.beyond is not None:
        print(f"{'the next one':22} doesn't fit: {answer.beyond.peak.total / GIB:.1f} GiB")
    print(answer.estimate.table(known.price))
    return 0


def _print_savings(found: list[Saving]) -> int:
    print(f"{'lever':12}{'value':>8}{'GiB less':>12}{'seconds more':>16}")
    for lever, value, nbytes, seconds in found:
        print(f"{lever:12}{value!s:>8}{nbytes / GIB:12.1f}{seconds:16.3f}")
    return 0


def _cluster(known: argparse.Namespace) -> Cluster:
    if (known.cluster is None) == (known.device is None):
        raise ConfigError("shardwright plan MODEL needs --device NAME and --ranks N, or --cluster FILE")
    if known.cluster is not None:
        found = Cluster.load(known.cluster)
        ranks = known.ranks or found.ranks
        return replace(found, ranks=ranks, ranks_per_host=min(ranks, found.ranks_per_host))
    if known.ranks is None:
        raise ConfigError("--ranks is missing: how many devices are there?")
    return Cluster(device(known.device), known.ranks, min(known.ranks, 8))


def _asked(known: argparse.Namespace) -> tuple[Subject, Choice]:
    """The model, and how it is trained."""
    if known.models is not None:
        rows = runs.architectures(runs.read(known.models, runs.MODEL_COLUMNS))
        if known.model not in rows:
            raise ConfigError(f"{known.models} has no model {known.model!r}; it has {', '.join(rows)}")
        if known.out is not None:
            raise ConfigError("--out: a row of numbers has no names of modules, which a plan needs; give the "
                              "model as a folder of Hugging Face or a recipe")  # fmt: skip
        found = rows[known.model]
    elif Path(known.model).suffix == ".toml":
        return import_module("shardwright.cli.plan_recipe").asked(known)  # pydantic comes with an extra
    elif is_config(known.model) and (known.trace or not has_numbers(known.model)):
        size = known.batch or _ROWS, known.sequence or _SEQUENCE
        traced = import_module("shardwright.cli.plan_hf")  # transformers comes with an extra
        return traced.asked(known, size)
    elif is_config(known.model):
        found = architecture(known.model)
    else:
        raise ConfigError(
            f"MODEL {known.model!r} is neither a folder with a config.json nor such a file, nor a recipe "
            "(.toml); a row of a table takes --models CSV as well"
        )
    if known.param_dtype == "float32":
        raise ConfigError(
            "--param-dtype float32: numbers alone are priced in 16 bits; --trace traces the model of a "
            "folder in that dtype"
        )
    batch = Microbatch(known.sequence or _SEQUENCE, known.batch or _ROWS)
    return of_architecture(found, batch), changed(Choice(), known)
