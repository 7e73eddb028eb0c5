"""The whole bench, once, on a tiny model over loopback."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from bench import links
from bench.links import PREFIX, LinkError, Place, places
from bench.model import Size
from bench.rank import Job
from bench.step import RankError, Ranks

ROOT = Path(__file__).parents[2]
SIZES = {"layers": 2, "width": 64, "vocab": 256, "sequence": 32, "batch": 2, "blocks": 1, "steps": 1}
TINY = [f"--{option}={value}" for option, value in SIZES.items()]


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_the_bench_measures_a_tiny_model_end_to_end(tmp_path):
    out = tmp_path / "out.json"
    systems = "fsdp2,shardwright,deepspeed"
    words = [sys.executable, "bench/step.py", *TINY, "--systems", systems, "--out", str(out)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    fsdp2, ours = result["rows"][:2]
    full_mib = 4 * (2 * 12 * 64**2 + (2 * 256 + 32) * 64 + 5 * 2 * 64) / 2**20
    assert all(row[key] > 0 for row in (fsdp2, ours) for key in ("step_ms", "ratio", "peak_mib"))
    # FSDP2: two gathers of half the model, less the root's second, and an all-reduce; headers on top of it.
    assert 1.5 < fsdp2["sent_mib"] / full_mib < 2.5
    assert ours["sent_mib"] < fsdp2["sent_mib"]
    assert fsdp2["losses"] == pytest.approx(ours["losses"], rel=1e-4) and len(ours["losses"]) > 2
    assert result["machine"]["cores"] == os.cpu_count()
    if importlib.util.find_spec("deepspeed") is None:
        assert "deepspeed: skipped: the package deepspeed is not installed" in done.stdout


def toy(script, limit_s=60):
    """What a bench prints at toy size, started as a user starts it; it must end well."""
    words = [sys.executable, f"bench/{script}", "--toy"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_bench_of_publishing_prints_a_row_for_each_rate():
    *_, row = toy("publish.py", limit_s=200).splitlines()
    assert [float(cell.strip(" %")) > 0 for cell in row.split("|")[1:-1]] == [True] * 7


@pytest.mark.slow
def test_the_bench_of_meshes_prints_a_step_of_eight_mixes_beside_its_prediction():
    row = r"^(\w+=2(?: x \w+=2)*) +measured +\S+ ms, predicted +\S+ \(\S+%\)$"
    assert len(set(re.findall(row, toy("meshes.py", limit_s=300), re.MULTILINE))) == 8


@pytest.mark.slow
def test_the_bench_of_mixed_ranks_prints_their_speeds_alone_and_together():
    alone = r"rank \d alone: [\d.]+ samples/s, on [\d.]+ cores\n"
    assert re.search(
        rf"{alone}{alone}together: [\d.]+ samples/s, [\d.]+ of the sum; at most", toy("mixed.py")
    )


@pytest.mark.slow
def test_the_bench_of_entropy_prints_a_row_for_each_class_of_tensors_and_for_each_coder():
    printed = toy("entropy.py")
    for run in ("from scratch, 1e-3", "fine-tune, 1e-3"):
        for kind in ("embedding", "norm", "matrix"):
            assert all(f"| {run} | {step} | {kind} | " in printed for step in (2, 3))
    assert "| coder | of | bits |" in printed
    if importlib.util.find_spec("zstandard") is not None:
        assert all(f"| zstd 1, shuffle | {what} | " in printed for what in ("differences", "gradients"))


@pytest.mark.slow
def test_the_bench_of_checksums_prints_the_share_of_messages_and_of_memory():
    shares = re.findall(
        r"^(\S+).*: \S+ ms of CPU time a step, (\S+)% of it$", toy("checksums.py"), re.MULTILINE
    )
    assert [what for what, _ in shares] == ["messages", "memory"]
    assert all(0 < float(share) < 50 for _, share in shares)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="the extra wire isn't installed")
def test_the_bench_of_differences_compares_bit_for_bit_at_each_rate_and_sends_fewer_bytes():
    line = r"lr (\S+): 6 steps .* equal bit for bit; MiB a step (\S+) plain, (\S+) diff"
    found = re.findall(line, toy("difference.py"))
    assert [rate for rate, _, _ in found] == ["0.001", "0.0001", "1e-05"]
    assert all(float(fewer) < 0.6 * float(plain) for _, plain, fewer in found)


@pytest.mark.slow
def test_the_bench_of_muon_counts_that_owners_send_nothing_and_compute_nothing_twice():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in toy("muon.py").splitlines()[-6:]]
    sent, flops, busiest, losses = ({row[0]: float(row[n]) for row in rows[:-1]} for n in (5, 6, 7, 8))
    assert (sent["owner-muon"], flops["owner-muon"], busiest["owner-muon"]) == (0, 1, 0.5)
    assert all(sent[name] > 0 and flops[name] == 2 for name in ("rows-gathering", "fsdp2-gathering"))
    assert sent["fsdp2-torch"] > sent["fsdp2-gathering"]
    muons = [loss for name, loss in losses.items() if name != "rows-adamw"]
    assert muons == pytest.approx(muons[:1] * 4, abs=1e-4)
    assert rows[-1][0] == "bound" and all(float(row[1]) > 0 < float(row[3]) for row in rows)


def job(tmp_path: Path, system: str) -> Job:
    return Job("solo", system, 0, 1, "lo", 1, 1, 1, False, str(tmp_path), Size(1, 64, 64, 8, 1))


def test_a_failing_rank_shows_its_traceback_and_one_that_hangs_is_ended(tmp_path):
    with Ranks([Place((), "lo", 1)]) as ranks:
        with pytest.raises(RankError, match=r"rank 0 ended with an error:\n(.*\n)*KeyError: 'no-such'"):
            ranks.perform([job(tmp_path, "no-such")], limit_s=60)
        assert ranks.perform([job(tmp_path, "local")], limit_s=60)[0]["peak_nbytes"] > 0
        with pytest.raises(RankError, match=r"rank 0 ran past 0.01 s \(--limit-s\)"):
            ranks.perform([job(tmp_path, "local")], limit_s=0.01)
    assert ranks.processes[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("world", [2, 3])
def test_a_shaped_link_is_made_and_removed_also_after_an_error(world):
    try:
        with places("1gbit", world) as homes:
            mine = f"{PREFIX}-{os.getpid()}-"
            assert namespaces().count(mine) == (2 if world == 2 else world + 1)
            words = [*homes[0].prefix, "tc", "qdisc", "show", "dev", homes[0].interface]
            shaped = subprocess.run(words, capture_output=True, text=True)
            assert "tbf" in shaped.stdout and "rate 1Gbit" in shaped.stdout
            ping = [*homes[0].prefix, "ip", "-brief", "addr", "show", "up"]
            assert "10.77.0.1/24" in subprocess.run(ping, capture_output=True, text=True).stdout
            raise KeyboardInterrupt
    except LinkError as error:
        pytest.skip(f"no namespaces here: {error}")
    except KeyboardInterrupt:
        pass
    assert f"{PREFIX}-{os.getpid()}-" not in namespaces()


@pytest.mark.skipif(
    bool(links._lacking()) or not links._can_make_namespaces(), reason="needs root and iproute2"
)
def test_a_delay_that_the_kernel_cannot_make_is_refused_and_leaves_nothing(monkeypatch):
    def without_netem(home, device, *words):
        if "netem" in words:
            raise LinkError("Specified qdisc kind is unknown.")

    monkeypatch.setattr(links, "_tc", without_netem)
    refused = pytest.raises(LinkError, match="needs the kernel's netem queue")
    with refused, places("1gbit+0.5ms", 2):
        pass
    assert f"{PREFIX}-{os.getpid()}-" not in namespaces()


@pytest.mark.slow
@pytest.mark.parametrize("num_started", [1, 2])
def test_ending_the_bench_early_leaves_nothing_behind(num_started):
    words = [sys.executable, "bench/step.py", *TINY, "--blocks", "100000", "--systems", "ddp"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # A shell lets what it starts in the background ignore SIGINT, and that is inherited.
    hearing = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    bench = subprocess.Popen(words, cwd=ROOT, preexec_fn=hearing, **silent)
    try:
        deadline = time.monotonic() + 30
        while len(children(bench.pid)) < num_started and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks = children(bench.pid)
        assert ranks
        bench.send_signal(signal.SIGINT)
        assert bench.wait(20) == 130
    finally:
        bench.kill()
        bench.wait()
    # A rank that was just being started is not known yet: it ends by itself, when its input does.
    deadline = time.monotonic() + 30
    while any(Path("/proc", str(pid)).exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path("/proc", str(pid)).exists() for pid in ranks)
    assert f"{PREFIX}-{bench.pid}-" not in namespaces()


@pytest.mark.slow
def test_a_bench_that_is_killed_takes_its_ranks_and_their_jobs_along():
    words = [sys.executable, "bench/step.py", *TINY, "--blocks", "100000", "--systems", "ddp"]
    bench = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    measuring: list[int] = []
    try:
        deadline = time.monotonic() + 90
        while len(measuring) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            measuring = [job for rank in children(bench.pid) for job in children(rank)]
        ranks = children(bench.pid)
        assert len(measuring) == 2
    finally:
        bench.kill()
        bench.wait()
    deadline = time.monotonic() + 30
    while any(Path("/proc", str(pid)).exists() for pid in ranks + measuring) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path("/proc", str(pid)).exists() for pid in ranks + measuring)
    links._remove_leftovers()  # as the next bench does
    assert f"{PREFIX}-{bench.pid}-" not in namespaces()


def children(pid: int) -> list[int]:
    """Process ids of the ranks that the bench has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    commands = [int(word) for word in found.read_text().split()] if found.exists() else []
    return [c for c in commands if b"bench/rank.py" in Path(f"/proc/{c}/cmdline").read_bytes()]
