"""How well a plan predicts steps on meshes: eight mixes of dp, replicate, cp and tp, measured and predicted.

    python -m bench.meshes [--rounds 15]                two jobs of CPU ranks, about two minutes

Each job measures its ranks' compute and links as ``shardwright bench`` does, all at the same time. Then steps
of all mixes alternate, with one of each rank alone, by whose median the compute that was measured is scaled:
so the machine's pace at that moment is in it, and nothing of a mesh. The machine should do nothing else.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import shardwright
from bench.toy import add_toy
from shardwright import MixedPrecisionPolicy, clock, fully_shard
from shardwright.parallel import context_parallel, tensor_parallel
from shardwright.plan import Choice, estimate
from shardwright.plan.cluster import Cluster
from shardwright.plan.measure import measured_device, measured_links

MIXES = {
    2: [{"dp": 2}, {"replicate": 2}, {"cp": 2}, {"tp": 2}],
    4: [{"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}, {"replicate": 2, "cp": 2}, {"cp": 2, "tp": 2}],
}
"""By the ranks of a job."""
WIDTH, HEADS, LAYERS, VOCABULARY = 256, 8, 4, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v, self.out = (
            nn.LayerNorm(WIDTH),
            *(nn.Linear(WIDTH, WIDTH) for _ in "qkvo"),
        )
        self.norm2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            of(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for of in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    tp_plan = {f"layers.*.{name}": "colwise" for name in ("q", "k", "v", "up")} | {
        f"layers.*.{name}": "rowwise" for name in ("out", "down")
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, position_ids: Any = None) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), logits.new_zeros(logits.shape[:2], dtype=torch.int64).flatten()
    )


def stepper(mix: dict[str, Any] | None, ids: Tensor) -> Callable[[], None]:
    """A step of a mesh, or of a rank alone. Every rank calls."""
    torch.manual_seed(0)
    model = Decoder()
    part = {"input_ids": ids}
    if mix is None:
        meshes = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("others", "own"))
        fully_shard(model, mesh=meshes["own"], groups="auto")
    else:
        mesh = shardwright.mesh(**mix)
        context_parallel(tensor_parallel(model, mesh), mesh)
        fully_shard(model, mesh=mesh.shard, groups="auto")
        part = mesh.split(part)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        loss_of(model(**part)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def choice_of(mix: dict[str, int], ranks: int) -> Choice:
    """The mesh as a plan takes it."""
    sizes = mix.get("tp", 1), mix.get("cp", 1)
    chosen = Choice("shardwright-cpu", mp_policy=MixedPrecisionPolicy(), tp=sizes[0], cp=sizes[1])
    return replace(chosen, shards=chosen.data_ranks(ranks) // mix.get("replicate", 1))


def predicted_s(mix: dict[str, int] | None, ids: Tensor, cluster: Cluster) -> float:
    """Seconds of its step, by the plan."""
    if mix is None:
        mix, cluster = {}, replace(cluster, ranks=1)
    with torch.device("meta"):
        return estimate(Decoder(), ids, cluster, choice_of(mix, cluster.ranks), loss=loss_of).step_s


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """Whose compute takes so many times as long."""
    constants = cluster.constants
    rates = {name: getattr(constants, name) / factor for name in ("matmul", "attention", "memory")}
    times = {name: getattr(constants, name) * factor for name in ("optimizer", "launch_s")}
    return replace(cluster, constants=replace(constants, **rates, **times))


def measured(rank: int, world: int, port: int, rounds: int, sequence: int, share: float, out: str) -> None:
    """A job's rank: medians of steps of its mixes and of a rank alone, and their predictions."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    cluster = measured_links(*measured_device(torch.float32, share), share)
    ids = torch.randint(VOCABULARY, (2, sequence), generator=torch.Generator().manual_seed(0))
    mixes = [None, *MIXES[world]]
    steps = [stepper(mix, ids) for mix in mixes]
    taken: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 2):
        for step, found in zip(steps, taken, strict=True):
            dist.barrier()
            start = clock.perf_counter()
            step()
            seconds = torch.tensor(clock.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number > 1:  # the first two plan and warm up
                found.append(float(seconds))
    if rank == 0:
        alone_s, *found_s = map(median, taken)
        pace = alone_s / predicted_s(None, ids, cluster)
        scaled = slowed(cluster, pace)
        rows = [
            (" x ".join(f"{name}={size}" for name, size in mix.items()), s, predicted_s(mix, ids, scaled))
            for mix, s in zip(MIXES[world], found_s, strict=True)
        ]
        with open(out, "w", encoding="utf-8") as file:
            json.dump({"alone_s": alone_s, "pace": pace, "rows": rows}, file)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each mix, and the errors of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the time that compute and links are measured"
    )
    add_toy(parser, rounds=2, sequence=16, share=0.02)
    known = parser.parse_args(arguments)
    errors = []
    for world in MIXES:
        with socket.socket() as free, TemporaryDirectory() as folder:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
            free.close()
            out = os.path.join(folder, "found.json")
            spawn(measured, (world, port, known.rounds, known.sequence, known.share, out), world)
            with open(out, encoding="utf-8") as file:
                found = json.load(file)
        pace = f"{1e3 * found['alone_s']:.1f} ms, {found['pace']:.2f} times what was measured"
        print(f"{world} ranks: a step of each alone takes {pace}", flush=True)
        for name, measured_s, step_s in found["rows"]:
            errors.append(step_s / measured_s - 1)
            both = f"measured {1e3 * measured_s:7.1f} ms, predicted {1e3 * step_s:7.1f}"
            print(f"{name:22} {both} ({errors[-1]:+.1%})", flush=True)
    mean, worst = fmean(map(abs, errors)), max(errors, key=abs)
    print(f"{len(errors)} mixes: mean error {mean:.1%}, bias {fmean(errors):+.1%}, worst {worst:+.1%}")


if __name__ == "__main__":
    main()
