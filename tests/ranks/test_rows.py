"""Moving only rows in use of an embedding gives the same bits as moving all of it, or moves all of it."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwright import MixedPrecisionPolicy, SchedulePolicy, explain, fully_shard, set_transport, stats
from shardwright.engine.unit import unit_of
from shardwright.policy import Agreement
from shardwright.schedule.check import check
from tests.ranks.models import Run, sharded, train_by
from tests.ranks.pool import on_ranks, run_ranks

VOCAB, WIDTH = 211, 6
DENSE, ROWS = (SchedulePolicy(bucket_cap_mb=0, row_wise=row_wise) for row_wise in (False, True))


class Scores(nn.Module):
    """Looks tokens up, and scores each by a small network."""

    def __init__(self, tied: bool = False, **options) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Embedding(VOCAB, WIDTH, **options)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recomputes = False

    def forward(self, tokens):
        look_up = self.embedding
        found = checkpoint(look_up, tokens, use_reentrant=False) if self.recomputes else look_up(tokens)
        return self.head(torch.tanh(self.hidden(found)))


def tokens_of(step, rank, num=5):
    """A few tokens, some of them those of other ranks; every third step none at all on rank 1."""
    generator = torch.Generator().manual_seed(100 * step + rank % 3)
    return torch.randint(0, VOCAB, (0 if step % 3 == 2 and rank == 1 else num, 3), generator=generator)


def shard(model, policy, mesh=None, **options):
    sharded(model, [model.embedding], mesh=mesh, **options).set_schedule_policy(policy)
    return model


def bits(model):
    return [param.detach().to_local().float().numpy().tobytes() for param in model.parameters()]


def train(model, run, rank, steps=5):
    """Losses of a few steps."""
    return train_by(run, (model(tokens_of(step, rank)).square().sum() for step in range(steps)))


def trained(rank, world, policy, transport="auto", shape=None, options=None):
    """Losses, shards and bytes sent. ``shape``: of a 2-D mesh; ``options``: of the embedding, mp_policy."""
    set_transport(transport)
    options = dict(options or {})
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    precision = {"mp_policy": options.pop("mp_policy")} if "mp_policy" in options else {}
    model = shard(Scores(**options), policy, mesh, **precision)
    before = stats(model).sent_nbytes
    losses = train(model, Run.of(model), rank)
    check(model.schedule())
    assert model.trace().schedule() == model.schedule()
    return losses, bits(model), stats(model).sent_nbytes - before


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.slow
def test_rows_in_use_train_as_the_whole_embedding_does_bit_for_bit(world):
    for transport in ("auto", "sockets", "collectives"):
        dense = run_ranks(world, trained, DENSE, transport)
        rows = run_ranks(world, trained, ROWS, transport)
        for one, other in zip(dense, rows, strict=True):
            assert one[:2] == other[:2], transport
        if world > 1 and transport == "sockets":
            weight = VOCAB * WIDTH * 4
            saved = [one[2] - other[2] for one, other in zip(dense, rows, strict=True)]
            # 5 all-gathers and 5 reduce-scatters of the embedding, of which less than half is left.
            assert sum(saved) > 0.5 * 10 * weight * (world - 1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {"padding_idx": 3},
        {"sparse": True},
        {"scale_grad_by_freq": True},
        {"tied": True},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ],
    ids=str,
)
@pytest.mark.slow
def test_every_kind_of_embedding_gives_the_same_bits(options):
    dense, rows = (run_ranks(2, trained, policy, "auto", None, options) for policy in (DENSE, ROWS))
    assert [one[:2] for one in dense] == [one[:2] for one in rows]


@pytest.mark.slow
def test_rows_in_use_are_averaged_over_copies_as_whole_shards_are():
    dense, rows = (run_ranks(4, trained, policy, "auto", (2, 2)) for policy in (DENSE, ROWS))
    assert [one[:2] for one in dense] == [one[:2] for one in rows]


def odd_steps(rank, world, policy):
    """Accumulation, several calls, discarded outputs, a graph used twice, old graphs, evaluation, edits."""
    model = shard(Scores(), policy)
    run, found = Run.of(model), []
    for step in range(3):  # microbatches, of which the last one communicates
        model.set_requires_gradient_sync(step == 2)
        model(tokens_of(step, rank)).square().sum().backward()
    run.step()
    found += bits(model)
    model(tokens_of(50, rank))  # nobody uses it
    first, second = model(tokens_of(3, rank)).square().sum(), model(tokens_of(4, rank)).square().sum()
    second.backward(retain_graph=True)
    first.backward()  # an older graph than the one that was reduced last
    second.backward()  # a graph that has been through a backward before
    run.step()
    found += bits(model)
    (model(tokens_of(6, rank)) + model(tokens_of(7, rank))).square().sum().backward()
    run.step()
    with torch.no_grad():
        found.append(model(tokens_of(9, rank, num=VOCAB)).numpy().tobytes())  # most rows are in use
        found.append(model(tokens_of(9, rank)).numpy().tobytes())
    with model.embedding.unsharded():
        assert torch.isfinite(model.embedding.weight).all()
        model.embedding.weight.data[7] = 0.25
    model.recomputes = True
    found.append(train(model, run, rank, steps=3))
    model.recomputes = False
    model.embedding.unshard()  # by hand: then all of it is there
    found.append(model.embedding.weight.detach().clone().numpy().tobytes())
    found.append(train(model, run, rank, steps=2))
    return found + bits(model)


@pytest.mark.parametrize("world", [2, 3])
def test_steps_of_every_shape_give_the_same_bits(world):
    assert run_ranks(world, odd_steps, DENSE) == run_ranks(world, odd_steps, ROWS)


class Choosing(nn.Module):
    """Looks up in one of two embeddings, as its caller says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.words, self.codes = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens, words):
        return self.head((self.words if words else self.codes)(tokens))


def skipped(rank, world, row_wise):
    """Losses and shards where some ranks skip a lookup in some steps, and all have agreed to help them."""
    model = Choosing()
    sharded(model, [model.words, model.codes])
    model.set_schedule_policy(replace(DENSE, row_wise=row_wise, agreement=Agreement.STRICT))
    words = (False, True, rank == 0, rank != 0, False, rank == 0)
    losses = (model(tokens_of(step, rank), which).square().sum() for step, which in enumerate(words))
    return train_by(Run.of(model), losses), bits(model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.slow
def test_ranks_that_skip_a_lookup_get_the_same_bits(world):
    assert run_ranks(world, skipped, False) == run_ranks(world, skipped, True)


def read_by_a_hook(rank, world, policy):
    """A caller's hook that reads the whole weight inside of the lookup's forward finds all of it."""
    model, seen = shard(Scores(), policy), []
    model.embedding.register_forward_pre_hook(lambda module, *_: seen.append(module.weight.sum().item()))
    return train(model, Run.of(model), rank, steps=2), seen, bits(model)


@pytest.mark.slow
def test_a_hook_that_reads_the_whole_weight_finds_all_of_it():
    assert run_ranks(2, read_by_a_hook, DENSE) == run_ranks(2, read_by_a_hook, ROWS)


def special_values(rank, world, policy):
    """Reduced gradients where ranks bring zeros of either sign, infinities and nan in rows of their own."""
    model = nn.Sequential(nn.Embedding(VOCAB, 2))
    fully_shard(model[0])
    fully_shard(model).set_schedule_policy(policy)
    values = torch.tensor([-0.0, 0.0, torch.inf, torch.nan, -torch.inf, 1.0])
    tokens = torch.arange(6) + 3 * rank + 60
    for _ in range(2):
        model.zero_grad()
        model(tokens).backward(values.unsqueeze(1).expand(6, 2))
    grad = model[0].weight.grad
    return grad.to_local().numpy().tobytes(), int((grad.to_local() != 0).sum())


def test_zeros_of_either_sign_infinities_and_nan_come_out_the_same():
    dense, rows = run_ranks(3, special_values, DENSE), run_ranks(3, special_values, ROWS)
    assert dense == rows
    assert sum(count for _, count in rows) > 0


@on_ranks(2)
def test_a_lookup_that_must_move_whole_says_why_once(rank):
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shardwright.engine.groups.gatherer")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    tied, stays, whole = Scores(tied=True), Scores(), Scores()
    shard(tied, ROWS)
    fully_shard(stays.embedding, reshard_after_forward=False)
    fully_shard(stays).set_schedule_policy(ROWS)
    fully_shard(whole).set_schedule_policy(ROWS)
    for model in (tied, stays, whole):
        train(model, Run.of(model), rank, steps=2)
        model.set_schedule_policy(ROWS)
        train(model, Run.of(model), rank, steps=1)
        group = unit_of(model).runtime.groups[0]
        assert group.gatherer.rows is None and group.gatherer.unmet[0] in str(explain(model))
    assert len(lines) == 3
    for line, why in zip(lines, ("tied", "stays unsharded", "other parameters"), strict=True):
        assert why in line


def schedule_of(rank, world):
    model = shard(Scores(), ROWS)
    train(model, Run.of(model), rank, steps=2)
    return str(replace(model.schedule(), names=()))


def test_rows_in_use_are_never_gathered_ahead():
    text = run_ranks(2, schedule_of)[0]
    begins = [line for line in text.splitlines() if "unshard 0" in line]
    assert begins
    assert all("F+ 0 : unshard 0, wait 0" in line for line in begins)


MANY = 30_000  # rows of 10 floats: more than a MiB


class Large(nn.Module):
    """A large embedding beside a small one, in no group of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.embedding, self.position = nn.Embedding(MANY, 10), nn.Embedding(3, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def trained_as_it_comes(rank, world, transport, policy):
    set_transport(transport)
    model = fully_shard(Large(), groups="auto")
    if policy is not None:
        model.set_schedule_policy(policy)
    before = stats(model).sent_nbytes
    losses = train(model, Run.of(model), rank)
    (lookup,) = (g for g in unit_of(model).runtime.groups if "embedding" in g.name and "pos" not in g.name)
    return losses, bits(model), stats(model).sent_nbytes - before, lookup.gatherer.rows is not None


def test_over_a_network_a_large_embedding_moves_rows_in_use_by_itself():
    (whole, *_), (rows, *_) = (
        run_ranks(2, trained_as_it_comes, "sockets", policy)
        for policy in (SchedulePolicy(row_wise=False), None)
    )
    assert rows[:2] == whole[:2] and rows[3] and not whole[3]
    assert rows[2] < 0.1 * whole[2]
    assert not run_ranks(2, trained_as_it_comes, "auto", None)[0][3]
