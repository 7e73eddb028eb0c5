"""Recipes: optimizers, schedules, the best checkpoint, early stopping; each kind at toy size."""

import json

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwright.checkpoint import load, save
from shardwright.finetune.engine import build_model
from shardwright.finetune.tuned import find_tuned
from shardwright.train.config import OptimizerConfig
from shardwright.train.eager import build_optimizer, opened
from shardwright.train.folder import RunFolder
from shardwright.train.ranks import RankPlace
from tests.hf.test_finetune import losses, recipe_of, tune
from tests.hf.test_finetune import place as place  # a fixture
from tests.ranks.pool import run_ranks


def test_the_best_checkpoint_is_what_is_left_and_a_run_without_progress_ends_early(place, tmp_path):
    sections = {
        "training": {"epochs": 0, "steps": 40},
        "optimizer": {"lr": 0.3, "schedule": "constant", "warmup_steps": 6},  # too high
        "heldout": {"every": 2, "keep_best": True, "patience": 3},
        "checkpoint": {"every": 4},
    }
    run_ranks(1, tune, recipe_of(place, tmp_path / "run", **sections))
    heldout = losses(tmp_path / "run", "heldout_loss")
    heldout.pop(0)  # before the first step: nothing to keep
    best = min(heldout, key=heldout.get)
    steps = max(heldout)
    assert steps == best + 3 * 2 < 40
    summary = json.loads(RunFolder(tmp_path / "run").summary.read_text())
    assert (summary["steps"], summary["exported_step"]) == (steps, best)
    assert summary["heldout_loss"] == pytest.approx(heldout[best], abs=1e-6)
    assert find_tuned(tmp_path / "run").folder.name == f"step-{best:06d}"
    run_ranks(1, tune, recipe_of(place, tmp_path / "two", **sections), False, best + 1)  # stopped after it
    run_ranks(1, tune, recipe_of(place, tmp_path / "two", **sections), True)
    assert losses(tmp_path / "two", "heldout_loss") == losses(tmp_path / "run", "heldout_loss")
    assert json.loads(RunFolder(tmp_path / "two").summary.read_text())["exported_step"] == best


def eight_bit(rank, world, recipe, folder):
    """What both AdamWs make of the same gradients, and whether a checkpoint changes the state in 8 bits."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    place = RankPlace(rank, world, torch.device("cpu"), mesh)
    wholes = []
    for kind in ("adamw", "adamw-8bit"):
        model = build_model(recipe, place)
        config = OptimizerConfig(kind=kind, lr=1e-2, weight_decay=0.1)
        optimizer = build_optimizer(config, model)
        for step in range(4):
            for i, p in enumerate(model.parameters()):
                local = p.to_local()
                generator = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
                noise = torch.randn(local.shape, generator=generator).to(local.dtype)
                p.grad = torch.distributed.tensor.DTensor.from_local(
                    noise, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
            optimizer.step()
        wholes.append({name: p.full_tensor().float() for name, p in model.named_parameters()})
    before = bits(optimizer)
    with opened(optimizer):
        save(folder, model=model, optimizer=optimizer, step=4)
        assert {p: state["exp_avg"].shape for p, state in optimizer.state.items()} == {
            p: p.shape for p in model.parameters()
        }
    model = build_model(recipe, place)
    again = build_optimizer(config, model)
    with opened(again):
        load(folder, model=model, optimizer=again)
    for old, new in ((before, bits(optimizer)), (before, bits(again))):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    return {name: (wholes[0][name] - wholes[1][name]).abs().max().item() for name in wholes[0]}


def bits(optimizer):
    states = optimizer._inner.state.values()
    found = [
        state[f"{part}{i}"].clone()
        for state in states
        for part in ("state", "absmax")
        for i in "12"
        if f"{part}{i}" in state
    ]
    assert {tensor.dtype for tensor in found} == {torch.uint8, torch.float32}  # small ones stay as they are
    return found


def test_adamw_in_8_bits_steps_shards_as_adamw_does_and_a_checkpoint_has_every_bit_of_it(place, tmp_path):
    pytest.importorskip("bitsandbytes")
    recipe = recipe_of(place, place / "none", base={"quantise": "none"}, adapter={"rank": 0})
    for off in run_ranks(2, eight_bit, recipe, tmp_path / "checkpoint"):
        assert max(off.values()) < 0.01  # a quarter of what four steps move
        assert max(off.values()) > 0
