"""The models that torch's harness for its wrapper class trains, ways to wrap them, training beside DDP."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.wrapper import FSDP, TrainingState, always_wrap_policy
from tests.ranks.models import Run, batches, build, full, loss_of, train_by


class Transformer(nn.Module):
    """torch's encoder-decoder with tied ends, a float and a long buffer, BatchNorm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(17, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 12, dropout=0.1, batch_first=True)
        self.output = nn.Linear(8, 17)
        self.output.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("long_buffer", torch.zeros_like(self.scale, dtype=torch.long))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        source = self.embed(tokens) + self.scale + self.long_buffer.type_as(self.scale)
        out = self.transformer(source, source)
        return self.output(self.norm(out.transpose(1, 2)).transpose(1, 2))


class OwnExpert(nn.Module):
    """Layers that all ranks share around one that every rank has its own of.

    alone: the group of this rank alone that the expert is wrapped with; None: a plain model.
    """

    def __init__(self, alone: Any = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Embedding(17, 7)
        self.after = nn.Linear(7, 17)
        torch.manual_seed(50 + dist.get_rank())
        self.expert = nn.Linear(7, 7)
        if alone is not None:
            self.expert = FSDP(self.expert, process_group=alone, **options)
            self.after = FSDP(self.after, **options)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.after(torch.relu(self.expert(self.before(tokens))))


class WithoutExperts(nn.Module):
    """The reference for ``OwnExpert``: its gradients, but for the expert's, divided and summed over ranks."""

    def __init__(self, module: OwnExpert) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)

    def reduce(self) -> None:
        """Sum over ranks what every rank has."""
        for name, param in self.module.named_parameters():
            if "expert" not in name:
                dist.all_reduce(param.grad.div_(dist.get_world_size()))


def nested(model: nn.Module, **options: Any) -> FSDP:
    """Mixed: a block wrapped whole, one wrapped inside of it, leftovers in the root."""
    model.blocks[0] = FSDP(model.blocks[0], **options)
    model.blocks[1].up = FSDP(model.blocks[1].up, **options)
    model.blocks[1] = FSDP(model.blocks[1], **options)
    return FSDP(model, **options)


def everything(model: nn.Module, **options: Any) -> FSDP:
    """Every module that has a forward."""
    return FSDP(model, auto_wrap_policy=always_wrap_policy, **options)


def root_only(model: nn.Module, **options: Any) -> FSDP:
    """One group."""
    return FSDP(model, **options)


def beside_ddp(
    make: Callable[[], nn.Module],
    sharded: FSDP,
    rank: int,
    world: int,
    steps: int = 3,
    after_loss_s: float = 0.0,
    ddp: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
) -> None:
    """Losses and full parameters equal DDP's (or what ``ddp`` makes), SGD with momentum; IDLE afterwards."""
    reference = ddp(make())
    ours = torch.optim.SGD(sharded.parameters(), lr=0.05, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        tokens = batches(step, world)[rank]
        losses = []
        for model, optimizer in ((sharded, ours), (reference, theirs)):
            torch.manual_seed(100 + step + rank)  # the same dropout in both
            loss = loss_of(model, tokens)
            time.sleep(after_loss_s)
            loss.backward()
            if isinstance(model, WithoutExperts):
                model.reduce()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert losses[0].dtype == torch.float32
        torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-5)
    assert sharded.training_state is TrainingState.IDLE
    expected = dict(reference.module.named_parameters())
    with FSDP.summon_full_params(sharded, writeback=False):
        found = {name: full(param).detach().clone() for name, param in sharded.named_parameters()}
    assert found.keys() == expected.keys()
    for name, param in found.items():
        torch.testing.assert_close(param, expected[name].detach(), atol=2e-6, rtol=1e-5, msg=name)


def stepped(rank, world, seed=7, **options):
    """A wrapped model after one step of Adam, and its optimizer."""
    run = Run.of(nested(build(seed), **options), torch.optim.Adam, lr=0.01)
    train_by(run, [loss_of(run.model, batches(0, world)[rank])])
    return run.model, run.optimizer


def same_state(one, other):
    """Assert that two state dicts have the same names and the same whole values."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(full(one[name]), full(other[name])), name
