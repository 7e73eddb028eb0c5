"""What ``make prove-gpu`` makes of what it finds: times out of a trace, one page, no process that is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.prove_gpu import suite
from bench.prove_gpu.__main__ import TOTAL_S, Section, python_of, sections
from bench.prove_gpu.device import Device, Trace, merged
from bench.prove_gpu.page import page

ROOT = Path(__file__).resolve().parents[2]


def test_communication_is_exposed_while_nothing_else_runs_on_the_device():
    trace = Trace(kernels=[(0, 4000), (3000, 5000)], copies=[(8000, 9000)], collectives=[(2000, 12000)])
    assert trace.exposed_ms == 6.0


def test_collectives_that_run_at_once_are_counted_once():
    assert Trace([], [], [(0, 3000), (1000, 2000), (5000, 6000)]).exposed_ms == 4.0


def test_a_trace_of_a_device_is_read_from_where_the_step_begins():
    events = [
        {"name": "warm up", "cat": "kernel", "ts": 1.0, "dur": 1.0},
        {"name": "measured step", "cat": "user_annotation", "ts": 10.0, "dur": 5.0},
        {"name": "measured step", "cat": "gpu_user_annotation", "ts": 11.0, "dur": 9.0},
        {"name": "aten::mm", "cat": "cpu_op", "ts": 11.0, "dur": 2.0},
        {"name": "void cutlass::Kernel2<sm90>(Params)", "cat": "kernel", "ts": 12.0, "dur": 3.0},
        {"name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "cat": "kernel", "ts": 13, "dur": 4},
        {"name": "Memcpy DtoH (Device -> Pinned)", "cat": "gpu_memcpy", "ts": 16.0, "dur": 0.5},
        {"name": "thread_name", "ph": "M"},
    ]
    trace = Trace.of(events, ("kernel", "gpu_memcpy", "gpu_memset"))
    assert trace == Trace(kernels=[(12.0, 15.0)], copies=[(16.0, 16.5)], collectives=[(13.0, 17.0)])
    assert trace.exposed_ms == pytest.approx(1.5e-3)


def test_spans_that_touch_are_one():
    assert merged([(5, 6), (0, 2), (2, 3)]) == [(0, 3), (5, 6)]


@pytest.mark.parametrize(("count", "worlds"), [(1, [1]), (2, [2, 1]), (4, [4, 1, 2]), (8, [8, 1, 2, 4])])
def test_all_cards_come_first_then_one(count, worlds):
    assert Device("cuda", simulated=False, count=count).worlds == worlds


def test_ranks_that_share_a_card_are_on_hosts_of_their_own_for_nccl(monkeypatch):
    monkeypatch.setattr(os, "environ", {"SHARDWRIGHT_SHARE_CARD": "4", "RANK": "3", "LOCAL_RANK": "3"})
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    chosen, joined = [], []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", joined.append)
    device = Device.of("accelerator")
    assert device.worlds == [4, 1, 2] and device.join() == torch.device("cuda", 0)
    assert chosen == [0] and joined == ["cpu:gloo,cuda:nccl"]
    assert os.environ["NCCL_HOSTID"] == "rank3" and os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert "times mean nothing" in page(device, {}, [])


def test_all_sections_have_their_time_within_22_minutes():
    assert sum(section.limit_s for section in sections(simulated=False)) <= TOTAL_S < 22 * 60


def test_the_page_has_the_figures_of_one_section_and_the_error_of_another():
    good, bad = Section("one", "First", 1), Section("two", "Second", 1)
    good.tables["times"] = [{"world": 2, "ms": 3.5}, {"world": 1, "ms": 7.5}]
    bad.errors.append("alone: exit status 1\nValueError: no")
    device = Device("cpu", simulated=True, count=2)
    text = page(device, device.described(), [good, bad])
    assert f"torch: {torch.__version__}" in text
    assert "| First | passed |" in text
    assert "| Second | failed |" in text
    assert "| ms (simulated) |" in text
    assert text.index("| 1 | 7.5 |") < text.index("| 2 | 3.5 |")
    assert "ValueError: no" in text


LEAVES_A_CHILD = """
import ctypes, pathlib, subprocess, sys
from bench.prove_gpu import __main__ as prove
ctypes.CDLL(None).prctl(prove._ADOPTS_ORPHANS, 1, 0, 0, 0)
starts = '''
import subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
'''
print(prove._run(["-c", starts], pathlib.Path(sys.argv[1]), 2.0, {}))
"""


@pytest.mark.slow
def test_a_section_at_its_time_limit_is_ended_with_children_in_sessions_of_their_own(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", LEAVES_A_CHILD, str(log)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "over its time limit" in ended.stdout
    assert not Path("/proc", log.read_text().strip()).exists()


@pytest.mark.slow
def test_a_device_suite_that_hangs_is_interrupted_and_leaves_what_has_passed(tmp_path):
    tests, report = tmp_path / "test_it.py", tmp_path / "report.xml"
    tests.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", str(tests)]
    assert not suite._ended(words, dict(os.environ), 4.0)
    assert 'name="test_a"' in report.read_text()


def test_fine_tuning_runs_where_setup_bnb_has_installed_its_libraries(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert python_of("finetune", tmp_path) == sys.executable  # they are not installed
    (tmp_path / ".venv-hf").mkdir()
    (tmp_path / ".venv-hf" / ".installed").touch()
    assert python_of("finetune", tmp_path) == str(tmp_path / ".venv-hf" / "bin" / "python")
    assert python_of("losses", tmp_path) == sys.executable
    monkeypatch.setattr(sys, "prefix", "/usr")  # a Python of the user's, whose torch may be another one
    assert python_of("finetune", tmp_path) == sys.executable
