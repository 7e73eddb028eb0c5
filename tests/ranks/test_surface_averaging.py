"""Gradients are averaged, summed, or weighted by what each loss stands for, and ``explain`` says which."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from shardwright import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    SchedulePolicy,
    explain,
    fully_shard,
    loss_weights,
    set_transport,
)
from shardwright.errors import InputError
from tests.ranks.models import VOCAB, Run, both_step, build, full, loss_of, shard_decoder
from tests.ranks.pool import on_ranks


def uneven(step: int, world: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Inputs and targets of two microbatches of each rank; as many targets count (are not -100) as may be."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for rank in range(world):
        for micro in range(2):
            tokens = torch.randint(0, VOCAB, (2 + rank, 6), generator=generator)
            targets = torch.randint(0, VOCAB, (2 + rank, 6), generator=generator)
            targets[:, : (rank + 2 * micro + step) % 5] = -100
            made.append((tokens, targets))
    return [made[2 * rank : 2 * rank + 2] for rank in range(world)]


def loss(model, tokens, targets, reduction="mean"):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)


@pytest.mark.parametrize(("world", "copies"), [(1, 1), (2, 1), (3, 1), (4, 2)])
@on_ranks()
def test_losses_weighted_by_their_targets_equal_one_process_over_uneven_batches(rank, world, copies):
    mesh = init_device_mesh("cpu", (copies, world // copies)) if copies > 1 else None
    model, reference = shard_decoder(build(), fully_shard, mesh=mesh), build()
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(3):
        everywhere = uneven(step, world)
        counts = [(targets != -100).sum().item() for _, targets in everywhere[rank]]
        model.set_requires_gradient_sync(True)
        for number, (batch, share) in enumerate(
            zip(everywhere[rank], loss_weights(model, counts), strict=True)
        ):
            model.set_requires_gradient_sync(step == 1 or number == 1)  # reduced once, or each time
            (loss(model, *batch) * share).backward()
        batches = [batch for own in everywhere for batch in own]
        total = sum((targets != -100).sum() for _, targets in batches)
        (sum(loss(reference, *batch, reduction="sum") for batch in batches) / total).backward()
        both_step(ours, theirs)
    assert "each loss weighted by its share of the step" in str(explain(model))


@on_ranks(2)
def test_gradients_are_summed_or_averaged_as_asked(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build()
    tokens = torch.arange(world * 12).view(world, 2, 6) % VOCAB
    torch.stack([loss_of(reference, rows) for rows in tokens]).sum().backward()
    for averaging, scale, said in (("sum", 1, "summed over"), ("average", world, "averaged over")):
        model.set_gradient_averaging(averaging)
        assert said in str(explain(model))
        model.zero_grad()
        loss_of(model, tokens[rank]).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad) * scale, theirs.grad)
    with pytest.raises(InputError, match='must be "average" or "sum"'):
        model.set_gradient_averaging("mean")
    with pytest.raises(InputError, match="at least 0"):
        loss_weights(model, [3, -1])
    with pytest.raises(InputError, match="0 on all ranks"):
        loss_weights(model, [0, 0])
    with pytest.raises(InputError, match="no sharded parameters"):
        loss_weights(build(), [1])
    assert "averaged over" in str(explain(model))  # what was refused has changed nothing


class Slope(nn.Module):
    """Its weight's gradient is ``slope`` everywhere."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, 3, dtype=dtype))

    def forward(self, slope: float) -> torch.Tensor:
        return self.weight * slope


@pytest.mark.each_case
@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
@on_ranks(4)
def test_large_float16_gradients_are_averaged_without_an_overflow(world, transport):
    set_transport(transport)
    copies = init_device_mesh("cpu", (2, world // 2))

    def grad_of(model, *slopes, expected=20_000):
        for slope in slopes or (20_000,):
            model(slope).sum().backward()
        for param in model.parameters():
            assert (full(param.grad) == expected).all(), full(param.grad)

    grad_of(fully_shard(Slope()))
    grad_of(fully_shard(Slope(), mesh=copies))
    grad_of(fully_shard(Slope(torch.float32), mp_policy=MixedPrecisionPolicy(torch.float16)))
    grad_of(fully_shard(Slope(torch.float32), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)))
    grad_of(FullyShardedDataParallel(Slope(), use_orig_params=False))
    divided = fully_shard(Slope())
    divided.set_gradient_divide_factor(2.0)
    grad_of(divided, expected=40_000)

    added = fully_shard(Slope(), mesh=copies)
    added.set_requires_all_reduce(False)
    added(10_000).sum().backward()
    added.set_requires_all_reduce(True)
    added.set_gradient_divide_factor(16.0)  # what was summed before was divided for the factor before
    added(10_000).sum().backward()
    assert (full(added.weight.grad) == 5_000).all()

    lookup = fully_shard(nn.Embedding(64, 3, dtype=torch.float16))
    lookup.set_schedule_policy(SchedulePolicy(row_wise=True))
    (lookup(torch.tensor([5])) * 20_000).sum().backward()
    rows = full(lookup.weight.grad)
    assert (rows[5] == 20_000).all() and rows.count_nonzero() == 3


@on_ranks(2, 3, 4)
def test_gradients_of_other_dtypes_are_summed_as_they_are_and_divided_once(rank, world):
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (None, 3.0):
            model = fully_shard(Slope(dtype))
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            slopes = [torch.randn(7, 3, generator=torch.Generator().manual_seed(r)) for r in range(world)]
            (model(1.0) * slopes[rank].to(dtype)).sum().backward()
            total = slopes[0].to(dtype)
            for slope in slopes[1:]:
                total = total + slope.to(dtype)
            assert torch.equal(full(model.weight.grad), total / (factor or world))
