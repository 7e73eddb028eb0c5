"""How the model of ``shardwright plan`` is trained: ``plan.Choice``, as the command line has it."""

import argparse
from dataclasses import replace
from typing import Any

import torch

from shardwright.cli.arguments.plan_choice import AXES, SEARCHED
from shardwright.plan.cluster import Cluster, device
from shardwright.plan.file import OFFLOADS
from shardwright.plan.predict import Choice


def changed(choice: Choice, known: argparse.Namespace) -> Choice:
    """The choice with what the command line says in its place."""
    said = {name: getattr(known, name) for name in ("microbatches", *SEARCHED, *AXES)}
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if "offload" in given:
        given["offload"] = OFFLOADS[given["offload"]]
    if known.runtime:
        (given["runtime"],) = known.runtime
    dtypes = {"param_dtype": known.param_dtype, "reduce_dtype": known.reduce_dtype}
    dtypes = {name: getattr(torch, value) for name, value in dtypes.items() if value is not None}
    return replace(choice, mp_policy=replace(choice.mp_policy, **dtypes), **given)


def cluster_of(known: argparse.Namespace) -> Cluster:
    """Of a file, or of devices of the library."""
    if known.cluster is not None:
        found = Cluster.load(known.cluster)
        return found.of(known.ranks or found.ranks)
    return Cluster(device(known.device), known.ranks, min(known.ranks, 8))
