"""What agreement between ranks costs: steps with and without it, alternating in one process.

    python bench/agreement.py --world 2 --step-ms 200 60

Three copies of one model train side by side, one with ``agreement="strict"`` and two with ``"off"``, for each
length of a step (the batch is chosen for it). Prints the medians in ms and what is added, for each step
paired with its neighbours; beside it what the second copy with "off" adds to the first, which is the noise.
The same of the quickest quarter of each copy's steps, which other work on the machine has disturbed least.
Then microseconds of one exchange of as many words as the model needs, and over sockets those of a hop, beside
one way of a raw ping-pong of as many bytes over TCP between ranks 0 and 1, by turns in the same run. With no
lengths of a step (``--step-ms``) only these: between two network namespaces

    python bench/agreement.py --link 10gbit --step-ms
"""

import argparse
import copy
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout, not one installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from bench.launch import arguments, run, slowest_s
from bench.layers import build_layers, step_s
from bench.toy import add_toy
from shardwright import SchedulePolicy, fully_shard, set_transport
from shardwright.engine.step.consensus import channel_of
from shardwright.transport.channel import AxisChannel
from shardwright.transport.cpu.handshake import listen
from shardwright.transport.cpu.message import HEAD_NBYTES
from shardwright.transport.mesh import comm_of, resolve
from shardwright.transport.process import process_state

WARM_UP_STEPS = 3
NUM_EXCHANGES = 400
NUM_ROUNDS = 10
NUM_WORDS = 20


def measure(options: argparse.Namespace) -> None:
    """One rank: every length of a step; rank 0 prints the table."""
    set_transport(options.transport)
    local = build_layers(options.num, options.width)
    models = {}
    for name in ("off", "strict", "off again"):
        model = copy.deepcopy(local)
        for layer in model:
            fully_shard(layer)
        fully_shard(model).set_schedule_policy(SchedulePolicy(agreement=name.split()[0]))
        models[name] = model, torch.optim.SGD(model.parameters(), 1e-3)
    if options.rank == 0:
        print(f"{options.num} groups, world {options.world}, {options.link}, {options.transport}")
    for wanted_ms in options.step_ms:
        rows = options.rows
        for _ in range(6):  # towards the wanted length, by the step without agreement
            inputs = torch.randn(rows, options.width)
            took_ms = median(slowest_s(partial(step_s, *models["off"], inputs)) for _ in range(3)) * 1e3
            rows = max(1, int(rows * wanted_ms / took_ms))
        times: dict[str, list[float]] = {name: [] for name in models}
        for number in range(options.steps + WARM_UP_STEPS):
            for turn in range(len(models)):  # each goes first, second and last equally often
                name = list(models)[(number + turn) % len(models)]
                times[name].append(slowest_s(partial(step_s, *models[name], inputs)) * 1e3)
        off, strict, again = (times[name][WARM_UP_STEPS:] for name in models)
        if options.rank == 0:
            added = median(b - (a + c) / 2 for a, b, c in zip(off, strict, again, strict=True))
            noise = median(c - a for a, c in zip(off, again, strict=True))
            print(
                f"  {wanted_ms:5.0f} ms step: {median(off + again):.2f} without, {median(strict):.2f} with, "
                f"{added:+.3f} ms paired ({100 * added / median(off):+.2f} %); "
                f"the same twice {100 * noise / median(off):+.2f} %"
            )
            first, with_it, second = map(_quickest, (off, strict, again))
            without = (first + second) / 2
            print(
                f"        quickest quarter: {without:.2f} without, {with_it:.2f} with "
                f"({100 * (with_it / without - 1):+.2f} %); "
                f"the same twice {100 * (second / first - 1):+.2f} %"
            )
    channel = channel_of([resolve(None)])
    if channel is not None:
        _tell(options, "one exchange", _took_us(lambda: channel.exchange([1] * NUM_WORDS)))
        _measure_hops(options)


def _measure_hops(options: argparse.Namespace) -> None:
    """Microseconds of a hop over sockets, and of one way of a raw ping-pong, by turns."""
    process_state.transport = "sockets"  # also where the model's ranks share memory
    channel = AxisChannel(comm_of(dist.new_group(), "cpu"))
    num_hops = (options.world - 1).bit_length() if options.world > 4 else 1
    channel.exchange([0])  # opens connections
    raw = _raw(options.rank)
    hops: list[float] = []
    ways: list[float] = []
    for _ in range(NUM_ROUNDS):
        dist.barrier()
        hops += [us / num_hops for us in _took_us(lambda: channel.exchange([1] * NUM_WORDS))]
        dist.barrier()  # in which ranks above 1 sleep
        ways += [us / 2 for us in _took_us(raw)]
    _tell(options, f"one hop over sockets, of {num_hops}", hops)
    _tell(options, "one way of a raw ping-pong", ways)


def _raw(rank: int) -> Callable[[], None]:
    """There and back over a TCP connection between ranks 0 and 1; nothing on other ranks."""
    place: list[Any] = [None]
    if rank == 0:
        listener, own = listen()
        place = [(own.host, own.port)]
    dist.broadcast_object_list(place, 0)
    if rank > 1:
        return lambda: None
    with_peer = listener.accept()[0] if rank == 0 else socket.create_connection(place[0])
    with_peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    message = bytearray(HEAD_NBYTES + 8 * NUM_WORDS)

    def go() -> None:
        if rank == 0:
            with_peer.sendall(message)
        with_peer.recv_into(message, len(message), socket.MSG_WAITALL)
        if rank == 1:
            with_peer.sendall(message)

    return go


def _took_us(call: Callable[[], object]) -> list[float]:
    """What each of many calls takes."""
    took = []
    for _ in range(NUM_EXCHANGES):
        start = time.perf_counter()
        call()
        took.append((time.perf_counter() - start) * 1e6)
    return took


def _tell(options: argparse.Namespace, what: str, took_us: list[float]) -> None:
    if options.rank == 0:
        took_us.sort()
        p10, p95 = took_us[len(took_us) // 10], took_us[-len(took_us) // 20]
        print(f"  {what}: p10 {p10:.1f} us, median {median(took_us):.1f} us, p95 {p95:.0f} us")


def _quickest(times: list[float]) -> float:
    return median(sorted(times)[: max(1, len(times) // 4)])


def main() -> None:
    """Parse, then measure as a rank or launch the ranks."""
    parser = arguments(__doc__, limit_s=300.0)
    parser.add_argument("--transport", default="auto", help="see set_transport")
    parser.add_argument("--num", type=int, default=12, help="number of groups")
    parser.add_argument("--width", type=int, default=512, help="a group has width * (width + 1) parameters")
    parser.add_argument("--rows", type=int, default=256, help="of each rank's input, to begin with")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-ms", type=float, nargs="*", default=[200.0, 60.0])
    add_toy(parser, num=2, width=32, rows=8, steps=4, step_ms=[2.0])
    run(parser, measure, __file__)


if __name__ == "__main__":
    main()
