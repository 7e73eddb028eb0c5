"""``shardwright train --backend xla``: the run of the eager backend, in one compiled program."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

pytest.importorskip("torchax", reason="the extra shardwright[xla] isn't installed (make setup-xla)")

RECIPE = """
[data]
path = "{text}"
[model]
num_layers = 2
dim = 16
num_heads = 2
hidden_dim = 24
[training]
steps = 8
batch_size = 2
accumulation = 2
sequence_length = 16
log_every = 1
[optimizer]
lr = 1e-2
warmup_steps = 2
[heldout]
every = 4
num_windows = 5
[checkpoint]
every = 4
[sample]
num_bytes = 8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").mkdir()
    for i in range(6):
        lines = (f"def function_{i}_{j}(x):\n    return x + {i * j}\n" for j in range(50))
        (folder / "text" / f"{i}.py").write_text("\n".join(lines))
    (folder / "tiny.toml").write_text(RECIPE.format(text=folder / "text"))
    return folder


def train(folder, run, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "train", "tiny.toml", "--run.folder", run, *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / run


def rows(run, key):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.fixture(scope="module")
def eager(folder):
    return train(folder, "eager")


@pytest.fixture(scope="module")
def compiled(folder):
    return train(folder, "compiled", "--backend", "xla")


def test_both_backends_train_the_same_run_and_write_the_same_files(eager, compiled):
    for key in ("loss", "grad_norm", "lr", "heldout_loss"):
        ours, theirs = rows(compiled, key), rows(eager, key)
        assert ours.keys() == theirs.keys()
        assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=2e-4), key
    assert {p.name for p in compiled.iterdir()} == {p.name for p in eager.iterdir()}
    summaries = [json.loads((run / "summary.json").read_text()) for run in (eager, compiled)]
    assert summaries[0].keys() == summaries[1].keys()
    for key in ("parameters", "ranks", "steps", "full_nbytes", "unigram_entropy", "corpus_sha256"):
        assert summaries[0][key] == summaries[1][key], key
    assert summaries[1]["at_rest_nbytes"] < 0.6 * summaries[1]["full_nbytes"]
    whole = [load_file(run / "model.safetensors") for run in (eager, compiled)]
    assert {name: t.shape for name, t in whole[0].items()} == {name: t.shape for name, t in whole[1].items()}


@pytest.mark.parametrize("first", ["eager", "xla"])
def test_a_run_that_one_backend_began_is_finished_by_the_other(folder, eager, first):
    second = "xla" if first == "eager" else "eager"
    # As many steps as the whole run, so that each rate is its; a stop in the middle is a removed end.
    run = train(folder, f"{first}-first", "--backend", first)
    (run / "checkpoint" / "step-000008").rename(run / "aside")
    (run / "checkpoint" / "latest").unlink()
    train(folder, run.name, "--backend", second, "--resume")
    for key in ("loss", "heldout_loss"):
        ours, theirs = rows(run, key), rows(eager, key)
        assert ours.keys() == theirs.keys()
        assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=2e-4), key


def test_ranks_may_have_a_tied_embedding_half_precision_and_recomputation(folder):
    options = ["--model.tied_embedding", "true", "--training.dtype", "bf16"]
    options += ["--training.activation_checkpointing", "true", "--launch.ranks", "3"]
    ours = rows(train(folder, "tied-compiled", "--backend", "xla", *options), "heldout_loss")
    theirs = rows(train(folder, "tied-eager", *options), "heldout_loss")
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=2e-2)
