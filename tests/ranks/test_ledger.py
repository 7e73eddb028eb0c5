"""The ledger of real steps, with what was made slow on purpose: each is found, at the right rank."""

import gc
import json
import logging
import re
import time
from pathlib import Path

import pytest
import torch

from shardwright import fully_shard, set_transport
from shardwright.cli import main
from shardwright.observe.ledger.causes import CORES, REST
from shardwright.observe.ledger.ledger import booked, summary, table
from shardwright.observe.steps.clocks import on_one_clock
from shardwright.observe.steps.recording import ring
from shardwright.observe.watch.lifecycle import late_over_the_run
from shardwright.train.folder import RunFolder
from shardwright.transport.process import span
from tests.ranks.models import Run, batches, build, loss_of, shard_decoder
from tests.ranks.pool import run_ranks
from tests.ranks.top import said_by_top

SLOW_S, WARM, STEPS = 0.1, 3, 9


def computes(seconds):
    matrix = torch.ones(256, 256)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        matrix @ matrix


def collects(seconds):
    """Garbage that takes about so long to look through."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        gc.collect()


def trained(rank, world, transport, causes):
    """causes: what is slow at which rank, in every step after the first ones."""
    set_transport(transport)
    run = Run.of(shard_decoder(build(), fully_shard))
    mine = {cause: seconds for cause, (slow, seconds) in causes.items() if slow == rank}
    run.model.register_forward_hook(lambda *_: computes(mine.get("compute", 0) * (step >= WARM)))
    gc.collect()
    gc.freeze()  # so that a collection takes about a millisecond
    kept = [[i] for i in range(200_000)]
    for step in range(STEPS):
        slow = step >= WARM
        with span("data"):
            tokens = batches(step, world)[rank]
            time.sleep(mine.get("data", 0) * slow)
        loss_of(run.model, tokens).backward()
        collects(mine.get("garbage collection", 0) * slow)
        time.sleep(mine.get("user code", 0) * slow)
        run.step()
        with span("save"):
            time.sleep(mine.get("checkpoint", 0) * slow)
    gc.unfreeze()
    assert kept
    return ring()


@pytest.mark.parametrize(
    ("transport", "causes"),
    [
        ("sockets", {"data": (1, SLOW_S)}),
        ("auto", {"garbage collection": (0, SLOW_S)}),
        ("auto", {"compute": (1, 2 * SLOW_S), "data": (2, SLOW_S / 2)}),
        ("auto", {"user code": (1, SLOW_S)}),
        ("sockets", {"checkpoint": (0, 2 * SLOW_S), "compute": (2, SLOW_S)}),
    ],
)
def test_what_is_slow_on_purpose_is_first_in_the_ledger_and_the_rest_is_small(transport, causes):
    rings = run_ranks(3, trained, transport, causes)
    ledger = booked(on_one_clock(rings), range(WARM + 2, STEPS + 1))
    wanted = [(cause, rank) for cause, (rank, _) in causes.items()]
    # On a busy machine every rank loses time to other work, too, and the ledger says so.
    losses = [loss for loss in ledger.losses() if loss.cause != CORES]
    assert [loss[:2] for loss in losses[: len(wanted)]] == wanted, losses
    rest = sum(line.seconds for line in ledger.lines if line.cause == REST)
    assert rest < 0.02 * sum(ledger.seconds.values())
    assert f"{wanted[0][0]}  rank {wanted[0][1]}" in summary(ledger)
    steps = {step for _, step in ledger.seconds}
    assert any(f"late: rank {wanted[0][1]}, {wanted[0][0]}" in table(ledger, step) for step in steps)


def shown(rank, world):
    trained(rank, world, "auto", {"data": (0, SLOW_S)})
    return said_by_top(rank)


def test_top_says_what_the_last_steps_lost_and_to_whom():
    said = json.loads(run_ranks(2, shown)[1])
    first = max(said["lost"], key=lambda loss: loss["seconds"])
    assert (first["cause"], first["whose"]) == ("data", 0) and said["lost"][0] == first


def told(rank, world, folder):
    """Trains until some rank's log says who is late, at most ten seconds."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardwright.observe.watch.watchdog").addHandler(handler)
    run = Run.of(shard_decoder(build(), fully_shard))
    agreed, step, late = torch.zeros(1), 0, []
    while not agreed.item() and step < 200:
        with span("data"):
            tokens = batches(step, world)[rank]
            time.sleep(SLOW_S if rank == 1 else 0.0)
        loss_of(run.model, tokens).backward()
        run.step()
        late = [line for line in lines if "costs the others" in line]
        agreed = torch.tensor([float(bool(late))])
        torch.distributed.all_reduce(agreed)
        step += 1
    if rank == 0:
        RunFolder(Path(folder)).log_late(late_over_the_run())
    torch.distributed.barrier()
    return late


def test_a_line_of_the_log_says_who_costs_the_others_much_and_the_runs_folder_keeps_it(tmp_path, capsys):
    (line,) = [line for late in run_ranks(2, told, str(tmp_path)) for line in late]
    assert (
        line.startswith("rank 1 on ")
        and "% of the last " in line
        and ": data (" in line
        and "test_ledger.py:" in line
    ), line
    assert main(["top", str(tmp_path)]) == 0
    host = line.split()[3]
    assert re.search(rf"{host} \(rank 1\): (18|19|20) steps, ", capsys.readouterr().out)
    assert main(["top", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rank"], said["cause"]) == (1, "data")
    assert 18 <= said["steps"] <= 20  # a rank that has just begun a step has not ended it
    assert 0.05 < said["share"] < 1


def test_top_says_of_a_run_that_has_ended_that_nobody_was_late_and_knows_it_from_a_folder_that_is_no_run(
    tmp_path, capsys
):
    folder = RunFolder(tmp_path / "run")
    assert main(["top", str(tmp_path)]) == 2
    assert "this is no run of `shardwright train`. Give the folder of a run" in capsys.readouterr().err
    folder.root.mkdir()
    folder.config.touch()
    assert main(["top", str(folder.root)]) == 2
    assert "a run on one rank, or one that was killed" in capsys.readouterr().err
    folder.leave_ring(ring())
    assert main(["top", str(folder.root)]) == 0
    assert "has ended; no rank was found late in it" in " ".join(capsys.readouterr().out.split())
    assert main(["top", str(folder.root), "--json"]) == 0
    assert capsys.readouterr().out == ""
