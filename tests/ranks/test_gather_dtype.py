"""Weights that are sent in another dtype than the one that computes."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardwright import MixedPrecisionPolicy, fully_shard, set_transport, stats
from shardwright.engine.unit import unit_of
from shardwright.errors import Diverged, InputError
from tests.ranks.models import Block, Run, full, sharded, squared
from tests.ranks.pool import on_ranks, run_ranks

BF16 = MixedPrecisionPolicy(gather_dtype=torch.bfloat16)
WIDTH = 64
WAYS = {
    "rows": {},
    "last dim": {"shard_placement_fn": lambda param: Shard(param.ndim - 1)},
    "smaller world": {"reshard_after_forward": 2},
    "kept": {"reshard_after_forward": False},
}


def rounded(model: nn.Module, skipped: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """Have a plain model compute with its weights as they are sent; what they are."""
    exact = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim and name not in skipped:
                param.copy_(param.bfloat16())
    return exact


def train_both(model, local, rank, world, skipped=()):
    """Plain training beside it: gradients of rounded weights step exact ones."""
    ours, theirs = (Run.of(each, torch.optim.AdamW, lr=1e-2) for each in (model, local))
    for number in range(4):
        batch = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(number))
        squared(model, batch.chunk(world)[rank]).backward()
        exact = rounded(local, skipped)
        squared(local, batch).backward()
        with torch.no_grad():
            for param, was in zip(local.parameters(), exact, strict=True):
                param.copy_(was)
        ours.step()
        theirs.step()
    for (name, param), other in zip(model.named_parameters(), local.parameters(), strict=True):
        assert param.dtype is torch.float32
        torch.testing.assert_close(
            full(param), other.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m
        )


def stack():
    torch.manual_seed(3)
    return nn.Sequential(*(Block(WIDTH) for _ in range(3)))


def trains_as_one(rank, world, way, transport):
    set_transport(transport)
    train_both(sharded(stack(), mp_policy=BF16, **WAYS[way]), stack(), rank, world)


@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_sent_in_bf16_train_as_rounded_ones_do_in_one_process(way, transport):
    for world in (1, 3) if way != "smaller world" else (4,):
        run_ranks(world, trains_as_one, way, transport)


@on_ranks(2)
def test_as_many_bytes_are_sent_as_were_asked_for_and_compute_is_in_float32(world):
    set_transport("sockets")

    def sent(policy):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        sharded(model, mp_policy=policy, reshard_after_forward=True)
        seen = []
        model[1].register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
        for _ in range(2):
            before = stats(model).sent_nbytes
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
        assert set(seen) == {torch.float32}
        return stats(model).sent_nbytes - before

    weights = 3 * WIDTH * WIDTH * 4 * (world - 1) // world
    assert sent(MixedPrecisionPolicy()) == weights
    assert sent(BF16) == weights // 2


@on_ranks(2)
def test_weights_without_edits_keep_their_precision_and_edits_arrive():
    model = fully_shard(stack(), mp_policy=BF16)
    before = {name: full(param).detach().clone() for name, param in model.named_parameters()}
    with model.unsharded(), torch.no_grad():
        assert torch.equal(model[0].up.weight, before["0.up.weight"].bfloat16().float())
        model[0].up.bias.fill_(0.25)
    before["0.up.bias"].fill_(0.25)
    for _ in range(2):
        for name, param in model.named_parameters():
            assert torch.equal(full(param), before[name]), name
        model(torch.ones(2, WIDTH)).sum().backward()
        model.state_dict()


@on_ranks(2)
def test_what_keeps_its_dtype_is_sent_in_it(rank, world):
    policy = MixedPrecisionPolicy(
        gather_dtype=torch.bfloat16,
        param_dtype_override_fn=lambda param: param.dtype if param.ndim == 1 else None,
    )
    local = stack()
    names = tuple(name for name, param in local.named_parameters() if param.ndim == 1)
    train_both(sharded(stack(), mp_policy=policy), local, rank, world, names)


@on_ranks(2)
def test_ranks_that_send_in_other_dtypes_are_told(rank):
    model = fully_shard(
        stack(), mp_policy=MixedPrecisionPolicy(gather_dtype=torch.bfloat16 if rank else None)
    )
    with pytest.raises(Diverged, match=r"gather_dtype=torch\.bfloat16"):
        model(torch.ones(2, WIDTH))


@on_ranks(2)
def test_a_budget_is_asked_for_what_arrives_too():
    model = fully_shard(nn.Linear(WIDTH, WIDTH), mp_policy=BF16)
    group = unit_of(model).group
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    model.reshard()
    model.unshard(async_op=True)
    assert group.held_nbytes == group.arriving_nbytes > 1.4 * group.unsharded_nbytes
    model.unshard()
    assert group.held_nbytes == group.unsharded_nbytes


@pytest.mark.parametrize("dtype", ["bf16", torch.int32, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_weights_cannot_be_sent_in_is_refused(dtype):
    with pytest.raises(InputError, match="gather_dtype"):
        MixedPrecisionPolicy(gather_dtype=dtype)
