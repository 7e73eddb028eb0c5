"""``shardwright preflight`` on the ranks of a job that is well, and in namespaces with four troubles."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from shardwright.cli import main
from shardwright.plan import measure
from shardwright.plan.cluster import Cluster
from tests.ranks.nodes import hosts_of, nodes
from tests.ranks.pool import as_torchrun, free_port, run_ranks


def checked(rank, world, port, folder):
    as_torchrun(rank, world, port)
    with pytest.MonkeyPatch.context() as patch, open(f"{folder}/out{rank}", "w") as out:
        patch.setattr(sys, "stdout", out)
        patch.setattr(measure, "_LONG_US", 2000)
        patch.setattr(measure, "_LINK_NBYTES", (1 << 10, 1 << 16, 1 << 18))
        out_file = f"{folder}/cluster.toml"
        return main(
            ["preflight", "--folder", folder, "--seconds", "6", "--dtype", "float32", "--out", out_file]
        )


def test_a_job_that_is_well_is_told_in_a_page_and_written_as_the_cluster_that_plans_take(tmp_path):
    assert run_ranks(2, checked, free_port(), str(tmp_path), limit_s=60.0) == [0, 0]
    said = (tmp_path / "out0").read_text()
    assert "2 rank(s) on 1 host(s)" in said and "all is well" in said, said
    assert f"torch {torch.__version__}" in said and "in a host  2" in said
    assert "all ranks see what the others wrote" in said
    assert (tmp_path / "out1").read_text() == ""
    cluster = Cluster.load(tmp_path / "cluster.toml")
    assert (cluster.ranks, cluster.ranks_per_host) == (2, 2) and cluster.device.name.startswith("CPU")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.toml", "out0", "out1"]


def test_one_process_checks_its_own_host(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["preflight", "--folder", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["world"], said["failed"]) == (1, []) and said["hosts"]["0"]["disk"][0] > 0
    assert list(tmp_path.iterdir()) == []


def start(rank, world, node, master, folder, **more):
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    environment |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": master, "MASTER_PORT": "29417", "OMP_NUM_THREADS": "1", **more}
    words = [
        *node.prefix,
        sys.executable,
        "-m",
        "shardwright",
        "preflight",
        "--json",
        "--folder",
        str(folder),
    ]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow  # the start of four processes, and ten seconds: one of them never comes
def test_a_slow_link_an_unknown_name_a_name_of_the_loopback_and_an_old_version_are_each_named(tmp_path):
    old = tmp_path / "old" / "shardwright-0.0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: shardwright\nVersion: 0.0.1\n")
    path = os.pathsep.join([str(old.parent), os.environ.get("PYTHONPATH", "")])
    folder = tmp_path / "shared"
    with nodes(4) as made:
        names = [node.name for node in made]
        hosts_of(names[1]).write_text(f"127.0.1.1 {names[1]}\n10.79.0.1 {names[0]}\n")
        shape = f"-n {names[2]} qdisc add dev wire root tbf rate 16mbit burst 64k latency 30ms"
        subprocess.run(["tc", *shape.split()], check=True)
        masters = [names[0], names[0], names[0], "nosuchhost.invalid"]
        begin = time.monotonic()
        ranks = [
            start(rank, 4, node, masters[rank], folder, **({"PYTHONPATH": path} if rank == 2 else {}))
            for rank, node in enumerate(made)
        ]
        try:
            said = [rank.communicate(timeout=60) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        took_s = time.monotonic() - begin
    assert [rank.returncode for rank in ranks] == [1, 1, 1, 1], said
    assert "MASTER_ADDR=nosuchhost.invalid is no name that this host knows" in said[3][1]
    found = json.loads(said[0][0])
    failed = {trouble["what"]: trouble for trouble in found["failed"]}
    assert {what: trouble["ranks"] for what, trouble in failed.items()} == {
        "missing": [3],
        "name": [1],
        "versions": [2],
        "slow link": [2],
    }, found["failed"]
    assert failed["name"]["remedy"].endswith("export GLOO_SOCKET_IFNAME=wire")
    assert "shardwright 0.0.1" in failed["versions"]["text"]
    assert failed["slow link"]["text"].startswith(f"host {names[2]} sends")
    flows = {(flow[0], int(rank)): flow[1] for rank, each in found["links"].items() for flow in each["flows"]}
    assert 1e6 < flows[2, 0] < 3e6 < flows[0, 1]  # 16 Mbit/s are 2 MB/s
    assert took_s < 45  # a rank that hangs would be ended at 60; ten seconds, and the start of four processes
