"""A status exchange in words, for people who ask: what runs, or what is wrong, and the table of all ranks."""

from shardwright.columns import in_words
from shardwright.observe.watch.diagnosis import diagnose
from shardwright.observe.watch.findings import Fault, Findings
from shardwright.observe.watch.table import table, tell
from shardwright.policy import WatchPolicy


def status(found: Findings, policy: WatchPolicy) -> str:
    """How a job is: "running: ..." where every rank answers and none waits for long, else the diagnosis."""
    diagnosis = diagnose(found, policy)
    waits = [answer.waits for answer in found.answers.values() if answer.waits]
    if diagnosis.fault is not Fault.SLOW or found.silent or any(w.since_s > policy.suspect_s for w in waits):
        return tell(diagnosis, found)
    return f"running: {_progress(found)}\n{table(found)}"


def _progress(found: Findings) -> str:
    answers = found.answers.values()
    said = next((found.answers[rank].status.progress for rank in sorted(found.answers)), "") or "no step yet"
    host, device = max(a.status.host_nbytes for a in answers), max(a.status.device_nbytes for a in answers)
    memory = [f"{in_words(n)} {of}" for n, of in ((host, "of the host"), (device, "of the device")) if n]
    return f"{said}; memory of the largest rank: {', '.join(memory) or 'not known'}"
