"""Where a step waits, and over which axis of the mesh: trace and ledger name the axis, and the rank on it."""

import json
import re
import time

import pytest
import torch

import shardwright
from shardwright.observe.ledger.late import late_ranks
from shardwright.observe.ledger.ledger import booked, summary, table
from shardwright.observe.steps.clocks import on_one_clock
from shardwright.observe.steps.recording import ring
from shardwright.observe.steps.step_page import save_page
from shardwright.transport.process import span
from tests.ranks.pool import run_ranks
from tests.ranks.test_every_mesh import LENGTH, ROWS, Schedule1F1B, build, pipeline, sharded

LATE_S, STEPS, WARM = 0.2, 8, 3


def trains(rank, world, sizes, late, where):
    """Steps in which a rank is late: in "data", or in the "forward" of a block before its attention."""
    mesh = shardwright.mesh(**sizes)
    positions = mesh.split({"x": torch.arange(LENGTH)[None]})["x"]
    ids = torch.zeros(ROWS, positions.shape[1], dtype=torch.long)
    if mesh.pp is None:
        model = sharded(build("ep" in sizes), mesh, False)
        step = lambda: model(ids, positions).square().mean().backward()  # noqa: E731
        model.blocks["1"].attention.register_forward_pre_hook(lambda *_: dally("forward"))
    else:
        _, of_stages = pipeline(mesh, False, False, Schedule1F1B, lambda out, _: out.square().mean())
        step = lambda: of_stages(ids, positions, ids)  # noqa: E731

    def dally(here):
        time.sleep(LATE_S if (rank, here) == (late, where) and len(begun) > WARM else 0)

    begun = []
    for number in range(STEPS):
        begun.append(number)
        with span("data"):
            dally("data")
        step()
    return ring()


@pytest.mark.each_case
@pytest.mark.parametrize(
    ("sizes", "late", "waiter", "where", "axis", "place", "verb"),
    [
        ({"dp": 2, "replicate": 2}, 3, 2, "data", "dp", 1, "words"),
        ({"dp": 2, "cp": 2}, 3, 2, "forward", "cp", 1, "all-to-all"),
        ({"dp": 4, "ep": 2}, 0, 1, "forward", "ep", 0, "all-to-all"),
        ({"dp": 2, "tp": 2}, 2, 3, "data", "tp", 0, "all-reduce"),
        ({"dp": 2, "pp": 2}, 0, 2, "data", "pp", 0, "point-to-point"),
    ],
)
def test_a_late_rank_is_named_on_the_axis_over_which_the_others_wait(
    tmp_path, sizes, late, waiter, where, axis, place, verb
):
    rings = on_one_clock(run_ranks(4, trains, sizes, late, where))
    waits = [
        each
        for each in late_ranks(rings)
        if (each.rank, each.wait.axis, each.late) == (waiter, axis, late) and each.fault_s > LATE_S / 2
        if each.did and where in (each.did.action, each.did.phase)
    ]
    # On a busy machine the waiter is late itself now and then.
    assert waits and {each.place for each in waits} == {place}
    assert verb in {each.wait.action for each in waits}
    said = rf"over {axis}, .* for rank {late} \({axis} {place}\), which was in (its )?{where}"
    assert re.search(said, waits[0].text()), waits[0].text()
    ledger = booked(rings, range(WARM + 2, STEPS))
    cause = "data" if where == "data" else "user code"  # it slept
    [loss] = [each for each in ledger.losses() if (each.whose, each.cause) == (late, cause)]
    assert axis in loss.axes and loss.seconds > 2 * LATE_S
    text = summary(ledger)
    assert re.search(rf"{cause}  rank {late} \(\S+, .*{axis} {place}.*\)  .*over .*{axis}", text), text
    steps = {step for _, step in ledger.seconds}
    assert any(f"late: rank {late}, {cause} over {axis}" in table(ledger, step) for step in steps)
    save_page(rings, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert axis in {each["args"].get("axis") for each in events if "args" in each}
    assert f"over {axis}" in (tmp_path / "trace.html").read_text()
