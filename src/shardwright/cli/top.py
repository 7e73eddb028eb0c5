"""What every rank of a running job waits for, or does: asked of them, and shown."""

import argparse
import json
import socket
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from shardwright import clock
from shardwright.errors import CommError, ConfigError
from shardwright.extras import from_extra
from shardwright.observe.ledger.lateness import Late, history
from shardwright.observe.ledger.ledger import Ledger, booked, summary
from shardwright.observe.preflight.host import within
from shardwright.observe.steps.clocks import on_one_clock
from shardwright.observe.steps.rings import Ring
from shardwright.observe.watch.diagnosis import diagnose
from shardwright.observe.watch.findings import Findings
from shardwright.observe.watch.status import status
from shardwright.observe.watch.status_exchange import StatusExchange, find_exchange, store_at
from shardwright.policy import WatchPolicy
from shardwright.train.folder import JOB_FILE, LATE_FILE, RunFolder
from shardwright.train.report import as_json, open_console

with from_extra("train"):
    from rich.live import Live
    from rich.text import Text

_ANSWER_S = 1.0
_PAUSE_S = 1.0
_BOOK_S = 10.0  # between two looks at what steps lost: ranks read their rings for it
_STEPS = 10  # the last ones, which are looked at
CONNECT = timedelta(seconds=5.0)
"""For an answer from the job's store, at most."""


def run(known: argparse.Namespace) -> int:
    """Ask and show, until Ctrl-C or the job's end.

    Raises:
        ConfigError: nothing is at JOB. CommError: no job is watched there.
    """
    if _has_ended(RunFolder(Path(known.job))):
        before = late_before(known.job)
        for each in before if known.json else ():
            print(each.to_json())
        said = f"the run at {known.job} has ended; " + (history(before) or "no rank was found late in it")
        open_console(stderr=known.json).print(said, markup=False)
        return 0
    address = store_of(known.job)
    exchange, console = exchange_at(address), open_console()
    ledger, booked_s = None, -_BOOK_S
    live = console.is_terminal and not (known.json or known.once)
    try:
        with Live(console=console, auto_refresh=False) if live else nullcontext() as screen:
            while ":" in address or Path(address).exists():  # else the launcher has ended
                found = exchange.call(_ANSWER_S)
                if clock.monotonic() > booked_s + _BOOK_S:
                    ledger, booked_s = ledger_of(exchange), clock.monotonic()
                late = _late(known.job, exchange)
                text = f"{status(found, WatchPolicy())}\n\n{_lost(ledger, late)}".rstrip()
                if known.json:
                    print(_object(found, ledger, late), flush=True)
                elif screen is not None:
                    screen.update(Text(text), refresh=True)
                else:
                    console.print(text, markup=False)
                if known.once:
                    return 0
                gone = exchange.ended(range(found.world)) | {note.rank for note in found.notes}
                if len(gone) == found.world:
                    break
                clock.sleep(_PAUSE_S)
    except KeyboardInterrupt:
        return 0
    except RuntimeError:
        pass  # the store is gone, and with it the process that held it
    open_console(stderr=known.json).print(f"the job at {known.job} has ended", markup=False)
    return 0


def ledger_of(exchange: StatusExchange) -> Ledger | None:
    """What the last steps of a job lost, and to whom; None where no step is on record on all ranks."""
    rings = [Ring.from_bytes(data) for data in exchange.rings(_STEPS, _ANSWER_S)]
    whole = [ring for ring in rings if len(ring.steps) > 1]
    return booked(on_one_clock(whole)) if len(whole) > 1 else None


def _has_ended(run: RunFolder) -> bool:
    """Whether the ranks of a run have left what they leave when it ends, and no job trains there now."""
    left = run.trace.is_dir() or (run.root / LATE_FILE).is_file()
    return left and not (run.root / JOB_FILE).exists()


def late_before(job: str) -> list[Late]:
    """Which ranks were late in the run of a folder, as far as that is in there."""
    file = Path(job, LATE_FILE)
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [Late.from_json(line) for line in lines if line.endswith("}")]  # the last one may be half written


def _late(job: str, exchange: StatusExchange) -> list[Late]:
    """Which ranks were late: the folder of a run has those of earlier jobs, too; its store has the latest."""
    return max(late_before(job), [Late.from_json(text) for text in exchange.late()], key=len)


def _lost(ledger: Ledger | None, late: list[Late]) -> str:
    """What the last steps lost; and over the run which host was named as late."""
    return "\n".join(filter(None, ("" if ledger is None else summary(ledger), history(late))))


def _object(found: Findings, ledger: Ledger | None, late: list[Late]) -> str:
    """What each rank answers, what the ended ones left, the diagnosis as "verdict" (null: all is well), what
    the last steps lost, seconds of all ranks together, and which ranks were late over the run."""
    diagnosis = diagnose(found, WatchPolicy())
    said = [each._asdict() for each in late]
    lost = [] if ledger is None else [loss._asdict() for loss in ledger.losses()]
    return as_json({**asdict(found), "verdict": diagnosis and asdict(diagnosis), "lost": lost, "late": said})


def store_of(job: str) -> str:
    """The address of a job's store, from what people give. Raises: ConfigError for a folder without one."""
    if not Path(job).is_dir():
        return job
    file = Path(job, JOB_FILE)
    if not file.exists():
        alone = RunFolder(Path(job)).config.is_file()
        why = (
            "a run on one rank, or one that was killed" if alone else "this is no run of `shardwright train`"
        )
        raise ConfigError(
            f"{job} has no {JOB_FILE}, which a job of several ranks keeps while it trains: {why}. Give the "
            "folder of a run (run.folder of its recipe), or HOST:PORT of a job's store"
        )
    return json.loads(file.read_text(encoding="utf-8"))["store"]


def exchange_at(address: str) -> StatusExchange:
    """The status exchange of the job whose store is there. Raises: ConfigError, CommError."""
    if ":" not in address and not Path(address).exists():
        raise ConfigError(f"no store is at {address}: the job has ended, or runs on another host")
    exchange = _find(address)
    if exchange is None:
        raise CommError(
            f"the store at {address} knows of no watched job: no model is sharded yet, or its watch is off"
        )
    return exchange


def _find(address: str) -> StatusExchange | None:
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        try:  # torch would try again and again, in a thread that may not outlive this process
            socket.create_connection((host, int(port)), CONNECT.total_seconds()).close()
        except OSError as error:
            raise _no_store(address, error.strerror or str(error)) from None
    try:  # who listens there may be no store, and never say anything
        return within(CONNECT.total_seconds(), _ask, address)
    except TimeoutError:
        raise _no_store(address, "nothing there spoke as a store does") from None
    except RuntimeError as error:
        raise _no_store(address, str(error).splitlines()[0]) from None


def _no_store(address: str, why: str) -> CommError:
    return CommError(
        f"no job's store answers at {address} within {CONNECT.total_seconds():g} s: {why}. Give what a "
        "rank of the job has as MASTER_ADDR:MASTER_PORT, on a host that reaches it"
    )


def _ask(address: str) -> StatusExchange | None:
    store = store_at(address, CONNECT * 0.3)  # of one try, of two
    store.set_timeout(CONNECT * 0.8)
    return find_exchange(store)
