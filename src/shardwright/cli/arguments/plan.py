"""``shardwright plan``: what a step takes and holds, before anything is rented.

shardwright plan MODEL --device H100 --ranks 64 [--search] [--out plan.toml]
shardwright plan --runs runs.csv --models models.csv --out predicted.csv
"""

import argparse
import math
import os
from importlib import import_module
from typing import Any

from shardwright.cli.arguments.plan_choice import add_arguments, check_arguments
from shardwright.cli.outputs import check_file
from shardwright.cli.verb import add_verb, check_exists, work
from shardwright.errors import ConfigError
from shardwright.observe.steps.drawing import savable
from shardwright.recipe.shipped import recipe_at

SEQUENCE, ROWS = 2048, 1
"""Of a microbatch, where nothing else is said."""


def add_commands(commands: Any) -> None:
    """Add it to the subparsers of the command."""
    plan = add_verb(
        commands,
        "plan",
        "Predict the seconds and bytes of training steps: the schedule of a step is planned and "
        "simulated. No GPU, no weights.",
        "shardwright plan quickstart --device H100 --ranks 8",
        "shardwright plan models/llama --device H100 --ranks 64 --search --out plan.toml",
        "shardwright plan models/llama --cluster cluster.toml --fewest ranks",
        "shardwright plan models/llama --device H100 --ranks 64 --runtime shardwright --runtime fsdp2",
    )
    plan.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder of Hugging Face or its config.json, a recipe or its name, or a row of --models",
    )
    plan.add_argument("--sequence", type=int, metavar="TOKENS", help=f"of a sequence (default {SEQUENCE})")
    plan.add_argument("--batch", type=int, metavar="ROWS", help=f"of a rank's microbatch (default {ROWS})")
    plan.add_argument("--trace", action="store_true", help="a folder's model, by transformers (extra hf)")
    plan.add_argument("--models", metavar="CSV", help="a model's architecture in each row")
    where = plan.add_argument_group("the cluster")
    where.add_argument("--device", metavar="NAME", help="of the library of devices, as H100")
    where.add_argument("--ranks", type=int, metavar="N", help="how many devices; 8 in a host")
    where.add_argument("--cluster", metavar="FILE", help="in place of both: a cluster (docs/plan.md)")
    add_arguments(plan)
    asked = plan.add_argument_group("what is asked", "without any: the seconds and bytes of a step")
    asked.add_argument("--search", action="store_true", help="find the fastest way to do it that fits")
    asked.add_argument("--meshes", action="store_true", help="with --search: sizes of tp, cp, ep and pp too")
    asked.add_argument("--largest", choices=("batch", "sequence"), help="the largest that fits")
    asked.add_argument("--fewest", choices=("ranks",), help="the fewest devices that it fits on")
    asked.add_argument("--savings", action="store_true", help="what each lever of --search frees by itself")
    asked.add_argument("--budget", type=float, metavar="GIB", help="of a device; default: all but a reserve")
    asked.add_argument("--tokens", type=float, metavar="N", help="to train on, as 15e12 (default 1e9)")
    asked.add_argument("--price", type=float, metavar="PER_HOUR", help="of a device, to price the tokens")
    asked.add_argument("--runs", metavar="CSV", help="a run in each row (docs/plan.md)")
    shown = plan.add_argument_group("output")
    shown.add_argument("--json", action="store_true", help="print one object, in bytes and seconds")
    shown.add_argument("--draw", metavar="FILE", help="a step's timeline above its memory: .html, .png, .svg")
    shown.add_argument("--out", metavar="FILE", help="the plan (TOML); with --runs: the predictions (CSV)")
    plan.set_defaults(call=work("plan", _check))


def _check(known: argparse.Namespace) -> None:
    if (known.model is None) == (known.runs is None):
        raise ConfigError("shardwright plan takes a MODEL or --runs CSV; see: shardwright plan --help")
    if known.model is None:
        _check_table(known)
    else:
        _check_model(known)
    for option in ("runs", "models", "cluster"):
        check_exists(getattr(known, option), f"--{option}")
    for path in (known.draw and savable(known.draw), known.out):
        if path:
            check_file(path)


def _check_table(known: argparse.Namespace) -> None:
    if known.models is None or known.out is None:
        raise ConfigError("shardwright plan --runs needs --models CSV and --out CSV as well")
    flags = [word.partition("=")[0] for word in known.given if word.startswith("--")]
    others = [flag for flag in flags if flag not in ("--runs", "--models", "--out")]
    if others:
        raise ConfigError(
            f"{', '.join(others)}: of no effect with --runs, which takes --models and --out alone; leave it "
            "out (each run's row has its own devices, sizes and policies)"
        )


def _check_model(known: argparse.Namespace) -> None:
    for name in ("ranks", "sequence", "batch", "microbatches", "shards", "budget", "price", "tokens"):
        value = getattr(known, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name} must be more than 0, got {value}")
    asked = [name for name in ("search", "largest", "fewest", "savings") if getattr(known, name)]
    if len(asked) > 1 or (known.out is not None and asked not in ([], ["search"])):
        others = ", --".join([*asked[1:], "out"])
        raise ConfigError(f"--{asked[0]} goes with none of --{others}: ask one by one")
    given = asked + [name for name in ("draw", "out") if getattr(known, name)]
    if len(known.runtime or []) > 1 and given:
        raise ConfigError(f"--{given[0]} is of one --runtime: give --runtime once")
    check_arguments(known)
    if (known.cluster is None) == (known.device is None):
        raise ConfigError("shardwright plan MODEL needs --device NAME and --ranks N, or --cluster FILE")
    if known.device is not None and known.ranks is None:
        raise ConfigError("--ranks is missing: how many devices are there?")
    if known.models is None:
        known.model = str(recipe_at(known.model))
    if known.models is None and not known.model.endswith(".toml") and not os.path.exists(known.model):
        raise ConfigError(
            f"MODEL {known.model!r} is neither a folder with a config.json nor such a file, nor a recipe "
            "(.toml) or the name of one of the package; a row of a table takes --models CSV as well"
        )
    if known.models is None and known.model.endswith(".toml"):
        import_module("shardwright.recipe.resolve").resolve(known.model)  # pydantic comes with an extra
