"""Seconds of operations and collectives on a cluster: ``t = latency + bytes / bandwidth``. Pure.

A constant may be an array, one element for each variant: then so is every price made with it.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardwright.errors import ConfigError
from shardwright.plan.axes import ALONE, AxisSizes
from shardwright.plan.cluster import Cluster
from shardwright.plan.constants import Constants
from shardwright.plan.presets import Preset
from shardwright.plan.workload import Op, OpKind, Stretch
from shardwright.policy import DEFAULT_OFFLOAD, CPUOffloadPolicy, OffloadPolicy

Seconds = Any
"""A number, or an array of numbers."""

_EXCHANGE = OpKind.EXCHANGE

HOST_HOP = 4.0
"""Latency of a hop between hosts, in hops inside of one (NCCL's own figures: 14 us and 3.4 us)."""
LAUNCH_S = 20e-6
"""Seconds of a collective that moves nothing between two ranks."""


_UNKNOWN = (
    "what links carry {} isn't known, and was not measured: write {} (bytes/s, in one direction) into the "
    "cluster's file, or measure it: torchrun --nproc-per-node {} -m shardwright bench links --out "
    "cluster.toml{}"
)


class CollectiveCost(NamedTuple):
    """``t = latency + bytes / bandwidth``, of a collective of ``bytes`` unsharded.

    latency_s: seconds of one that moves nothing. bandwidth: bytes/s of a very large one.
    """

    latency_s: Seconds
    bandwidth: Seconds

    def seconds(self, nbytes: float) -> Seconds:
        """What a collective of so many bytes takes."""
        return self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True)
class Prices:
    """What a thing takes on a cluster, as ``preset`` runs it.

    shards: ranks that a parameter is sharded over, neighbours first. gather_itemsize, reduce_itemsize: bytes
    of an element of parameters, and of gradients, on the wire. software: factor of all compute. offload: what
    is on the host at rest. smaller_world: ranks over which shards are kept from a forward to its backward.
    axes: what ranks share besides.
    """

    cluster: Cluster
    constants: Constants
    preset: Preset
    shards: int
    gather_itemsize: int = 2
    reduce_itemsize: int = 2
    software: Seconds = 1.0
    offload: OffloadPolicy = DEFAULT_OFFLOAD
    smaller_world: int | None = None
    axes: AxisSizes = ALONE

    # ---- compute

    def op(self, op: Op) -> Seconds:
        """Seconds of one operation: what its units take in its dtype, and what its bytes take.

        Raises: ConfigError where the device's rate in that dtype isn't known.
        """
        constants, device = self.constants, self.cluster.device
        if op.kind is OpKind.MATMUL:
            reached = device.matmul * constants.matmul / (1 + constants.narrow / op.narrowest)
            return op.flops / (device.flops_in(op.dtype) * reached)
        seconds = self.copy(op.nbytes)
        if op.kind is OpKind.ATTENTION:
            reached = device.attention * constants.attention
            return seconds + op.flops / (device.flops_in(op.dtype) * reached)
        return seconds

    def compute(self, stretch: Stretch) -> Seconds:
        """Seconds of the device."""
        return self.software * sum((self.op(op) for op in stretch.ops if op.kind is not _EXCHANGE), 0.0)

    def exchanged(self, stretch: Stretch) -> Seconds:
        """Seconds in which the device waits for exchanges of the stretch."""
        return sum((self.exchange(op) for op in stretch.ops if op.kind is _EXCHANGE), 0.0)

    def launch(self, stretch: Stretch) -> Seconds:
        """Seconds of the host, which launches the kernels."""
        return self.constants.launch_s * sum(op.kernels for op in stretch.ops)

    def copy(self, nbytes: float) -> Seconds:
        """Seconds of the device to read and write ``nbytes`` in all."""
        return nbytes / (self.cluster.device.memory_bandwidth * self.constants.memory)

    def optimizer(self, numel: int) -> Seconds:
        """Seconds of a step of the parameters of a shard, on the device or where they are, on its host."""
        device = self.cluster.device
        host = isinstance(self.offload, CPUOffloadPolicy) and self.offload.shards_on_host
        return self.constants.optimizer * numel / (device.host_memory if host else device.memory_bandwidth)

    def host_copy(self, nbytes: float) -> Seconds:
        """Seconds of a copy from the device to its host, or back."""
        return nbytes / self.cluster.device.host_link

    # ---- collectives

    def gather(self, nbytes: int) -> Seconds:
        """An all-gather or a reduce-scatter of ``nbytes`` unsharded, over the ranks of the shards."""
        return self.gathering.seconds(nbytes)

    def all_reduce(self, nbytes: int) -> Seconds:
        """An all-reduce of ``nbytes`` of each shard over its copies."""
        return self.copying.seconds(nbytes)

    @cached_property
    def gathering(self) -> CollectiveCost:
        """Of all-gathers and reduce-scatters."""
        return self._over(self.shards, self.axes.tp)

    @cached_property
    def gathering_kept(self) -> CollectiveCost:
        """Of all-gathers in a backward from the smaller world."""
        return replace(self, shards=self.smaller_world or self.shards).gathering

    @cached_property
    def copying(self) -> CollectiveCost:
        """Of all-reduces over copies of shards, each of which is on another host, where there are several."""
        copies, cluster = self.axes.data_ranks(self.cluster.ranks) // self.shards, self.cluster
        if cluster.hosts == 1:
            return self._ring(copies, 1, self._inside, 2)
        return self._ring(
            copies, copies, self._between / min(self.shards * self.axes.tp, cluster.ranks_per_host), 2
        )

    def exchange(self, op: Op) -> Seconds:
        """Seconds of so many exchanges of a rank on an axis: on tp all-gathers or reduce-scatters, on cp and
        ep all-to-alls, on pp what one rank sends another."""
        ranks, apart = self.axes.place(op.axis, self.cluster.ranks)
        nbytes = op.nbytes / op.kernels / self.constants.exchange
        return op.kernels * (self.constants.exchange_s + self._exchanged(op.axis, ranks, apart, nbytes))

    def _exchanged(self, axis: str, ranks: int, apart: int, nbytes: float) -> Seconds:
        if axis == "tp":
            return self._over(ranks, apart).seconds(nbytes)
        inside, out, bandwidth = self._spread(ranks, apart)
        if axis == "pp":  # to the next rank of the axis
            hop, rate = (1.0, self._inside) if inside > 1 else (HOST_HOP, bandwidth)
            return LAUNCH_S + self.constants.hop_s * hop + nbytes / rate
        # To each rank goes an equal part: inside of the host, and through its part of the host's network.
        seconds = LAUNCH_S + self.constants.hop_s * (inside - 1 + HOST_HOP * out)
        seconds = seconds + nbytes / ranks * (inside - 1) / self._inside
        if out:
            seconds = seconds + nbytes / ranks * (ranks - inside) * inside / bandwidth
        return seconds

    def _spread(self, ranks: int, apart: int) -> tuple[int, int, Seconds]:
        """Of ranks so far apart: how many are on a host, on how many other hosts there are more, and the
        bytes/s that those of one host share; each other rank of it is in an axis of its own."""
        here = self.cluster.ranks_on_host
        inside = min(ranks, max(1, here // apart))
        out = -(-ranks // inside) - 1
        return inside, out, self._between * inside / here if out else math.inf

    def _over(self, ranks: int, apart: int) -> CollectiveCost:
        """An all-gather or a reduce-scatter over ranks so far apart."""
        inside, out, bandwidth = self._spread(ranks, apart)
        if inside > 1:
            bandwidth = 1 / (1 / self._inside + 1 / bandwidth)
        return self._ring(ranks, out + 1, bandwidth, 1)

    @property
    def _inside(self) -> float:
        """Bytes/s of rings inside a host. Raises: ConfigError where that isn't known."""
        device, ranks = self.cluster.device, self.cluster.ranks_on_host
        if ranks > 1 and not device.link_bandwidth:
            raise ConfigError(_UNKNOWN.format("inside a host", "[device] link_bandwidth", ranks, ""))
        return device.link_bandwidth * device.ring or math.inf

    @property
    def _between(self) -> Seconds:
        """Bytes/s of a collective from a host to the others. Raises: ConfigError where that isn't known."""
        if not self.cluster.network:
            on = ", on two hosts or more"
            raise ConfigError(
                _UNKNOWN.format("between hosts", "host_bandwidth", self.cluster.ranks_on_host, on)
            )
        return self.cluster.network * self.constants.wire

    def _ring(self, ranks: int, hosts: int, bandwidth: Seconds, turns: int) -> CollectiveCost:
        if ranks == 1:
            return CollectiveCost(0.0, float("inf"))
        hops = ranks - hosts + HOST_HOP * (hosts - 1)
        latency = LAUNCH_S + turns * self.constants.hop_s * hops
        return CollectiveCost(latency, bandwidth * ranks / (ranks - 1) / turns)
