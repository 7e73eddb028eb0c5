"""The arguments of ``shardwright plan`` that say how the model is trained: those of ``plan.Choice``."""

import argparse
from dataclasses import replace
from typing import Any

import torch

from shardwright.errors import ConfigError
from shardwright.plan.predict import Choice
from shardwright.plan.presets import PRESETS
from shardwright.planned import BASES, OFFLOADS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SEARCHED = ("shards", "reshard_after_forward", "keep", "offload", "base", "recompute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them, as a section of ``--help``."""
    group = parser.add_argument_group("how it is trained", "as the arguments of shardwright.plan.Choice")
    group.add_argument(
        "--runtime",
        choices=[name for name in PRESETS if not name.endswith("-cpu")],
        action="append",
        help="whose schedule; given twice, both are shown (default shardwright)",
    )
    group.add_argument("--microbatches", type=int, metavar="N", help="of a step (default 1)")
    group.add_argument("--shards", type=int, metavar="RANKS", help="that share a parameter (default: all)")
    group.add_argument(
        "--reshard-after-forward",
        type=_reshard,
        metavar="true|false|RANKS",
        help="RANKS: shards are kept over so many until the backward (default true)",
    )
    group.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="of the groups, the last ones, unsharded until the backward: 0 to 1 (default 0)",
    )
    group.add_argument(
        "--param-dtype", choices=tuple(_DTYPES), help="that is computed with (default bfloat16)"
    )
    group.add_argument(
        "--reduce-dtype", choices=tuple(_DTYPES), help="of sums of gradients (default float32)"
    )
    group.add_argument(
        "--offload", choices=tuple(OFFLOADS), help="what is on the host at rest (default none)"
    )
    group.add_argument(
        "--recompute", type=float, metavar="SHARE", help="of the blocks, in the backward: 0 to 1 (default 0)"
    )
    group.add_argument("--base", choices=tuple(BASES), help="frozen weights: as they are, or in 4 bits")


def _reshard(text: str) -> bool | int:
    if text in ("true", "false"):
        return text == "true"
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected true, false or a number of ranks, got {text!r}")
    return int(text)


def changed(choice: Choice, known: argparse.Namespace) -> Choice:
    """The choice with what the command line says in its place.

    Raises: ConfigError for a value that ``--search`` or ``--savings`` would replace.
    """
    said = {name: getattr(known, name) for name in ("microbatches", *_SEARCHED)}
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    tried = [name for name in _SEARCHED if name in given]
    if tried and (known.search or known.savings):
        flag = "--search" if known.search else "--savings"
        raise ConfigError(f"{flag} tries every --{tried[0].replace('_', '-')} by itself: leave it out")
    if "offload" in given:
        given["offload"] = OFFLOADS[given["offload"]]
    if known.runtime:
        (given["runtime"],) = known.runtime
    dtypes = {"param_dtype": known.param_dtype, "reduce_dtype": known.reduce_dtype}
    dtypes = {name: _DTYPES[value] for name, value in dtypes.items() if value is not None}
    return replace(choice, mp_policy=replace(choice.mp_policy, **dtypes), **given)
