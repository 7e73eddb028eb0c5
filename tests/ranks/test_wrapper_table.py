"""What a wrapped model saves has the plain model's names and loads again, in whatever way it was wrapped, of
whatever kind: one table of all values, of which CI runs a case for each two of them."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint import state_dict as torchs

from shardwright import checkpoint
from shardwright.wrapper import (
    FSDP,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ModuleWrapPolicy,
    OptimStateKeyType,
    StateDictType,
)
from tests.ranks.models import Block, batches, build, full, loss_of
from tests.ranks.pool import run_ranks

RANK0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
KINDS = {
    "full": (StateDictType.FULL_STATE_DICT,),
    "rank0": (StateDictType.FULL_STATE_DICT, *RANK0),
    "sharded": (StateDictType.SHARDED_STATE_DICT,),
    "local": (StateDictType.LOCAL_STATE_DICT,),
}
"""What ``state_dict_type`` is given; ``dcp`` are torch's functions and its files, ``own`` our checkpoints."""


class Case(NamedTuple):
    checkpointed: str = "none"
    compiled: bool = False
    layout: str = "original"
    kind: str = "full"
    what: str = "model"
    world: int = 2


HOW = ("none", "before", "after", "inside"), (False, True), ("original", "flat")
VALUES = (*HOW, (*KINDS, "dcp", "own"), ("model", "optimizer"), (1, 2, 3))
EVERY = [Case(*values) for values in product(*VALUES)]


def pairs_of(case: Case) -> set[Any]:
    """Each two of its values, with their columns."""
    return set(combinations(enumerate(case), 2))


def covering() -> list[Case]:
    """Cases that have each two values of different columns at least twice, always those that bring most."""
    chosen: list[Case] = []
    for _ in range(2):
        wanted = set.union(*map(pairs_of, EVERY))
        left = [case for case in EVERY if case not in chosen]
        while wanted:
            chosen.append(max(left, key=lambda case: len(pairs_of(case) & wanted)))
            wanted -= pairs_of(chosen[-1])
            left.remove(chosen[-1])
    return chosen


def table() -> Iterator[Any]:
    chosen = covering()
    for case in EVERY:
        words = (case.checkpointed, "compiled" if case.compiled else "eager", *case[2:])
        marks = [] if case in chosen else [pytest.mark.exhaustive]
        yield pytest.param(case, id="-".join(map(str, words)), marks=marks)


# ---- what is wrapped


class Run(NamedTuple):
    """A wrapped model (``whole``: as it is called, maybe compiled) and its optimizer."""

    whole: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, case: Case, seed: int) -> "Run":
        model = wrapped(build(seed), case)
        model = torch.compile(model, backend="eager") if case.compiled else model
        return cls(model, torch.optim.Adam(model.parameters(), lr=0.01))

    def step(self, tokens: torch.Tensor) -> None:
        loss_of(self.whole, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def wrapped(model: nn.Module, case: Case) -> FSDP:
    options = {"use_orig_params": case.layout == "original"}
    if case.checkpointed == "before":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FSDP(checkpoint_wrapper(block), **options)
        return FSDP(checkpoint_wrapper(model), **options)
    if case.checkpointed == "inside":
        apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, nn.Linear))
    found = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    if case.checkpointed == "after":
        apply_activation_checkpointing(found, check_fn=lambda each: isinstance(each, Block))
    return found


def plainly(case: Case, state: dict[str, Any]) -> dict[str, Any]:
    """Without what a compiled module, as any of torch's, puts before the names of what it is made of."""
    assert all(key.startswith("_orig_mod.") == case.compiled for key in state)
    return {key.removeprefix("_orig_mod."): value for key, value in state.items()}


def as_loaded(case: Case, state: dict[str, Any]) -> dict[str, Any]:
    return {f"_orig_mod.{key}": value for key, value in state.items()} if case.compiled else state


def kind_of(model: nn.Module, case: Case) -> Any:
    return FSDP.state_dict_type(model, *KINDS[case.kind]) if case.kind in KINDS else nullcontext()


# ---- what was saved, and goes into a wrapped model, or a plain one


def save(case: Case, run: Run, folder: str) -> Any:
    if case.kind == "own":
        checkpoint.save(folder, model=run.whole, optimizer=run.optimizer, step=1)
        return None
    if case.kind == "dcp":
        if case.what == "model":
            state = torchs.get_model_state_dict(run.whole)
        else:
            state = torchs.get_optimizer_state_dict(run.whole, run.optimizer)
        dcp.save({"it": state}, checkpoint_id=folder)
        return state
    with kind_of(run.whole, case):
        if case.what == "model":
            return plainly(case, run.whole.state_dict())
        return FSDP.optim_state_dict(run.whole, run.optimizer)


def load(case: Case, target: Case, run: Run, saved: Any, folder: str) -> None:
    if case.kind == "own":
        checkpoint.load(folder, model=run.whole, optimizer=run.optimizer)
    elif case.kind == "dcp":
        load_dcp(case, run, folder)
    elif case.what == "model":
        with kind_of(run.whole, case):
            run.whole.load_state_dict(as_loaded(target, saved))
    else:
        with kind_of(run.whole, case):
            run.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(run.whole, run.optimizer, saved))


def load_dcp(case: Case, run: Run, folder: str, alone: bool = False) -> None:
    if case.what == "model":
        state = torchs.get_model_state_dict(run.whole)
        dcp.load({"it": state}, checkpoint_id=folder, no_dist=alone)
        torchs.set_model_state_dict(run.whole, state)
    else:
        state = torchs.get_optimizer_state_dict(run.whole, run.optimizer)
        dcp.load({"it": state}, checkpoint_id=folder, no_dist=alone)
        torchs.set_optimizer_state_dict(run.whole, run.optimizer, state)


def load_plain(case: Case, saved: Any, folder: str) -> Run:
    """Into a model and an optimizer of one process."""
    model = build(2)
    run = Run(model, torch.optim.Adam(model.parameters(), lr=0.5))
    if case.kind == "own":
        checkpoint.load(folder, model=model, optimizer=run.optimizer)
    elif case.kind == "dcp":
        load_dcp(case, run, folder, alone=True)
    elif case.what == "model":
        model.load_state_dict({name: full(value) for name, value in saved.items()})
    else:
        whole = {name: {key: full(v) for key, v in entry.items()} for name, entry in saved["state"].items()}
        state, keys = {**saved, "state": whole}, OptimStateKeyType.PARAM_ID
        numbered = FSDP.rekey_optim_state_dict(state, keys, model, optim=run.optimizer)
        run.optimizer.load_state_dict(numbered)
    return run


def whole_of(case: Case, run: Run) -> dict[str, torch.Tensor]:
    """All numbers of what was saved, by the names of the plain model."""
    if case.what == "model":
        return {name.removeprefix("_orig_mod."): full(v) for name, v in run.whole.state_dict().items()}
    state: dict[str, Any]
    if FSDP.fsdp_modules(run.whole):
        state = FSDP.optim_state_dict(run.whole, run.optimizer)["state"]
    else:
        state = {name: run.optimizer.state[param] for name, param in run.whole.named_parameters()}
    return {f"{name} {key}": value for name, entry in state.items() for key, value in entry.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def check_names(case: Case, saved: Any, reference: nn.Module) -> None:
    if case.kind == "local" and case.layout == "flat":
        return  # as they lie: one flat parameter of each wrapper
    names = saved if case.what == "model" else saved["state"]
    expected = reference.state_dict() if case.what == "model" else dict(reference.named_parameters())
    assert set(names) == set(expected)
    if case.what == "optimizer":
        assert {name for group in saved["param_groups"] for name in group["params"]} == set(expected)


def saved_and_loaded(rank: int, world: int, case: Case, folder: str) -> None:
    run, plain = Run.of(case, 7), build()
    reference = Run(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
    tokens = batches(0, world)
    run.step(tokens[rank])
    torch.stack([loss_of(reference.whole, rows) for rows in tokens]).mean().backward()
    reference.optimizer.step()
    before, expected = whole_of(case, run), whole_of(case, reference)
    assert before.keys() == expected.keys()
    for name, value in before.items():
        torch.testing.assert_close(value, expected[name].detach(), atol=2e-5, rtol=1e-4, msg=name)
    saved = save(case, run, folder)
    if case.kind == "rank0":
        assert bool(saved) == (rank == 0)
        if case.what == "model":  # which rank 0 gives to the others; the optimizer's state is sent by itself
            box = [saved]
            dist.broadcast_object_list(box, 0)
            saved = box[0]
    if saved:
        check_names(case, saved, reference.whole)
    run.step(tokens[rank])  # what was saved isn't touched by it
    others = [case]
    if case.kind != "local":
        other = "flat" if case.layout == "original" else "original"
        others.append(Case(layout=other))
    for number, target in enumerate(others):
        loaded = Run.of(target, 8 + number)
        load(case, target, loaded, saved, folder)
        same(whole_of(case, loaded), before)
        loaded.step(tokens[rank])
    if case.kind != "local" and (saved or case.kind == "own"):
        same(whole_of(case, load_plain(case, saved, folder)), before)


@pytest.mark.parametrize("case", list(table()))
def test_what_is_saved_has_the_plain_names_and_loads_again(case, tmp_path: Path) -> None:
    run_ranks(case.world, saved_and_loaded, case, str(tmp_path / "saved"))


def test_each_two_values_are_run_together():
    chosen = covering()
    assert set.union(*map(pairs_of, chosen)) == set.union(*map(pairs_of, EVERY))
    assert len(chosen) < 80
