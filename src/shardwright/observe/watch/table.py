"""A diagnosis, and what it was made of, in words for people."""

from shardwright.columns import in_columns
from shardwright.observe.watch.diagnosis import activity, spans
from shardwright.observe.watch.findings import Diagnosis, Findings


def table(found: Findings) -> str:
    """A row for each rank, those that say the same joined: rank, what it waits for or does, since, where."""
    rows: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for rank in range(found.world):
        what, line, since_s = _row(found, rank)
        rows.setdefault((what, line), []).append((rank, since_s))
    cells = [("rank", "waits for or does", "since", "in")]
    for (what, line), members in rows.items():
        ranks = spans([rank for rank, _ in members]).partition(" ")[2]
        cells.append((ranks, what, f"{max(since_s for _, since_s in members):.1f} s", line))
    return "\n".join(f"  {line}" for line in in_columns(cells, "<<><"))


def _row(found: Findings, rank: int) -> tuple[str, str, float]:
    note = next((note for note in found.notes if note.rank == rank), None)
    if note is not None:
        return (f"raised {note.raised}" if note.raised else "ended its program"), note.line, 0.0
    answer = found.answers.get(rank)
    if rank in found.ended or answer is None:
        silent = "does not answer" if rank in found.silent else "has not come yet"
        silent = "process has ended" if rank in found.ended else silent
        return silent, "", found.silent.get(rank, 0.0)
    after = f", after {answer.caught}" if answer.caught else ""
    waits = answer.waits
    what = f"waits in {activity(answer)}, number {waits.number}" if waits is not None else activity(answer)
    return what + after, answer.line, waits.since_s if waits is not None else answer.since_s


def tell(diagnosis: Diagnosis, found: Findings) -> str:
    """The whole diagnosis: class and sentence, the table, the remedy."""
    return f"{diagnosis.fault}: {diagnosis.sentence}\n{table(found)}\n{diagnosis.remedy}"
