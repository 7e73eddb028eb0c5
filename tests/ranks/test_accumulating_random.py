"""Whatever is done between the microbatches of a step, gradients, norms and weights are those of plain
autograd on plain tensors."""

import random

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright import clip_grad_norm_, fully_shard, torch_private
from tests.ranks.models import full
from tests.ranks.pool import run_ranks

WIDTH, NUM_BLOCKS = 6, 3


class Model(nn.Module):
    """Blocks of which a forward runs some; ``fails`` raises in the forward or backward of a block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, runs, fails=None):
        for number, block in enumerate(self.blocks):
            if number in runs:
                x = torch.tanh(block(x)) + x
            if fails == ("forward", number):
                raise ArithmeticError("told to")
            if fails == ("backward", number):
                x = Fails.apply(x)
        return self.head(x)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("told to")


def rows(seed):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


class Both:
    """The sharded model of this rank beside a plain one, which computes what all ranks do."""

    def __init__(self, rank, world, shape, reshard):
        self.rank, self.world = rank, world
        self.ours, self.whole = Model(), Model()
        mesh = init_device_mesh("cpu", shape)
        options = {"shard_over_all": True} if reshard == "over all" else {"reshard_after_forward": reshard}
        for part in (*self.ours.blocks, self.ours):
            fully_shard(part, mesh=mesh, **options)
        self.models = self.ours, self.whole
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.5) for model in self.models]

    def microbatch(self, seed, sync, all_reduce, runs, fails, is_last=True):
        self.ours.set_is_last_backward(is_last)
        self.ours.set_requires_gradient_sync(sync)
        self.ours.set_requires_all_reduce(all_reduce)
        if fails is not None:
            with pytest.raises(ArithmeticError):
                out = self.ours(rows(seed + self.rank).requires_grad_(), runs[self.rank], fails)
                out.square().mean().backward()
            for rank in range(self.world):
                with pytest.raises(ArithmeticError):
                    out = self.whole(rows(seed + rank).requires_grad_(), runs[rank], fails)
                    (out.square().mean() / self.world).backward()
            if sync and fails[0] == "backward":
                self.clear(0)  # some of it was reduced
            return
        self.ours(rows(seed + self.rank), runs[self.rank]).square().mean().backward()
        for rank in range(self.world):
            loss = self.whole(rows(seed + rank), runs[rank]).square().mean() / self.world
            loss.backward()
        if sync and all_reduce and is_last:
            self.compare_grads()

    def compare_grads(self):
        for (name, mine), other in zip(self.ours.named_parameters(), self.whole.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if other.grad is not None:
                found = full(mine.grad)
                assert torch.allclose(found, other.grad, atol=1e-5), (name, found - other.grad)

    def step(self):
        norms = [clip_grad_norm_(model.parameters(), 0.5) for model in self.models]
        assert torch.allclose(*norms, atol=1e-5)
        for optimizer in self.optimizers:
            optimizer.step()
        self.clear(0)
        self.compare_weights()

    def compare_weights(self):
        for (name, mine), other in zip(
            self.ours.named_parameters(), self.whole.named_parameters(), strict=True
        ):
            assert torch.allclose(full(mine), other[1], atol=1e-5), name

    def clear(self, way):
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if way < 2:
                optimizer.zero_grad(set_to_none=way == 0)
            elif way < 4:
                model.zero_grad(set_to_none=way == 2)
            else:
                for param in model.parameters():
                    param.grad = None

    def evaluate(self, seed):
        with torch.no_grad():
            outs = [model(rows(seed), range(NUM_BLOCKS)) for model in self.models]
        assert torch.allclose(*outs, atol=1e-5)

    def load(self, seed):
        values = {
            name: torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) / 3
            for name, p in self.whole.named_parameters()
        }
        for model in self.models:
            model.load_state_dict(values)

    def freeze(self, number, trains):
        for model in self.models:
            model.blocks[number].requires_grad_(trains)

    def edit(self, number):
        for model in self.models:
            with torch.no_grad():
                model.blocks[number].weight.mul_(0.9)


def sequences(rank, world, shape, reshard, seeds):
    for seed in seeds:
        draw = random.Random(seed)
        both = Both(rank, world, shape, reshard)
        done = []
        try:
            _run(both, draw, world, len(shape) > 1, done)
        except BaseException as error:
            error.add_note(f"seed {seed}: {done}")
            raise


def _run(both, draw, world, hybrid, done):
    for _ in range(6):
        for _ in range(draw.randrange(4)):  # what happens before the step's last microbatch
            what = draw.choices(
                ("microbatch", "clear", "evaluate", "load", "freeze", "edit", "fails"), (8, 2, 1, 1, 1, 1, 2)
            )[0]
            number = draw.randrange(NUM_BLOCKS)
            sync, all_reduce = draw.choice([(False, True), (False, True), (True, True), (True, not hybrid)])
            runs = [draw.sample(range(NUM_BLOCKS), draw.randrange(NUM_BLOCKS + 1)) for _ in range(world)]
            if draw.random() < 0.7:
                runs = runs[:1] * world
            way, trains = draw.randrange(5), draw.random() < 0.6
            seed = draw.randrange(10**6)
            done.append((what, number, sync, all_reduce, runs, way, trains))
            if what == "microbatch":
                both.microbatch(seed, sync, all_reduce, runs, None, is_last=draw.random() < 0.7)
            elif what == "fails":
                runs = runs[:1] * world  # else ranks fail in different places, and are told that they diverge
                both.microbatch(seed, sync, all_reduce, runs, (draw.choice(("forward", "backward")), number))
            elif what == "clear":
                both.clear(way)
            elif what == "evaluate":
                both.evaluate(seed)
            elif what == "load":
                both.load(seed)
            elif what == "freeze":
                both.freeze(number, trains)
            else:
                both.edit(number)
        runs = [draw.sample(range(NUM_BLOCKS), draw.randrange(NUM_BLOCKS + 1))] * world
        done.append(("last", runs))
        both.microbatch(draw.randrange(10**6), True, True, runs, None)
        both.step()


SETTINGS = [
    *(((world,), reshard) for world in (1, 2, 3) for reshard in (None, True, False)),
    ((4,), 2),
    ((2, 1), True),
    ((2, 2), True),
    ((2, 2), None),
    *([((2, 2), "over all")] if torch_private.keeps_order else []),
]


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 32), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("shape", "reshard"), SETTINGS)
def test_random_sequences_give_the_gradients_of_plain_autograd(shape, reshard, seeds):
    world = shape[0] * (shape[1] if len(shape) > 1 else 1)
    run_ranks(world, sequences, shape, reshard, seeds, limit_s=max(60.0, 8.0 * len(seeds)))
