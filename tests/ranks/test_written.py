"""A backward reads the weights that its forward has saved, or raises as it would in one process."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh

from shardwright import CPUOffloadPolicy, OptimizerOffloadPolicy, SchedulePolicy, fully_shard
from shardwright.errors import InputError, StageError
from tests.ranks.models import NEEDS_ORDER, assert_same_grads, full, sharded
from tests.ranks.pool import on_ranks, run_ranks

CHANGED = "modified by an inplace operation"


class Block(nn.Module):
    def __init__(self, keeps=None):
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.keeps = keeps

    def forward(self, x):
        out = torch.tanh(self.lin(x))
        if self.keeps is not None:
            self.keeps.append((out @ self.lin.weight).square().mean())
        return out


WHOLE = object()


def model_of(reshard, escapes=None, kind="nothing"):
    torch.manual_seed(3)
    blocks = nn.Sequential(*(Block(escapes if number == 1 else None) for number in range(5)))
    KINDS[kind](blocks)
    if reshard is not WHOLE:
        sharded(blocks, reshard_after_forward=reshard).set_schedule_policy(SchedulePolicy(bucket_cap_mb=0))
    return blocks


def batch(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


def escaping(rank, world, reshard):
    escapes = []
    ours, whole = model_of(reshard, escapes), model_of(WHOLE, theirs := [])
    for step in range(6):
        for model, kept in ((ours, escapes), (whole, theirs)):
            kept.clear()
            model.zero_grad()
            loss = model(batch(step)).square().mean()
            if step >= 2:
                loss = loss + kept[0]
            try:
                loss.backward()
            except RuntimeError as error:
                assert model is ours and step >= 2 and CHANGED in str(error), error
                return "refused"
        assert_same_grads(ours, whole)
    return "exact"


@pytest.mark.parametrize(("reshard", "outcome"), [(True, "refused"), (False, "exact")])
@pytest.mark.parametrize("world", [1, 2])
def test_a_tensor_that_escapes_from_a_forward_never_gives_gradients_of_other_weights(world, reshard, outcome):
    assert run_ranks(world, escaping, reshard) == [outcome] * world


def step(model, optimizer):
    optimizer.step()


def load(model, optimizer):
    model.load_state_dict({name: torch.full(p.shape, 0.1) for name, p in model.state_dict().items()})


def one_in_place(model, optimizer):
    with torch.no_grad():
        model[2].lin.weight.mul_(2)


def one_bias(model, optimizer):
    with torch.no_grad():
        model[2].lin.bias.mul_(2)


def first_weight(model, optimizer):
    with torch.no_grad():
        model[0].lin.weight.mul_(2)


def edited(model, optimizer):
    with model[3].unsharded() if hasattr(model, "unsharded") else nullcontext(), torch.no_grad():
        model[3].lin.weight[:, 3] = 0


def an_evaluation(model, optimizer):
    with torch.no_grad():
        model(batch(9))


def another_forward(model, optimizer):
    model(batch(9))


def nothing(*_):
    pass


WRITES = {
    write.__name__: write
    for write in (
        step,
        load,
        one_in_place,
        one_bias,
        first_weight,
        edited,
        an_evaluation,
        another_forward,
        nothing,
    )
}


def tied(blocks):
    blocks[3].lin.weight = blocks[1].lin.weight


def frozen(blocks):
    blocks[0].requires_grad_(False)
    blocks[2].lin.weight.requires_grad_(False)


def checkpointed(blocks):
    for block in blocks[1:4]:
        apply_activation_checkpointing(block, check_fn=lambda module: isinstance(module, nn.Linear))


def compiled(blocks):
    for block in blocks[1:4]:
        block.compile(backend="aot_eager")


KINDS = {kind.__name__: kind for kind in (nothing, tied, frozen, checkpointed, compiled)}


@pytest.mark.parametrize(
    ("world", "reshard", "kind"),
    [
        *((world, reshard, "nothing") for world in (1, 2) for reshard in (None, True, False)),
        *((2, reshard, kind) for kind in KINDS for reshard in (True, False) if kind != "nothing"),
    ],
)
@on_ranks()
def test_a_backward_after_a_change_of_weights_raises_where_one_process_does(rank, reshard, kind):
    found = {}
    for name, write in WRITES.items():
        models = ours, whole = model_of(reshard, kind=kind), model_of(WHOLE, kind=kind)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        outcomes = []
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch(0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = model(batch(1)).square().mean()
            model(batch(2)).square().mean().backward()  # gradients for a step
            write(model, optimizer)
            optimizer.zero_grad()
            try:
                loss.backward()
                outcomes.append("exact")
            except RuntimeError as error:
                outcomes.append("raises" if CHANGED in str(error) else str(error))
        if outcomes == ["exact"] * 2:
            assert_same_grads(ours, whole)
        found[name] = outcomes
    assert {name: ours for name, (ours, _) in found.items()} == {
        name: whole for name, (_, whole) in found.items()
    }
    if kind == "nothing":
        raises = {name for name, (_, whole) in found.items() if whole == "raises"}
        assert raises == {"step", "load", "one_in_place", "edited"}


@on_ranks(2)
def test_a_mode_that_copies_what_autograd_has_saved_is_refused():
    model = model_of(True)
    refused = pytest.raises(StageError, match=r"inside of allow_mutation_on_saved_tensors\(\)")
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), refused:
        model(batch(0))
    model(batch(0)).sum().backward()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_other_memory_for_an_unsharded_parameter_is_refused_by_name(reshard):
    """Other memory for an unsharded parameter, inside of a forward: its own copy would be used for ever."""
    for change in (lambda lin: lin.to(torch.float64), lambda lin: setattr(lin.bias, "data", torch.ones(16))):
        model, told = model_of(reshard), 0
        handle = model[2].lin.register_forward_hook(lambda lin, _, out, change=change: change(lin) and None)
        for _ in range(2):
            try:
                model(batch(0)).sum().backward()
            except StageError as error:
                assert "parameter 'lin." in str(error) and "was given other memory" in str(error)
                told += 1
        assert told
        handle.remove()
        fresh = model_of(WHOLE)
        assert torch.equal(model(batch(1)), fresh(batch(1)))


class Codebook(nn.Module):
    """Changes its weights in place in its own forward, as running averages do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4)
        self.decay = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.decay.mul_(0.9)
            self.table.weight.clamp_(max=0.4)
        return self.table(x) * self.decay


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(2)
def test_what_a_forward_changes_of_its_weights_in_place_is_kept(reshard):
    models = ours, whole = Codebook(), Codebook()
    fully_shard(ours.table, reshard_after_forward=reshard)
    fully_shard(ours, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD([model.table.weight], 0.1) for model in models]
    x = torch.arange(6)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            with torch.no_grad():
                model(x)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(ours.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(full(mine), other, atol=1e-6)


@on_ranks(1, 2)
def test_a_table_whose_forward_changes_other_rows_on_each_rank_is_refused(world):
    for table in (nn.Embedding(6, 4, max_norm=0.5), nn.EmbeddingBag(6, 4, max_norm=0.5)):
        if world == 1:
            fully_shard(table)(torch.arange(6).view(2, 3))
            assert full(table.weight).norm(dim=-1).max() < 0.51
        else:
            with pytest.raises(InputError, match=r"max_norm of '1' .*changes rows of its weight"):
                fully_shard(nn.Sequential(nn.Linear(4, 4), table))


@pytest.mark.each_case
@pytest.mark.parametrize(
    "way", ["smaller world", pytest.param("over all", marks=NEEDS_ORDER), "offloaded", "copies"]
)
@on_ranks(4)
def test_an_edit_without_a_mark_is_seen_after_reshard(world, way):
    """``param.data`` between two microbatches that aren't synchronised; then reshard(), as the docs say."""
    options = {
        "smaller world": {"reshard_after_forward": 2},
        "over all": {"mesh": init_device_mesh("cpu", (2, world // 2)), "shard_over_all": True},
        "offloaded": {"offload_policy": OptimizerOffloadPolicy()},
        "copies": {"offload_policy": CPUOffloadPolicy(params=False)},
    }[way]
    ours, whole = Block(), Block()
    whole.load_state_dict(ours.state_dict())
    fully_shard(ours.lin, **options)
    fully_shard(ours, **options)
    ours.set_requires_gradient_sync(False)
    for factor in (1.0, 0.5, 3.0):
        for model in (ours, whole):
            for param in model.parameters():
                param.data.mul_(factor)
        ours.lin.reshard()
        ours.reshard()
        outs = [model(batch(0)) for model in (ours, whole)]
        assert torch.allclose(*outs, atol=1e-6), factor
        for out in outs:
            out.sum().backward()
