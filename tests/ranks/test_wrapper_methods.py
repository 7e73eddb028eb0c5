"""The wrapper where a caller takes part: own reductions, whole quantised weights, orders of its own."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import SchedulePolicy
from shardwright.errors import CommError
from shardwright.wrapper import FSDP
from tests.ranks import quantised
from tests.ranks.models import Run, assert_same_grads, batches, both_step, loss_of
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.test_wrapper_harness import AnyOrder
from tests.ranks.wrapped import nested


class LowRank:
    """What PowerSGD keeps of one group: the right factor, and what earlier rounds have left out."""

    def __init__(self, rank):
        self.rank = rank
        self.right = None
        self.left_out = 0.0
        self.numel = 0
        self.sent = []


def compressed(state, whole, shard):
    """A hook that reduces two thin factors of the gradient, and carries on what they miss."""
    world, me = dist.get_world_size(), dist.get_rank()
    state.numel = whole.numel()
    side = int(state.numel**0.5)
    padded = torch.nn.functional.pad(whole, (0, -state.numel % side))
    matrix = padded.view(-1, side) + state.left_out
    if state.right is None:
        generator = torch.Generator().manual_seed(0)
        right = torch.randn(side, min(state.rank, *matrix.shape), generator=generator)
        state.right = torch.linalg.qr(right)[0]
    left = matrix @ state.right
    dist.all_reduce(left)
    left = torch.linalg.qr(left)[0]
    state.right = matrix.t() @ left
    dist.all_reduce(state.right)
    state.right /= world
    state.sent.append(left.numel() + state.right.numel())
    mean = left @ state.right.t()
    state.left_out = matrix - mean
    shard.copy_(mean.view(-1)[: state.numel].chunk(world)[me])


def even():
    """A model whose parameters two ranks cut without padding, and its wrappers."""
    torch.manual_seed(2)
    layers = [FSDP(nn.Linear(8, 16)), FSDP(nn.Linear(16, 16)), FSDP(nn.Linear(16, 8))]
    return FSDP(nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])), layers


def hooked(rank):
    """The same with the hook in every wrapper, each with a state of its own."""
    model, layers = even()
    states = [LowRank(rank) for _ in layers]
    for layer, state in zip(layers, states, strict=True):
        layer.register_comm_hook(state, compressed)
    return model, layers, states


def rounds(model, layers, rank, num):
    """This rank's shards of each layer's gradients, over as many batches; one flat tensor for each layer."""
    for step in range(num):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
    return [torch.cat([param.grad.to_local().flatten() for param in layer.parameters()]) for layer in layers]


@on_ranks(2)
def test_a_low_rank_hook_with_memory_reduces_each_group_and_loses_nothing(rank, world):
    exact = rounds(*hooked(rank=1000)[:2], rank, num=1)  # nothing is left out: the sums of a reduce-scatter
    for found, expected in zip(exact, rounds(*even(), rank, num=1), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    num = 6
    model, layers, states = hooked(rank=2)
    shards = zip(rounds(model, layers, rank, num), rounds(*even(), rank, num), states, strict=True)
    for found, expected, state in shards:
        # What a round leaves out is carried on: the sum of all lacks what is left out now, and no more.
        dist.all_reduce(state.left_out)
        lacking = state.left_out.reshape(-1)[: state.numel].chunk(world)[rank] / world
        torch.testing.assert_close(expected - found, lacking, atol=1e-3, rtol=1e-3)
        assert lacking.norm() > 0.01 * expected.norm(), "nothing was left out"
        assert len(state.sent) == num
        assert state.sent[-1] < state.numel / 2


@pytest.mark.parametrize("codec", ["nf4", "nf4-double", "int8"])
@on_ranks(2)
def test_whole_parameters_of_a_quantised_model_are_its_codes_and_are_read_as_weights(rank, codec):
    plain, model = quantised.build(codec), quantised.build(codec)
    for place, layer in enumerate(model):
        model[place] = FSDP(layer)
    model = FSDP(model)
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    x = torch.randn(4, quantised.COLS, generator=torch.Generator().manual_seed(rank))
    with FSDP.summon_full_params(model):
        shown = dict(model.named_parameters())
        for name, param in plain.named_parameters():  # codes and scales, whole
            assert torch.equal(shown[name], param), name
        for ours, theirs in zip(model.module, plain, strict=True):  # and what is read of them: weights
            assert torch.equal(ours.up.weight, theirs.up.weight)
            assert ours.up.weight.dtype == torch.float32
            assert torch.equal(ours.experts, theirs.experts)
        for each in (model.module[0], plain[0]):
            each.adapter.weight.data.mul_(2.0)  # edits of what is trained are kept
    for name, param in model.named_parameters():
        changed = name.endswith("0.adapter.weight")
        assert torch.equal(param.to_local(), before[name] * 2.0 if changed else before[name]), name
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        assert (model.module[1].up.weight.shape == (quantised.ROWS, quantised.COLS)) or rank > 0
    torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()
    assert all((param.grad is not None) == ("adapter" in name) for name, param in model.named_parameters())


ORDERS = ((0, 1, 2), (1, 0, 2))  # blocks 0 and 1 are groups


def in_own_order(agreement):
    torch.manual_seed(7)
    model = nested(AnyOrder())
    model.set_schedule_policy(SchedulePolicy(agreement=agreement, bucket_cap_mb=0))
    return model


@on_ranks(2)
def test_ranks_in_other_orders_are_exact_from_the_first_iteration_on_evaluations_included(rank, world):
    model = in_own_order("strict")
    torch.manual_seed(7)
    reference = AnyOrder()
    model.module.order = ORDERS[rank]
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(4):
        tokens = batches(step, world)
        with torch.no_grad():
            seen = model(tokens[rank])
        loss_of(model, tokens[rank]).backward()
        losses = []
        for order, rows in zip(ORDERS, tokens, strict=True):
            reference.order = order
            losses.append(loss_of(reference, rows))
            if order == ORDERS[rank]:
                torch.testing.assert_close(seen, reference(rows).detach(), atol=1e-5, rtol=1e-5)
        torch.stack(losses).mean().backward()
        assert_same_grads(model, reference, 1e-5)
        both_step(ours, theirs, 1e-5)


def refused_orders(rank, world, evaluates):
    model = in_own_order("off")
    model.module.order = ORDERS[rank]
    messages = []
    for step in range(4):
        with (
            pytest.raises(CommError, match="different collectives") as error,
            torch.set_grad_enabled(not evaluates),
        ):
            loss_of(model, batches(step, world)[rank])
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
def test_without_agreement_another_order_is_an_error_on_every_rank_in_every_iteration(evaluates):
    for message in itertools.chain(*run_ranks(2, refused_orders, evaluates)):
        assert "blocks.0" in message and "blocks.1" in message
