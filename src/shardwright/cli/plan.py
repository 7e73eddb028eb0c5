"""What ``shardwright plan`` predicts, and prints."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwright.cli.arguments.plan import ROWS, SEQUENCE
from shardwright.cli.plan_choice import changed, cluster_of
from shardwright.errors import ConfigError, InputError
from shardwright.plan import runs
from shardwright.plan.answer import in_words
from shardwright.plan.cluster import GIB
from shardwright.plan.configs import architecture, has_numbers, is_config
from shardwright.plan.constants import Constants
from shardwright.plan.predict import Choice, price
from shardwright.plan.questions import Fitting, fewest_ranks, largest_batch, longest_sequence, savings
from shardwright.plan.search import fastest, fastest_mesh, planned
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
    """An answer for each runtime, one below the other."""
    for place, name in enumerate(known.runtime or [None]):
        one = copy(known)
        one.runtime = name and [name]
        found, table = _answer(one)
        if known.json:
            print(json.dumps(found))
        else:
            print(*([""] if place else []), in_words(found), *table, sep="\n")
    if known.out is not None:
        said = f'{known.out}: fully_shard(model, plan="{known.out}") applies it'
        print(said if known.json else f"\n{said}", file=sys.stderr if known.json else None)
    return 0


def _answer(known: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """As data, and lines that follow its words. Raises: ConfigError, InputError."""
    subject, choice = _asked(known)
    named = replace(subject, at=lambda *size: replace(subject.at(*size), name=known.model))
    if choice.base != "plain" and not any(group.frozen[0] for group in subject.workload.groups):
        raise ConfigError(f"--base {choice.base}: {known.model} has no frozen weights, so none would be in 4 "
                          "bits; give a recipe with adapters, or ask shardwright.plan.estimate")  # fmt: skip
    cluster = cluster_of(known).within(None if known.budget is None else known.budget * GIB)
    counted = known.tokens or 1e9, known.price
    if known.largest or known.fewest:
        return _most(known, _QUESTIONS[known.largest or known.fewest](named, cluster, choice)), []
    if known.search:
        plan = (fastest_mesh if known.meshes else fastest)(named, cluster, choice)
        found, answer = plan.estimate, plan.answer(*counted)
    else:
        found = price(named.workload, cluster, choice)
        plan, answer = planned(found, subject.modules), found.answer(*counted)
    if known.draw is not None:
        found.drawing().save(known.draw)
    if known.out is not None:
        plan.save(known.out)
    if known.savings:
        return answer | {"levers": [each._asdict() for each in savings(named, cluster, choice)]}, []
    if known.search:
        return answer, []
    hint = "It doesn't fit as it is: --search looks for a way that does; --budget GIB sets another limit."
    return answer, ["", found.by_phase()] if found.fits else ["", hint]


_QUESTIONS = {"batch": largest_batch, "sequence": longest_sequence, "ranks": fewest_ranks}


def _most(known: argparse.Namespace, most: Fitting) -> dict[str, Any]:
    asked = f"largest {known.largest}" if known.largest else f"fewest {known.fewest}"
    beyond = None if most.beyond is None else most.beyond.peak.total
    found = most.estimate.answer(known.tokens or 1e9, known.price)
    return {"asked": asked, "value": most.value, "next_peak_nbytes": beyond} | found


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
    choice = changed(Choice(), known)
    return of_architecture(found, batch, choice.axes), choice
