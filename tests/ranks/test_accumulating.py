"""Gradients of several backwards are those of one process, also where modules run in some of them only, or by
themselves."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright import clip_grad_norm_, fully_shard
from shardwright.engine.groups.gradient_state import GradPlace
from shardwright.engine.unit import unit_of
from shardwright.errors import StageError
from tests.ranks.models import full, waits
from tests.ranks.pool import on_ranks, run_ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.block, self.branch = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x, branch=False):
        x = self.block(x)
        return self.norm(x + self.branch(x) if branch else x)


def beside(rank, world, way, reshard, steps=4):
    """Four steps of ``way(model, rows, seed)``, with norm and head in one group, and of one process."""
    ours, whole = Model(), Model()
    for part in (ours.block, ours.branch, [ours.norm, ours.head], ours):
        fully_shard(part, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (ours, whole)]
    for step in range(steps):
        way(ours, partial(rows, step, rank))
        for other in range(world):
            way(whole, partial(rows, step, other))
        for (name, own), theirs in zip(ours.named_parameters(), whole.parameters(), strict=True):
            assert (own.grad is None) == (theirs.grad is None), (step, name)
            if own.grad is not None:
                theirs.grad /= world
                assert torch.allclose(full(own.grad), theirs.grad, atol=1e-5), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def rows(step, rank, number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))


def of(out):
    return out.square().mean()


def branch_first(model, batch):
    """A branch (a vision tower, an adapter) that the last microbatch leaves out."""
    for number, branch in enumerate((False, True, False)):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number == 2)
        of(model.head(model(batch(number), branch))).backward()


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_only_an_earlier_microbatch_ran_is_reduced_in_the_last_one(world, reshard):
    run_ranks(world, beside, branch_first, reshard)


def as_with_ddp(model, batch):
    """``no_sync`` around all microbatches but the last."""
    for number in range(2):
        synced = number == 1 or not hasattr(model, "no_sync")
        with nullcontext() if synced else model.no_sync():
            of(model(batch(number), branch=number == 0)).backward()


@pytest.mark.parametrize("world", [1, 2])
def test_no_sync_is_that_of_distributed_data_parallel(world):
    run_ranks(world, beside, as_with_ddp, None)


def head_after(model, batch):
    of(model.head(model(batch(0)))).backward()


def chunked(model, batch):
    """The loss of chunks: torchtitan's calls the head of the list [norm, head] once for each."""
    hidden = model(batch(0))
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.chunk(2):
        of(model.head(chunk)).backward()
    hidden.backward(leaf.grad)


def head_before(model, batch):
    of(model.head(batch(0))).backward()
    of(model(batch(1))).backward()


def each_alone(model, batch):
    model.head(batch(0))
    model.norm(batch(1))
    with torch.no_grad():
        model.norm(batch(2))
    of(model.head(model(batch(3)))).backward()


@pytest.mark.parametrize("way", [head_after, chunked, head_before, each_alone])
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("world", [1, 2])
def test_modules_of_a_list_may_run_by_themselves_in_any_order_any_number_of_times(world, reshard, way):
    run_ranks(world, beside, way, reshard)


def clearing(model):
    """By name, ways to drop gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {
        "optimizer": optimizer.zero_grad,
        "optimizer, in place": lambda: optimizer.zero_grad(set_to_none=False),
        "model": model.zero_grad,
        "model, in place": lambda: model.zero_grad(set_to_none=False),
        "None": lambda: [setattr(param, "grad", None) for param in model.parameters()],
        "foreach": lambda: torch._foreach_zero_([p.grad for p in model.parameters()]),
        "fill": lambda: [p.grad.fill_(0.0) for p in model.parameters()],
    }


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("earlier", [False, True])
@on_ranks(2)
def test_what_is_cleared_between_microbatches_is_gone(earlier, fails):
    """A microbatch without sync, after a step whose gradients were kept or not, is dropped; also where one
    after it fails."""
    for name in clearing(Model()):
        ours, whole = Model(), Model()
        fully_shard(ours)
        for model in (ours, whole):
            if earlier:
                of(model(rows(0, 0, 0), branch=True)).backward()
            if model is ours:
                model.set_requires_gradient_sync(False)
            of(model(rows(0, 0, 1), branch=True)).backward()
            if fails:
                handle = model.block.register_full_backward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    of(model(rows(0, 0, 1), branch=True)).backward()
                handle.remove()
        for model in (ours, whole):
            model.head.requires_grad_(False)  # which no forward ran
            for param in model.head.parameters():
                param.grad = torch.zeros_like(param)
            clearing(model)[name]()
            if model is ours:
                model.set_requires_gradient_sync(True)
            of(model(rows(0, 0, 2), branch=True)).backward()
        for (path, mine), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
            if other.grad is not None and mine.grad is not None:
                assert torch.allclose(full(mine.grad), other.grad, atol=1e-6), (name, path)


@pytest.mark.parametrize("way", ["optimizer, in place", "model, in place", "foreach", "frozen"])
@pytest.mark.parametrize("copies", [1, 2])
@on_ranks(4)
def test_what_some_ranks_had_is_a_gradient_on_all_also_zeroed_or_frozen_since(rank, way, copies):
    """The branch runs on the ranks of one copy, or on one rank, in a microbatch that isn't summed yet."""
    model = Model()
    mesh = init_device_mesh("cpu", (copies, 4 // copies) if copies > 1 else (4,))
    for module in (model.branch, model):
        fully_shard(module, mesh=mesh)
    wait = model.set_requires_all_reduce if copies > 1 else model.set_requires_gradient_sync
    wait(False)
    of(model(rows(0, rank, 0), branch=rank < copies)).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    if way == "frozen":
        model.branch.requires_grad_(False)
    elif way == "foreach":
        torch._foreach_zero_(grads)
    else:
        clearing(model)[way]()
    wait(True)
    of(model(rows(0, rank, 1))).backward()
    for param in model.branch.parameters():
        assert full(param.grad).any() == (way == "frozen")


@on_ranks(2)
def test_gradients_that_are_not_reduced_yet_are_neither_read_nor_stepped_with(rank):
    model = fully_shard(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.set_requires_gradient_sync(False)
    of(model(rows(0, rank, 0), branch=True)).backward()
    grad = model.block.weight.grad
    assert "aren't reduced yet" in repr(grad.to_local())
    for read in (
        optimizer.step,
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: grad.norm(),
        lambda: grad.full_tensor(),
        lambda: full(grad),
    ):
        with pytest.raises(StageError, match=r"set_requires_gradient_sync\(False\)"):
            read()
    before = full(model.block.weight)
    model.set_requires_gradient_sync(True)
    of(model(rows(0, rank, 0), branch=True)).backward()
    optimizer.step()
    assert not torch.equal(full(model.block.weight), before)


@on_ranks(2)
def test_what_a_failed_backward_has_lost_of_earlier_microbatches_is_told(rank):
    """A last backward that fails after it had begun to reduce what earlier microbatches brought."""
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(8, 8)), nn.Tanh(), fully_shard(nn.Linear(8, 8))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for clears in (True, False):
        model.set_requires_gradient_sync(False)
        of(model(rows(0, rank, 0))).backward()
        model.set_requires_gradient_sync(True)
        handle = model[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            of(model(rows(0, rank, 1))).backward()
        handle.remove()
        if clears:
            optimizer.zero_grad()
            of(model(rows(0, rank, 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with pytest.raises(StageError, match=r"'weight' were lost in a .*zero_grad\(\)"):
                of(model(rows(0, rank, 1))).backward()


@pytest.mark.parametrize("way", ["set", "no_sync"])
@pytest.mark.parametrize("copies", [1, 2])
@on_ranks(4)
def test_what_a_failed_microbatch_without_sync_has_brought_stays_and_so_do_sums_in_flight(rank, way, copies):
    ours, whole = Model(), Model()
    fully_shard(ours, mesh=init_device_mesh("cpu", (copies, 4 // copies) if copies > 1 else (4,)))
    ours.set_is_last_backward(False)
    for model in (ours, whole):
        of(model(rows(0, 0, 0), branch=True)).backward()
        handle = model.branch.register_full_backward_pre_hook(lambda *_: 1 / 0)
        with (
            pytest.raises(ZeroDivisionError),
            ours.no_sync() if way == "no_sync" and model is ours else nullcontext(),
        ):
            if way == "set":
                ours.set_requires_gradient_sync(False)
            of(model(rows(0, 0, 1), branch=True)).backward()
        handle.remove()
        if model is ours:
            ours.set_is_last_backward(True)
            ours.set_requires_gradient_sync(True)
        of(model(rows(0, 0, 2))).backward()
    for (name, mine), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        assert other.grad is None or torch.allclose(full(mine.grad), other.grad, atol=1e-6), name


@on_ranks(2)
def test_gradients_may_be_reduced_inside_of_a_step_with_a_closure(rank, world):
    """As Lightning's Trainer does: the last microbatch's backward runs inside of the step."""
    ours, whole = Model(), Model()
    fully_shard(ours)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, whole)]
    ours.set_requires_gradient_sync(False)
    of(ours(rows(0, rank, 0), branch=True)).backward()
    for other in range(world):
        (of(whole(rows(0, other, 0), branch=True)) / world).backward()

    def last():
        ours.set_requires_gradient_sync(True)
        of(ours(rows(0, rank, 1), branch=True)).backward()

    def last_of_all():
        for other in range(world):
            (of(whole(rows(0, other, 1), branch=True)) / world).backward()

    optimizers[0].step(last)
    optimizers[1].step(closure=last_of_all)
    for mine, other in zip(ours.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(full(mine), other, atol=1e-5)


def put(place):
    """A parameter of which a gradient waits at ``place`` when a backward ends, and the state of its group."""
    [group] = unit_of(fully_shard(nn.Linear(4, 4, bias=False))).runtime.groups
    [param], gradients = group.params, group.reducer.gradients
    gradients.put(place, {param: torch.ones(16)})
    gradients.outlive()
    assert waits(param.sharded) and not gradients.is_idle
    return param, gradients


@pytest.mark.parametrize("place", GradPlace)
@on_ranks(1)
def test_what_waits_anywhere_when_a_backward_ends_is_cleared_with_grad(place):
    param, gradients = put(place)
    param.sharded.grad = None
    assert gradients.is_idle
    gradients.brought.add(param)
    gradients.give({param: torch.ones(16)})
    assert full(param.sharded.grad).eq(1).all()


@pytest.mark.parametrize("place", GradPlace)
@on_ranks(1)
def test_what_waits_anywhere_when_the_next_backward_fails_stays_or_is_told_as_lost(place):
    param, gradients = put(place)
    gradients.drop()
    if place in (GradPlace.ACCUMULATING, GradPlace.SUMMED):
        assert gradients.of(place)[param].eq(1).all()
    else:
        gradients.brought.add(param)
        with pytest.raises(StageError, match=r"were lost in a .*zero_grad\(\)"):
            gradients.give({param: torch.ones(16)})
