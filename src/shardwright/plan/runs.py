"""``shardwright plan --runs``: rows of runs in, predictions out, for tables as published runs come in."""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from shardwright.errors import ConfigError, InputError
from shardwright.plan import pipeline
from shardwright.plan.axes import ALONE, AxisSizes
from shardwright.plan.cluster import GIB, Cluster, device
from shardwright.plan.constants import Constants
from shardwright.plan.memory import HeldBytes, Sharding, fits, peak, reserved
from shardwright.plan.presets import Preset, preset, schedule
from shardwright.plan.prices import Prices
from shardwright.plan.simulate import Timeline
from shardwright.plan.transformer import Architecture, Microbatch, Recompute, part_of, workload

Row = Mapping[str, str]
_T = TypeVar("_T")

MODEL_COLUMNS = (
    *("model_id", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "ffn_gated"),
    *("vocab_size", "tied_embeddings", "biases", "norm", "pos"),
)
RUN_COLUMNS = (
    *("row_id", "model_id", "seq_len_tokens", "n_gpus", "gpus_per_node", "gpu", "gpu_mem_gb"),
    *("internode_gbps_per_node", "framework", "sharding", "tp", "pp", "cp", "activation_ckpt"),
    *("torch_compile", "compute_dtype", "allgather_dtype", "reduce_dtype", "microbatch_seqs_per_gpu"),
    *("grad_accum", "global_batch_seqs"),
)

COLUMNS: tuple[str, ...] = (
    *("row_id", "step_time_s", "tokens_per_s_per_gpu", "peak_active_gib", "peak_reserved_gib", "fits"),
)
"""Of the table of predictions."""


@dataclass(frozen=True)
class Setup:
    """One row, as the planner takes it.

    shards: ranks that a parameter is sharded over. itemsizes: bytes of an element of parameters, and of
    gradients, on the wire. reshards: parameters are resharded after a forward. old_torch: it ran on torch 1.
    axes: what ranks share besides.
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
    axes: AxisSizes = ALONE


def read(path: str | Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table with commas; a cell that a row lacks is empty.

    Raises: ConfigError where there is no such table, or it lacks one of ``columns``.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file, restkey="", restval="")
            missing = [column for column in columns if column not in (table.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"the table {path} lacks the column(s) {', '.join(missing)}; it has "
                    f"{', '.join(table.fieldnames or ['none'])}; see docs/plan.md, Columns"
                )
            return list(table)
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(f"can't read the table {path}: {error}") from error


def architectures(rows: Iterable[Row]) -> dict[str, Architecture]:
    """By ``model_id``. Raises: ConfigError naming the row and the column that can't be read."""
    return {row["model_id"]: _architecture(_Cells(row, row["model_id"])) for row in rows}


def _architecture(cells: "_Cells") -> Architecture:
    sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")
    return Architecture(
        *map(cells.whole, sizes),
        gated=cells.flag("ffn_gated"),
        tied=cells.flag("tied_embeddings"),
        biases=cells.flag("biases"),
        rotary=cells.one_of("pos", {"rope.*": True, "learned.*": False}, "rope or learned"),
        rms=cells.one_of("norm", {"rmsnorm": True, "layernorm": False}, "rmsnorm or layernorm"),
    )


class _Cells(NamedTuple):
    """A row's cells as they are meant. Each method raises ConfigError: row, column, what is there, what is
    expected."""

    row: Row
    name: str

    def text(self, column: str) -> str:
        """Without spaces around it."""
        return self.row[column].strip()

    def refusal(self, column: str, expected: str) -> ConfigError:
        """That something else is expected there."""
        return ConfigError(f"row {self.name}: column {column} is {self.text(column)!r}, expected {expected}")

    def number(self, column: str) -> float:
        """Above 0."""
        try:
            found = float(self.text(column))
        except ValueError:
            found = math.nan
        if not 0 < found < math.inf:
            raise self.refusal(column, "a number above 0")
        return found

    def whole(self, column: str, default: int | None = None) -> int:
        """A whole number above 0."""
        if default is not None and not self.text(column):
            return default
        found = self.number(column)
        if found % 1:
            raise self.refusal(column, "a whole number")
        return int(found)

    def flag(self, column: str) -> bool:
        """1 or 0; empty is 0."""
        return self.one_of(column, {"1": True, "0|": False}, "0 or 1")

    def one_of(self, column: str, meant: Mapping[str, _T], expected: str) -> _T:
        """What the first pattern means that the whole cell is, in any case."""
        for pattern, value in meant.items():
            if re.fullmatch(pattern, self.text(column), re.IGNORECASE):
                return value
        raise self.refusal(column, expected)


_HALF = r"bf16|bfloat16|fp16|float16"
_EIGHT = r".*(fp8|float8|e4m3|e5m2).*"
_FSDP = r"FSDP|FULL.SHARD|SHARD_GRAD_OP|HYBRID|HSDP"
_OTHER = r"DEEPSPEED|MEGATRON|NO_SHARD|\bDDP\b|(?<!_)ZERO"


def setup(row: Row, models: Mapping[str, Architecture]) -> Setup:
    """What a row says. Raises: ConfigError for what isn't known, or can't be predicted."""
    cells = _Cells(row, row["row_id"])
    if row["model_id"] not in models:
        raise cells.refusal("model_id", "a row of the table of models that can be read")
    sharding, runtime = cells.text("sharding").upper(), _runtime(cells)
    ranks, accumulated, axes = cells.whole("n_gpus"), cells.whole("grad_accum", 1), _axes(cells)
    try:
        data, _ = axes.data_ranks(ranks), part_of(models[row["model_id"]], axes)
    except InputError as error:
        raise ConfigError(f"row {cells.name}: {error}") from error
    batch = _batch(cells, data // axes.cp * accumulated, axes)
    if axes.pp > 1 and accumulated == 1 and batch.sequences % axes.pp == 0:
        # torchtitan's default: as many microbatches as stages
        accumulated, batch = axes.pp, replace(batch, sequences=batch.sequences // axes.pp)
    found = Setup(
        cells.name,
        models[row["model_id"]],
        batch,
        _cluster(cells, ranks),
        preset(runtime),
        _shards(cells, data),
        accumulated,
        (
            cells.one_of("allgather_dtype", {f"{_HALF}|": 2, _EIGHT: 1}, "bf16, fp16 or fp8"),
            cells.one_of("reduce_dtype", {_HALF: 2, "fp32|float32|": 4}, "bf16, fp16 or fp32"),
        ),
        reshards=axes.pp == 1 and not re.search("GRAD_OP|ZERO2", sharding),
        old_torch=re.search(r"torch 1\.", row["framework"]) is not None,
        axes=axes,
    )
    if "nth" in row["activation_ckpt"] and not fits(held(found).total, found.cluster.device):
        return replace(found, batch=replace(found.batch, recompute_every=1))
    return found


def _axes(cells: _Cells) -> AxisSizes:
    """An interleaved pipeline has two stages on a rank."""
    both = f"{cells.text('framework')} {cells.text('sharding')}"
    chunks = 2 if re.search("interleaved", both, re.IGNORECASE) else 1
    return AxisSizes(**{axis: cells.whole(axis, 1) for axis in ("tp", "cp", "pp")}, chunks=chunks)


def _runtime(cells: _Cells) -> str:
    """The name of the preset."""
    for column in ("framework", "sharding"):
        if re.search(_OTHER, cells.text(column).upper()):
            raise cells.refusal(column, "FSDP, the one that is predicted")
    both = f"{cells.text('framework')} {cells.text('sharding')}".upper()
    if not re.search(_FSDP, cells.text("sharding").upper()):
        raise cells.refusal("sharding", "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, or FSDP1 or FSDP2 ...")
    return "fsdp2" if "FSDP2" in both else "fsdp1"


def _shards(cells: _Cells, ranks: int) -> int:
    """Ranks that a parameter is sharded over: those of a host, or as many as it says ("8-way")."""
    sharding = cells.text("sharding").upper()
    if "HYBRID" not in sharding and "HSDP" not in sharding:
        return ranks
    said = re.search(r"(\d+)-WAY", sharding)
    shards = min(ranks, int(said[1]) if said else cells.whole("gpus_per_node", 8))
    if not shards or ranks % shards:
        raise cells.refusal("n_gpus", f"a multiple of the {shards} that a parameter is sharded over")
    return shards


def _batch(cells: _Cells, microbatches: int, axes: AxisSizes) -> Microbatch:
    framework, said = cells.text("framework"), cells.text("activation_ckpt")
    every = re.fullmatch(r"selective_every_(\d+|n)\D*", said)
    recompute, of_layers = Recompute.FULL, 1
    if not every:
        meant = {"none|": Recompute.NONE, "full": Recompute.FULL, "selective_op": Recompute.SELECTIVE}
        expected = "none, full, selective_op or selective_every_2nd_layer (or another number)"
        recompute = cells.one_of("activation_ckpt", meant, expected)
    elif every[1] == "0":
        raise cells.refusal("activation_ckpt", "every 1st layer or fewer")
    else:
        of_layers = 2 if every[1] == "n" else int(every[1])  # n isn't stated: 2, or 1 where that fits
    return Microbatch(
        cells.whole("seq_len_tokens"),
        _sequences(cells, microbatches, axes),
        recompute,
        of_layers,
        compiled=cells.flag("torch_compile"),
        fused_loss="llm-foundry" in framework,
        fused_norms="fused_rmsnorm" in framework,
        float8=cells.one_of("compute_dtype", {f"{_HALF}|": False, _EIGHT: True}, "bf16, fp16 or fp8"),
    )


def _sequences(cells: _Cells, microbatches: int, axes: AxisSizes) -> int:
    """Rows of a microbatch, of the ranks that share it: as stated, for these or for each device, else what
    the global batch is divided into."""
    stated = cells.text("microbatch_seqs_per_gpu") and cells.whole("microbatch_seqs_per_gpu")
    if stated and not cells.text("global_batch_seqs"):
        return stated
    of_all = cells.whole("global_batch_seqs")
    found = stated or of_all // microbatches or 1
    if of_all == found * microbatches * axes.sharing:
        return found * axes.sharing
    if of_all != found * microbatches:
        expected = f"n_gpus x grad_accum ({microbatches * axes.sharing}) x microbatch_seqs_per_gpu"
        expected += "" if axes.sharing == 1 else f", or that over tp x cp x pp ({axes.sharing})"
        raise cells.refusal(
            "global_batch_seqs", f"{expected} ({stated})" if stated else f"{expected}, a whole one"
        )
    return found


def _cluster(cells: _Cells, ranks: int) -> Cluster:
    try:
        spec = device(_DEVICES.get(cells.text("gpu"), cells.text("gpu")))
    except ConfigError as error:
        raise cells.refusal("gpu", f"a device of the library: {error}") from error
    if cells.text("gpu_mem_gb"):
        spec = replace(spec, memory_nbytes=cells.number("gpu_mem_gb") * GIB)
    host = min(ranks, cells.whole("gpus_per_node", 8))
    if ranks % host:
        raise cells.refusal("n_gpus", f"a multiple of the {host} of a host")
    cluster = Cluster(spec, ranks, host)
    if cells.text("internode_gbps_per_node"):
        return replace(cluster, host_bandwidth=cells.number("internode_gbps_per_node") * 1e9 / 8)
    return cluster


_DEVICES = {"H100-96GB-HBM2e": "H100-96GB-500W"}  # the same hosts as the rows that say so


def timeline(setup: Setup, constants: Constants) -> Timeline:
    """The step of a row, simulated."""
    work = workload(setup.arch, setup.batch, setup.axes)
    planned = schedule(work, setup.preset, setup.reshards)
    factor = constants.old_torch if setup.old_torch else 1.0
    prices = Prices(
        setup.cluster, constants, setup.preset, setup.shards, *setup.itemsizes, factor, axes=setup.axes
    )
    return pipeline.timeline(planned, work, prices, setup.microbatches)


def held(setup: Setup) -> HeldBytes:
    """The moment of a row's step at which most bytes are held."""
    work = workload(setup.arch, setup.batch, setup.axes)
    planned = schedule(work, setup.preset, setup.reshards)
    sharding = Sharding(setup.shards, setup.itemsizes[1], setup.microbatches > 1)
    return peak(pipeline.held(planned, work, setup.preset, sharding, setup.axes, setup.microbatches))


def predict(setup: Setup, constants: Constants) -> dict[str, str]:
    """The columns of a row's prediction."""
    step_s, active = float(timeline(setup, constants).step_s), held(setup).total
    device = setup.cluster.device
    values = (
        setup.row_id,
        f"{step_s:.6g}",
        f"{setup.batch.tokens * setup.microbatches / setup.axes.sharing / step_s:.6g}",
        f"{active / GIB:.2f}",
        f"{reserved(active, device) / GIB:.2f}",
        str(int(fits(active, device))),
    )
    return dict(zip(COLUMNS, values, strict=True))


def write(path: str | Path, rows: Iterable[Mapping[str, str]]) -> None:
    """The predictions as a table with commas; what a row lacks stays empty. Raises: ConfigError."""
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(rows)
    except OSError as error:
        raise ConfigError(
            f"can't write the predictions to --out {path}: {error}; name another file"
        ) from error
