"""The examples in docstrings of public functions run as they stand, in one process without a process group.

Each sees ``torch``, ``nn``, ``F`` and ``shardwright``, and an empty current folder.
"""

import ast
import doctest
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import shardwright
from tests.pure.docstrings import package_at
from tests.ranks.pool import run_ranks

MOST_USED = {
    "CPUOffloadPolicy",
    "FSDPModule.set_requires_gradient_sync",
    "FSDPModule.unsharded",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "ReduceScatterBucketer",
    "SchedulePolicy",
    "StepInBackward",
    "StopRequest",
    "add_lora",
    "async_save",
    "clip_grad_norm_",
    "estimate",
    "explain",
    "full_state_dict",
    "fully_shard",
    "gathered",
    "linear_cross_entropy",
    "load",
    "lockstep",
    "loss_weights",
    "offload_states",
    "quantize",
    "quantize_",
    "register_fsdp_forward_method",
    "save",
    "search",
    "stats",
    "stream_state_dict",
}


def examples() -> dict[str, str]:
    """``module: name`` -> docstring of the public functions and classes that have an example."""
    found = package_at(Path(shardwright.__file__).parent).documented()
    docs = {f"{item.module}: {item.name}": ast.get_docstring(item.node) or "" for item in found}
    return {name: doc for name, doc in docs.items() if "\nExamples:\n" in doc}


def run_all(rank: int, world: int, folder: str, docs: dict[str, str]) -> dict[str, str]:
    """Name -> what went otherwise than the docstring says."""
    failures = {}
    for number, (name, doc) in enumerate(docs.items()):
        place = Path(folder, str(number))
        place.mkdir()
        os.chdir(place)
        said: list[str] = []
        names = {"torch": torch, "nn": nn, "F": F, "shardwright": shardwright}
        example = doctest.DocTestParser().get_doctest(doc, names, name, None, None)
        assert example.examples
        runner = doctest.DocTestRunner(verbose=False)
        if runner.run(example, out=said.append).failed:
            failures[name] = "".join(said)
    return failures


def test_every_example_of_a_docstring_gives_what_it_shows(tmp_path):
    (failures,) = run_ranks(1, run_all, str(tmp_path), examples(), grouped=False)
    assert not failures, "\n".join(failures.values())


def test_the_most_used_functions_have_an_example():
    assert not MOST_USED - {name.partition(": ")[2] for name in examples()}


def test_an_example_that_shows_something_else_is_seen(tmp_path):
    (failures,) = run_ranks(1, run_all, str(tmp_path), {"wrong": ">>> 1 + 1\n3\n"})
    assert failures.keys() == {"wrong"}
