"""What a forward takes and gives may be anything; gradients are those of one process."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

from shardwright import MixedPrecisionPolicy, fully_shard
from shardwright.errors import StageError
from shardwright.wrapper import FSDP, MixedPrecision
from tests.ranks.models import full
from tests.ranks.pool import on_ranks, run_ranks


class Block(nn.Module):
    """Gives its result in its own way: ``give(self, hidden)``, and ``taken(block, given)`` takes it."""

    def __init__(self, give):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.give = give
        self.left = None

    def forward(self, x):
        return self.give(self, self.second(torch.tanh(self.first(x))))


def as_attribute(block, hidden):
    block.left = hidden


def as_closure(block, hidden):
    return lambda: hidden


def as_generator(block, hidden):
    yield torch.tanh(hidden)
    yield hidden


def beside_detached(block, hidden):
    block.left = hidden
    return hidden.detach()


def as_late_generator(block, hidden):
    return (block.second(hidden + number) for number in range(2))


def taken(block, given):
    if block.left is not None:
        left, block.left = block.left, None
        return left
    if callable(given):
        return given()
    return sum(given)


class Model(nn.Module):
    def __init__(self, give):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block(give) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = taken(block, block(x))
        return self.head(x)


WAYS = {
    way.__name__: way for way in (as_attribute, as_closure, as_generator, beside_detached, as_late_generator)
}


def trained(rank, world, way, reshard, outermost):
    give = WAYS[way]
    models = Block(give), Block(give)
    models = ours, whole = models if outermost else (Model(give), Model(give))
    whole.load_state_dict(ours.state_dict())
    for block in [] if outermost else ours.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(ours, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(4):
        for model in models:
            for sample in range(world):
                if model is whole or sample == rank:
                    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + sample))
                    out = taken(model, model(x)) if outermost else model(x)
                    out.square().mean().backward()
        for (name, mine), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
            assert torch.allclose(full(mine.grad), other.grad / world, atol=1e-5), (step, name)
            other.grad /= world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_block_gives_may_hide_its_tensors(way, reshard):
    run_ranks(2, trained, way, reshard, False)


@pytest.mark.parametrize("way", [way for way in WAYS if "late" not in way])
def test_what_a_model_gives_may_hide_its_tensors(way):
    run_ranks(2, trained, way, True, True)


class Held:
    def __init__(self, weight):
        self.weight = weight


VIEWS = {
    "itself": lambda weight: weight,
    "transposed": lambda weight: {"table": [weight.t()]},
    "row": lambda weight: weight[0],
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: (weight.data, None),
    "in an object": Held,
}


class Table(nn.Module):
    """Gives a view of its own weight, as a tied head or a codebook does."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.kind = kind

    def forward(self):
        return VIEWS[self.kind](self.weight)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in VIEWS if kind != "in an object"])
@on_ranks(2)
def test_a_forward_may_give_views_of_its_weights(kind, reshard):
    whole = Table(kind)
    ours = nn.Sequential(Table(kind))
    fully_shard(ours[0], reshard_after_forward=reshard)
    fully_shard(ours)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            given = tree_leaves((ours[0](), ours[0]()))
            for mine, other in zip(given, tree_leaves((whole(), whole())), strict=True):
                assert mine is other is None or torch.equal(mine, other)
    mine, other = (next(t for t in tree_leaves(table()) if t is not None) for table in (ours[0], whole))
    if other.requires_grad:
        mine.square().sum().backward()
        other.square().sum().backward()
        assert torch.equal(full(ours[0].weight.grad), whole.weight.grad)


@on_ranks(2)
def test_a_view_of_a_weight_in_an_object_is_refused_by_name():
    table = fully_shard(Table("in an object"))
    with pytest.raises(StageError, match=r"'Table' gives a view of one of its parameters in an object"):
        table()
    table.kind = "itself"
    assert torch.equal(table(), Table("itself").weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(4, 4), nn.Linear(4, 2)

    def forward(self, packed, extra=None):
        return self.head(self.rnn(packed)[0].data)


def packed(rank, world):
    model, whole = Recurrent(), Recurrent()
    fully_shard(model.head)
    fully_shard(model)
    rows = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    for _ in range(2):
        assert torch.allclose(model(rows, extra=None), whole(rows), atol=1e-6)
        model(rows).sum().backward()


def test_containers_whose_constructors_look_at_their_leaves_are_taken():
    run_ranks(1, packed)


NORMS = {
    "batch": (lambda: nn.BatchNorm2d(3), (5, 3, 4, 4)),
    "instance": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (5, 3, 4, 4)),
    "without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (5, 3)),
    "group": (lambda: nn.GroupNorm(3, 3), (5, 3, 4, 4)),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", NORMS)
@on_ranks(2)
def test_norms_with_running_statistics_train_under_mixed_precision(kind, flat):
    make, shape = NORMS[kind]
    torch.manual_seed(0)
    half = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model = nn.Sequential(nn.Conv2d(3, 3, 1) if len(shape) == 4 else nn.Linear(3, 3), make(), nn.Tanh())
    whole = copy.deepcopy(model)
    if flat:
        model = FSDP(model, use_orig_params=False, mixed_precision=MixedPrecision(torch.bfloat16))
    else:
        fully_shard(model, mp_policy=half)
    x = torch.randn(shape)
    for training in (True, False):
        out, other = model.train(training)(x), whole.train(training)(x)
        assert torch.allclose(out.float(), other, atol=0.05)
        out.float().square().mean().backward()
