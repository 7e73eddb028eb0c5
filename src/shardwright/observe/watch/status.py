"""A status exchange in words, for people who ask: what runs, or what is wrong, and the table of all ranks."""

from shardwright.observe.watch.diagnosis import Fault, Findings, diagnose, table, tell
from shardwright.policy import WatchPolicy

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def status(found: Findings, policy: WatchPolicy) -> str:
    """How a job is: "running: ..." where every rank answers and none waits for long, else the diagnosis."""
    diagnosis = diagnose(found, policy)
    waits = [answer.waits for answer in found.answers.values() if answer.waits]
    if diagnosis.fault is not Fault.SLOW or found.silent or any(w.since_s > policy.suspect_s for w in waits):
        return tell(diagnosis, found)
    return f"running: {_progress(found)}\n{table(found)}"


def in_words(nbytes: float) -> str:
    """``nbytes`` with a binary unit: 12.3 MiB."""
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.{0 if unit == 0 else 1}f} {_UNITS[unit]}"


def _progress(found: Findings) -> str:
    answers = found.answers.values()
    said = next((found.answers[rank].status.progress for rank in sorted(found.answers)), "") or "no step yet"
    host, device = max(a.status.host_nbytes for a in answers), max(a.status.device_nbytes for a in answers)
    memory = [f"{in_words(n)} {of}" for n, of in ((host, "of the host"), (device, "of the device")) if n]
    return f"{said}; memory of the largest rank: {', '.join(memory) or 'not known'}"
