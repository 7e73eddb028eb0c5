"""``SchedulePolicy(wire="difference")``: an all-gather over a network sends what has changed, bit for bit."""

import math
import os
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from shardwright import MixedPrecisionPolicy, SchedulePolicy, explain, fully_shard, set_transport, stats
from shardwright.checkpoint import load, save
from shardwright.engine.groups import table
from shardwright.engine.unit import unit_of
from shardwright.errors import CommError, MissingExtra
from shardwright.transport.base import LinkSpeed
from shardwright.transport.differences import differences_of
from shardwright.transport.link import free_nbytes, measured
from tests.ranks.models import NEEDS_ORDER
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.quantised import COLS
from tests.ranks.quantised import build as build_quantised
from tests.ranks.quantised import shard as shard_quantised

VOCAB, WIDTH = 499, 96
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLAIN, DIFFERENCE = (SchedulePolicy(wire=wire, keep_last=0) for wire in ("plain", "difference"))


class Scorer(nn.Module):
    """Embedding, residual blocks, head: 320,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def shard(policy, precision=BF16, **options):
    model = Scorer()
    for module in (model.embedding, *model.blocks, model.head, model):
        fully_shard(module, mp_policy=precision, reshard_after_forward=True, **options)
    model.set_schedule_policy(policy)
    return model


def loss_of(model, rank, step):
    tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Training:
    """A sharded model and AdamW; what each step, forward or backward has sent from this rank."""

    def __init__(self, rank, policy, lr=1e-4, **options):
        self.rank, self.model, self.done = rank, shard(policy, **options), 0
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=lr)

    def step(self):
        loss = loss_of(self.model, self.rank, self.done)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.item()

    def sent(self, do):
        before = stats(self.model).sent_nbytes
        do()
        return stats(self.model).sent_nbytes - before

    def bits(self):
        return [param.detach().to_local().numpy().tobytes() for param in self.model.parameters()]


def trained(rank, world, policy, precision=BF16, num_steps=20, lr=1e-4):
    """Losses, the shards' bits, and the bytes that each step has sent."""
    set_transport("sockets")
    training, losses = Training(rank, policy, lr, precision=precision), []
    sent = [training.sent(lambda: losses.append(training.step())) for _ in range(num_steps)]
    return losses, training.bits(), sent


@pytest.mark.parametrize(("world", "precision"), [(2, BF16), (4, BF16), (2, MixedPrecisionPolicy())])
def test_what_has_changed_trains_as_whole_shards_do_bit_for_bit_with_fewer_bytes(world, precision):
    plain = run_ranks(world, trained, PLAIN, precision)
    changes = run_ranks(world, trained, DIFFERENCE, precision)
    for (losses, bits, sent), (same_losses, same_bits, fewer) in zip(plain, changes, strict=True):
        assert (same_losses, same_bits) == (losses, bits)
        assert sum(fewer[1:]) < (0.55 if precision.param_dtype is None else 0.35) * sum(sent[1:])


def gathers(rank, world, policy):
    """Bytes that the parts of a step send: forwards, evaluations and backwards."""
    set_transport("sockets")
    training = Training(rank, policy)
    model, found = training.model, {}

    def evaluate():
        with torch.no_grad():
            loss_of(model, rank, 0)

    found["first"] = training.sent(evaluate)
    found["again"] = training.sent(evaluate)
    training.step()
    found["after a step"] = training.sent(evaluate)
    losses = []
    found["two forwards"] = training.sent(lambda: losses.extend(loss_of(model, rank, s) for s in (1, 2)))
    sum(losses).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    with torch.no_grad():
        local = model.head.weight.to_local()
        local.data[0] += 1  # leaves no mark
    found["edit"] = training.sent(evaluate)
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    found["load"] = training.sent(evaluate)
    return found, training.step(), training.bits()


@pytest.mark.parametrize("world", [2, 3])
def test_only_what_has_changed_since_the_last_all_gather_is_sent(world):
    plain, changes = (run_ranks(world, gathers, policy) for policy in (PLAIN, DIFFERENCE))
    for (whole, *same), (sent, *others) in zip(plain, changes, strict=True):
        assert others == same
        once = whole["first"]
        assert sent["first"] <= once
        assert sent["again"] < 1000 * (world - 1)  # heads
        assert sent["two forwards"] < 2000 * (world - 1)
        assert sent["after a step"] < 0.5 * once
        assert 0 < sent["edit"] < 0.5 * once
        assert 0.1 * once < sent["load"] <= once


def frozen(rank, world, policy):
    """A frozen base with a head that is trained: bytes of each step."""
    set_transport("sockets")
    training = Training(rank, policy)
    training.model.requires_grad_(False)
    training.model.head.requires_grad_(True)
    training.optimizer = torch.optim.AdamW(training.model.head.parameters(), lr=1e-4)
    sent = [training.sent(training.step) for _ in range(3)]
    return sent, training.bits()


def test_a_frozen_base_is_sent_once():
    plain, changes = (run_ranks(2, frozen, policy) for policy in (PLAIN, DIFFERENCE))
    head = (
        VOCAB * WIDTH
    )  # bytes of its gradient in bf16, half of which are for the other rank, and of its shard
    for (sent, bits), (fewer, same) in zip(plain, changes, strict=True):
        assert same == bits
        assert max(fewer[1:]) < 2 * head < sent[1] / 3


def quantised(rank, world, policy, shape):
    """A base in 4 bits with adapters that are trained; losses and bytes of each step."""
    set_transport("sockets")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "ranks")[: len(shape)])
    model = shard_quantised(build_quantised(), mesh=mesh, shard_over_all=len(shape) > 1)
    model.set_schedule_policy(policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    comm = unit_of(model[0]).group.axis.comm
    comm = comm if len(shape) == 1 else comm.between  # inside of a node parts are whole, in shared memory
    losses, sent = [], []
    for step in range(4):
        before = comm.sent_nbytes + comm.coded_nbytes
        x = torch.randn(3, COLS, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sent.append(comm.sent_nbytes + comm.coded_nbytes - before)
    adapters = [p.to_local().detach().numpy().tobytes() for p in model.parameters() if p.requires_grad]
    return (losses, adapters), sent


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=NEEDS_ORDER)])
def test_of_a_quantised_base_only_adapters_move_after_the_first_step_also_between_nodes(shape):
    world = math.prod(shape)
    plain, changes = (run_ranks(world, quantised, policy, shape) for policy in (PLAIN, DIFFERENCE))
    for (result, sent), (same, fewer) in zip(plain, changes, strict=True):
        assert same == result
        assert max(fewer[1:]) < (0.6 if len(shape) == 1 else 0.8) * sent[1]  # adapters' shards and gradients


def interrupted(rank, world, policy):
    """A step of which a rank's forward fails, with all-gathers in flight, and clean steps after it."""
    set_transport("sockets")
    training = Training(rank, policy)
    training.step()

    def fail(*_):
        raise ValueError("in the middle")

    handle = training.model.blocks[1].register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the middle"):
            training.step()
    handle.remove()
    return [training.step() for _ in range(3)], training.bits()


def test_after_an_error_in_a_step_the_next_ones_are_right():
    plain, changes = (run_ranks(2, interrupted, policy) for policy in (PLAIN, DIFFERENCE))
    assert changes == plain


def skipping(rank, world, policy):
    """Ranks take turns in using a block: the others take part in its all-gather, and drop it."""
    set_transport("sockets")
    training = Training(rank, policy)
    skipped = training.model.blocks[1]
    losses = []
    for step in range(6):
        forward = type(training.model).forward

        def without(model, tokens, step=step, forward=forward):
            if step % world == rank:
                return forward(model, tokens)
            x = model.embedding(tokens)
            for block in model.blocks:
                x = x if block is skipped else x + block(x)
            return model.head(x)

        training.model.__class__.forward = without
        try:
            losses.append(training.step())
        finally:
            training.model.__class__.forward = forward
    return losses, training.bits()


def test_what_a_rank_receives_for_others_is_kept_too():
    plain, changes = (run_ranks(2, skipping, policy) for policy in (PLAIN, DIFFERENCE))
    assert changes == plain


def halved(rank, world, policy, folder, first, last):
    """Steps ``first`` to ``last`` in a process of its own, from the checkpoint of the step before."""
    set_transport("sockets")
    training = Training(rank, policy)
    if first:
        training.done = load(folder, model=training.model, optimizer=training.optimizer).step
        assert training.done == first
    losses = [training.step() for _ in range(first, last)]
    save(folder, model=training.model, optimizer=training.optimizer, step=last)
    return losses, training.bits()


@pytest.mark.parametrize("policy", [PLAIN, DIFFERENCE], ids=["from whole shards", "from what has changed"])
def test_a_run_that_is_resumed_in_new_processes_is_the_one_that_was_not_interrupted(tmp_path, policy):
    whole = run_ranks(2, halved, DIFFERENCE, tmp_path / "whole", 0, 6)
    before = run_ranks(2, halved, policy, tmp_path / "cut", 0, 3)
    after = run_ranks(2, halved, DIFFERENCE, tmp_path / "cut", 3, 6)
    for (losses, bits), (first, _), (second, same) in zip(whole, before, after, strict=True):
        assert (first + second, same) == (losses, bits)


def kept_of(group):
    return [*map(differences_of(group.axis.comm).of, group._bound.segments)]


def kept_nbytes(training):
    return sum(kept.nbytes for group in unit_of(training.model).runtime.groups for kept in kept_of(group))


def switched(rank, world):
    """Whole shards, changes, whole shards again, changes of some groups within a budget."""
    set_transport("sockets")
    training = Training(rank, DIFFERENCE)
    training.step()
    kept = [kept_nbytes(training)]
    explained = sum(group.kept_nbytes for group in explain(training.model).groups)
    budget = explained // 2
    as_it_is = table.free_nbytes
    # The second time a quarter of what is free is half of what all copies take.
    for policy, free in ((PLAIN, as_it_is), (DIFFERENCE, lambda _: 4 * budget), (DIFFERENCE, as_it_is)):
        with mock.patch.object(table, "free_nbytes", free):
            training.model.set_schedule_policy(policy)
            training.step()
        kept.append(kept_nbytes(training))
    return kept, budget, explained, str(explain(training.model)), training.bits()


def unswitched(rank, world):
    set_transport("sockets")
    training = Training(rank, PLAIN)
    for _ in range(4):
        training.step()
    return training.bits()


def test_copies_are_kept_within_a_budget_named_by_explain_and_freed_when_they_are_not_asked_for():
    plain = run_ranks(2, unswitched)
    for bits, (kept, budget, explained, text, same) in zip(plain, run_ranks(2, switched), strict=True):
        assert same == bits
        assert kept[0] == kept[3] == explained
        assert kept[1] == 0 < kept[2] <= budget
        assert "all-gathers send what has changed" in text


@on_ranks(1)
def test_without_the_coder_it_is_refused_with_the_line_that_installs_it():
    sys.modules["zstandard"] = None  # as if it weren't installed
    for wire in ("difference", "auto"):
        with pytest.raises(MissingExtra, match=r"needs zstandard, .*pip install 'shardwright\[wire\]'"):
            shard(SchedulePolicy(wire=wire))


@on_ranks(2)
def test_ranks_that_share_memory_keep_no_copies_and_say_why(rank):
    set_transport("auto")
    model = shard(DIFFERENCE)
    loss_of(model, rank, 0)
    changed = explain(model).groups[0].changed
    assert any("its ranks share memory" in line for line in changed)


@on_ranks(2)
def test_a_rank_that_has_lost_its_copy_computes_nothing_and_says_whose_and_what_to_do(rank):
    """Rank 1 loses what it has kept of one group."""
    set_transport("sockets")
    training = Training(rank, DIFFERENCE)
    training.step()
    if rank == 1:
        kept_of(unit_of(training.model.blocks[1]).group)[0].versions.clear()
    with pytest.raises(CommError) as caught:
        training.step()
    text = str(caught.value)
    assert "rank 0 in 'all-gather blocks.0 and 3 more, to head' can't be used" in text
    assert "since number" in text and 'wire="plain"' in text


def killed(rank, world):
    set_transport("sockets")
    training = Training(rank, DIFFERENCE)
    training.step()
    if rank == 1:
        training.model.blocks[1].register_forward_pre_hook(lambda *_: os._exit(0))
        training.step()
    with pytest.raises(CommError, match="rank 1"):
        for _ in range(3):
            training.step()
    raise ValueError("told")


def test_a_killed_rank_is_named():
    with pytest.raises(AssertionError, match="told"):
        run_ranks(2, killed)


AUTO = SchedulePolicy(wire="auto", keep_last=0)


def automatic(rank, world, link, policy=AUTO, free=None):
    """Training by a link that is measured, or is said to be so fast, on a host that has so many bytes free
    for each rank; what was measured, and what ``explain`` says."""
    set_transport("sockets")
    training = Training(rank, policy)
    comm = unit_of(training.model.head).group.axis.comm
    if link is not None:
        comm.link = link
    if free is not None:
        comm.free_nbytes = free
    training.step()
    sent = training.sent(training.step)
    found = measured(comm), free_nbytes(comm)
    return training.bits(), sent, found, explain(training.model).groups[2].changed


def test_on_a_slow_link_auto_sends_changes_and_on_a_fast_one_whole_shards_the_same_on_all_ranks():
    slow, fast = (LinkSpeed(s, 4e-9, 6e-10) for s in (8e-8, 1e-11))
    plain = run_ranks(2, trained, PLAIN, BF16, 2)
    changes = run_ranks(2, trained, DIFFERENCE, BF16, 2)
    for link in (slow, fast, None):
        ranks = run_ranks(2, automatic, link)
        assert ranks[0][2] == ranks[1][2]  # the slowest rank's
        for rank, (bits, sent, found, changed) in enumerate(ranks):
            assert bits == plain[rank][1]
            if link is slow:
                assert sent == changes[rank][2][1]
                assert any("all-gathers send what has changed, coded" in line for line in changed)
            elif link is fast:
                assert any("its link moves 100000 MB/s" in line for line in changed)
            else:
                assert min(*found[0], found[1]) > 0


@pytest.mark.parametrize("policy", [DIFFERENCE, AUTO], ids=["difference", "auto"])
def test_on_a_host_without_free_memory_whole_shards_are_sent_and_explain_says_why(policy):
    plain = run_ranks(2, trained, PLAIN, BF16, 2)
    ranks = run_ranks(2, automatic, LinkSpeed(8e-8, 4e-9, 6e-10), policy, 0)
    for (_, bits, sent), (same, whole, _, changed) in zip(plain, ranks, strict=True):
        assert (same, whole) == (bits, sent[1])
        assert any("its copy doesn't fit" in line and "free memory" in line for line in changed)


@pytest.mark.parametrize(
    "lr", [1e-4, *(pytest.param(lr, marks=pytest.mark.exhaustive) for lr in (1e-5, 1e-3))]
)
@pytest.mark.slow
def test_hundreds_of_steps_at_any_learning_rate_are_the_same_bit_for_bit(lr):
    # Without the instructions for bfloat16 a core computes it at a hundredth of float32's speed.
    plain, difference = (
        run_ranks(2, trained, policy, BF16, 300, lr, limit_s=240.0) for policy in (PLAIN, DIFFERENCE)
    )
    for (losses, bits, sent), (same_losses, same_bits, fewer) in zip(plain, difference, strict=True):
        assert (same_losses, same_bits) == (losses, bits)
        assert sum(fewer[1:]) < 0.45 * sum(sent[1:])
