"""What can go wrong between ranks, a function each, and what the ranks must say of it.

``python -m tests.ranks.faults [NAME ...]`` runs them and prints the table of docs/watch.md.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardwright import SchedulePolicy, fully_shard, set_transport
from shardwright.checkpoint import save
from shardwright.engine.step.consensus import Consensus
from shardwright.observe.watch.status_exchange import StatusExchange
from shardwright.schedule.sync import AllReduceMin
from shardwright.transport.cpu.connection import Connection
from tests.ranks.scripts import fault, run_scripts

STEP = 2  # the step in which the fault comes
LONG_S = 3.0  # what a rank may take without being accused of anything


class Layer(nn.Module):
    """A linear layer that does ``act()`` in its forward, once that is set."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.act: Callable[[], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.act is not None:
            self.act()
        return self.linear(x)


def built(dim: int = 8) -> nn.Sequential:
    """Three sharded layers, nested in a sharded root."""
    layers = [fully_shard(Layer(dim)) for _ in range(3)]
    return fully_shard(nn.Sequential(*layers, nn.Linear(dim, dim)))


def step(model: nn.Module, skip_backward: bool = False) -> None:
    """One training step without an optimizer."""
    loss = model(torch.ones(2, 8)).sum()
    if not skip_backward:
        loss.backward()


def until_fault() -> nn.Sequential:
    """A model that has trained up to the step of the fault."""
    model = built()
    for _ in range(STEP):
        step(model)
    fault()
    return model


def on(model: nn.Sequential, act: Callable[[], Any]) -> None:
    """From now on the second layer's forward does ``act()`` first."""
    model[1].act = act


def rest(model: nn.Module) -> None:
    """The steps after the fault."""
    for _ in range(3):
        step(model)


def bad_batch(after_s: float = 0.0) -> None:
    """Raise what a user's code raises."""
    time.sleep(after_s)
    raise ValueError("bad batch")


def killed(after_s: float = 0.0) -> None:
    """Nothing of this process goes on."""
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def in_forward(acts: dict[int, Callable[[], Any]], rank: int, world: int) -> None:
    """Ranks that do something in a forward, in each from now on."""
    model = until_fault()
    if rank in acts:
        on(model, acts[rank])
    rest(model)


def while_asking(act: Callable[[], Any], rank: int, world: int) -> None:
    """Rank 1 does ``act()`` where ranks ask each other what to launch; the others wait there, inside of the
    agreement: the second layer runs by itself, which no schedule has."""
    model = until_fault()
    if rank == 1:
        exchange = Consensus.exchange
        Consensus.exchange = lambda self, sync: (
            act() if isinstance(sync, AllReduceMin) else exchange(self, sync)
        )
    model[1](torch.ones(2, 8)).sum().backward()


# ---- ranks that fail, leave or die


raises_in_forward = partial(in_forward, {1: bad_batch})


def raises_in_backward(rank: int, world: int) -> None:
    model = until_fault()
    x = torch.ones(2, 8)
    out = model[1](model[0](x))
    if rank == 1:
        out.register_hook(lambda grad: bad_batch())
    model[2](out).sum().backward()
    rest(model)


def ends_early(rank: int, world: int) -> None:
    model = until_fault()
    if rank == 1:
        return
    rest(model)


dies = partial(in_forward, {1: killed})
# Rank 1 computes; rank 2 has asked for all ranks' status, and is killed.
caller_dies = partial(in_forward, {1: partial(time.sleep, 2.5), 2: partial(killed, 1.2)})


# ---- ranks that diverge


def catches(rank: int, world: int, agreement: str = "strict") -> None:
    model = until_fault()
    model.set_schedule_policy(SchedulePolicy(agreement=agreement))
    if rank == 1:
        on(model, bad_batch)
        try:
            step(model)
        except ValueError:
            model[1].act = None
    rest(model)


def saves_alone(rank: int, world: int) -> None:
    model = until_fault()
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            save(folder, model=model, step=STEP)
    rest(model)


def skips_backward(rank: int, world: int) -> None:
    model = until_fault()
    step(model, skip_backward=rank == 1)
    rest(model)


def barrier_alone(rank: int, world: int) -> None:
    model = until_fault()
    if rank == 1:
        dist.barrier()
    rest(model)


def in_flight_alone(rank: int, world: int) -> None:
    """Rank 1 alone launches an all-reduce, and waits for it where only torch's recorder sees that."""
    model = until_fault()
    if rank == 1:
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    rest(model)


def in_flight_on_two_groups(rank: int, world: int) -> None:
    """Each rank waits so for an all-reduce on another group of the caller's."""
    groups = [dist.new_group(list(range(world)), group_desc=f"group {index}") for index in range(2)]
    model = built()
    for _ in range(STEP):
        step(model)
        for group in groups:
            dist.all_reduce(torch.ones(2), group=group)
    fault()
    dist.all_reduce(torch.ones(2), group=groups[rank], async_op=True).wait()


def other_shapes(rank: int, world: int) -> None:
    fault()
    model = built(8 if rank == 0 else 16)
    model(torch.ones(2, 8 if rank == 0 else 16))


def other_order(rank: int, world: int) -> None:
    """An error only where ranks don't agree on what to launch."""
    model = until_fault()
    model.set_schedule_policy(SchedulePolicy(agreement="off"))
    x = torch.ones(2, 8)
    for layer in (0, 1, 2) if rank != 1 else (1, 0, 2):
        x = model[layer](x)
    x.sum().backward()
    rest(model)


def other_root(rank: int, world: int) -> None:
    """Rank 1 alone calls a model that isn't a child of the one around it."""
    other = built()
    in_forward({1: lambda: other(torch.ones(2, 8))}, rank, world)


def other_model_first(rank: int, world: int) -> None:
    """Two models without a common root, which rank 1 takes in another order: each agrees by itself."""
    models = [built(), built()]
    for _ in range(STEP):
        for model in models:
            step(model)
    fault()
    for model in models if rank == 0 else models[::-1]:
        step(model)


def _hybrid(rank: int, act: Callable[[nn.Sequential], None]) -> None:
    """Copies on two pairs of ranks: what rank 3 does concerns rank 2 at once, and the others in the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    layers = [fully_shard(Layer(), mesh=mesh) for _ in range(3)]
    model = fully_shard(nn.Sequential(*layers, nn.Linear(8, 8)), mesh=mesh)
    for _ in range(STEP):
        step(model)
    fault()
    if rank == 3:
        act(model)
    rest(model)


def raises_under_copies(rank: int, world: int) -> None:
    _hybrid(rank, lambda model: on(model, bad_batch))


def diverges_under_copies(rank: int, world: int) -> None:
    _hybrid(rank, lambda model: step(model, skip_backward=True))


def without_a_shard(rank: int, world: int) -> None:
    """One row over two ranks: rank 1 holds none of it, and takes part all the same."""
    model = fully_shard(nn.Sequential(Layer(8), fully_shard(nn.Linear(8, 1))))
    step(model)
    fault()
    if rank == 1:
        bad_batch()
    rest(model)


def recomputes(rank: int, world: int) -> None:
    """Rank 1 raises in the recomputation of a checkpointed layer, in the backward."""
    model = until_fault()
    x = model[0](torch.ones(2, 8))
    x = checkpoint(model[1], x, use_reentrant=False)
    if rank == 1:
        on(model, bad_batch)
    x.sum().backward()
    rest(model)


def accumulates(rank: int, world: int) -> None:
    """Rank 1 takes one microbatch more before it lets its gradients be reduced."""
    model = until_fault()
    for _ in range(3 if rank == 1 else 2):
        model.set_requires_gradient_sync(False)
        step(model)
    model.set_requires_gradient_sync(True)
    rest(model)


def slow_store(rank: int, world: int) -> None:
    """Every look into the store takes 0.1 s."""
    latest, exchange = StatusExchange.latest, StatusExchange
    exchange.latest = lambda self: time.sleep(0.1) or latest(self)
    raises_in_forward(rank, world)


# ---- ranks that take their time


def computes() -> None:
    end, x = time.monotonic() + LONG_S, torch.ones(64, 64)
    while time.monotonic() < end:
        x = (x @ x).clamp(0, 1)


def compiles_for(seconds: float) -> None:
    """Compile one function after another."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch._dynamo.reset()
        torch.compile(lambda x: (x @ x).relu().sum(), backend="aot_eager")(torch.ones(8, 8))


def once(act: Callable[[], Any], rank: int, world: int) -> None:
    """Rank 1 does something in one forward."""
    model = until_fault()
    if rank == 1:
        on(model, act)
    step(model)
    model[1].act = None
    rest(model)


def loads(rank: int, world: int, then: Callable[[], Any] = lambda: None) -> None:
    """Rank 1 takes long between two steps, where the others wait to begin the next one."""
    model = until_fault()
    if rank == 1:
        time.sleep(LONG_S)
    then()
    rest(model)


def slow_backward(rank: int, world: int) -> None:
    model = until_fault()
    out = model[1](model[0](torch.ones(2, 8)))
    if rank == 1:
        out.register_hook(lambda grad: time.sleep(LONG_S))
    model[2](out).sum().backward()
    rest(model)


def comes_late_to_a_barrier(rank: int, world: int) -> None:
    """All others are in a collective of the caller's own, that rank 1 comes to in the end."""
    loads(rank, world, dist.barrier)


def comes_late_to_what_is_in_flight(rank: int, world: int) -> None:
    loads(rank, world, lambda: dist.all_reduce(torch.ones(2), async_op=True).wait())


def holds_the_gil() -> None:
    ctypes.PyDLL(None).usleep(int(LONG_S * 1e6))


def stopped() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {LONG_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


sleeps = partial(once, partial(time.sleep, LONG_S))


def slow_bytes(rank: int, world: int) -> None:
    """Every rank has launched the all-gather; rank 1's bytes take their time."""
    model = until_fault()
    write = Connection._write

    def late(connection: Connection) -> None:
        if connection._out and connection._out[0].transfer.launch.key.startswith("all-gather"):
            Connection._write = write
            time.sleep(LONG_S)
        write(connection)

    if rank == 1:
        Connection._write = late
    rest(model)


def well(rank: int, world: int) -> None:
    rest(until_fault())


@dataclass(frozen=True)
class Case:
    """A fault: what the survivors raise ("": nothing) and what that says, under which policy and store."""

    run: Callable[[int, int], None]
    error: str = ""
    says: tuple[str, ...] = ()
    culprits: tuple[int, ...] = (1,)
    policy: str = ""
    store: str = "tcp"
    world: int = 2
    transport: str = "auto"

    def __call__(self, rank: int, world: int) -> None:
        set_transport(self.transport)
        self.run(rank, world)


BAD = ("rank 1 raised ValueError: bad batch", "faults.py:", "in bad_batch")
PLACES = ("rank 0", "rank 1", "of pass", "faults.py:")
CASES = {
    "raise in forward": Case(raises_in_forward, "RankFailed", BAD),
    "raise in forward, sockets": Case(raises_in_forward, "RankFailed", BAD, transport="sockets"),
    "raise in forward, collectives": Case(raises_in_forward, "RankFailed", BAD, transport="collectives"),
    "raise in forward, file store": Case(raises_in_forward, "RankFailed", BAD, store="file"),
    "raise in forward, 4 ranks": Case(raises_in_forward, "RankFailed", BAD, world=4),
    "raise in backward": Case(raises_in_backward, "RankFailed", BAD),
    "raise in forward, slow store": Case(slow_store, "RankFailed", BAD),
    "raise in recomputation": Case(recomputes, "RankFailed", BAD),
    "raise on a rank without a shard": Case(without_a_shard, "RankFailed", BAD),
    "raise on a 2 x 2 mesh": Case(
        raises_under_copies, "RankFailed", ("rank 3 raised ValueError: bad batch",), (3,), world=4
    ),
    "raise on the rank that holds the store": Case(
        partial(in_forward, {0: bad_batch}), "RankFailed", ("rank 0 raised ValueError: bad batch",), (0,)
    ),
    "raise while the others ask": Case(partial(while_asking, bad_batch), "RankFailed", BAD, world=3),
    "barrier while the others ask": Case(
        partial(while_asking, dist.barrier),
        "Diverged",
        ("ranks 0, 2 are in agree", "rank 1 is in torch.distributed.barrier"),
        world=3,
    ),
    "two ranks raise": Case(
        partial(in_forward, {1: bad_batch, 2: partial(bad_batch, 0.3)}), "RankFailed", BAD, (1, 2), world=3
    ),
    "sys.exit in forward": Case(
        partial(in_forward, {1: partial(sys.exit, 3)}), "RankFailed", ("rank 1 ended its program",)
    ),
    "data end early, program ends": Case(ends_early, "RankFailed", ("rank 1 ended its program", "lockstep")),
    "SIGKILL": Case(dies, "RankLost", ("rank 1 is lost",)),
    "SIGKILL, 4 ranks": Case(dies, "RankLost", ("rank 1 is lost",), world=4),
    "SIGKILL, collectives": Case(dies, "RankLost", ("rank 1 is lost",), transport="collectives", world=3),
    "SIGKILL of the rank that holds the store": Case(
        partial(in_forward, {0: killed}), "RankLost", ("store",), (0,)
    ),
    "SIGKILL of a rank that has called the exchange": Case(
        caller_dies, "RankLost", ("rank 2 is lost",), (2,), world=3
    ),
    "exception caught, next step, agreement strict": Case(catches, "Diverged", PLACES, culprits=()),
    **{
        f"exception caught, next step, agreement off, {each}": Case(
            partial(catches, agreement="off"),
            "Diverged",
            (*PLACES, "after ValueError: bad batch"),
            (),
            transport=each,
        )
        for each in ("collectives", "sockets")
    },
    "save on rank 0 alone": Case(saves_alone, "Diverged", (*PLACES, "save("), culprits=()),
    "backward skipped": Case(skips_backward, "Diverged", PLACES, culprits=()),
    "backward skipped, 4 ranks": Case(skips_backward, "Diverged", PLACES, culprits=(), world=4),
    "backward skipped, collectives": Case(
        skips_backward, "Diverged", PLACES, culprits=(), transport="collectives"
    ),
    "backward skipped on a 2 x 2 mesh": Case(
        diverges_under_copies, "Diverged", ("rank 3", "of pass", "faults.py:"), culprits=(), world=4
    ),
    "one microbatch more": Case(accumulates, "Diverged", PLACES, culprits=()),
    "barrier on rank 1 alone": Case(barrier_alone, "Diverged", (*PLACES, "torch.distributed.barrier")),
    "waits for its own all-reduce alone": Case(
        in_flight_alone, "Diverged", (*PLACES, "gloo:all_reduce in group default_pg")
    ),
    "all-reduces on two groups": Case(in_flight_on_two_groups, "RuntimeError", culprits=()),
    "other order, agreement off": Case(
        other_order, "Diverged", ("ranks 0, 2 launched", "rank 1 launched"), culprits=(), world=3
    ),
    "a root of its own on rank 1 alone": Case(other_root, "Diverged", PLACES, culprits=()),
    "two models in another order": Case(other_model_first, "Diverged", PLACES, culprits=()),
    "other shapes": Case(other_shapes, "Diverged", ("[8, 8]", "[16, 16]"), culprits=()),
    "sleeps for ever, stall_s=2": Case(
        partial(in_forward, {1: partial(time.sleep, 1e4)}),
        "Stalled",
        ("rank 1 has done nothing", "faults.py:"),
        culprits=(),
        policy="stall_s=2",
    ),
    "computes 3 s, stall_s=1": Case(partial(once, computes), policy="stall_s=1"),
    "compiles 3 s": Case(partial(once, partial(compiles_for, LONG_S))),
    "sleeps 3 s": Case(sleeps, policy="suspect_s=0.3"),
    "sleeps 3 s, 4 ranks": Case(sleeps, world=4),
    "loads data for 3 s": Case(loads, world=3),
    "sleeps 3 s in backward": Case(slow_backward, world=3),
    "comes 3 s late to a barrier": Case(comes_late_to_a_barrier, world=3),
    "comes 3 s late to an all-reduce in flight": Case(
        comes_late_to_what_is_in_flight, world=3, policy="suspect_s=0.3"
    ),
    "holds the GIL 3 s": Case(partial(once, holds_the_gil)),
    "stopped 3 s": Case(partial(once, stopped)),
    "stopped 3 s, collectives": Case(partial(once, stopped), transport="collectives"),
    "bytes take 3 s": Case(slow_bytes, transport="sockets"),
    "bytes take 3 s, collective_s=1": Case(
        slow_bytes,
        "Stalled",
        ("all-gather", "has not ended for 1 s", "rank", "collective_s"),
        culprits=(),
        policy="collective_s=1",
        transport="sockets",
    ),
    "nothing": Case(well, world=3),
}


def main(names: list[str]) -> None:
    """Run the faults and print what the ranks said, and after how many seconds."""
    print("| fault | said by the others | after, s | the rank itself |\n|---|---|---:|---|")
    for name in names or CASES:
        case = CASES[name]
        outcomes = run_scripts(case.world, case, case.policy, case.store)
        others = [o for rank, o in enumerate(outcomes) if rank not in case.culprits or not case.error]
        said = ", ".join(dict.fromkeys(o.error or f"nothing (exit code {o.code})" for o in others))
        own = ", ".join(dict.fromkeys(o.error or f"exit code {o.code}" for o in outcomes if o not in others))
        print(f"| {name} | {said} | {max(o.took_s for o in others):.1f} | {own} |", flush=True)
        if os.environ.get("VERBOSE"):
            for rank, o in enumerate(outcomes):
                print(f"--- rank {rank}: {o.code} {o.error} {o.took_s:.1f} s {o.threads}\n{o.stderr}")


if __name__ == "__main__":
    main(sys.argv[1:])
