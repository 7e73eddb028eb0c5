"""The root's own parameters are two groups, and the first block's; the second is gathered when it is read."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright import SchedulePolicy, explain, fully_shard, set_transport, stats
from shardwright.engine.step.runtime import Phase
from tests.ranks import models
from tests.ranks.pool import on_ranks, run_ranks

WIDTH, VOCAB = 264, 1001  # each end is larger than a MiB, up to which small groups share collectives


class Model(nn.Module):
    """``reads``: where and how the forward reads the head's weight. ``position``: a small module of the root
    comes before the blocks, beside the embedding."""

    def __init__(self, reads="in its forward", tied=False, position=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Linear(1, WIDTH) if position else None
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.reads = reads
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        penalty = 0.0
        x = self.embedding((x * 100).long().abs() % VOCAB)
        if self.position is not None:
            x = x + self.position(x.new_ones(1))
        if self.reads == "before the blocks":
            penalty = self.head.weight.square().mean()
        elif self.reads == "in a list":
            penalty = sum(param.square().mean() for param in self.head.parameters())
        elif self.reads == "by its name":
            penalty = self.get_parameter("head.weight").square().mean()
        for block in self.blocks:
            x = torch.relu(block(x))
        if self.reads == "never":
            return x
        if self.reads == "beside its forward":
            return F.linear(self.norm(x), self.head.weight, self.head.bias)
        return self.head(self.norm(x)) + penalty


equal_steps = functools.partial(models.equal_steps, lr=0.01)


def made(**options):
    torch.manual_seed(3)
    return Model(**options)


def sharded(model, **options):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, **options)


def lines(model, phase):
    """The schedule of a phase: event -> actions."""
    return {str(entry.event): list(map(str, entry.actions)) for entry in model.schedule().phases[phase]}


@on_ranks(2)
def test_the_head_is_gathered_beside_the_blocks_and_reduced_before_them(rank, world):
    model = sharded(made())
    assert "group 4: norm, head  on" in str(explain(model))
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=0))
    assert sum(row.exposed_nbytes for row in explain(model).groups) == 0  # no step was recorded
    equal_steps(model, made(), rank, world)
    first_block, _, _, embedding, head = explain(model).groups
    assert head.exposed_nbytes == 0 < first_block.exposed_nbytes < embedding.exposed_nbytes
    assert "all-gather in forward" in embedding.exposed and "row_wise=True" in embedding.exposed
    forward, backward = lines(model, Phase.FORWARD), lines(model, Phase.BACKWARD)
    assert forward["F+ 3"] == ["unshard 3", "unshard 0", "wait 3"]
    assert "unshard 4" in forward["F+ 2"]
    assert forward["F+ 4"] == ["wait 4"]
    assert "reduce 4" in backward["G  4"]
    assert list(backward).index("G  4") < list(backward).index("G  2") < list(backward).index("G  3")


def embedding_apart(rank, world, position):
    """The root's groups but the embedding's, and the actions of a forward."""
    set_transport("sockets")
    model, reference = made(position=position), made(position=position)
    fully_shard(model.embedding)
    sharded(model).set_schedule_policy(SchedulePolicy(bucket_cap_mb=0))
    equal_steps(model, reference, rank, world)
    forward = lines(model, Phase.FORWARD)
    twin = copy.deepcopy(model)
    equal_steps(twin, unsharded(twin), rank, world, steps=2)
    assert lines(twin, Phase.FORWARD) == forward
    return [(row.modules, row.exposed) for row in explain(model).groups[4:]], forward


@pytest.mark.parametrize("position", [False, True])
def test_a_head_that_has_little_or_nothing_of_the_root_before_the_blocks_is_gathered_beside_them(position):
    head = 5 if position else 4
    for rows, forward in run_ranks(2, embedding_apart, position):
        *_, (modules, exposed) = rows
        assert modules == (("norm", "head") if position else ("",)) and exposed == ""
        (issued,) = (event for event, actions in forward.items() if f"unshard {head}" in actions)
        assert issued == "F+ 3"  # the last block's
        assert forward[f"F+ {head}"] == [f"wait {head}"]


READS = ("in its forward", "beside its forward", "before the blocks", "in a list", "by its name", "never")


def unsharded(model):
    """One that isn't sharded, with the same weights."""
    twin = made(reads=model.reads, position=model.position is not None)
    with torch.no_grad():
        for param, own in zip(twin.parameters(), model.parameters(), strict=True):
            param.copy_(models.full(own))
    return twin


@pytest.mark.parametrize("reads", READS)
@on_ranks(2)
def test_however_the_head_is_read_it_is_there(rank, world, reads):
    model = sharded(made(reads=reads))
    equal_steps(model, made(reads=reads), rank, world)
    with torch.no_grad():
        model(torch.ones(2, 3))
    model.reshard()
    equal_steps(model, unsharded(model), rank, world)


@on_ranks(2)
def test_after_a_forward_that_failed_before_it_was_read_training_goes_on(rank, world):
    model, blocks = sharded(made()), []
    handle = model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 3))
        blocks.append(model.head.weight)  # read outside of a forward: at rest
    handle.remove()
    assert all(hasattr(weight, "full_tensor") for weight in blocks)
    equal_steps(model, made(), rank, world)


@on_ranks(2)
def test_a_deep_copy_defers_its_head_too(rank, world):
    model = sharded(made())
    equal_steps(model, made(), rank, world, steps=1)
    twin, reference = copy.deepcopy(model), unsharded(model)
    assert lines(model, Phase.FORWARD)["F+ 4"] == ["wait 4"]
    equal_steps(twin, reference, rank, world, steps=2)
    assert lines(twin, Phase.FORWARD)["F+ 4"] == ["wait 4"]


@pytest.mark.slow
@on_ranks(2, limit_s=120.0)
def test_a_compiled_model_or_head_waits_for_it(rank, world):
    for whole in (True, False):
        model, reference = sharded(made()), made()
        if whole:
            model.compile(backend="aot_eager")
        else:
            model.head.compile(backend="aot_eager")
        equal_steps(model, reference, rank, world)


@on_ranks(2)
def test_what_the_caller_has_unsharded_is_not_gathered_again(rank, world):
    model, reference = sharded(made(), reshard_after_forward=True), made()
    x = torch.ones(2, 3)
    with model.unsharded():
        assert torch.equal(model.head.weight, reference.head.weight)
        assert torch.equal(model(x), reference(x))
    model.unshard()
    assert torch.equal(model.head.weight, reference.head.weight)
    assert torch.equal(model(x), reference(x))
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert stats(model).unsharded_nbytes == 0
    equal_steps(model, reference, rank, world)


@on_ranks(2)
def test_a_setter_on_the_root_is_for_both_groups(rank, world):
    model, seen = sharded(made()), []
    model.set_all_reduce_hook(lambda grads: seen.append(grads.numel()))
    equal_steps(model, made(), rank, world, steps=1)
    assert sum(seen) == sum(
        p.to_local().numel()
        for p in (*model.embedding.parameters(), *model.norm.parameters(), *model.head.parameters())
    )


@on_ranks(2)
def test_in_a_larger_model_it_is_as_any_other_group(rank, world):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = made(), nn.Linear(VOCAB, 7)

        def forward(self, x):
            return self.out(self.inner(x))

    model, reference = models.twins(Outer)
    sharded(model.inner)
    fully_shard(model)
    equal_steps(model, reference, rank, world)


@on_ranks(2)
def test_a_tied_head_or_a_small_one_stays_with_the_rest(rank, world):
    tied = sharded(made(tied=True))
    equal_steps(tied, made(tied=True), rank, world)
    assert "F+ 4" not in lines(tied, Phase.FORWARD)
    small = nn.Sequential(nn.Linear(13, 8), nn.Linear(8, 8), nn.Linear(8, 13))
    models.sharded(small, [small[1]])
    small(torch.ones(2, 13)).sum().backward()
    assert "F+ 2" not in lines(small, Phase.FORWARD)


BLOCK = 1000  # of a block's two matrices each is larger than a MiB


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, BLOCK), nn.Linear(BLOCK, WIDTH)
        self.reads = "in their forwards"

    def forward(self, x):
        if self.reads == "the last one first":
            x = x + 0.1 * F.linear(x, self.down.weight.t())[..., :WIDTH]
        return x + self.down(torch.relu(self.up(x)))


def deep(reads="in their forwards", **options):
    model = made(**options)
    model.blocks = nn.ModuleList(Block() for _ in range(3))
    model.blocks[0].reads = reads
    return model


@pytest.mark.parametrize("reads", ["in their forwards", "the last one first"])
@on_ranks(2)
def test_the_first_block_is_two_groups_of_which_one_is_moved_beside_the_others_compute(rank, world, reads):
    model, reference = models.twins(lambda: deep(reads))
    sharded(model)
    names = [group.modules for group in explain(model).groups]
    assert names == [("blocks.0",), ("blocks.1",), ("blocks.2",), ("blocks.0.down",), ("",), ("norm", "head")]
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=0))
    equal_steps(model, reference, rank, world)
    if reads == "in their forwards":
        forward, backward = lines(model, Phase.FORWARD), lines(model, Phase.BACKWARD)
        assert forward["F+ 4"] == ["unshard 4", "unshard 0", "unshard 3", "wait 4"]
        assert backward["B+ 1"] == ["unshard 0", "unshard 3", "wait 1"]  # one module's groups: as one ahead
        reduced = [event for event, actions in backward.items() if {"reduce 0", "reduce 3"} & {*actions}]
        assert reduced == ["G  3", "G  0"]
    twin = copy.deepcopy(model)
    equal_steps(twin, copy.deepcopy(reference), rank, world, steps=1)


@on_ranks(2)
def test_a_first_block_that_something_was_asked_of_stays_one_group():
    model = deep()
    fully_shard(model.blocks[0]).set_gradient_divide_factor(1.0)
    models.sharded(model, model.blocks[1:])
    assert len(explain(model).groups) == 5


@on_ranks(2)
def test_a_parameter_of_a_group_that_was_cut_off_may_be_tied_later(rank, world):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deep()
            self.again, self.down = nn.Linear(WIDTH, VOCAB), nn.Linear(BLOCK, WIDTH)
            self.again.weight, self.down.weight = self.inner.head.weight, self.inner.blocks[0].down.weight

        def forward(self, x):
            return self.again(self.down(torch.tanh(self.inner(x)[..., :BLOCK])))

    model, reference = models.twins(Outer)
    sharded(model.inner)
    fully_shard(model)
    equal_steps(model, reference, rank, world)
