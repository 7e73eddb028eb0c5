"""Whole runs of ``shardwright train``, on ranks that it starts itself, and what they leave behind."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shardwright.cli import VERBS, main
from shardwright.data.text import heldout_windows, read_corpus
from shardwright.errors import DataError
from shardwright.observe.steps.rings import load
from shardwright.plan.file import Plan, PlannedGroup
from shardwright.policy import SchedulePolicy
from shardwright.train.eager import heldout_loss
from shardwright.train.models import Transformer
from shardwright.train.sample import load_run

LIMIT_S = 120.0
RECIPE = """
[data]
path = "{text}"
[model]
num_layers = 2
dim = 16
num_heads = 2
hidden_dim = 24
dropout = 0.1
[training]
steps = 40
batch_size = 2
sequence_length = 16
log_every = 1
[heldout]
every = 20
num_windows = 5
[checkpoint]
every = 15
[sample]
num_bytes = 20
[schedule]
bucket_cap_mb = 0.0  # else all of so small a model is gathered at once
[launch]
timeout_s = 30.0
"""
BREAK = """
import os
if os.environ.get("RANK") == "1":
    from shardwright.train import eager

    def broken(config, step, steps):
        if step == 3:
            raise RuntimeError("broken on purpose")
        return 1e-3

    eager.learning_rate = broken
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe and a corpus of a few files."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").mkdir()
    for i in range(6):
        lines = (f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(100))
        (folder / "text" / f"{i}.py").write_text("\n".join(lines))
    (folder / "tiny.toml").write_text(RECIPE.format(text=folder / "text"))
    return folder


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def start(place, *arguments, module=("shardwright",), **environment):
    command = [sys.executable, "-m", *module, "train", "tiny.toml", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, cwd=place, env=env, **PIPES)


def run(place, *arguments, **options):
    """(exit code, stdout, stderr) of a run."""
    process = start(place, *arguments, **options)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def succeeded(*arguments, **options):
    """(stdout, stderr) of a run that ends well."""
    code, out, err = run(*arguments, **options)
    assert code == 0, err
    return out, err


def rows(folder, *keys):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [tuple(row.get(key) for key in keys) for row in lines]


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.02)
    return found


def wait_for_steps(folder, count):
    metrics = folder / "metrics.jsonl"

    def are_written():
        return metrics.exists() and metrics.read_text().count("\n") >= count

    wait_for(are_written, f"{count} steps in {folder}")


def ranks_of(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def whole(place):
    """The folder of an uninterrupted run on two ranks, which the others are compared with."""
    out, _ = succeeded(place)
    assert re.search(r"^step \d+/40  loss \d+\.\d+, .* s left$", out, re.MULTILINE), out
    return place / "runs" / "tiny", out


def test_a_run_that_has_ended_left_the_last_steps_of_its_ranks(whole, tmp_path):
    assert main(["trace", str(whole[0]), "--out", str(tmp_path), "--steps", "3"]) == 0
    assert {"trace.html", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
    text = (tmp_path / "trace.html").read_text()
    assert "Steps 38 to 40 on 2 ranks" in text
    assert all(name in text for name in ('"data"', '"optimizer"', "forward of blocks.1"))


@pytest.fixture(scope="module")
def undropped(place):
    """The folder of a run on two ranks without dropout: its numbers don't depend on who takes which rows."""
    succeeded(place, "--run.folder", "undropped", "--model.dropout=0")
    return place / "undropped"


def check_files(folder, ranks):
    """Every file is there with its keys, and the model file alone gives the held-out loss of the run."""
    names = {"config.toml", "metrics.jsonl", "summary.json", "model.safetensors"}
    names |= {"checkpoint", "trace", ".lock"}
    # Where a rank was late, as on a busy machine, there is one file more.
    assert {path.name for path in folder.iterdir()} - {"late.jsonl"} == names
    assert [step for step, loss in rows(folder, "step", "loss") if loss is not None] == list(range(1, 41))
    assert all(None not in row for row in rows(folder, "step", "lr", "grad_norm", "tokens_per_s") if row[1])
    assert [step for step, loss in rows(folder, "step", "heldout_loss") if loss is not None] == [20, 40]
    summary = json.loads((folder / "summary.json").read_text())
    full = summary["full_nbytes"]
    assert full == 4 * summary["parameters"]
    assert full / ranks <= summary["at_rest_nbytes"] <= 1.1 * full / ranks
    assert summary["tokens_per_s"] > 0
    assert summary["ranks"] == ranks
    hidden = summary["communication_hidden_share"]
    assert hidden is None if ranks == 1 else 0 <= hidden <= 1
    share = summary["communication_share_of_step"]
    assert share is None if ranks == 1 else 0 < share < 1
    resolved, model = load_run(folder)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == shapes  # noqa: SIM118
        assert all(torch.isfinite(file.get_tensor(name)).all() for name in shapes)
    corpus = read_corpus(resolved.recipe.data)
    windows = heldout_windows(corpus.heldout, 16, resolved.recipe.heldout.num_windows)
    return summary, heldout_loss(model, windows, batch_size=4)


def test_two_ranks_leave_every_file_and_a_whole_model(place, whole):
    folder, out = whole
    summary, loss = check_files(folder, ranks=2)
    assert loss == pytest.approx(summary["heldout_loss"], abs=1e-5)
    assert loss < 5.5  # it has learned something: ln 256 = 5.545
    assert summary["peak_unsharded_nbytes"] < summary["full_nbytes"]
    assert summary["peak_nbytes"] == pytest.approx(summary["expected_peak_nbytes"], rel=0.2)
    assert summary["peak_process_nbytes"] > 100 << 20  # torch alone takes more
    shown = ["parameters", "at rest, per rank", "peak unsharded", "expected peak of memory"]
    for words in (*shown, "tokens/s", "hidden", "held-out loss"):
        assert words in out
    assert f"{summary['unigram_entropy']:.3f} nats per byte" in out
    assert "20 bytes that the model writes" in out


BY_OTHERS = {
    "train": "docs/start.md, by test_docs.py",
    "chat": "docs/serving.md, by tests/hf/test_docs.py",
    "merge": "docs/serving.md, by tests/hf/test_docs.py",
    "bench": "test_bench_command.py",
    "preflight": "test_preflight.py",
    "top": "test_top_shows_a_healthy_run_as_running_and_ends_with_it",
}
"""Commands whose examples need a job that runs, another environment, or seconds; and what runs them."""


def test_the_first_example_of_each_commands_help_runs_as_it_stands(whole, tmp_path, monkeypatch, capsys):
    for name in ("quickstart", "first", "second"):
        shutil.copytree(whole[0], tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    actions = ("inspect", "verify", "diff", "convert", "consolidate")
    commands = [[verb] for verb in VERBS if verb not in BY_OTHERS]
    commands += [["checkpoint", each] for each in actions]
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--help"])
        example = re.search(r"^examples?:\n  (.*)", capsys.readouterr().out, re.MULTILINE)[1]
        words, _, _ = example.partition(" > ")
        assert words.startswith(f"shardwright {' '.join(command)}")
        assert main(shlex.split(words)[1:]) == 0, example
        assert capsys.readouterr().out, example
    assert {"models", "trace", "weights", "mine.toml"} <= {path.name for path in tmp_path.iterdir()}


def test_the_consolidated_checkpoint_gives_the_same_heldout_loss_in_plain_pytorch(place, whole):
    folder, out = whole[0], place / "consolidated"
    command = [sys.executable, "-m", "shardwright", "checkpoint", "consolidate"]
    subprocess.run([*command, folder / "checkpoint" / "step-000040", out], check=True, capture_output=True)
    resolved, _ = load_run(folder)
    plain = Transformer(resolved.recipe.model)
    plain.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    windows = heldout_windows(read_corpus(resolved.recipe.data).heldout, 16, 5)
    loss = heldout_loss(plain.eval(), windows, batch_size=4)
    summary = json.loads((folder / "summary.json").read_text())
    assert loss == pytest.approx(summary["heldout_loss"], abs=1e-5)


@pytest.mark.slow
def test_one_rank_trains_too_from_the_same_weights_and_prints_objects(place, whole):
    options = ("--launch.ranks", "1", "--training.batch_size", "4", "--run.folder", "one")
    out, err = succeeded(place, *options, "--json")
    *printed, last = map(json.loads, out.splitlines())
    assert printed == list(map(json.loads, (place / "one" / "metrics.jsonl").read_text().splitlines()))
    assert last == json.loads((place / "one" / "summary.json").read_text())
    assert "corpus: " in err and "20 bytes that the model writes" not in err
    summary, loss = check_files(place / "one", ranks=1)
    assert loss == pytest.approx(summary["heldout_loss"], abs=1e-5)
    first, one = rows(whole[0], "loss")[0][0], rows(place / "one", "loss")[0][0]
    assert one == pytest.approx(first, abs=5e-3)  # the same bytes; only what dropout leaves out differs


@pytest.mark.slow
def test_a_recipe_with_a_plan_gives_the_same_numbers_and_shows_what_was_predicted(place, whole):
    groups = (PlannedGroup(("embedding",)), PlannedGroup(("blocks.0", "blocks.1")))
    plan = Plan(2, 1, groups, 1, 32, ("blocks.0",), SchedulePolicy(depth=2), step_s=1000.0, exposed_s=999.9)
    plan.save(place / "plan.toml")
    options = ("--training.plan=plan.toml", "--run.folder=planned", "--schedule.bucket_cap_mb=1.0")
    out, _ = succeeded(place, *options, "--training.steps=15")
    first, planned = rows(whole[0], "loss")[0], rows(place / "planned", "loss")
    assert planned[0] == first
    summary = json.loads((place / "planned" / "summary.json").read_text())
    assert summary["at_rest_nbytes"] == summary["full_nbytes"]  # the plan has a copy on each rank
    predicted = summary["predicted"]
    assert (predicted["step_s"], predicted["exposed_s"]) == (1000.0, 999.9)
    assert 0 <= predicted["measured_exposed_s"] < predicted["measured_step_s"] < 10
    assert f"1000 s; measured {predicted['measured_step_s']:.4g} s" in out
    flat, off = " ".join(out.split()), r"most of the difference\W+exposed communication, -[\d.]+ s"
    assert re.search(rf"step 3 predicted step: 1000 s; measured [\d.e-]+ s; {off}", flat)
    assert len(re.findall(off, flat)) == 2  # there and in the summary


@pytest.mark.slow
def test_bf16_tied_recomputed_and_accumulated_under_torchrun(place):
    """The other half of the options, on ranks that somebody else started.

    The file holds the fp32 weights and the run evaluated in bf16 (8 bits of mantissa: 0.4 % per value, which
    the mean over thousands of bytes makes smaller), hence 1e-2 of a loss of about 5.
    """
    options = ("--training.dtype=bf16", "--model.tied_embedding=true", "--training.accumulation=2")
    recomputed = ("--training.activation_checkpointing=true", "--training.offload_activations=true")
    more = (*recomputed, "--run.folder=other")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardwright")
    succeeded(place, *options, *more, module=torchrun)
    summary, loss = check_files(place / "other", ranks=2)
    assert loss == pytest.approx(summary["heldout_loss"], abs=1e-2)
    with safe_open(place / "other" / "model.safetensors", framework="pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_top_shows_a_healthy_run_as_running_and_ends_with_it(place, json):
    process = start(place, "--run.folder", "shown", "--training.steps=100000", "--heldout.every=100000")
    try:
        wait_for_steps(place / "shown", 3)
        pattern = r"^running: step \d+ of 100000, loss [\d.]+, [\d,]+ tokens/s; memory of the largest rank: "
        command = [sys.executable, "-m", "shardwright", "top", "shown", "--once"]

        def shown():  # a busy machine may hold up a rank for longer than is called healthy
            out = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=LIMIT_S).stdout
            return re.search(pattern, out) and "of the host" in out

        wait_for(shown, "a table that says how far the run is")
        words = [sys.executable, "-m", "shardwright", "top", "shown", *json]
        following = subprocess.Popen(words, cwd=place, **PIPES)
        assert following.stdout is not None
        following.stdout.readline()  # it looks again and again, also where nobody sees a terminal
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    out, err = following.communicate(timeout=LIMIT_S)
    assert following.returncode == 0, err
    assert (err if json else out).rstrip().endswith("the job at shown has ended")


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_twice_is_bit_equal_to_one_that_was_not(place, whole):
    folder = place / "stopped"
    stops = [(3, signal.SIGINT, ()), (20, signal.SIGTERM, ("--resume",))]
    for count, number, options in stops:
        process = start(place, "--run.folder", folder.name, *options)
        wait_for_steps(folder, count)
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert "which is saved" in out
        assert "Traceback" not in err
        assert not (folder / "summary.json").exists()
        assert len(rows(folder, "step")) < len(rows(whole[0], "step"))
    out, _ = succeeded(place, "--run.folder", folder.name, "--resume")
    assert "goes on after step" in out
    keys = ("step", "loss", "lr", "grad_norm", "heldout_loss")
    assert rows(folder, *keys) == rows(whole[0], *keys)
    assert (folder / "model.safetensors").read_bytes() == (whole[0] / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_goes_on_with_the_same_global_batches_on_another_number_of_ranks(place, undropped, ranks):
    """From the last checkpoint that is whole; the newer one, which isn't, is in nobody's way."""
    folder = place / f"on{ranks}"
    shutil.copytree(undropped, folder)
    os.truncate(folder / "checkpoint" / "step-000040" / "shard-00001.safetensors", 100)
    options = ("--run.folder", folder.name, "--model.dropout=0", f"--launch.ranks={ranks}")
    out, _ = succeeded(place, *options, "--resume")
    assert "passed over a newer checkpoint: step-000040" in out
    assert "goes on after step 30 of 40" in out
    assert "= 4 sequences of up to 16" in out
    both = (rows(each, "step", "loss") for each in (folder, undropped))
    for (step, loss), (other, expected) in zip(*both, strict=True):
        assert step == other
        assert loss == (expected if expected is None else pytest.approx(expected, abs=1e-5)), step
    names = {path.name for path in (folder / "checkpoint").glob("*step-000040*")}
    assert names == {"step-000040", "damaged-step-000040"}


@pytest.mark.slow
def test_ranks_save_and_leave_when_the_launcher_is_killed(place):
    folder = place / "orphaned"
    process = start(place, "--run.folder", folder.name, "--training.steps=100000")
    wait_for_steps(folder, 3)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    process.communicate(timeout=LIMIT_S)
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), f"ranks {ranks} to leave")
    assert list((folder / "checkpoint").glob("step-*"))


@pytest.mark.slow
def test_a_rank_that_raises_is_shown_first_and_once_and_ends_all(place, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BREAK)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, _, err = run(place, "--run.folder", "broken", PYTHONPATH=path)
    assert code == 1
    assert err.startswith("shardwright: rank 1 of 2 failed:\nTraceback")
    assert err.count("Traceback") == 1
    assert "RuntimeError: broken on purpose\n" in err
    assert err.rstrip().endswith("all ranks have ended")
    assert [ring.rank for ring in load(place / "broken" / "trace")] == [0, 1]


def test_a_rank_that_is_killed_ends_all_within_seconds(place):
    folder = place / "killed"
    process = start(place, "--run.folder", folder.name, "--training.steps=100000")
    wait_for_steps(folder, 3)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    started = time.monotonic()
    _, err = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - started < 15
    assert process.returncode == 1
    assert "rank 1 of 2 failed: was ended by signal 9 (SIGKILL)" in err
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.slow
def test_a_run_by_muon_learns_and_resumes_to_the_same_bits(place):
    options = ("--optimizer.kind", "muon", "--optimizer.lr", "0.02", "--launch.ranks", "2", "--run.folder")
    succeeded(place, *options, "muon")
    losses = [loss for (loss,) in rows(place / "muon", "loss") if loss]
    assert losses[-1] < losses[0] - 1
    weights = (place / "muon" / "model.safetensors").read_bytes()
    succeeded(place, *options, "muon", "--resume", "30")
    assert (place / "muon" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_resuming_what_is_not_there_or_another_run_says_so(place, whole):
    code, _, err = run(place, "--resume", "--run.folder", "nosuch")
    assert (code, err.count("\n")) == (1, 1)
    assert "nosuch has no checkpoint to go on from: start without --resume" in err
    code, _, err = run(place, "--resume", "--run.seed", "7", "--training.steps", "50")
    assert code == 1
    assert "run.seed: was 0, is 7" in err


@pytest.mark.slow
def test_bad_data_is_one_clear_error(place, whole):
    (place / "empty").mkdir()
    code, _, err = run(place, "--data.path", "empty", "--run.folder", "bad")
    assert (code, err.count("\n")) == (1, 1)
    assert "data.path = 'empty': found no text files; point it at text files" in err
    assert not (place / "bad").exists()
    with pytest.raises(DataError, match="no such file or folder"):
        read_corpus(load_run(place / "runs" / "tiny")[0].recipe.data.model_copy(update={"path": "nosuch"}))


@pytest.mark.slow
def test_a_second_run_moves_the_first_aside(place, whole):
    before = (whole[0] / "metrics.jsonl").read_text()
    out, _ = succeeded(place, "--training.steps", "1")
    assert "is now in runs/tiny.1" in out, out
    assert (place / "runs" / "tiny.1" / "metrics.jsonl").read_text() == before


def test_the_xla_backend_without_its_extra_is_refused_before_anything_starts(place, monkeypatch, capsys):
    found, extra = importlib.util.find_spec, ("jax", "optax", "torchax")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name in extra else found(name, *more)
    )
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", str(place / "tiny.toml"), "--backend", "xla"]) == 2
    assert "pip install 'shardwright[xla]'" in capsys.readouterr().err
