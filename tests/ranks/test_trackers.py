"""The rows of a run in the real libraries, without a network: what they wrote is read back."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from shardwright.plan import estimate
from shardwright.plan.cluster import DEVICES, Cluster, device
from shardwright.recipe.config import ModelConfig
from shardwright.train.flops import flops_per_token, peak_flops
from shardwright.train.models import Transformer, flops_of
from shardwright.train.trackers import TrackedRun, tracking
from tests.ranks.pool import run_ranks
from tests.ranks.test_resume import train
from tests.ranks.test_train import RECIPE, run

NAMES = ["tensorboard", "wandb", "mlflow", "trackio"]
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe of four steps, and variables that keep each library on this host."""
    for name, value in {**OFFLINE, "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / f"{name}.py").write_text("".join(f"{name}_{i} = {i}\n" for i in range(200)))
    text = RECIPE.format(text="text").replace("every = 15", "every = 2").replace("every = 20", "every = 100")
    (tmp_path / "tiny.toml").write_text(text.replace("steps = 40", "steps = 4"))
    return tmp_path / "tiny.toml"


def follow(recipe, *jobs):
    """Train by the command, one job after another, tracked by all; the rows of the file."""
    for job in jobs:
        tracked = ["--track.to", json.dumps(NAMES), "--track.peak_tflops", "0.01", "--launch.ranks", "2"]
        code, out, err = run(recipe.parent, "--run.folder", "run", *tracked, *job)
        assert code == 0 and "gets no more rows" not in out + err, out + err
    lines = (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


READ = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator("run/tensorboard")
found.Reload()
told = {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
""",
    "mlflow": """
import os
from pathlib import Path
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow.tracking import MlflowClient
client = MlflowClient(Path("run/mlruns").resolve().as_uri())
number = client.get_experiment_by_name("shardwright").experiment_id
runs = client.search_runs([number])
assert len(runs) == 1 and runs[0].info.run_name == "run" and runs[0].info.status == "FINISHED"
assert runs[0].data.params["training.batch_size"] == "2"
key = runs[0].info.run_id
told = {n: {m.step: m.value for m in client.get_metric_history(key, n)} for n in runs[0].data.metrics}
""",
    "wandb": """
import struct
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data):  # a log as of LevelDB: in blocks of 32 KiB, a record in one part (1), or several (2, 3, 4)
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""

told, ids = {}, set()
for file in sorted(Path("run/wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
    for record in records(file.read_bytes()):
        ids |= {record.run.run_id} if record.HasField("run") else set()
        items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for key, value in items.items():
            told.setdefault(key, {})[items.get("_step", record.history.step.num)] = value
assert len(ids) == 1, ids
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
told = {}
runs = SQLiteStorage.get_runs("shardwright")
assert len(runs) == 1, runs
for row in SQLiteStorage.get_logs("shardwright", runs[0]):
    for key, value in row.items():
        told.setdefault(key, {})[row["step"]] = value
""",
}


def read(name, folder):
    """By name of a number what the tracker has for each step, as its own library reads it."""
    code = f"import json\n{READ[name]}\nprint(json.dumps({{k: list(v.items()) for k, v in told.items()}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return {key: dict(map(tuple, pairs)) for key, pairs in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
def test_every_tracker_has_the_rows_of_a_run_and_of_the_run_that_goes_on_in_it(recipe):
    for name in NAMES:
        pytest.importorskip(name)
    rows = follow(recipe, [], ["--resume", "--training.steps", "6"])
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    for name in NAMES:
        told = read(name, recipe.parent)
        for key in logged[0].keys() - {"step", "device_nbytes", "time"}:
            expected = {row["step"]: row[key] for row in logged}
            assert told[key] == pytest.approx(expected, rel=1e-6), (name, key)
        evaluated = {row["step"]: row["heldout_loss"] for row in rows if "heldout_loss" in row}
        assert told["heldout_loss"] == pytest.approx(evaluated, rel=1e-6), name


def test_a_row_has_time_tokens_speed_mfu_memory_and_what_data_and_communication_took(recipe):
    jobs = [
        ({"run.resume": "auto", "track.peak_tflops": "0.01"}, {}),
        ({"run.resume": "auto", "training.steps": "5"}, {}),
    ]
    run_ranks(2, train, str(recipe), jobs)
    rows = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row for row in rows if "loss" in row]
    assert (first["step"], first["tokens"]) == (1, 2 * 2 * 16) and (last["step"], last["tokens"]) == (5, 320)
    assert 0 < rows[-1]["time"] - first["time"] < 600 and first["lr"] > 0 and first["grad_norm"] > 0
    assert first["data_s"] > 0 and first["exposed_s"] >= 0 and first["host_nbytes"] > 50e6
    assert first["device_nbytes"] is None and last["mfu"] is None  # nobody says what a CPU could do
    blocks = 2 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 16
    needed = 6 * (blocks + 16 * 256) + 6 * 2 * 16 * 16
    assert first["mfu"] == pytest.approx(first["tokens_per_s"] * needed / (2 * 0.01e12))
    assert not (recipe.parent / "run" / "trackers.json").exists()


def test_the_flops_of_a_token_are_those_that_a_plan_counts():
    config = ModelConfig(num_layers=3, dim=64, hidden_dim=96)
    with torch.device("meta"):
        model, sample = Transformer(config), torch.empty(2, 32, dtype=torch.int64)
    planned = estimate(model, sample, Cluster(DEVICES["H100"], 1), loss=lambda logits: logits.float().sum())
    assert flops_of(config, 32) == pytest.approx(planned.model_flops / 64, rel=0.01)  # vectors are in one
    assert flops_per_token(10, 0, 0) == 40  # frozen: nothing is computed for their gradients


@pytest.mark.parametrize(
    ("printed", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67),
        ("NVIDIA A100-SXM4-40GB", torch.float32, 19.5),
        ("AMD Instinct MI300X", torch.float16, 1300),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, None),
    ],
)
def test_the_peak_of_a_device_is_in_the_dtype_that_is_trained_in(printed, dtype, tflops, monkeypatch):
    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(get_device_name=lambda: printed)
    )
    found = peak_flops("any", 0.0, dtype)
    assert found == (tflops and pytest.approx(tflops * 1e12))
    assert peak_flops("any", 2.0, dtype) == 2e12 and peak_flops("cpu", 0.0, dtype) is None
    if dtype is torch.float32:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            assert peak_flops("any", 0.0, dtype) == device(printed).peak_flops / 2
        finally:
            torch.set_float32_matmul_precision(before)


class Fails:
    """A tracker whose server is gone after the first row."""

    run_id = "7"

    def __init__(self, run):
        self.run, self.rows, self.closed = run, [], []

    def log(self, numbers, step):
        if self.rows:
            raise ConnectionError("no route to host")
        self.rows.append((step, numbers))

    def close(self, finished):
        self.closed.append(finished)


def test_a_tracker_that_fails_is_warned_of_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    made = []
    for name in ("wandb", "mlflow"):
        open_run = type(name, (Fails,), {} if name == "wandb" else {"log": lambda *_: None})
        adapter = SimpleNamespace(open_run=lambda run, make=open_run: made.append(make(run)) or made[-1])
        monkeypatch.setitem(sys.modules, f"shardwright.train.trackers.{name}", adapter)
    tracked = TrackedRun(tmp_path, "shardwright", {})
    with pytest.raises(KeyError), tracking(["wandb", "mlflow"], tracked) as track:
        for step in (1, 2, 3):
            track({"step": step, "loss": 2.0, "mfu": None})
        raise KeyError("the run fails")
    assert made[0].rows == [(1, {"loss": 2.0})] and made[0].closed == [] and made[1].closed == [False]
    warned = (
        "wandb gets no more rows of this run, which are in metrics.jsonl: ConnectionError('no route to host')"
    )
    assert caplog.messages == [warned]
    with tracking(["mlflow"], replace(tracked, step=3)):
        assert made[2].run.run_id == "7"
