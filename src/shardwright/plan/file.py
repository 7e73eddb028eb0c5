"""A plan of training: what is to be sharded how, in a file that people read.

``plan.search`` finds one; ``fully_shard(model, plan=...)`` applies one.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.errors import ConfigError, InputError
from shardwright.extras import require
from shardwright.files import parsed
from shardwright.options import check, limited, read, words_of
from shardwright.policy import (
    DEFAULT_OFFLOAD,
    Agreement,
    Base,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Offload,
    OffloadPolicy,
    OptimizerOffloadPolicy,
    SchedulePolicy,
    Wire,
)

OFFLOADS: dict[Offload, OffloadPolicy] = {
    "none": DEFAULT_OFFLOAD,
    "optimizer": OptimizerOffloadPolicy(),
    "all": CPUOffloadPolicy(),
}
"""What of shards, gradients and the optimizer's state is on the host at rest."""


def offload_name(policy: OffloadPolicy) -> Any:
    """The name of a policy in ``OFFLOADS``; None where it has none."""
    return next((name for name, known in OFFLOADS.items() if known == policy), None)


BASES = get_args(Base)


@dataclass(frozen=True)
class PlannedGroup:
    """Modules, by name, whose parameters are one group.

    reshard_after_forward: False keeps it unsharded until its backward; True (None of
    ``fully_shard``) frees it after its forward, unless the policy of the schedule keeps it (``keep_last``);
    an int keeps shards over so many ranks.
    """

    modules: tuple[str, ...]
    reshard_after_forward: bool | int = True


@dataclass(frozen=True)
class Plan:
    """How a model is trained on a number of ranks, with the predicted time and memory.

    ``fully_shard(model, plan=...)`` applies it.

    Args:
        ranks: the number of ranks in total.
        shards: ranks that a parameter is sharded over; it is replicated over the others.
        groups: in the order in which a forward runs them; the remaining parameters are in the model's own
            group.
        microbatches: of a step.
        microbatch_tokens: tokens of one microbatch on one rank.
        modules_to_recompute: names of the modules under activation checkpointing.
        policy: when collectives are issued.
        mp_policy: dtypes of all groups.
        step_s: predicted seconds of a step.
        exposed_s: seconds of ``step_s`` in which nothing is computed.
        peak_nbytes: predicted peak bytes of a device.
        devices: the devices that it was predicted for.
        offload: what is on the host at rest, "none", "optimizer" or "all".
        base: "nf4" quantises frozen weights (``quantize_``) before they are sharded; else "plain".

    Raises:
        InputError: the ranks or the shards can't be divided, two groups name a module, or ``offload`` or
            ``base`` is unknown.
    """

    ranks: int = field(metadata={"ge": 1})
    shards: int = field(metadata={"ge": 1})
    groups: tuple[PlannedGroup, ...]
    microbatches: int = limited(1, ge=1)
    microbatch_tokens: int = limited(1, ge=1)
    modules_to_recompute: tuple[str, ...] = ()
    policy: SchedulePolicy = field(default_factory=SchedulePolicy)
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    step_s: float = 0.0
    exposed_s: float = 0.0
    peak_nbytes: int = 0
    devices: str = ""
    offload: Offload = "none"
    base: Base = "plain"

    def __post_init__(self) -> None:
        check(self)
        if self.ranks % self.shards:
            raise InputError(f"a plan's shards must divide its {self.ranks} ranks, got {self.shards}")
        smaller = [group.reshard_after_forward for group in self.groups]
        wrong = [each for each in smaller if not isinstance(each, bool) and (each < 1 or self.shards % each)]
        if wrong:
            raise InputError(
                f"a plan's reshard_after_forward must be true, false or a factor of its {self.shards} "
                f"shards, got {wrong[0]}"
            )
        names = [name for group in self.groups for name in group.modules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not all(group.modules for group in self.groups):
            raise InputError(
                f"a plan's groups must each name modules of their own, got {twice or 'an empty one'}"
            )

    def save(self, path: str | Path) -> None:
        """Write it as TOML, atomically, so that several ranks may call it.

        Args:
            path: of the file; an existing file is replaced.
        """
        part = Path(f"{path}.{os.getpid()}")
        part.write_text(_text(self), encoding="utf-8")
        part.replace(path)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan from the file that ``save`` wrote.

        Args:
            path: of the file.

        Returns:
            The plan.

        Raises:
            ConfigError: the file isn't a valid plan.
        """
        remedy = "give the path of a file that Plan.save wrote"
        try:
            return _plan(parsed(tomllib.loads, Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"can't read the plan {path}: {error.strerror}; {remedy}") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is not a plan: {error}; {remedy}, or correct it there") from error

    def check(self, model: nn.Module, ranks: int) -> None:
        """Check that it is for this model and this number of ranks. Local; nothing is changed.

        Args:
            model: the model, not sharded yet.
            ranks: how many there are.

        Raises:
            InputError: it is for another model or number of ranks.
            MissingExtra: its ``wire`` needs ``pip install 'shardwright[wire]'``.
        """
        if self.policy.wire is not Wire.PLAIN:
            require("wire", "zstandard")
        if ranks != self.ranks:
            raise InputError(
                f"the plan is for {self.ranks} ranks, and there are {ranks}: start {self.ranks}, or make a "
                f"plan for {ranks} (shardwright.plan.search with Cluster(..., ranks={ranks}))"
            )
        known = dict(model.named_modules())
        named = {name: "groups" for group in self.groups for name in group.modules}
        named |= dict.fromkeys(self.modules_to_recompute, "modules_to_recompute")
        missing = [name for name in named if not name or name not in known]
        if missing:
            near = difflib.get_close_matches(missing[0], known, 3)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            more = f", nor {len(missing) - 1} more that the plan names" if missing[1:] else ""
            raise InputError(
                f"{type(model).__name__} has no module {missing[0]!r}, which the plan's {named[missing[0]]} "
                f"name{more}; {hint}Make a plan for this model (shardwright.plan.search)"
            )

    def recompute(self, model: nn.Module) -> None:
        """Put the modules that it names under activation checkpointing: their forward keeps only its inputs
        and is computed again in the backward.

        In place; names don't change. Every rank calls it.

        Args:
            model: the model.
        """
        for name in self.modules_to_recompute:
            module = model.get_submodule(name)
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def _text(plan: Plan) -> str:
    words = words_of(Plan)

    def lines_of(*names: str) -> list[str]:
        return [f"{name} = {_value(getattr(plan, name))}  # {words[name]}" for name in names]

    lines = [
        f"# How to train on {plan.ranks} ranks: fully_shard(model, plan=...) applies it.",
        "",
        *lines_of("ranks", "shards", "microbatches", "microbatch_tokens", "modules_to_recompute"),
        *lines_of("offload", "base"),
        "",
        "[predicted]",
        *lines_of("devices", "step_s", "exposed_s"),
        f"peak_nbytes = {plan.peak_nbytes}  # {plan.peak_nbytes / 2**30:.2f} GiB of each device",
        "",
        "[policy]  # of the schedule: the fields of SchedulePolicy",
        *_fields(plan.policy),
        "",
        "[mp_policy]  # the fields of MixedPrecisionPolicy; none: parameters stay in their own dtype",
        *_fields(plan.mp_policy),
    ]
    for group in plan.groups:
        lines += ["", "[[groups]]", *_fields(group)]
    return "\n".join(lines) + "\n"


def _fields(of: Any) -> list[str]:
    """Lines of TOML, which has no null: without what is None or empty, or may come from the environment."""
    values = ((each.name, getattr(of, each.name)) for each in fields(of))
    left_out = (None, {}, Agreement.STRICT)
    return [f"{name} = {_value(value)}" for name, value in values if value not in left_out]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(name)} = {_value(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value)


def _plan(found: dict[str, Any]) -> Plan:
    """Raises: ValueError or TypeError that says what is wrong."""
    dtypes: Any = found.get("mp_policy")
    for name, value in dtypes.items() if isinstance(dtypes, dict) else ():
        dtypes[name] = getattr(torch, value, value) if isinstance(value, str) else value
    predicted = found.pop("predicted", {})
    if not isinstance(predicted, dict):
        raise ValueError(f"[predicted] got {predicted!r}, expected a table")
    return read(Plan, found | predicted)
