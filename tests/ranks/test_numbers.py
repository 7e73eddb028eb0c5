"""A number that is read from a sharded gradient is that of all ranks, or an error says that it isn't."""

import pytest
import torch
from torch import nn

from shardwright import fully_shard
from shardwright.errors import InputError
from tests.ranks.pool import on_ranks, run_ranks


def read(rank, world):
    model = fully_shard(nn.Linear(4, 4))
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    grad = model.weight.grad
    parts = {
        "norm": grad.norm(),
        "sum": grad.sum(),
        "mean": grad.mean(),
        "max": grad.max(),
        "nan": grad.isnan().any(),
    }
    for name, part in parts.items():
        for number in (float, bool, lambda t: t.item()):
            if world > 1 and any(
                placed.is_partial() for placed in part.placements
            ):  # torch 2.15 reduces any()
                with pytest.raises(InputError, match=r"rank's part alone.*full_tensor\(\)"):
                    number(part)
            number(part.full_tensor())
        assert part.full_tensor().item() == parts[name].full_tensor().item()
    whole = grad.full_tensor()
    assert parts["norm"].full_tensor().item() == pytest.approx(whole.norm().item())
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return float(total) if not hasattr(total, "placements") else total.full_tensor().item()


@pytest.mark.each_case
@pytest.mark.parametrize("world", [1, 2])
def test_a_number_of_a_ranks_part_is_refused_with_the_remedy(world):
    assert len({*run_ranks(world, read)}) == 1


@on_ranks(2)
def test_torchs_own_initialisation_of_shards_is_let_through():
    """torch's own code reads this rank's part, and means it."""
    model = fully_shard(nn.Linear(64, 64))
    for param in model.parameters():
        nn.init.trunc_normal_(param, std=0.02, a=-0.01, b=0.01)
        assert param.full_tensor().abs().max() <= 0.01
    model(torch.ones(1, 64)).sum().backward()
