"""The files of one run.

    runs/quickstart/config.toml         the resolved recipe, the origin of each value beside it
                    .lock               held by the job that trains here, while it lives
                    metrics.jsonl       one object per logged step, and per evaluation
                    checkpoint/         resumable, sharded; or where checkpoint.folder says
                    best/               the same, of the lowest held-out loss, with heldout.keep_best
                    exported/step-N/    with [base]: the model or adapter, after epochs and at the end
                    model.safetensors   else: the whole model, plain names   } written at the end
                    trace/rank-N.ring   the last steps of each rank, for `shardwright trace`: at its end
                    late.jsonl          one object each time that a rank was found late, for `shardwright top`
                    job.json            where the job's store is, for `shardwright top`: while it trains
                    summary.json        what the run came to, one key each   }

Each is written whole or not at all, by rank 0; rings by their ranks.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.storage import LOCK, FolderLock
from shardwright.checkpoint.url import Location, location_of
from shardwright.errors import ConfigError, InputError
from shardwright.extras import from_extra
from shardwright.observe.steps.rings import Ring, write

with from_extra("checkpoint"):
    from safetensors.torch import load_file, save_file

JOB_FILE, LATE_FILE = "job.json", "late.jsonl"
_claimed: "dict[Path, FolderLock]" = {}
"""The locks of this process, by the run's folder: they live as long as it does."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run, and the only code that writes to it. ``checkpoints``: ``checkpoint.folder``."""

    root: Path
    checkpoints: str = ""

    @property
    def config(self) -> Path:
        """The resolved recipe."""
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object per line."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """One JSON object."""
        return self.root / "summary.json"

    @property
    def model(self) -> Path:
        """The whole model."""
        return self.root / "model.safetensors"

    @property
    def checkpoint(self) -> Location:
        """The folder of sharded checkpoints, or its URL."""
        return location_of(self.checkpoints or self.root / "checkpoint")

    @property
    def best(self) -> Path:
        """The folder of the checkpoint with the lowest held-out loss."""
        return self.root / "best"

    def exported(self, step: int) -> Path:
        """A fine-tuned model, or its adapter, as it was after ``step``."""
        return self.root / "exported" / f"step-{step:06d}"

    def claim(self, *, make: bool) -> None:
        """Keep other jobs out of the folder for as long as this process lives; where there is none, ``make``
        it or do nothing. A second call does nothing.

        Raises: Held, if another job trains here; ConfigError, if the folder can't be written.
        """
        try:
            if make:
                self.root.mkdir(parents=True, exist_ok=True)
            if self.root.is_dir() and self.root not in _claimed:
                _claimed[self.root] = FolderLock(self.root)
        except OSError as error:
            raise ConfigError(
                f"can't write to {self.root}: {error.strerror or error}; give the run another folder "
                "(--run.folder)"
            ) from error

    def start_afresh(self) -> Path | None:
        """Move an earlier run in the folder aside; it is never overwritten. Returns where to.

        The folder itself stays, with its lock. Its config goes last, so that what is interrupted here is
        found, and moved, by the next job.
        Raises: ConfigError, if it can't be moved.
        """
        if not self.config.exists():
            return None
        number = 1
        while (aside := self.root.with_name(f"{self.root.name}.{number}")).exists():
            number += 1
        try:
            aside.mkdir()
            for path in sorted(self.root.iterdir(), key=lambda path: path == self.config):
                if path.name != LOCK:
                    path.rename(aside / path.name)
        except OSError as error:
            raise ConfigError(
                f"can't move the earlier run in {self.root} to {aside}: {error.strerror or error}; go on "
                "with it (--resume), or give the new one a folder of its own (--run.folder)"
            ) from error
        return aside

    def forget_after(self, step: int) -> None:
        """Drop what an interrupted run logged after ``step``, because it is about to be done again."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []
        kept = [line for line in lines if _step(line) <= step]
        _write(self.metrics, "".join(line + "\n" for line in kept))
        self.summary.unlink(missing_ok=True)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row to ``metrics.jsonl``; it is on the disk's side when this returns."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def write_config(self, text: str) -> None:
        """Write ``config.toml``."""
        _write(self.config, text)

    @contextmanager
    def open_to_top(self, store: str) -> Iterator[None]:
        """``job.json`` says, for the length of the block, where the job's store is; nothing for ""."""
        file = self.root / JOB_FILE
        if store:
            _write(file, json.dumps({"store": store}) + "\n")
        try:
            yield
        finally:
            if store:
                file.unlink(missing_ok=True)

    def log_late(self, lines: Iterable[str]) -> None:
        """Append to ``late.jsonl``, which there is from the first line on; nothing where it can't be
        written."""
        if lines := list(lines):
            with suppress(OSError), (self.root / LATE_FILE).open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)

    @property
    def trace(self) -> Path:
        """The folder of rings."""
        return self.root / "trace"

    def leave_ring(self, own: Ring) -> None:
        """What this rank did in its last steps; nothing where nothing is on record or can be written."""
        if own.records:
            with suppress(OSError):
                write(self.trace, own)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        _write(self.summary, json.dumps(summary, indent=2) + "\n")

    def write_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write ``model.safetensors``."""
        part = self.model.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"format": "pt"})
        os.replace(part, self.model)

    def read_model(self) -> dict[str, torch.Tensor]:
        """The tensors of ``model.safetensors``, on the CPU.

        Raises:
            InputError: the run has no model (yet), or is one of fine-tuning.
        """
        if (self.root / "exported").is_dir():
            raise InputError(
                f"{self.root} is a run of fine-tuning, and its models are in {self.root / 'exported'}: load "
                "one with transformers, or an adapter with peft"
            )
        if not self.model.is_file() or not self.config.is_file():
            raise InputError(
                f"{self.root} holds no finished run (no model.safetensors): give the folder of one"
                f"{self.before()}, or finish this run with: shardwright train RECIPE --resume"
            )
        return load_file(self.model)

    def before(self) -> str:
        """Where the last finished one is of the runs that were moved aside here, in words; "" without one."""
        aside, number = self.root, 0
        while (moved := self.root.with_name(f"{self.root.name}.{number + 1}")).exists():
            number += 1
            if (moved / "model.safetensors").exists() or (moved / "exported").is_dir():
                aside = moved
        return f" (the run before it is in {aside})" if aside != self.root else ""


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:  # cut off in the middle when the machine went down
        return float("inf")


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
