"""Where the rows of a run go besides ``metrics.jsonl``: libraries of the extra [track], an adapter for each.

    metrics.jsonl <- row -> TensorBoard, Weights & Biases, MLflow, trackio: those that ``track.to`` lists

Only the first process has them. What each calls the run is kept in ``trackers.json`` of the run's folder, so
that a resumed run goes on in it. The rows are those of ``metrics.jsonl``, under the same names.
"""

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

FILE = "trackers.json"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker begins with. run_id: what it called the run before; "" for a new one. step: the last one
    that is kept of a run that goes on. settings: the resolved recipe, by section."""

    folder: Path
    project: str
    settings: Mapping[str, Mapping[str, Any]]
    run_id: str = ""
    step: int = 0

    @property
    def flat_settings(self) -> dict[str, Any]:
        """The recipe as ``section.key``, for those that know no sections."""
        return {
            f"{section}.{key}": value for section, of in self.settings.items() for key, value in of.items()
        }


class Tracker(Protocol):
    """An adapter. run_id: what its library calls the run."""

    @property
    def run_id(self) -> str: ...

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of ``step``; several calls for one step have different names."""
        ...

    def close(self, finished: bool) -> None:
        """The run has ended, or was stopped and may go on: everything is written when this returns."""
        ...


@contextmanager
def tracking(names: Sequence[str], run: TrackedRun) -> Iterator[Callable[[Row], None]]:
    """A function that takes a row of ``metrics.jsonl``, for the length of the block; the first process calls.

    A tracker that fails while it logs is warned of and left alone from then on: the rows are in the file.
    Raises: what a library raises as a run is opened in it; then nothing was trained.
    """
    ids: dict[str, str] = _read(run.folder / FILE) if run.step else {}
    open_ones: dict[str, Tracker] = {}
    finished = False
    try:
        for name in names:
            adapter = importlib.import_module(f"shardwright.train.trackers.{name}")
            with redirect_stdout(sys.stderr):  # stdout may be for rows alone (`--json`)
                open_ones[name] = adapter.open_run(replace(run, run_id=ids.get(name, "")))
        if names:
            ids |= {name: tracker.run_id for name, tracker in open_ones.items()}
            (run.folder / FILE).write_text(json.dumps(ids) + "\n", encoding="utf-8")
        yield lambda row: _log(open_ones, row)
        finished = True
    finally:
        for name in tuple(open_ones):
            _try(open_ones, name, lambda tracker: tracker.close(finished))


def _log(open_ones: dict[str, Tracker], row: Row) -> None:
    numbers = {key: value for key, value in row.items() if key != "step" and value is not None}
    for name in tuple(open_ones):
        _try(open_ones, name, lambda tracker: tracker.log(numbers, row["step"]))


def _try(open_ones: dict[str, Tracker], name: str, call: Callable[[Tracker], None]) -> None:
    try:
        with redirect_stdout(sys.stderr):
            call(open_ones[name])
    except Exception as error:  # a library's or its server's; a run of days doesn't end for it
        del open_ones[name]
        logger.warning("%s gets no more rows of this run, which are in metrics.jsonl: %r", name, error)


def _read(file: Path) -> dict[str, str]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
