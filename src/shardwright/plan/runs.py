"""``shardwright plan --runs``: rows of runs in, predictions out, for tables as published runs come in."""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.errors import ConfigError
from shardwright.plan.cluster import GIB, Cluster, device
from shardwright.plan.constants import Constants
from shardwright.plan.memory import HeldBytes, Sharding, fits, memory, peak, reserved
from shardwright.plan.presets import Preset, preset, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.simulate import Timeline, simulate
from shardwright.plan.transformer import Architecture, Microbatch, Recompute, workload

Row = Mapping[str, str]


COLUMNS: tuple[str, ...] = (
    "row_id",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "peak_active_gib",
    "peak_reserved_gib",
    "fits",
)
"""Of the table of predictions."""


@dataclass(frozen=True)
class Setup:
    """One row, as the planner takes it.

    shards: ranks that a parameter is sharded over. itemsizes: bytes of an element of parameters, and of
    gradients, on the wire. reshards: parameters are resharded after a forward. old_torch: it ran on torch 1.
    """

    row_id: str
    arch: Architecture
    batch: Microbatch
    cluster: Cluster
    preset: Preset
    shards: int
    microbatches: int
    itemsizes: tuple[int, int]
    reshards: bool = True
    old_torch: bool = False


def read(path: str | Path) -> list[dict[str, str]]:
    """The rows of a table with commas. Raises: ConfigError where there is none."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"can't read the table {path}: {error}") from error


def architectures(rows: Iterable[Row]) -> dict[str, Architecture]:
    """By ``model_id``. Raises: ConfigError naming the row and the column that can't be read."""
    return {row["model_id"]: _architecture(row) for row in rows}


def _architecture(row: Row) -> Architecture:
    def number(column: str) -> int:
        return _number(row, column, row.get("model_id", "?"))

    return Architecture(
        *map(number, ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")),
        gated=row["ffn_gated"] == "1",
        tied=row["tied_embeddings"] == "1",
        biases=row["biases"] == "1",
        rotary=row["pos"].startswith("rope"),
        rms=row["norm"] == "rmsnorm",
    )


def _number(row: Row, column: str, name: str, default: float | None = None) -> int:
    text = (row.get(column) or "").strip()
    try:
        return int(float(text)) if text or default is None else int(default)
    except ValueError:
        raise ConfigError(f"row {name}: column {column} must be a number, got {text!r}") from None


def setup(row: Row, models: Mapping[str, Architecture]) -> Setup:
    """What a row says. Raises: ConfigError for what isn't known, or can't be predicted."""
    name, framework, sharding = row["row_id"], row["framework"], row["sharding"].upper()
    if row["model_id"] not in models:
        raise ConfigError(f"row {name}: the table of models has no {row['model_id']!r}")
    split = [axis for axis in ("tp", "pp", "cp") if _number(row, axis, name, 1) > 1]
    if split:
        raise ConfigError(f"row {name}: {', '.join(split)} > 1; only sharded data parallelism is predicted")
    ranks, accumulated = _number(row, "n_gpus", name), _number(row, "grad_accum", name, 1)
    found = Setup(
        name,
        models[row["model_id"]],
        _batch(row, name, ranks * accumulated),
        _cluster(row, name, ranks),
        preset("fsdp2" if "FSDP2" in framework or "FSDP2" in sharding else "fsdp1"),
        min(ranks, _number(row, "gpus_per_node", name, 8)) if "HYBRID" in sharding else ranks,
        accumulated,
        (1 if "8" in row["allgather_dtype"] else 2, 2 if row["reduce_dtype"] == "bf16" else 4),
        reshards="GRAD_OP" not in sharding,
        old_torch=re.search(r"torch 1\.", framework) is not None,
    )
    if "nth" in row["activation_ckpt"] and not fits(held(found).total, found.cluster.device):
        return replace(found, batch=replace(found.batch, recompute_every=1))
    return found


def _batch(row: Row, name: str, microbatches: int) -> Microbatch:
    framework, said = row["framework"], row["activation_ckpt"]
    every = 1
    recompute = Recompute.NONE if said in ("", "none") else Recompute.FULL
    if said == "selective_op":
        recompute = Recompute.SELECTIVE
    elif said.startswith("selective_every"):  # "nth" of a table that doesn't state n: 2, or 1 where that fits
        every = int((re.findall(r"\d+", said) or ["2"])[0])
    return Microbatch(
        _number(row, "seq_len_tokens", name),
        _number(row, "microbatch_seqs_per_gpu", name, _number(row, "global_batch_seqs", name) / microbatches),
        recompute,
        every,
        compiled=row["torch_compile"] == "1",
        fused_loss="llm-foundry" in framework,
        fused_norms="fused_rmsnorm" in framework,
        float8="8" in row["compute_dtype"],
    )


def _cluster(row: Row, name: str, ranks: int) -> Cluster:
    spec = device(_DEVICES.get(row["gpu"], row["gpu"]))
    if row["gpu_mem_gb"]:
        spec = replace(spec, memory_nbytes=float(row["gpu_mem_gb"]) * GIB)
    cluster = Cluster(spec, ranks, min(ranks, _number(row, "gpus_per_node", name, 8)))
    if row["internode_gbps_per_node"]:
        return replace(cluster, host_bandwidth=float(row["internode_gbps_per_node"]) * 1e9 / 8)
    return cluster


_DEVICES = {"H100-96GB-HBM2e": "H100-96GB-500W"}  # the same hosts as the rows that say so


def timeline(setup: Setup, constants: Constants) -> Timeline:
    """The step of a row, simulated."""
    work = workload(setup.arch, setup.batch)
    planned = schedule(work, setup.preset, setup.reshards)
    factor = constants.old_torch if setup.old_torch else 1.0
    prices = Prices(setup.cluster, constants, setup.preset, setup.shards, *setup.itemsizes, factor)
    return simulate(planned, work, prices, setup.microbatches)


def held(setup: Setup) -> HeldBytes:
    """The moment of a row's step at which most bytes are held."""
    work = workload(setup.arch, setup.batch)
    planned = schedule(work, setup.preset, setup.reshards)
    sharding = Sharding(setup.shards, setup.itemsizes[1], setup.microbatches > 1)
    return peak(memory(planned, work, setup.preset, sharding))


def predict(setup: Setup, constants: Constants) -> dict[str, str]:
    """The columns of a row's prediction."""
    step_s, active = float(timeline(setup, constants).step_s), held(setup).total
    device = setup.cluster.device
    values = (
        setup.row_id,
        f"{step_s:.6g}",
        f"{setup.batch.tokens * setup.microbatches / step_s:.6g}",
        f"{active / GIB:.2f}",
        f"{reserved(active, device) / GIB:.2f}",
        str(int(fits(active, device))),
    )
    return dict(zip(COLUMNS, values, strict=True))


def write(path: str | Path, rows: Iterable[Mapping[str, str]]) -> None:
    """The predictions as a table with commas; what a row lacks stays empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
