"""What ``shardwright plan`` predicts, and prints."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from shardwright.cli.arguments.plan import ROWS, SEQUENCE
from shardwright.cli.plan_choice import changed
from shardwright.errors import ConfigError, InputError
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


def run(known: argparse.Namespace) -> int:
    """Predict what is asked for, and print it. Raises: ConfigError, InputError."""
    return _predict_table(known) if known.model is None else _predict_model(known)


def _predict_table(known: argparse.Namespace) -> int:
    """Every row. One that can't be predicted stays empty, and standard error says why."""
    rows, models, found = runs.read(known.runs, runs.RUN_COLUMNS), {}, []
    for row in runs.read(known.models, runs.MODEL_COLUMNS):
        with _refusals_told():
            models.update(runs.architectures([row]))
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
    if len(known.runtime or []) > 1:
        return _predict_runtimes(known)
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


def _predict_runtimes(known: argparse.Namespace) -> int:
    """One table below the other."""
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
    if known.cluster is not None:
        found = Cluster.load(known.cluster)
        ranks = known.ranks or found.ranks
        return replace(found, ranks=ranks, ranks_per_host=min(ranks, found.ranks_per_host))
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
        size = known.batch or ROWS, known.sequence or SEQUENCE
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
    batch = Microbatch(known.sequence or SEQUENCE, known.batch or ROWS)
    return of_architecture(found, batch), changed(Choice(), known)
