"""Small models for parity tests, each with what sharding finds hard, and the loops that compare them."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from shardwright import FSDPModule, fully_shard, stats, torch_private
from shardwright.engine.groups.gradient_state import mark_of

NEEDS_ORDER = pytest.mark.skipif(
    not torch_private.keeps_order, reason=f"torch {torch.__version__} has no new_group(sort_ranks=)"
)

VOCAB, WIDTH = 17, 13  # odd sizes: every shard of every world is uneven


class Block(nn.Module):
    """A residual MLP with uneven weights, a scalar parameter and a buffer that its forward reads."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 29)
        self.down = nn.Linear(29, width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.linspace(0, 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x + self.shift.to(x.dtype))))) * self.scale


class Decoder(nn.Module):
    """Embedding, blocks, head; ``tied`` shares the embedding's weight with the head's."""

    def __init__(self, num_blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed: int = 7, **kwargs) -> Decoder:
    """The same model on every rank and in every world."""
    torch.manual_seed(seed)
    return Decoder(**kwargs)


def filled(value: float, width: int = 8) -> nn.Sequential:
    """Two layers, all of whose parameters are one number."""
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 5))
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def batches(step: int, world: int, rows: int = 4) -> torch.Tensor:
    """Tokens of all ranks at a step: int64 [world, rows, 6]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCAB, (world, rows, 6), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy of one rank's tokens, averaged."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def fresh_mesh(world: int) -> DeviceMesh:
    """All ranks, on a process group that nothing was sharded over before: so a transport is chosen for it."""
    return DeviceMesh.from_group(dist.new_group(range(world)), "cpu")


@dataclass
class Run:
    """A model and its optimizer on its way through the same steps as another."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module, optimizer: Callable = torch.optim.SGD, **options) -> "Run":
        # SGD with momentum: Adam is scale-invariant and would hide a wrong gradient scale.
        options = options or {"lr": 0.1, "momentum": 0.9}
        return cls(model, optimizer([p for p in model.parameters() if p.requires_grad], **options))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def both_step(ours: Run, theirs: Run, tolerance: float = 1e-6) -> None:
    """A step of both, after which they are the same."""
    ours.step()
    theirs.step()
    assert_same(ours.model, theirs.model, tolerance)


def train_by(run: Run, losses: Iterable[torch.Tensor]) -> list[float]:
    """A step by each of the losses, which are computed one after another; what they were."""
    seen = []
    for loss in losses:
        loss.backward()
        run.step()
        seen.append(loss.item())
    return seen


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The average of a scalar over all ranks."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's whole value, or the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def waits(param: torch.Tensor) -> bool:
    """Whether its gradients wait to be reduced, so that nothing may read them."""
    return mark_of(param.grad) is not None


def distance(tensor: torch.Tensor, whole: torch.Tensor) -> float:
    """The largest difference from a whole tensor: of this rank's shard, so that ranks move nothing for it."""
    tensor, whole = tensor.detach(), whole.detach()
    kinds = [type(each) for each in tensor.placements] if isinstance(tensor, DTensor) else [None]
    if {*kinds} <= {Replicate, Shard} and kinds.count(Shard) < 2:
        assert tensor.shape == whole.shape
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                parts = whole.chunk(tensor.device_mesh.size(axis), placement.dim)
                own = tensor.device_mesh.get_local_rank(axis)
                whole = parts[own] if own < len(parts) else whole.narrow(placement.dim, 0, 0)
        tensor = tensor.to_local()
        assert tensor.shape == whole.shape
    tensor = full(tensor)
    return (tensor - whole).abs().max().item() if tensor.numel() else 0.0


def differences(sharded: nn.Module, reference: nn.Module) -> Iterator[tuple[str, float]]:
    """``(name, largest difference)`` of each parameter."""
    expected = dict(reference.named_parameters())
    for name, param in sharded.named_parameters():
        yield name, distance(param, expected[name])


def assert_same(sharded: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> None:
    """Every parameter equal to ``tolerance``; names and shapes equal."""
    ours = {name: tuple(p.shape) for name, p in sharded.named_parameters()}
    assert ours == {name: tuple(p.shape) for name, p in reference.named_parameters()}
    worst = max(differences(sharded, reference), key=lambda pair: pair[1])
    assert worst[1] <= tolerance, f"{worst[0]} differs by {worst[1]:.3g}"


def assert_same_grads(sharded: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> None:
    """Every gradient equal to ``tolerance``, or None for both."""
    for (name, param), other in zip(sharded.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            worst = distance(param.grad, other.grad)
            assert worst <= tolerance, f"the gradient of {name} differs by {worst:.3g}"


def both_backward(
    sharded: nn.Module,
    reference: nn.Module,
    inputs: torch.Tensor,
    rank: int,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    parts: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backwards of this rank's inputs (of [world, ...]) and of the mean over all; both losses."""
    ours = loss(sharded, inputs[rank]) / parts
    ours.backward()
    theirs = torch.stack([loss(reference, rows) for rows in inputs]).mean() / parts
    theirs.backward()
    return ours.detach(), theirs.detach()


def train_beside(
    sharded: Run, reference: Run, rank: int, world: int, steps: int = 3, tolerance: float = 1e-6
) -> None:
    """``steps`` steps of both; the reference is one process that sees all ranks' batches. Asserts parity."""
    for step in range(steps):
        loss, expected = both_backward(sharded.model, reference.model, batches(step, world), rank)
        assert abs(mean_over_ranks(loss) - expected) <= tolerance
        both_step(sharded, reference, tolerance)


def warned(call: Callable[[], object]) -> list[str]:
    """What the call warns of, once or again."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        call()
    return [str(each.message) for each in caught]


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The mean of what comes out, squared."""
    return model(x).square().mean()


def equal_steps(
    model: nn.Module,
    reference: nn.Module,
    rank: int,
    world: int,
    forward: Callable = squared,
    *,
    shape: tuple[int, ...] = (5, 13),
    steps: int = 3,
    lr: float = 0.1,
    after: Callable = lambda: None,
) -> None:
    """Steps of both on the same inputs [world, *shape], of which each rank sees its own.

    ``forward(model, x)`` gives a loss; ``after()`` is called after each step. Asserts parity, and that
    everything is at rest again.
    """
    ours, theirs = Run.of(model, lr=lr, momentum=0.9), Run.of(reference, lr=lr, momentum=0.9)
    roots = [model] if isinstance(model, FSDPModule) else list(model.children())
    for step in range(steps):
        x = torch.randn(world, *shape, generator=torch.Generator().manual_seed(step))
        both_backward(model, reference, x, rank, forward)
        assert all(stats(root).unsharded_nbytes == 0 for root in roots)
        both_step(ours, theirs)
        after()


def train_on_parts(
    model: nn.Module, rank: int, world: int, width: int, lr: float, steps: int = 3, target: float = 0.0
) -> list[float]:
    """Train on this rank's part of batches that are the same in every world; the losses of the whole ones.

    Inputs are random [12, width] (12: every world of the tests divides it); outputs are drawn towards
    ``linspace(-target, target)``.
    """
    run = Run.of(model, lr=lr, momentum=0.9)
    wanted = torch.linspace(-target, target, width)
    losses = []
    for step in range(steps):
        batch = torch.randn(12, width, generator=torch.Generator().manual_seed(step))
        loss = (model(batch.chunk(world)[rank]) - wanted).square().mean()
        loss.backward()
        run.step()
        losses.append((mean_over_ranks(loss) if world > 1 else loss).item())
    assert set(run.optimizer.state) == {p for p in model.parameters() if p.requires_grad}
    return losses


def shard_decoder(model: Decoder, fully_shard: Callable, **options) -> Decoder:
    """One group per block, the rest in the root."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def sharded(model: nn.Module, parts: Iterable = (), **options):
    """A group per part (by default per block, or layer), the rest in the root."""
    for part in parts or getattr(model, "blocks", model):
        fully_shard(part, **options)
    return fully_shard(model, **options)


def twins(make: Callable[[], nn.Module], seed: int = 5) -> tuple[nn.Module, nn.Module]:
    """Two models with the same numbers."""
    torch.manual_seed(seed)
    model = make()
    torch.manual_seed(seed)
    return model, make()
