"""A job of its own that ends while its last save fails."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardwright import fully_shard
from shardwright.checkpoint import async_save, load, save
from tests.ranks.scripts import run_scripts


def build(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 500), nn.Linear(500, 5))
    for p in model.parameters():
        nn.init.constant_(p, value)
    return model


def leave_with_a_save_that_fails(path: str, rank: int, world: int) -> None:
    model = fully_shard(build(1.0))
    save(path, model=model, step=1)
    async_save(path, model=model, step=1)


def test_an_error_that_nobody_waits_for_is_told_at_exit(tmp_path: Path) -> None:
    for end in run_scripts(2, partial(leave_with_a_save_that_fails, str(tmp_path))):
        assert "the last checkpoint was not saved: " in end.stderr
        assert "step-000001 exists already" in end.stderr
    model = build(-1.0)
    assert load(tmp_path, model=model).step == 1
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
