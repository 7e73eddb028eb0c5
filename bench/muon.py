"""What a step with Muon costs, by how the ranks come to whole matrices.

    python bench/muon.py
    python bench/muon.py --systems --rounds 24

One transformer is trained in five ways, whose steps alternate in one process, one compute thread per rank:
``rows-adamw`` is ours with AdamW; ``owner-muon`` is ``layout="owner"`` with ``shardwright.optim.Muon``;
``rows-gathering`` is ours with the usual Muon, in which every rank gathers each gradient and orthogonalises
all of them; ``fsdp2-gathering`` is that over torch's ``fully_shard``, and ``fsdp2-torch`` is
``torch.optim.Muon`` over its DTensors. The last one iterates in bfloat16, the others in ``--ns-dtype``: in
float32, which CPUs without units for bfloat16 multiply faster, or in bfloat16 for a fair comparison with it.
What isn't a hidden matrix is stepped by AdamW everywhere.

``bound`` is a step of ``rows-adamw`` and, measured alone in the same round, the Newton-Schulz iterations of
the matrices that a rank of ``owner-muon`` has, of the slowest rank. Printed are medians, and the median and
quartiles of the ratios of a round: of the slowest rank's time, and of the ranks' mean CPU time, which other
work on the machine disturbs less. Counted in a step of the optimizer, not in what is timed: MiB that a rank
must send for the collectives of torch that it calls, and what it has sent over our sockets; and by torch's
``FlopCounterMode`` the FLOPs of all ranks and of the busiest one, over those of one process. The loss is the
last one of rank 0: all Muons train alike.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shardwright
from bench.launch import arguments, run, slowest_s
from bench.model import Size, Transformer, build, tokens
from bench.toy import add_toy
from shardwright.optim import Muon, hidden_matrices

WARM_UP_STEPS = 2
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.95, 0.1
REST = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.0}
OURS = "owner-muon"
SYSTEMS = ("rows-adamw", OURS, "rows-gathering", "fsdp2-gathering", "fsdp2-torch")


def orthogonalised(x: Tensor) -> Tensor:
    """[out, in] after five Newton-Schulz iterations in its dtype, with ``torch.optim.Muon``'s factors."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if is_tall else x


class GatheringMuon(torch.optim.Optimizer):
    """The usual Muon of sharded matrices: every rank gathers and orthogonalises all, and steps its rows."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": LEARNING_RATE})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As ``torch.optim.Muon`` steps."""
        for param in self.param_groups[0]["params"]:
            assert param.grad is not None
            mean = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param.grad))
            mean.lerp_(param.grad, 1 - MOMENTUM)
            (whole,) = shardwright.gathered([param.grad.lerp(mean, MOMENTUM)])
            update = shardwright.scattered(param.grad, orthogonalised(whole.to(self.dtype)).float())
            param.mul_(1 - LEARNING_RATE * WEIGHT_DECAY)
            param.sub_(update, alpha=LEARNING_RATE * max(1.0, whole.shape[0] / whole.shape[1]) ** 0.5)


class System(NamedTuple):
    """A sharded model and its optimizers, which step one after another."""

    model: Transformer
    optimizers: list[torch.optim.Optimizer]

    def step_optimizers(self) -> None:
        """All of them."""
        for optimizer in self.optimizers:
            optimizer.step()

    def step_s(self, batch: Tensor, losses: list[float]) -> float:
        """Seconds of a training step."""
        start = time.perf_counter()
        loss = self.model(batch)
        loss.backward()
        self.step_optimizers()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        took_s = time.perf_counter() - start
        losses.append(loss.item())
        return took_s


def system_of(name: str, size: Size, world: int, dtype: str) -> System:
    """One of ``SYSTEMS``, with the same first weights on every rank."""
    model = build(size)
    kind, _, stepped = name.partition("-")
    if kind == "fsdp2":
        shard: Callable[..., Any] = partial(
            torch_fsdp.fully_shard, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=True
        )
    else:
        shard = partial(shardwright.fully_shard, layout=kind)
    for block in model.blocks:
        shard(block)
    if kind == "owner":
        shardwright.fully_shard(model)
    else:
        shard(model)
    names = hidden_matrices(model)
    matrices = [model.get_parameter(each) for each in names]
    rest = [param for each, param in model.named_parameters() if each not in names]
    if stepped == "adamw":
        return System(
            model, [AdamW([{"params": matrices}, {"params": rest, **REST}], LEARNING_RATE, foreach=True)]
        )
    if stepped == "muon":
        return System(model, [_our_muon(shardwright.owned_params(model), rest, dtype)])
    if stepped == "gathering":
        muon: Any = GatheringMuon(matrices, getattr(torch, dtype))
    else:
        muon = torch.optim.Muon(matrices, LEARNING_RATE)
    return System(model, [muon, AdamW(rest, foreach=True, **REST)])


def _our_muon(matrices: Any, rest: list[nn.Parameter], dtype: str) -> Muon:
    of_rest = {f"rest_{name}": value for name, value in REST.items()}
    return Muon(matrices, LEARNING_RATE, ns_dtype=dtype, rest=rest, **of_rest)


_SENT: dict[str, Callable[[int, int], float]] = {
    "all_gather_into_tensor": lambda nbytes, world: nbytes * (world - 1),
    "all_reduce": lambda nbytes, world: 2 * nbytes * (world - 1) / world,
    "reduce_scatter_tensor": lambda nbytes, world: nbytes * (world - 1) / world,
    "all_to_all_single": lambda nbytes, world: nbytes * (world - 1) / world,
    "wait_tensor": lambda *_: 0,
    "_wrap_tensor_autograd": lambda *_: 0,
}
"""Bytes that a rank must send, by the bytes that it hands over."""


class Sent(TorchDispatchMode):
    """Counts what torch's collectives must send, and lets DTensors become operations on this rank's parts
    before another mode counts those."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.nbytes = world, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space:
            self.nbytes += _SENT[name](args[0].nbytes, self.world)
        return func(*args, **(kwargs or {}))


def counted(system: System, batch: Tensor, world: int) -> tuple[float, int]:
    """Bytes that this rank sends in a step of the optimizers, and its FLOPs there."""
    system.model(batch).backward()
    is_ours = isinstance(system.model, shardwright.FSDPModule)
    before = shardwright.stats(system.model).sent_nbytes if is_ours else 0
    with FlopCounterMode(display=False) as flops, Sent(world) as sent:
        system.step_optimizers()
    after = shardwright.stats(system.model).sent_nbytes if is_ours else 0
    return sent.nbytes + after - before, flops.get_total_flops()


def one_process_flops(size: Size) -> int:
    """FLOPs of a step of Muon that isn't distributed."""
    with torch.device("meta"):
        model = Transformer(size)
    names = hidden_matrices(model)
    matrices = [model.get_parameter(each) for each in names]
    for param in matrices:
        param.grad = torch.zeros_like(param)
    with FlopCounterMode(display=False) as flops:
        _our_muon(matrices, [], "float32").step()
    return flops.get_total_flops()


def newton_schulz_s(matrices: list[Tensor]) -> float:
    """Seconds of the iterations alone."""
    start = time.perf_counter()
    for matrix in matrices:
        orthogonalised(matrix)
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> None:
    """One rank: every system's steps; rank 0 prints the table."""
    shardwright.set_transport(options.transport)
    size, world = options.size, options.world
    systems = {
        name: system_of(name, size, world, options.ns_dtype)
        for name in ("rows-adamw", OURS, *options.systems)
    }
    dtype = getattr(torch, options.ns_dtype)
    owned = [torch.randn(each.shape, dtype=dtype) for each in shardwright.owned_params(systems[OURS].model)]
    losses: dict[str, list[float]] = {name: [] for name in systems}
    walls: dict[str, list[float]] = {name: [] for name in (*systems, "alone")}
    cpus: dict[str, list[float]] = {name: [] for name in walls}
    for number in range(WARM_UP_STEPS + options.rounds):
        batch = tokens(size, options.rank, number)
        rounds = {name: partial(each.step_s, batch, losses[name]) for name, each in systems.items()}
        rounds["alone"] = partial(newton_schulz_s, owned)
        for turn in range(len(rounds)):  # each comes first in one round, and last in another
            name = list(rounds)[(number + turn) % len(rounds)]
            begin = time.process_time()
            walls[name].append(slowest_s(rounds[name]))
            cpus[name].append(time.process_time() - begin)
    batch = tokens(size, options.rank, 0)
    found = {name: counted(each, batch, world) for name, each in systems.items()}
    every: list[Any] = [None] * world
    dist.all_gather_object(every, (cpus, found))
    if options.rank:
        return
    means = {
        name: [sum(each) / world for each in zip(*(rank[name] for rank, _ in every), strict=True)]
        for name in cpus
    }
    print(
        f"{size.layers} blocks of width {size.width}, world {world}, {options.link}, {options.rounds} rounds"
    )
    alone_ms, one = 1e3 * median(walls["alone"][WARM_UP_STEPS:]), one_process_flops(size)
    print(f"Newton-Schulz alone: {alone_ms:.0f} ms; of one process: {one / 1e9:.4g} GFLOPs")
    print("| system | ms | owner-muon / it | CPU ms | / it | MiB sent | FLOPs | busiest rank's | loss |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in (*systems, "bound"):
        line = f"| {name} |{_beside(walls, name)}{_beside(means, name)}"
        if name == "bound":
            line += " - | - | - | - |"
        else:
            sent, flops = zip(*(counts[name] for _, counts in every), strict=True)
            line += f" {max(sent) / 2**20:.3g} | {sum(flops) / one:.2f} | {max(flops) / one:.2f} |"
            line += f" {losses[name][-1]:.5f} |"
        print(line)


def _beside(times: dict[str, list[float]], name: str) -> str:
    """Cells: the median in ms, and of ``OURS`` over it the median of the rounds, with its quartiles."""
    took = {each: found[WARM_UP_STEPS:] for each, found in times.items()}
    if name == "bound":
        took[name] = [sum(each) for each in zip(took["rows-adamw"], took["alone"], strict=True)]
    ratios = [ours / its for ours, its in zip(took[OURS], took[name], strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return f" {1e3 * median(took[name]):.0f} | {middle:.3f} ({low:.2f}-{high:.2f}) |"


def main() -> None:
    """Parse, then measure as a rank or launch the ranks."""
    parser = arguments(__doc__, limit_s=300.0)
    parser.add_argument("--transport", default="auto", help="see set_transport")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS[2:], default=SYSTEMS[2:], help="besides")
    parser.add_argument("--ns-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=6, help="2 or more")
    parser.set_defaults(size=Size(4, 384, 2048, 128, 4))
    add_toy(parser, rounds=2, size=Size(2, 64, 256, 32, 2))
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
