"""What rank 0 shows: the opening lines, progress, and the table at the end. No other rank prints."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from shardwright.columns import in_words
from shardwright.extras import from_extra
from shardwright.train.loop import StepReport

with from_extra("train"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text

_NEVER_CUT = 100_000  # columns; where nobody looks there is no width to fit, and rich would take 80


def figures(report: StepReport) -> str:
    """A logged step in a few words."""
    more = "".join(f", {name} {value:.3f}" for name, value in report.figures.items())
    return f"loss {report.loss:.3f}{more}, {report.tokens_per_s:,.0f} tokens/s"


class _Console(Console):
    """Leaves it to the command what to do where nobody reads what is printed; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise  # it is called where the error was caught


def open_console(*, shown: bool = True, stderr: bool = False) -> Console:
    """For text and tables: as wide as the terminal, and without an end in a pipe or a file."""
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else _NEVER_CUT
    return _Console(quiet=not shown, stderr=stderr, width=width, highlight=False, soft_wrap=True)


def as_json(value: Any) -> str:
    """``value`` on one line of JSON: dataclasses as objects, sets as sorted lists, paths as text."""
    return json.dumps(
        asdict(value) if is_dataclass(value) and not isinstance(value, type) else value, default=_plain
    )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


class Screen:
    """A progress bar on a terminal, plain lines anywhere else, nothing on any rank but the first.

    in_json: stdout gets what `metrics.jsonl` and `summary.json` hold, an object per line; stderr the rest.
    """

    def __init__(self, *, shown: bool, in_json: bool = False) -> None:
        self._console = open_console(shown=shown, stderr=in_json)
        self._prints_json = in_json and shown
        self._steps = 0
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=None, figures="")

    def say(self, line: str) -> None:
        """One line of text, above the bar if there is one."""
        self._console.print(Text(line))

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of `metrics.jsonl`, or the summary; shown in JSON only."""
        if self._prints_json:
            print(as_json(row), flush=True)

    def start(self, step: int, steps: int) -> None:
        """Training begins, or goes on, after ``step`` of ``steps``."""
        self._steps = steps
        self._bar.update(self._task, completed=step, total=steps)
        if self._console.is_terminal:
            self._bar.start()

    def stop(self) -> None:
        """Training has ended; the terminal is plain again. May be called twice."""
        if self._console.is_terminal:  # elsewhere it never started, and would print an empty line
            self._bar.stop()

    def stepped(self, report: StepReport, seconds_left: float) -> None:
        """A logged step."""
        self._bar.update(self._task, completed=report.step, figures=figures(report))
        if not self._console.is_terminal:
            self.say(f"step {report.step}/{self._steps}  {figures(report)}  {seconds_left:.0f} s left")

    def summary(self, summary: Mapping[str, Any], length: int) -> None:
        """The table of ``summary.json`` (keys: see :mod:`shardwright.train.run`), and the sample below it, of
        ``length`` bytes or tokens."""
        self.row(summary)
        if self._prints_json:
            return
        table = Table(show_header=False, title=f"{summary['steps']} steps on {summary['ranks']} rank(s)")
        for name, value in _rows(summary):
            table.add_row(name, value)
        self._console.print(table)
        self.say(f"{length} {written(summary['unit'])}s that the model writes:\n{summary['sample']}")


def written(unit: str) -> str:
    """What a model writes and data consists of, "byte" or "token", where a loss is per ``unit``: a loss per
    pair is one of two answers of tokens."""
    return "byte" if unit == "byte" else "token"


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    at_rest, full = summary["at_rest_nbytes"], summary["full_nbytes"]
    hidden, speed = summary["communication_hidden_share"], summary["tokens_per_s"]
    peak, process = summary["peak_unsharded_nbytes"], summary["peak_process_nbytes"]
    unit = summary["unit"]
    largest = "not measured" if process is None else f"{in_words(process)} of the host"
    share = summary["communication_share_of_step"]
    how = "not measured" if hidden is None else f"{hidden:.0%}; exposed: {share:.1%} of a step"
    of_bytes = " (a token is a byte)" if unit == "byte" else ""
    return [
        ("parameters", f"{summary['parameters']:,}"),
        ("at rest, per rank", f"{in_words(at_rest)} of {in_words(full)} unsharded ({at_rest / full:.1%})"),
        ("peak unsharded", "not measured" if peak is None else f"{in_words(peak)} at once"),
        ("peak memory, per rank", _beside(summary["peak_nbytes"], summary["expected_peak_nbytes"])),
        ("peak memory, largest process", largest),
        ("speed", "no step was made" if speed is None else f"{speed:,.0f} tokens/s{of_bytes}"),
        ("communication hidden", how if summary["ranks"] > 1 else "one rank has none"),
        *beside_prediction(summary.get("predicted")),
        ("held-out loss", f"{summary['heldout_loss']:.3f} nats per {unit}"),
        ("corpus's unigram entropy", f"{summary['unigram_entropy']:.3f} nats per {written(unit)}"),
    ]


def _beside(peak: int | None, expected: int | None) -> str:
    """A peak of memory, and what was expected."""
    measured = "not measured" if peak is None else in_words(peak)
    return measured if expected is None else f"{measured}; expected {in_words(expected)}"


def beside_prediction(given: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What the plan said of a step, what it was, and which of its two terms is further off."""
    if given is None:
        return []
    step, exposed = given["step_s"], given["exposed_s"]
    measured, waited = given["measured_step_s"], given["measured_exposed_s"]
    found = [("predicted step", f"{step:.4g} s; measured {measured:.4g} s")]
    if waited is None:
        return [
            *found,
            ("difference", f"{measured - step:+.4g} s; no host waits here, so of which term isn't known"),
        ]
    off = {"compute": measured - waited - (step - exposed), "exposed communication": waited - exposed}
    term = max(off, key=lambda name: abs(off[name]))
    return [*found, ("most of the difference", f"{term}, {off[term]:+.4g} s")]
