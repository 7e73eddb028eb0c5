"""Each way to combine replicas, sharding, tensor, sequence, context, expert and pipeline parallelism on 4
and 8 ranks trains as one process does, in fp64: losses, norms and parameters of three clipped steps."""

import os
import random
import re
import signal
import time
from functools import partial
from itertools import combinations, product

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import shardwright
from examples.experts import RoutedExperts
from shardwright import MixedPrecisionPolicy, clip_grad_norm_, context_parallel, expert_parallel, fully_shard
from shardwright.checkpoint import load, save
from shardwright.errors import CheckpointError
from shardwright.parallel import mean_over_tokens, shift_labels
from tests.ranks.models import full
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.scripts import run_scripts

TOLERANCE = 1e-12
VOCAB, LENGTH, WIDTH, HEADS, LAYERS, ROWS = 16, 16, 16, 8, 4, 4
AXES = ("pp", "replicate", "dp", "cp", "tp")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, routed):
        super().__init__()
        self.attention = Attention()
        self.mlp = RoutedExperts(8, WIDTH, WIDTH, 2) if routed else FeedForward()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """All of a transformer, or the stage of it that is left of ``blocks``, ``embedding`` and ``head``."""

    def __init__(self, routed):
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleDict({str(n): Block(routed and n % 2 == 1) for n in range(LAYERS)})
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x, position_ids=None):
        if self.embedding is not None:
            x = self.embedding(x) + self.places(position_ids)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def stage(self, number, count):
        """Leave the blocks of one stage."""
        each = LAYERS // count
        for n in {*range(LAYERS)} - {*range(each * number, each * (number + 1))}:
            del self.blocks[str(n)]
        if number:
            self.embedding = self.places = None
        if number < count - 1:
            self.head = None
        return self


def build(routed):
    torch.manual_seed(3)
    return Model(routed).double()


def tensor_parallel(model, tp, sp):
    """As users write it: of attention and feed-forward; with ``sp`` sequences are cut between them."""
    cut = Shard(1) if sp else Replicate()
    whole = {"input_layouts": cut, "desired_input_layouts": Replicate()}
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {
        "attention": PrepareModuleInput(**whole),
        "attention.out": RowwiseParallel(output_layouts=cut),
    }
    feed_forward = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=cut)}
    if sp:
        plan |= {f"norms.{n}": SequenceParallel(use_local_output=True) for n in range(2)}
    for block in model.blocks.values():
        routed = isinstance(block.mlp, RoutedExperts)
        parallelize_module(block, tp, plan | ({} if routed else feed_forward))
        if sp or not routed:
            local = PrepareModuleInput(**whole, use_local_output=True)
            parallelize_module(block, tp, {"mlp": local})
        if sp and routed:
            back = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=cut)
            parallelize_module(block, tp, {"mlp": back})
    if sp and model.embedding is not None:
        for name in ("embedding", "places"):
            parallelize_module(
                model, tp, {name: RowwiseParallel(input_layouts=Replicate(), output_layouts=cut)}
            )
    if sp and model.head is not None:
        parallelize_module(
            model, tp, {"head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate())}
        )


def sharded(model, mesh, sp, **options):
    if mesh.tp is not None:
        tensor_parallel(model, mesh.tp, sp)
    if mesh.cp is not None:
        context_parallel(model, mesh)
    if any(isinstance(block.mlp, RoutedExperts) for block in model.blocks.values()):
        expert_parallel(model, mesh)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh.shard, **options)
    return fully_shard(model, mesh=mesh.shard, **options)


SCHEDULES = [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble]


def pipeline(mesh, routed, sp, make, loss_of, dtypes=(torch.float64, torch.float64), **options):
    """This rank's stages, and a step of its schedule: tokens, positions and labels -> the loss."""
    place, size = mesh.pp.get_local_rank(), mesh.pp.size()
    second = {Schedule1F1B: [], ScheduleZBVZeroBubble: [2 * size - 1 - place]}.get(make, [place + size])
    numbers = [place, *second]
    count = size * len(numbers)
    stored, dtype = dtypes
    parts = [
        sharded(build(routed).stage(number, count).to(stored), mesh, sp, **options) for number in numbers
    ]
    length = LENGTH // (mesh.cp.size() if mesh.cp else 1)
    ids = torch.zeros(1, length, dtype=torch.long)
    hidden = torch.zeros(1, length // (mesh.tp.size() if sp else 1), WIDTH, dtype=dtype, requires_grad=True)
    logits = torch.zeros(1, length, VOCAB, dtype=dtype, requires_grad=True)
    stages = [
        PipelineStage(
            part, number, count, torch.device("cpu"), group=mesh.pp.get_group(),
            input_args=(ids, ids) if number == 0 else (hidden,),
            output_args=(logits if number == count - 1 else hidden,),
        )
        for part, number in zip(parts, numbers, strict=True)
    ]  # fmt: skip
    given = stages if len(stages) > 1 else stages[0]
    schedule = make(given, n_microbatches=ROWS, loss_fn=loss_of, scale_grads=False)

    def step(tokens, positions, labels):
        losses = []
        args = (tokens, positions.expand_as(tokens).contiguous()) if 0 in numbers else ()
        schedule.step(*args, target=labels if count - 1 in numbers else None, losses=losses)
        return torch.stack(losses).sum().detach() if count - 1 in numbers else None

    return parts, step


def trains(rank, world, sizes, sp, make):
    mesh = shardwright.mesh(**sizes)
    routed = "ep" in sizes
    num_learned = 0

    def loss_of(logits, labels):
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return mean_over_tokens(total, num_learned, mesh)

    if mesh.pp is None:
        parts = [sharded(build(routed), mesh, sp)]

        def step_of(tokens, positions, labels):
            loss = loss_of(parts[0](tokens, positions), labels)
            loss.backward()
            return loss.detach()

    else:
        parts, step_of = pipeline(mesh, routed, sp, make, loss_of)
    reference = build(routed)
    params = [param for part in parts for param in part.parameters()]
    ours, theirs = (torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in (params, reference.parameters()))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (mesh.num_samples, ROWS, LENGTH), generator=generator)
        learned = torch.rand(tokens.shape, generator=generator) < torch.linspace(0.05, 0.95, LENGTH)
        positions = torch.arange(LENGTH)[None]
        labels = torch.stack([shift_labels(t, positions) for t in tokens.masked_fill(~learned, -100)])
        own = {"x": tokens[mesh.sample_rank], "labels": labels[mesh.sample_rank], "position_ids": positions}
        part = mesh.split(own)
        num_learned = (part["labels"] != -100).sum()
        loss = step_of(part["x"], part["position_ids"], part["labels"])
        logits = reference(tokens.flatten(0, 1), positions)
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        expected.backward()
        norm = clip_grad_norm_(params, 0.1, pp=mesh.pp)
        norm_of_one = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(norm, norm_of_one, atol=TOLERANCE, rtol=0)
        if loss is not None:
            torch.testing.assert_close(loss, expected.detach(), atol=TOLERANCE, rtol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        whole = dict(reference.named_parameters())
        for name, param in (pair for each in parts for pair in each.named_parameters()):
            torch.testing.assert_close(full(param), whole[name], atol=TOLERANCE, rtol=0)


def every_mesh():
    """(world, sizes, sp, schedule): each subset of the axes, of 2 ranks each, the first of what is left."""
    turn = 0
    for world in (4, 8):
        chosen = [each for n in range(1, world.bit_length()) for each in combinations(AXES, n)]
        for axes in chosen:
            sizes = dict.fromkeys(axes, 2) | {axes[0]: world >> (len(axes) - 1)}
            if sizes.get("pp", 1) > LAYERS:
                continue
            shares = sizes.get("dp", 1) * sizes.get("cp", 1) > 1
            for sp, ep in product([False, True][: 1 + ("tp" in axes)], [{}, {"ep": 2}][: 1 + shares]):
                make = SCHEDULES[turn % 4] if sizes.get("pp") == 2 else Schedule1F1B
                turn += "pp" in axes
                yield world, {"dp": 1} | sizes | ep, sp, make


IN_CI = ({"dp": 1, "pp": 2, "cp": 2}, {"dp": 2, "tp": 2, "ep": 2})
TABLE = [
    pytest.param(*each, marks=() if each[1] in IN_CI else pytest.mark.exhaustive, id=str(number))
    for number, each in enumerate(every_mesh())
]


@pytest.mark.each_case
@pytest.mark.parametrize(("world", "sizes", "sp", "make"), TABLE)
def test_every_mesh_trains_as_one_process(world, sizes, sp, make):
    run_ranks(world, trains, sizes, sp, make)


# Roundings to bf16 between a token and the logits: in a block 2 norms, q/k/v, softmax and what it weighs,
# out, up, gelu, down, 2 sums over "tp" and 2 residual ones; then the sum of embeddings, and the head. A
# gradient goes that way once more for values, and once for their derivatives. Products are summed in fp32,
# whose roundings are 2 ** 16 times smaller, and so are gradients over ranks.
ROUNDINGS = 3 * (13 * LAYERS + 2)
# Each rounding is at most 2 ** -8 of its value, and their signs are as good as random, so that the error of a
# whole gradient is below 4 * sqrt(n) * u of its norm but for one of 1500 (Higham and Mary 2019, theorem 2.4,
# with lambda = 4). A factor of 2, or a part that is missing, is more.
BF16 = 4 * ROUNDINGS**0.5 * 2**-8


def computes_in_bf16(rank, world, sizes, sp, make):
    mesh, routed = shardwright.mesh(**sizes), "ep" in sizes
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (mesh.num_samples, ROWS, LENGTH), generator=generator)
    positions = torch.arange(LENGTH)[None]
    labels = torch.stack([shift_labels(each) for each in tokens])
    own = {"x": tokens[mesh.sample_rank], "labels": labels[mesh.sample_rank], "position_ids": positions}
    part = mesh.split(own)
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}

    def loss_of(logits, labels):
        assert logits.dtype == torch.bfloat16
        total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        return mean_over_tokens(total, (part["labels"] != -100).sum(), mesh)

    if mesh.pp is None:
        parts = [sharded(build(routed).float(), mesh, sp, **policy)]
        loss_of(parts[0](part["x"], part["position_ids"]), part["labels"]).backward()
    else:
        dtypes = torch.float32, torch.bfloat16
        parts, step_of = pipeline(mesh, routed, sp, make, loss_of, dtypes, **policy)
        step_of(part["x"], part["position_ids"], part["labels"])
    reference = build(routed)
    F.cross_entropy(reference(tokens.flatten(0, 1), positions).flatten(0, 1), labels.flatten()).backward()
    whole = dict(reference.named_parameters())
    pairs = [(full(param.grad), whole[n].grad) for each in parts for n, param in each.named_parameters()]
    error = sum(((ours - theirs) ** 2).sum() for ours, theirs in pairs) ** 0.5
    norm = sum((theirs**2).sum() for _, theirs in pairs) ** 0.5
    assert error < BF16 * norm


@pytest.mark.each_case
@pytest.mark.parametrize("number", [place for place, each in enumerate(every_mesh()) if each[1] in IN_CI])
def test_in_bf16_the_gradients_of_a_mesh_are_those_of_one_process_in_fp64_but_for_roundings(number):
    world, sizes, sp, make = [*every_mesh()][number]
    run_ranks(world, computes_in_bf16, sizes, sp, make)


# ---- checkpoints


def stage_on(sizes, sp):
    """This rank's part of a model, and its optimizer, on a mesh."""
    mesh = shardwright.mesh(**sizes)
    whole = build(routed=True)
    part = whole if mesh.pp is None else whole.stage(mesh.pp.get_local_rank(), mesh.pp.size())
    part = sharded(part, mesh, sp)
    return mesh, part, torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)


def one_step(model, optimizer):
    for param in model.parameters():
        param.grad = 2 * param.detach()
    optimizer.step()


def saves(rank, world, folder, sizes, sp):
    mesh, part, optimizer = stage_on(sizes, sp)
    one_step(part, optimizer)
    save(folder, model=part, optimizer=optimizer, extra={"seen": 3}, step=1, pp=mesh.pp)


def loads(rank, world, folder, sizes, sp):
    mesh, part, optimizer = stage_on(sizes, sp)
    reference = build(routed=True)
    of_one = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    one_step(reference, of_one)
    assert load(folder, model=part, optimizer=optimizer, pp=mesh.pp).extra == {"seen": 3}
    whole = dict(reference.named_parameters())
    for name, param in part.named_parameters():
        assert torch.equal(full(param), whole[name])
        momentum = of_one.state[whole[name]]["momentum_buffer"]
        assert torch.equal(full(optimizer.state[param]["momentum_buffer"]), momentum)


MESHES = [each[:3] for each in every_mesh()] + [(1, {}, False)]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.exhaustive) for n in range(20)])
def test_a_checkpoint_of_any_mesh_is_loaded_on_any_other(tmp_path, seed):
    for (world, *on), do in zip(random.Random(seed).sample(MESHES, 2), (saves, loads), strict=True):
        run_ranks(world, do, str(tmp_path), *on)


def test_a_checkpoint_of_a_pipeline_is_loaded_by_one_process_and_that_ones_by_a_pipeline(tmp_path):
    run_ranks(4, saves, str(tmp_path / "stages"), {"dp": 2, "pp": 2}, False)
    run_ranks(1, loads, str(tmp_path / "stages"), {}, False)
    run_ranks(1, saves, str(tmp_path / "whole"), {}, False)
    run_ranks(4, loads, str(tmp_path / "whole"), {"dp": 1, "pp": 2, "tp": 2}, False)


@on_ranks(2)
def test_a_pipeline_that_is_saved_or_loaded_wrongly_is_told_how(rank, tmp_path):
    mesh, part, optimizer = stage_on({"pp": 2}, False)
    with pytest.raises(CheckpointError, match="absent on rank"):
        save(tmp_path, model=part, step=1)
    with pytest.raises(CheckpointError, match="made different calls"):
        save(tmp_path, model=part, step=1, pp=mesh.pp if rank else None)
    with pytest.raises(CheckpointError, match="stage 1 of the pipeline has another extra than stage 0"):
        save(tmp_path, model=part, extra={"seen": rank}, step=1, pp=mesh.pp)
    optimizer.param_groups[0]["lr"] += rank
    with pytest.raises(CheckpointError, match="stage 1 of the pipeline has another optimizer than stage 0"):
        save(tmp_path, model=part, optimizer=optimizer, step=1, pp=mesh.pp)
    save(tmp_path, model=part, step=1, pp=mesh.pp)
    with pytest.raises(CheckpointError, match=r"(?s)doesn't fit.*unexpected model/"):
        load(tmp_path, model=part)
    del part.blocks["1" if rank == 0 else "2"]
    with pytest.raises(CheckpointError, match=r"no stage of the pipeline has: model/blocks.1"):
        load(tmp_path, model=part, pp=mesh.pp)


# ---- ranks that end, where others wait in torch's own collectives


def ends(rank, world, sizes, how):
    """In its third step, the last rank; "sleeps": for longer than the others tell."""
    mesh = shardwright.mesh(**sizes)
    positions = torch.arange(LENGTH)[None]
    if mesh.pp is None:
        model = sharded(build(False), mesh, False)
        step = lambda ids: model(ids, positions).square().mean().backward()  # noqa: E731
    else:
        _, of_stages = pipeline(mesh, False, False, Schedule1F1B, lambda logits, _: logits.square().mean())
        step = lambda ids: of_stages(ids, positions, ids)  # noqa: E731
    for number in range(4):
        if number == 2 and rank == world - 1:
            if how == "raises":
                raise ValueError("no data")
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else time.sleep(6.0)
        step(torch.zeros(ROWS, LENGTH, dtype=torch.long))


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("axis", "how", "told"),
    [
        ("pp", "raises", r"failed: rank 1 raised ValueError: no data in .*test_every_mesh.py:\d+ in ends"),
        ("tp", "killed", r"lost: rank 1 is lost: the process ended without a word"),
        ("pp", "sleeps", r"slow: rank 0 has been [\d.]+ s in torch.distributed._wait_batch_p2p .*"
            r"\(rank 1: idle at tests/ranks/test_every_mesh.py:\d+ in ends\)"),
    ],
)  # fmt: skip
def test_a_rank_that_others_wait_for_in_torchs_own_collectives_is_named_with_its_line(axis, how, told):
    sizes = {"dp": 1, axis: 2}
    first, _ = run_scripts(2, partial(ends, sizes=sizes, how=how), "suspect_s=0.5")
    assert re.search(told, first.stderr), first.stderr
