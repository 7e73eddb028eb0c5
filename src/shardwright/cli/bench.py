"""Measures the devices of this cluster, and what joins them."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.cli.arguments.bench import check_out
from shardwright.plan.cluster import Cluster
from shardwright.plan.measure import measured_device, measured_hosts, measured_links, of_first_rank


def run(known: argparse.Namespace) -> int:
    """Measure, and write the file. Raises: ConfigError, InputError."""
    path = Path(known.out)
    before = of_first_rank(lambda: _before(path, known.what))
    if known.what == "compute":
        device, constants = measured_device(getattr(torch, known.dtype))
        if before is None:
            found = measured_hosts(device, constants)
        else:
            links = before.constants
            device = replace(device, link_bandwidth=before.device.link_bandwidth)
            constants = replace(constants, hop_s=links.hop_s, contention=links.contention)
            found = replace(before, device=device, constants=constants)
    else:
        assert before is not None
        found = measured_links(before.device, before.constants)
    if dist.get_rank() == 0:
        found.save(path)
        print(told(found))
        print(f"written: {path}")
    return 0


def _before(path: Path, what: str) -> Cluster | None:
    check_out(path, what)
    return Cluster.load(path) if path.exists() else None


def measured_cluster(path: Path, dtype: torch.dtype) -> Cluster:
    """This job's ranks, briefly: links, and devices as the file has them, else measured. Every rank calls."""
    before = of_first_rank(lambda: _before(path, "compute"))
    share = 0.1  # of the time that the command of its own takes
    device, constants = measured_device(dtype, share) if before is None else (before.device, before.constants)
    if dist.get_world_size() == 1:
        return measured_hosts(device, constants)
    return measured_links(device, constants, share)


def told(cluster: Cluster) -> str:
    """A cluster in lines for people."""
    device, constants = cluster.device, cluster.constants
    inside, between = (
        f"{rate / 1e9:.3g} GB/s" if rate else "not measured"
        for rate in (device.link_bandwidth, cluster.host_bandwidth)
    )
    rows = [
        f"{cluster.ranks} x {device.name}, {cluster.ranks_per_host} in a host",
        f"matmuls        {device.peak_flops / 1e12:.3g} TFLOP/s, half of it {constants.narrow:.0f} wide",
        f"memory         {device.memory_bandwidth / 1e9:.3g} GB/s, elementwise {constants.memory:.0%} of it",
        f"links in a host {inside}, between hosts {between}, {constants.hop_s * 1e6:.0f} us a hop",
        f"computing loses {constants.contention:.2f} s for each second of a collective beside it",
    ]
    return "\n".join(rows)
