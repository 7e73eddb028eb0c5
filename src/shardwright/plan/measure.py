"""A cluster as it was measured: what its devices compute and its links carry, in the terms of the prices.

All ranks measure at the same time, since ranks of one host share memory and cores, and the slowest counts.
"""

import json
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwright import clock
from shardwright.errors import ConfigError, InputError
from shardwright.options import read
from shardwright.plan.axes import AxisSizes
from shardwright.plan.cluster import Cluster, DeviceSpec
from shardwright.plan.constants import Constants
from shardwright.plan.presets import preset
from shardwright.plan.prices import HOST_HOP, LAUNCH_S, Prices
from shardwright.plan.workload import Op, OpKind
from shardwright.schedule.layout import equal_spans
from shardwright.transport.base import Comm, Gather, Segment
from shardwright.transport.channel import compare
from shardwright.transport.host_memory import total_nbytes
from shardwright.transport.mesh import comm_of, default_mesh
from shardwright.transport.streams import wait_for_device

_LONG_US = 50_000  # of one measurement; shorter ones are repeated until they take as long
_MOST_REPEATS = 10_000
_NARROW = (32, 64, 128, 256, 512, 1024)
_LINK_NBYTES = (1 << 12, 1 << 14, 1 << 20, 1 << 22, 1 << 24)
_LINK_LONG_S = 3.0  # after one that took as long no larger one is measured


class Timer(NamedTuple):
    """How long calls take on the slowest rank of ``comm``.

    share: 0.1 measures a tenth as long as 1.0 does, and less exactly.
    """

    comm: Comm
    share: float

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one call: the median of three times as many as take long enough. Every rank calls."""
        repeats, long_us = 1, int(_LONG_US * self.share)
        while True:
            taken = _us(repeats, run), _us(repeats, run), _us(repeats, run)
            (slowest,) = self.comm.host.all_reduce_words([int(median(taken))], max, "what a measurement took")
            if slowest >= long_us or repeats >= _MOST_REPEATS:
                return max(slowest, 1) / 1e6 / repeats
            repeats = min(_MOST_REPEATS, max(2 * repeats, repeats * long_us // max(slowest, 1)))


class Fit(NamedTuple):
    """``seconds = at_zero + each * x``."""

    at_zero: float
    each: float


def fitted(points: Sequence[tuple[float, float]]) -> Fit:
    """The line through ``(x, seconds)`` with the least sum of squared relative errors."""
    if len(points) == 1:
        return Fit(points[0][1], 0.0)
    x, seconds = zip(*points, strict=True)
    each, at_zero = np.polyfit(x, seconds, 1, w=[1 / one for one in seconds])
    return Fit(max(float(at_zero), 0.0), max(float(each), 0.0))


def of_first_rank(make: Callable[[], Cluster | None]) -> Cluster | None:
    """What ``make`` returns on rank 0, on every rank of the job; its ConfigError, too. Every rank calls."""
    comm, _ = _meet()
    found, fault = None, ""
    if comm.rank == 0:
        try:
            found = make()
        except ConfigError as error:
            fault = str(error)
    text = json.dumps([found and asdict(found), fault])
    told, fault = json.loads((compare(comm, text, "what rank 0 has read") or [text])[0])
    if fault:
        raise ConfigError(fault)
    return told and read(Cluster, told)


def measured_device(dtype: torch.dtype = torch.bfloat16, share: float = 1.0) -> tuple[DeviceSpec, Constants]:
    """This rank's device: the rates of matmuls, memory, attention and AdamW in ``dtype``, the slowest rank's.

    Joins the job of the launcher, if there is one; every rank of it calls. Takes some ten seconds, of which
    ``share`` is taken, the less exactly.
    The device's shares and the constants are 1 where its rates are what was reached.
    """
    comm, device = _meet()
    timer = Timer(comm, share)
    peak_flops, narrow = _matmuls(timer, device, dtype)
    source, target = (torch.empty(1 << 26, dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * source.nbytes / timer.seconds(lambda: target.copy_(source))
    small, of_host = torch.zeros(1, device=device), device.type == "cpu"
    spec = DeviceSpec(
        name=_name(device),
        peak_flops=peak_flops,
        memory_nbytes=float(total_nbytes() if of_host else torch.accelerator.get_memory_info(device)[1]),
        memory_bandwidth=bandwidth,
        link_bandwidth=0.0,
        matmul=1.0,
        attention=min(_attention(timer, device, dtype) / peak_flops, 1.0),
        ring=1.0,
        reserved=1.0 if of_host else DeviceSpec.reserved,
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]  # checked there
        source="measured",
    )
    constants = Constants(
        matmul=1.0,
        attention=1.0,
        memory=_passes(timer, device, dtype) / bandwidth,
        narrow=narrow,
        optimizer=_optimizer_s(timer, device) * bandwidth,
        wire=1.0,
        launch_s=timer.seconds(lambda: [small.add_(1) for _ in range(100)]) / 100,
        contention=0.0,
    )
    return spec, constants


def _matmuls(timer: Timer, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of very wide ones, and the width that reaches half of it."""
    wide, points = _NARROW[-1], []
    for narrow in _NARROW:
        a, b = (torch.randn(*shape, device=device).to(dtype) for shape in ((wide, narrow), (narrow, wide)))
        taken = timer.seconds(lambda a=a, b=b: a @ b)
        points.append((1 / narrow, taken / (2.0 * narrow * wide * wide)))
    fit = fitted(points)
    if not fit.at_zero:
        return 1 / min(seconds for _, seconds in points), 0.0
    return 1 / fit.at_zero, fit.each / fit.at_zero


def _passes(timer: Timer, device: torch.device, dtype: torch.dtype) -> float:
    """Bytes/s of elementwise kernels as transformers have them."""
    hidden, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((2048, 1024), (1024,)))
    passes: list[tuple[int, Callable[[], object]]] = [
        (3, lambda: hidden + hidden),
        (2, lambda: F.gelu(hidden)),
        (2, lambda: F.layer_norm(hidden, (1024,), weight, weight)),
        (2, lambda: torch.softmax(hidden, -1)),
    ]
    moved = sum(times * hidden.nbytes for times, _ in passes)
    return moved / sum(timer.seconds(run) for _, run in passes)


def _attention(timer: Timer, device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the causal one, of which half is masked."""
    heads, length, size = 8, 512, 64
    query = torch.randn(1, heads, length, size, device=device).to(dtype)
    taken = timer.seconds(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    return 2.0 * heads * length * length * size / taken


def _optimizer_s(timer: Timer, device: torch.device) -> float:
    """Seconds of AdamW for each parameter."""
    param = torch.nn.Parameter(torch.zeros(1 << 22, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], foreach=True)
    return timer.seconds(optimizer.step) / param.numel()


def measured_hosts(device: DeviceSpec, constants: Constants) -> Cluster:
    """The ranks of this job by host, and the memory of the smallest. Of the links nothing is known yet. Every
    rank of the job calls. Raises: InputError where hosts have different numbers of ranks."""
    comm, _ = _meet()
    hosts = _hosts(comm)
    sizes = {hosts.count(host) for host in hosts}
    if len(sizes) > 1:
        raise InputError(f"hosts have {sorted(sizes)} ranks; a plan is for as many on each")
    (memory,) = comm.host.all_reduce_words([total_nbytes()], min, "what a host has")
    return Cluster(device, comm.world, sizes.pop(), constants=constants, host_memory_nbytes=float(memory))


def measured_links(device: DeviceSpec, constants: Constants, share: float = 1.0) -> Cluster:
    """``measured_hosts``, with the latency and the bandwidth of all-gathers between its ranks, by the
    transport that steps take, and of all-to-alls, by torch's process group; and how much computing loses
    beside an all-gather. Every rank of the job calls.

    Of a host's ranks the link is measured among themselves, and between hosts among all; a job of one host
    says nothing of what is between hosts. share: as of ``measured_device``.
    Raises: InputError for a job of one rank, or as ``measured_hosts``.
    """
    comm, where = _meet()
    if comm.world == 1:
        raise InputError(
            "links are between ranks, and this job has 1: start one on each device, with torchrun"
        )
    found = measured_hosts(device, constants)
    cluster = replace(found, measured_hosts=found.hosts)
    ranks, per_host = cluster.ranks, cluster.ranks_per_host
    if per_host > 1:
        hosts = _hosts(comm)
        inside = comm if per_host == ranks else comm_of(_groups_of(hosts), where.type)
        within, hop_s = _link(Timer(inside, share), hops=per_host - 1)
        cluster = replace(
            cluster,
            device=replace(device, link_bandwidth=within),
            constants=replace(cluster.constants, hop_s=hop_s),
        )
    if per_host < ranks:
        hops = ranks - cluster.hosts + HOST_HOP * (cluster.hosts - 1)
        between, hop_s = _link(Timer(comm, share), hops)
        if per_host > 1:  # prices add what the way inside of a host takes
            between = 1 / max(1 / between - 1 / cluster.device.link_bandwidth, 1e-15)
        cluster = replace(cluster, host_bandwidth=between, constants=replace(cluster.constants, hop_s=hop_s))
    found = _exchange(Timer(comm, share), cluster) | {"contention": _contention(Timer(comm, share))}
    return replace(cluster, constants=replace(cluster.constants, **found))


def _exchange(timer: Timer, cluster: Cluster) -> dict[str, float]:
    """Of all-to-alls by the process group of all ranks: the share of the bandwidth of links that they reach,
    and seconds of one that moves nothing."""
    where, ranks = _device_of(timer.comm), timer.comm.world
    prices = Prices(cluster, cluster.constants, preset("shardwright"), ranks, axes=AxisSizes(cp=ranks))
    points = []
    for nbytes in _LINK_NBYTES[1:-1]:
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=where)
        received = torch.empty_like(sent)
        taken = timer.seconds(lambda r=received, s=sent: dist.all_to_all_single(r, s))
        points.append((float(nbytes), taken))
    fit = fitted(points)
    at_zero, whole = (prices.exchange(Op(OpKind.EXCHANGE, nbytes=n, axis="cp")) for n in (0.0, 1e9))
    each = fit.each or points[-1][1] / points[-1][0]
    return {"exchange": (whole - at_zero) / 1e9 / each, "exchange_s": max(fit.at_zero - at_zero, 0.0)}


def _link(timer: Timer, hops: float) -> tuple[float, float]:
    """Bytes/s that come in on a rank, and seconds for each hop."""
    points = []
    for nbytes in _LINK_NBYTES:
        gather = _gather(timer.comm, nbytes)
        taken = timer.seconds(lambda gather=gather: gather().wait())
        points.append((float(nbytes * (timer.comm.world - 1)), taken))
        if taken > _LINK_LONG_S * timer.share:
            break
    fit = fitted(points)
    # On a busy machine the larger may take no longer: then all that the largest took counts as its bytes'.
    each = fit.each or points[-1][1] / points[-1][0]
    return 1 / each, max(fit.at_zero - LAUNCH_S, 0.0) / hops


def _gather(comm: Comm, nbytes: int) -> Callable[[], Gather]:
    flat = torch.zeros(nbytes * comm.world, dtype=torch.uint8, device=_device_of(comm))
    segment = Segment(flat, equal_spans(nbytes, comm.world))
    return lambda: comm.all_gather([segment], "measure the links")


def _contention(timer: Timer) -> float:
    """Seconds that computing loses for each second of an all-gather beside it."""
    a = torch.ones(512, 512, device=_device_of(timer.comm))
    gather = _gather(timer.comm, 1 << 22)
    gather_s = timer.seconds(lambda: gather().wait())
    products = math.ceil(2 * gather_s / timer.seconds(lambda: a @ a))  # as long as two all-gathers

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, a)

    def both() -> None:
        flight = gather()
        compute()
        flight.wait()

    return max(timer.seconds(both) - timer.seconds(compute), 0.0) / gather_s


def _us(repeats: int, run: Callable[[], object]) -> float:
    wait_for_device()
    start = clock.perf_counter()
    for _ in range(repeats):
        run()
    wait_for_device()
    return 1e6 * (clock.perf_counter() - start)


def _meet() -> tuple[Comm, torch.device]:
    """The transport of all ranks, and where this one computes."""
    mesh = default_mesh()
    comm = comm_of(mesh.get_group(), mesh.device_type)
    return comm, _device_of(comm)


def _device_of(comm: Comm) -> torch.device:
    accelerator = None if comm.host is comm else torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _hosts(comm: Comm) -> list[str]:
    """The name of each rank's host."""
    own = socket.gethostname()
    return compare(comm, own, "the names of hosts") or [own] * comm.world


def _groups_of(hosts: Sequence[str]) -> dist.ProcessGroup:
    """This rank's host's ranks. Every rank makes the groups of all hosts."""
    mine, _ = dist.new_subgroups_by_enumeration(
        [[rank for rank, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)]
    )
    assert isinstance(mine, dist.ProcessGroup)  # every rank is in one of them
    return mine


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    return str(module.get_device_name(device))
