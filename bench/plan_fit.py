"""Fits the constants of ``shardwright plan`` to measured runs, and prints how well it predicts others.

    python -m bench.plan_fit RUNS.csv MODELS.csv

Each run's step is simulated, for all constants at once with each of them raised a little (an array in the
place of a number), which gives the derivatives; the weighted least squares of the logarithms of predicted
over measured are then solved, with every constant drawn to a guess. Left out in turn: all runs of one model
size.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from shardwright.plan import runs
from shardwright.plan.cluster import DEVICES, DeviceSpec
from shardwright.plan.constants import Constants

GUESS = Constants(
    matmul=0.85,
    attention=0.8,
    memory=0.7,
    narrow=100.0,
    optimizer=60.0,
    wire=0.6,
    hop_s=5e-6,
    launch_s=6e-6,
    contention=0.15,
    old_torch=1.03,
)
"""What one would have said without any of the runs."""
NAMES = [field.name for field in fields(Constants) if not field.name.startswith("exchange")]
"""Of those that runs say."""
_STEP = 0.01
_DRAWN = 0.5
"""Standard deviation of a constant's logarithm about the guess; of a run's error it is ``_NOISE``."""
_NOISE = 0.03
_ROUNDS = 6

_A100 = DEVICES["A100-80GB"]
_AMPERE_ON_HOPPER = 0.629
"""Share of Hopper's peak that Ampere's instructions for matrices (mma.sync), those of FlashAttention 2, were
measured to reach (Luo et al. 2024, arXiv 2402.13499). No data sheet has it, and it isn't fitted to runs."""
SHARES = {
    "as measured on H100": {},
    "matmul as on A100": {"matmul": _A100.matmul},
    "both as on A100": {"matmul": _A100.matmul, "attention": _A100.attention},
    f"both, attention x {_AMPERE_ON_HOPPER}": {
        "matmul": _A100.matmul,
        "attention": _A100.attention * _AMPERE_ON_HOPPER,
    },
    "as DeviceSpec has by default": {"matmul": DeviceSpec.matmul, "attention": DeviceSpec.attention},
}
"""Shares of H100's peak that are taken in turn, by where they are from."""


def measured(runs_csv: str | Path, models_csv: str | Path) -> tuple[list[dict[str, str]], list[runs.Setup]]:
    """The runs whose speed was measured."""
    models = runs.architectures(runs.read(models_csv, runs.MODEL_COLUMNS))
    every = runs.read(runs_csv, (*runs.RUN_COLUMNS, "tokens_per_s_per_gpu", "oom"))
    rows = [row for row in every if row["tokens_per_s_per_gpu"] and row["oom"] != "1"]
    return rows, [runs.setup(row, models) for row in rows]


def measured_s(row: runs.Row) -> float:
    """Seconds of a step: its tokens over tokens per second."""
    tokens = float(row["global_batch_seqs"]) * float(row["seq_len_tokens"])
    return tokens / float(row["tokens_per_s_per_gpu"]) / float(row["n_gpus"])


def errors(setups: Sequence[runs.Setup], logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of predicted seconds, and their derivatives by those of the constants."""
    raised = logs[:, None] + _STEP * np.eye(len(logs), len(logs) + 1, 1)
    constants = Constants(**dict(zip(NAMES, np.exp(raised), strict=True)))
    seconds = [np.log(runs.timeline(setup, constants).step_s + np.zeros(len(logs) + 1)) for setup in setups]
    values = np.array(seconds)
    return values[:, 0], (values[:, 1:] - values[:, :1]) / _STEP


def fit(setups: Sequence[runs.Setup], targets: np.ndarray) -> Constants:
    """The constants that predict the logarithms of seconds best; single wild runs count less."""
    default = logs = np.log(np.array([getattr(GUESS, name) for name in NAMES], dtype=float))
    for _ in range(_ROUNDS):
        values, slopes = errors(setups, logs)
        residual = targets - values
        weight = 1 / np.maximum(np.abs(residual), _NOISE / 2) / _NOISE
        left = slopes.T @ (weight[:, None] * slopes) + np.eye(len(logs)) / _DRAWN**2
        right = slopes.T @ (weight * residual) + (default - logs) / _DRAWN**2
        logs = logs + np.clip(np.linalg.solve(left, right), -0.5, 0.5)
    return Constants(**dict(zip(NAMES, np.exp(logs), strict=True)))


def predicted(setups: Sequence[runs.Setup], constants: Constants) -> np.ndarray:
    """Seconds of a step of each."""
    return np.array([float(runs.timeline(setup, constants).step_s) for setup in setups])


def size(model_id: str) -> str:
    """The size in a model's name, as "7b"."""
    found = re.findall(r"(\d+(?:\.\d+)?[mbt])\b", model_id)
    return found[-1] if found else model_id


def table(names: Sequence[str], found: np.ndarray) -> list[str]:
    """Mean, p90 and bias of relative errors, by name and of all."""
    groups = defaultdict(list)
    for name, error in zip(names, found, strict=True):
        groups[name].append(error)
    groups["all"] = list(found)
    lines = [f"{'':28} rows   mean    p90    bias"]
    for name, values in groups.items():
        sizes = np.abs(values)
        p90 = np.quantile(sizes, 0.9)
        lines.append(f"{name:28} {len(values):4}  {sizes.mean():6.1%} {p90:6.1%} {np.mean(values):+7.1%}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description="Fit the constants of shardwright plan to measured runs.")
    parser.add_argument("runs")
    parser.add_argument("models")
    known = parser.parse_args(arguments)
    rows, setups = measured(known.runs, known.models)
    seconds = np.array([measured_s(row) for row in rows])
    targets = np.log(seconds)
    whole = fit(setups, targets)
    for name in NAMES:
        print(f"    {name}: float = {getattr(whole, name):.4g}")
    tables = [row["csv"] for row in rows]
    print("\nfitted to all runs")
    print("\n".join(table(tables, predicted(setups, whole) / seconds - 1)))
    sizes = [size(row["model_id"]) for row in rows]
    print("\nevery model size predicted from the others")
    print("\n".join(table(sizes, left_out(setups, targets, sizes))))
    devices = [setup.cluster.device.name[:4] for setup in setups]
    a100 = [index for index, name in enumerate(devices) if name == "A100"]
    h100 = [index for index, name in enumerate(devices) if name == "H100"]
    sheet = fit([setups[i] for i in a100], targets[a100])
    print("\nH100 from its data sheet, fitted to A100")
    found = []
    for shares in SHARES.values():
        there = [with_shares(setups[i], shares) for i in h100]
        found.extend(predicted(there, sheet) / seconds[h100] - 1)
    names = [name for name in SHARES for _ in h100]
    print("\n".join(table(names, np.array(found))[:-1]))


def with_shares(setup: runs.Setup, shares: Mapping[str, float]) -> runs.Setup:
    """The run on a device of other shares."""
    return replace(setup, cluster=replace(setup.cluster, device=replace(setup.cluster.device, **shares)))


def left_out(setups: Sequence[runs.Setup], targets: np.ndarray, folds: Sequence[str]) -> np.ndarray:
    """Relative errors, each predicted without the runs of its own fold."""
    found = np.zeros(len(targets))
    for fold in dict.fromkeys(folds):
        inside = np.array([name == fold for name in folds])
        others = [setup for setup, left in zip(setups, inside, strict=True) if not left]
        constants = fit(others, targets[~inside])
        mine = [setup for setup, left in zip(setups, inside, strict=True) if left]
        found[inside] = predicted(mine, constants) / np.exp(targets[inside]) - 1
    return found


if __name__ == "__main__":
    main()
