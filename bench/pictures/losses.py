"""Loss curves of one model trained by 1, 2 and 4 ranks, and by a run that was killed and resumed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from bench.pictures.ranks import LIMIT_S, ROOT, children, finished, start

GLOBAL_BATCH, STEPS, EVERY, KILLED_AFTER = 8, 120, 25, 65
TOY = {
    "model.num_layers": 2,
    "model.dim": 128,
    "model.num_heads": 4,
    "model.hidden_dim": 352,
    "training.sequence_length": 64,
    "training.steps": STEPS,
    "training.log_every": 1,
    "heldout.every": STEPS,
    "checkpoint.every": EVERY,
    "data.limit_nbytes": 4_000_000,
    "launch.device": "cpu",
}
"""What is smaller than in the quickstart's recipe; the learning rate and its schedule are the recipe's."""
STYLES = {
    "1 rank": {"color": "#b5cde6", "linewidth": 7.0},
    "2 ranks": {"color": "#1f77b4", "linewidth": 3.5},
    "4 ranks": {"color": "#111111", "linewidth": 1.0},
    "killed": {"color": "#c0392b", "linestyle": "none", "marker": "x", "markersize": 5, "markevery": 4},
    "resumed": {"color": "#2a9d5c", "linestyle": "none", "marker": "o", "markersize": 3.5, "markevery": 4},
}


def record(folder: Path) -> dict[str, Any]:
    """Five runs of ``shardwright train``, one after another; the losses of each by step."""
    curves = {}
    for world in (1, 2, 4):
        finished(train(folder, f"{world}", world))
        curves["1 rank" if world == 1 else f"{world} ranks"] = rows(folder / f"{world}")
    job = train(folder, "killed", 2)
    kill_at(job, folder / "killed", KILLED_AFTER)
    curves["killed"] = rows(folder / "killed")
    finished(train(folder, "killed", 2, "--resume", "last"))
    resumed = rows(folder / "killed")
    from_step = curves["killed"][-1][0] // EVERY * EVERY
    curves["resumed"] = [row for row in resumed if row[0] > from_step]
    return {"curves": curves, "global_batch": GLOBAL_BATCH}


def train(folder: Path, name: str, world: int, *more: str) -> subprocess.Popen[str]:
    """The quickstart's recipe at toy length, by so many ranks."""
    given = {**TOY, "run.folder": name, "launch.ranks": world, "training.batch_size": GLOBAL_BATCH // world}
    options = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return start(["shardwright", "train", str(ROOT / "recipes/quickstart.toml"), *options, *more], folder)


def rows(run: Path) -> list[tuple[int, float]]:
    """(step, loss) as far as the run has got."""
    log = run / "metrics.jsonl"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [(row["step"], row["loss"]) for row in found if "loss" in row]


def kill_at(job: subprocess.Popen[str], run: Path, step: int) -> None:
    """SIGKILL to the launcher and its ranks, as soon as ``step`` is done."""
    end = time.monotonic() + LIMIT_S
    while not (done := rows(run)) or done[-1][0] < step:
        if job.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the run did not get to step {step}:\n{finished(job)}")
        time.sleep(0.02)
    for pid in (*children(job.pid), job.pid):
        os.kill(pid, signal.SIGKILL)
    job.communicate()


def draw(found: dict[str, Any], out: Path) -> None:
    """The curves, and below them how far each is from one rank's."""
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5), sharex=True, layout="constrained", height_ratios=[3, 1]
    )
    one = dict(found["curves"]["1 rank"])
    for name, curve in found["curves"].items():
        steps, losses = zip(*curve, strict=True)
        above.plot(steps, losses, label=label(name, curve), **STYLES[name])
        apart = [loss - one[step] for step, loss in curve]
        narrow = {**STYLES[name], "linewidth": min(2.0, STYLES[name].get("linewidth", 0))}
        below.plot(steps, apart, **narrow)
    killed = found["curves"]["killed"][-1][0]
    for axes in (above, below):
        axes.axvline(killed, color="#c0392b", linewidth=0.8, linestyle=":")
        axes.grid(True, alpha=0.25)
    above.set_ylabel("loss, nats per byte")
    above.set_title(f"One model, {found['global_batch']} sequences a step, however many ranks", fontsize=10)
    above.legend(frameon=False, fontsize=9)
    below.set_ylabel("less that\nof 1 rank")
    below.ticklabel_format(axis="y", scilimits=(-3, 3))
    below.set_xlabel("step")
    figure.savefig(out)
    pyplot.close(figure)


def label(name: str, curve: list[tuple[int, float]]) -> str:
    """Of the legend."""
    if name == "killed":
        return f"2 ranks, killed after step {curve[-1][0]}"
    return f"resumed from the checkpoint of step {curve[0][0] - 1}" if name == "resumed" else name
