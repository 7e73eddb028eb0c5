"""From what the ranks say of themselves to what is wrong. Pure: no store, no clock, no process.

Judged in this order; the first that holds is the diagnosis:

    failed     a rank left a note: it raised an exception, or its program ended
    lost       a rank's process has ended without one, its connection is closed, or it is silent for lost_s;
               or the asking rank is cut off: all ranks of other hosts are
    diverged   two ranks launched different collectives under one number; or ranks wait for each other in a
               circle; or all wait, some in the caller's own collectives, and no wait can end
    stalled    a rank that others wait for has done nothing for stall_s; or a collective that all its ranks
               have launched hasn't ended for collective_s
    slow       none of these: a log line, never an error

Loaded when a rank has to be judged, which a job whose ranks don't wait for long never comes to.

A wait can end once every rank of its transport has launched what is waited for. So divergence is proven by
what was launched, never by how long it takes: a rank that computes, sleeps or is stopped is slow.
"""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from shardwright.observe.watch.findings import Answer, Diagnosis, Fault, Findings, Launched
from shardwright.policy import WatchPolicy

FOREIGN_S = 2.0
"""How long a rank must have been in a collective of the caller's own, that all its ranks enter, to count as
unable to end. Other calls (a receive, a broadcast) may be a long transfer: ``lost_s`` for those."""

_ALL_ENTER = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "monitored_barrier")


def diagnose(found: Findings, policy: WatchPolicy) -> Diagnosis:
    """The diagnosis of what a status exchange has brought."""
    return (
        _failed(found)
        or _lost(found, policy)
        or _different_launches(found)
        or _circle(found)
        or _nobody_can_go_on(found, policy)
        or _stalled(found, policy)
        or _stuck(found, policy)
        or _slow(found)
    )


def spans(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0, 2-5"."""
    ordered, parts = sorted(ranks), list[list[int]]()
    for rank in ordered:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = [str(p[0]) if len(p) == 1 else f"{p[0]}{'-' if len(p) > 2 else ', '}{p[-1]}" for p in parts]
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(words)}"


def _failed(found: Findings) -> Diagnosis | None:
    if not found.notes:
        return None
    # What was raised caused the rest; a program that ends first is the cause only where nothing was raised.
    first = min(found.notes, key=lambda note: (not note.raised, note.at_s))
    remedy = (
        f"Fix the error of rank {first.rank} (its own output has the traceback); the others waited for it."
    )
    if not first.raised:
        remedy = (
            f"Let every rank make as many steps: rank {first.rank} ended while others needed it "
            "(data of different lengths: shardwright.lockstep)."
        )
    also = [f"{spans([note.rank])} {note}" for note in found.notes if note.raised and note is not first]
    sentence = "; then ".join([f"rank {first.rank} {first}", *also])
    return Diagnosis(Fault.FAILED, (first.rank,), sentence, remedy)


def _lost(found: Findings, policy: WatchPolicy) -> Diagnosis | None:
    silent = [rank for rank, seconds in found.silent.items() if seconds > policy.lost_s]
    ranks = sorted({*found.ended, *silent})
    if not ranks:
        return None
    own = found.hosts.get(found.asker)
    away = {rank: host for rank, host in found.hosts.items() if host != own}
    if away and set(away) <= set(silent):
        return _cut_off(found.asker, sorted(away), len(set(away.values())), policy.lost_s)
    how = "ended without a word" if found.ended else f"has not answered for {policy.lost_s:g} s"
    return Diagnosis(
        Fault.LOST,
        tuple(ranks),
        f"{spans(ranks)} {'is' if len(ranks) == 1 else 'are'} lost: the process {how}",
        f"Look for what ended {spans(ranks)}: the out-of-memory killer, a crash in native code, a scheduler, "
        "its host.",
    )


def _cut_off(rank: int, away: Sequence[int], hosts: int, lost_s: float) -> Diagnosis:
    """No rank of another host answers: with two such hosts that is this one's doing."""
    said = f"{spans(away)} on {'another host' if hosts == 1 else f'{hosts} other hosts'}"
    said = f"{said} {'has' if len(away) == 1 else 'have'} not answered for {lost_s:g} s"
    at_fault = [rank] if hosts > 1 else away
    is_or_are = "is" if len(at_fault) == 1 else "are"
    what = "cut off" if hosts > 1 else f"lost, or rank {rank} is cut off"
    return Diagnosis(
        Fault.LOST,
        tuple(at_fault),
        f"{spans(at_fault)} {is_or_are} {what}: {said}",
        f"Look at the network of rank {rank}'s host"
        + (", and for what ended the other host." if hosts == 1 else "."),
    )


_DIVERGED = (
    "Every rank must make the same calls in the same order: look at the lines above for a call under "
    "`if rank == 0`, data of different lengths (shardwright.lockstep), or an exception that was caught."
)


def _different_launches(found: Findings) -> Diagnosis | None:
    """Two ranks launched different collectives under the same number of one transport."""
    for name in dict.fromkeys(name for answer in found.answers.values() for name in answer.logs):
        alike: dict[object, tuple[Launched, list[int]]] = {}
        for rank, answer in found.answers.items():
            if (log := answer.logs.get(name)) is not None:
                alike.setdefault((log.count, log.keys), (log, []))[1].append(rank)
        first = max(log.count - len(log.keys) for log, _ in alike.values()) + 1
        for number in range(first, max(log.count for log, _ in alike.values()) + 1):
            sides: dict[str, list[int]] = {}
            for log, ranks in alike.values():
                key = log.key(number)
                if key is not None:
                    sides.setdefault(key, []).extend(ranks)
            if len(sides) > 1:
                said = ", ".join(f"{spans(ranks)} launched {key!r}" for key, ranks in sides.items())
                ranks = sorted(rank for side in sides.values() for rank in side)
                sentence = f"ranks are in different collectives: as number {number}, {said}"
                return Diagnosis(Fault.DIVERGED, tuple(ranks), sentence, _DIVERGED)
    return None


def _missing(found: Findings, answer: Answer) -> list[int]:
    """The ranks that have answered and not launched what ``answer``'s rank waits for."""
    waits = answer.waits
    if waits is None or waits.log not in answer.logs:
        return []
    if (waits.log, waits.number) in found.missing:  # the same for all that wait for it, which may be all
        return found.missing[waits.log, waits.number]
    missing = found.missing.setdefault((waits.log, waits.number), [])
    for rank in answer.logs[waits.log].ranks:
        other = found.answers.get(rank)
        log = other.logs.get(waits.log) if other is not None else None
        if other is None or (log is None and answer.logs[waits.log].of_torch):
            continue  # what torch doesn't remember may have been launched all the same
        if (log.count if log is not None else 0) < waits.number:
            missing.append(rank)
    return missing


def _behind(found: Findings, answer: Answer) -> list[int]:
    """The ranks that have launched what ``answer``'s rank waits for, and whose devices haven't begun it."""
    waits = answer.waits
    if waits is None or waits.log not in answer.logs:
        return []
    logs = {rank: other.logs.get(waits.log) for rank, other in found.answers.items()}
    return [r for r, log in logs.items() if log and log.begun is not None and log.begun < waits.number]


def _unknown(found: Findings, answer: Answer) -> list[int]:
    """The ranks that don't say whether they have launched what ``answer``'s rank waits for."""
    log = answer.logs.get(answer.waits.log) if answer.waits is not None else None
    if answer.waits is None or log is None or not log.of_torch:
        return []
    return [r for r in log.ranks if r in found.answers and answer.waits.log not in found.answers[r].logs]


def _is_steady(found: Findings, answer: Answer) -> bool:
    """Whether the rank was in its wait when the exchange began, so that answers describe one moment.

    A thread that stands in one call for ``FOREIGN_S`` counts as waiting for what is in flight.
    """
    waits = answer.waits
    return waits is not None and waits.since_s > max(found.took_s, FOREIGN_S if waits.in_flight else 0.0)


def _elsewhere(found: Findings, answer: Answer) -> list[int]:
    """The ranks that wait, themselves, for what they launched before what ``answer``'s rank waits for."""
    waits, ranks = answer.waits, []
    for rank, other in found.answers.items():
        log = other.logs.get(waits.log) if waits is not None else None
        if waits is None or log is None or log.ended is None or not log.ended < waits.number <= log.count:
            continue
        own = other.waits if _is_steady(found, other) else None
        if own is not None and own.in_flight and (own.log, own.number) != (waits.log, waits.number):
            ranks.append(rank)
    return ranks


def _circle(found: Findings) -> Diagnosis | None:
    """Ranks of which each waits for one that waits, in the end, for the first: none can go on.

    Where all make the same calls in the same order that can't be, however long one of them computes: who is
    waited for, here, waits itself for a call that comes earlier in that order.
    """
    calls = {
        answer.rank: (answer.waits.log, answer.waits.number)
        for answer in found.answers.values()
        if answer.waits is not None and _is_steady(found, answer)
    }
    # A rank needs what it waits for, and that needs ranks: of many in one wait their peers are listed once.
    needs: dict[object, list[object]] = {rank: [call] for rank, call in calls.items()}
    for rank, call in calls.items():
        if call not in needs:
            peers = _missing(found, found.answers[rank]) + _elsewhere(found, found.answers[rank])
            needs[call] = [peer for peer in peers if calls.get(peer) != call]
    try:
        TopologicalSorter(needs).prepare()
    except CycleError:
        return _divergence(found, [*calls])
    return None


def _nobody_can_go_on(found: Findings, policy: WatchPolicy) -> Diagnosis | None:
    """Every rank waits, here or in a collective of the caller's own, and no wait of ours can end."""
    if len(found.answers) < found.world:
        return None
    answers = found.answers.values()
    ours = [answer for answer in answers if _is_steady(found, answer) and _missing(found, answer)]
    foreign = [answer for answer in answers if answer.waits is None and _is_stuck(answer, policy)]
    if not ours or not foreign or len(ours) + len(foreign) < found.world:
        return None
    return _divergence(found, sorted(found.answers))


def _is_stuck(answer: Answer, policy: WatchPolicy) -> bool:
    """Whether a rank has been in a collective of the caller's own for longer than that can take."""
    enough_s = FOREIGN_S if answer.foreign.startswith(_ALL_ENTER) else max(policy.lost_s, FOREIGN_S)
    return bool(answer.foreign) and answer.foreign_s >= enough_s


def _divergence(found: Findings, ranks: Sequence[int]) -> Diagnosis:
    sides: dict[str, list[int]] = {}
    for rank in ranks:
        sides.setdefault(activity(found.answers[rank]), []).append(rank)
    said = ", ".join(
        f"{spans(side)} {'is' if len(side) == 1 else 'are'} in {what}" for what, side in sides.items()
    )
    return Diagnosis(
        Fault.DIVERGED, tuple(ranks), f"ranks wait for each other in different places: {said}", _DIVERGED
    )


def _stalled(found: Findings, policy: WatchPolicy) -> Diagnosis | None:
    if policy.stall_s is None:
        return None
    stalled = [
        answer
        for answer in found.answers.values()
        if (answer.waits is None or (answer.waits.in_flight and not _missing(found, answer)))
        and not answer.foreign
        and answer.idle_s > policy.stall_s
    ]
    if not stalled or not any(answer.waits for answer in found.answers.values()):
        return None
    ranks = tuple(answer.rank for answer in stalled)
    lines = ", ".join(dict.fromkeys(answer.line for answer in stalled))
    return Diagnosis(
        Fault.STALLED,
        ranks,
        f"{spans(ranks)} {'has' if len(ranks) == 1 else 'have'} done nothing for "
        f"{max(answer.idle_s for answer in stalled):.1f} s, at {lines}",
        f"Fix what {spans(ranks)} waits for there, or raise stall_s ({policy.stall_s:g} s).",
    )


_NOT_ENTERED = "has not entered it: the device is still busy with what was queued before"


def _stuck(found: Findings, policy: WatchPolicy) -> Diagnosis | None:
    """All wait, and what one waits for all have launched: what moves the bytes has stopped, or crawls."""
    waiting = {(a.waits.log, a.waits.number): a for a in found.answers.values() if a.waits}
    for answer in waiting.values():
        log = answer.waits and answer.logs.get(answer.waits.log)
        if policy.collective_s is None or not log or _missing(found, answer):
            continue
        waits = [found.answers[rank].waits for rank in log.ranks if rank in found.answers]
        if len(waits) == len(log.ranks) and all(w and w.since_s > policy.collective_s for w in waits):
            said = f"{activity(answer)} has not ended for {policy.collective_s:g} s; all have launched it"
            behind = _behind(found, answer)
            if not behind:
                where = "what else their host runs" if log.in_memory else "the network between them"
                remedy = f"Look at {spans(log.ranks)}, and at {where}; or raise collective_s."
                return Diagnosis(Fault.STALLED, log.ranks, said, remedy)
            remedy = f"Look at what the device of {spans(behind)} does before it, or raise collective_s."
            said = f"{said}, and {spans(behind)} {_NOT_ENTERED}"
            return Diagnosis(Fault.STALLED, tuple(behind), said, remedy)
    return None


_MEANT = "Nothing is wrong if that is meant to take so long."


def _slow(found: Findings) -> Diagnosis:
    waiting = [answer for answer in found.answers.values() if answer.waits]
    waited_s = max((answer.waits.since_s for answer in waiting if answer.waits), default=0.0)
    if not waiting or waited_s < FOREIGN_S < max(answer.foreign_s for answer in found.answers.values()):
        return _in_calls_of_their_own(found)
    longest = max(waiting, key=lambda answer: answer.waits.since_s if answer.waits else 0.0)
    assert longest.waits is not None
    absent = {*range(found.world)} - {*found.answers} - {*found.ended} - {note.rank for note in found.notes}
    elsewhere = [] if longest.waits.number else [a.rank for a in found.answers.values() if a.waits is None]
    late = sorted({*_missing(found, longest), *absent, *elsewhere})
    late = late or sorted({rank for answer in waiting for rank in _missing(found, answer)})
    waited = f"rank {longest.rank} has waited {longest.waits.since_s:.1f} s in {activity(longest)}"
    if not late and (behind := _behind(found, longest)):
        said = f"{waited}, which all ranks have launched; {spans(behind)} {_NOT_ENTERED}"
        return Diagnosis(Fault.SLOW, tuple(behind), said, _MEANT)
    if not late and (unknown := _unknown(found, longest)):
        said = f"{waited}; whether {spans(unknown)} launched it, torch's flight recorder doesn't say"
        return Diagnosis(Fault.SLOW, tuple(unknown), said, _MEANT)
    if not late:
        log = longest.logs.get(longest.waits.log)
        why = "The host is busy." if log and log.in_memory else "The host is busy, or the network is slow."
        return Diagnosis(Fault.SLOW, (), f"{waited}, which all ranks have launched", why)
    said = []
    for rank in late:
        answer = found.answers.get(rank)
        silent = "does not answer, but has not ended" if rank in found.silent else "has not come yet"
        what = f"{activity(answer)} at {answer.line}" if answer else silent
        said.append(f"rank {rank}: {what}")
    return Diagnosis(
        Fault.SLOW,
        tuple(late),
        f"{waited} for {spans(late)} ({'; '.join(said[:4])}{'; ...' if len(said) > 4 else ''})",
        _MEANT,
    )


def _in_calls_of_their_own(found: Findings) -> Diagnosis:
    """No rank waits in a collective of ours."""
    calling = [answer for answer in found.answers.values() if answer.foreign]
    others = [answer for answer in found.answers.values() if not answer.foreign]
    if not calling:
        return Diagnosis(Fault.SLOW, (), "no rank waits for another", "Nothing is wrong.")
    longest = max(calling, key=lambda answer: answer.foreign_s)
    said = [f"rank {answer.rank}: {activity(answer)} at {answer.line}" for answer in others[:4]]
    at = f"rank {longest.rank} has been {longest.foreign_s:.1f} s in {activity(longest)} at {longest.line}"
    late = tuple(answer.rank for answer in others)
    return Diagnosis(Fault.SLOW, late, f"{at} ({'; '.join(said) or 'as all ranks'})", _MEANT)


def activity(answer: Answer) -> str:
    """What a rank waits for, or does, in words."""
    if answer.waits is not None:
        return f"{answer.waits.key} ({answer.place})" if answer.place else answer.waits.key
    what = f"torch.distributed.{answer.foreign}" if answer.foreign else answer.does
    return f"{what} ({answer.place})" if answer.place else what
