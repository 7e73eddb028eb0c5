"""``shardwright bench``: a cluster that is measured is one that plans take."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from bench.model import Size, Transformer
from shardwright import MixedPrecisionPolicy
from shardwright.cli import main
from shardwright.plan import Choice, estimate, measure
from shardwright.plan.cluster import DEVICES, Cluster
from shardwright.plan.measure import fitted
from tests.ranks.pool import as_torchrun, free_port, run_ranks


def test_a_line_is_fitted_through_its_points_and_never_falls():
    assert fitted([(x, 3e-6 + 2e-9 * x) for x in (0.0, 10.0, 1e4, 1e7)]) == pytest.approx((3e-6, 2e-9))
    assert fitted([(1.0, 2.0), (2.0, 1.0)]).each == 0.0


def test_a_link_on_which_more_bytes_took_less_time_has_a_bandwidth_that_a_file_can_hold(monkeypatch):
    monkeypatch.setattr(measure, "_gather", lambda *_: None)
    taken = iter([2.0, 2.0, 1.0, 1.0, 0.5])
    timer = SimpleNamespace(comm=SimpleNamespace(world=2), share=1.0, seconds=lambda _: next(taken))
    assert measure._link(timer, hops=1)[0] == measure._LINK_NBYTES[-1] / 0.5


def measured(rank, world, port, path):
    as_torchrun(rank, world, port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_LONG_US", 200)
        patch.setattr(measure, "_NARROW", (32, 128))
        patch.setattr(measure, "_LINK_NBYTES", (1 << 10, 1 << 16, 1 << 18))
        codes = [main(["bench", "compute", "--dtype", "float32", "--out", path])]
        assert rank or not Cluster.load(path).device.link_bandwidth  # others needn't see it
        codes.append(main(["bench", "links", "--dtype", "float32", "--out", path]))
        before = Cluster.load(path) if rank == 0 else None
        codes.append(main(["bench", "compute", "--out", path]))
    return codes, before, None if rank else Cluster.load(path)


def test_ranks_measure_their_devices_and_links_together_into_a_file_that_an_estimate_takes(tmp_path):
    path = tmp_path / "cluster.toml"
    (codes, links, again), (others, _, _) = run_ranks(2, measured, free_port(), str(path), limit_s=120.0)
    assert codes == others == [0, 0, 0]
    assert (links.ranks, links.ranks_per_host, links.hosts) == (2, 2, 1)
    assert links.device.name.startswith("CPU")
    assert links.device.peak_flops > 0 and 0 < links.device.link_bandwidth != links.device.memory_bandwidth
    assert (links.host_bandwidth, links.measured_hosts) == (0, 1)  # nothing is between hosts here
    assert 0 < links.host_memory_nbytes == links.device.memory_nbytes == 2 * links.memory_nbytes
    # Measured once more, a device keeps its links.
    kept = [(c.device.link_bandwidth, c.constants.hop_s, c.constants.contention) for c in (links, again)]
    assert kept[0] == kept[1] and links.device.memory_bandwidth != again.device.memory_bandwidth
    with torch.device("meta"):
        model, sample = Transformer(Size(layers=2, width=64)), torch.empty(2, 17, dtype=torch.int64)
    ours, theirs = (
        estimate(model, sample, each, Choice(mp_policy=MixedPrecisionPolicy())).timeline
        for each in (links, Cluster(DEVICES["H100"], 2))
    )
    assert (links.device.dtype, again.device.dtype) == ("float32", "bfloat16")
    assert links.device.source == again.device.source == "measured"
    assert ours.compute_s > theirs.compute_s > 0


def alone(rank, world, port, path):
    as_torchrun(rank, world, port)
    Cluster(DEVICES["H100"], 8).save(path)
    sys.stderr = open(f"{path}.log", "w")  # noqa: SIM115
    return main(["bench", "links", "--out", path])


def refused(rank, world, port, folder):
    as_torchrun(rank, world, port)
    os.mkdir(f"{folder}/{rank}")
    sys.stderr = open(f"{folder}/{rank}/log", "w")  # noqa: SIM115
    if rank:  # a file of its own, and none on rank 0: hosts needn't share a file system
        Cluster(DEVICES["H100"], 8).save(f"{folder}/{rank}/cluster.toml")
    return main(["bench", "links", "--out", f"{folder}/{rank}/cluster.toml"])


def test_a_file_that_rank_0_lacks_is_an_error_on_all_ranks(tmp_path):
    assert run_ranks(2, refused, free_port(), str(tmp_path)) == [2, 2]
    for rank in range(2):
        assert "first shardwright bench compute --out" in (tmp_path / str(rank) / "log").read_text()


def test_links_are_measured_between_two_ranks_or_more(tmp_path):
    path = tmp_path / "cluster.toml"
    assert run_ranks(1, alone, free_port(), str(path)) == [1]
    assert "links are between ranks, and this job has 1" in (tmp_path / "cluster.toml.log").read_text()
    assert Cluster.load(path) == Cluster(DEVICES["H100"], 8)


def test_what_was_measured_goes_through_its_file_and_a_word_that_is_none_is_told(tmp_path):
    path = tmp_path / "cluster.toml"
    cluster = Cluster(DEVICES["H100"], 8, constants=measure.Constants(hop_s=0.0, memory=0.5))
    cluster.save(path)
    assert Cluster.load(path) == cluster
    path.write_text(path.read_text() + "speed = 3\n")
    with pytest.raises(Exception, match=r"\[constants\] speed is unknown; known: matmul, "):
        Cluster.load(path)
