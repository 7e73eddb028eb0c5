"""What a rank holds, by category and group; and what an out-of-memory error says of it."""

import gc
import json
import os
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwright import SchedulePolicy, clock, fully_shard, quantize_
from shardwright.engine.step import executor
from shardwright.errors import StageError
from shardwright.observe.memory.accounts import memory_of
from shardwright.observe.memory.out_of_memory import Exhausted
from shardwright.observe.memory.report import NO_GROUP, Amount, Category
from shardwright.observe.steps.recording import ring
from shardwright.observe.steps.step_memory import levels
from shardwright.plan.predict import Choice, workload_of
from shardwright.plan.presets import preset, schedule
from shardwright.plan.remedies import changes_that_fit
from shardwright.transport.host_memory import VARIABLE, resident_nbytes
from shardwright.wrapper import FSDP
from tests.ranks.live import LiveStorages, storages_here
from tests.ranks.planned import MODELS, loss_of
from tests.ranks.pool import on_ranks, run_ranks
from tests.ranks.predicted import Rank, live_bytes
from tests.ranks.scripts import run_scripts

MIB = 2**20


def step(model, x):
    loss_of(model(x)).backward()


def recorded(rank, world, names):
    """By model the bytes of each category at each moment of a third step, and after it."""
    found = []
    for case in (MODELS[name] for name in names):
        model, x = case.make(), case.inputs()
        fully_shard(model, groups=case.groups, mp_policy=case.precision)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(2):
            step(model, x)
            optimizer.step()
            optimizer.zero_grad()
        with model.record_memory() as log:
            step(model, x)
        reports = [report for _, report in log.moments]
        found.append(([each.by_category for each in reports], model.memory().by_category))
    return found


def test_what_is_known_tensor_by_tensor_is_to_the_byte_what_a_plan_expects_at_every_event():
    names, sums = ["mlp", "transformer", "tied embedding", "mixed precision"], Category.GRADIENTS
    for rank, found in enumerate(run_ranks(2, recorded, names)):
        for name, (moments, after) in zip(names, found, strict=True):
            case = MODELS[name]
            choice = Choice("shardwright", case.groups, case.precision)
            workload = workload_of(case.make(), case.inputs(), choice, loss_of)
            planned = schedule(workload, replace(preset("shardwright"), policy=SchedulePolicy()), True)
            expected = live_bytes(planned, workload, Rank(rank, 2, case.precision))
            assert len(moments) == len(expected)
            for held, plan in zip(moments, expected, strict=True):
                for category in (Category.STATES, Category.UNSHARDED):
                    assert held[category] == plan.nbytes.get(category, 0), (name, plan.at, category)
                # What a reduce-scatter in flight reads is a buffer of a collective here, a gradient there.
                assert held[sums] + held[Category.TRANSPORT] == plan.nbytes.get(sums, 0), (name, plan.at)
            assert after[Category.UNSHARDED] == after[Category.TRANSPORT] == 0


class Keeps(nn.Module):
    """Keeps ``mib`` MiB for its backward, and returns what it is given."""

    def __init__(self, mib):
        super().__init__()
        self.weight, self.numel = nn.Parameter(torch.ones(3, 3)), mib * MIB // 4

    def forward(self, x):
        wide = (x.mean() * self.weight.mean()).expand(self.numel).contiguous()
        return x + (wide * wide).mean()


class Inside(nn.Module):
    """Calls ``look`` in the middle of the forward."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        self.look()
        return x


@on_ranks(2)
def test_the_page_of_a_step_has_memory_by_category():
    """In the middle of a forward; in MiB."""
    executor.PAUSE = 0  # ask the allocator at every event
    seen = []
    look = Inside(lambda: seen.append((clock.perf_counter(), model.memory())))
    model = nn.Sequential(Keeps(8), Keeps(24), look, Keeps(4), nn.Linear(4, 4 * MIB // 16))
    fully_shard(model, groups=[["0"], ["1"], ["3"], ["4"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        step(model, torch.ones(4, 4))
        optimizer.step()
        optimizer.zero_grad()
    at, report = seen[-1]
    level = [each for each in levels(ring()) if each.at <= at][-1]
    page = {name: nbytes / MIB for name, nbytes in level.nbytes.items()}
    counted = {str(name): nbytes / MIB for name, nbytes in report.by_category.items()}
    assert page["states"] == counted["states"] > 6
    assert page["unsharded"] == counted["unsharded"]
    assert page["gradients"] == counted["gradients"] == 0
    assert page["activations"] == pytest.approx(counted["activations"], abs=2)
    assert page["activations"] > 30
    assert page["other"] == pytest.approx(counted["other"], abs=2)


@on_ranks(2)
def test_activations_are_booked_to_the_group_whose_forward_keeps_them(rank):
    seen = []
    model = nn.Sequential(Keeps(8), Keeps(24), Inside(lambda: seen.append(model.memory())), Keeps(4))
    fully_shard(model, groups=[["0"], ["1"], ["3"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        step(model, torch.ones(4, 4))
        optimizer.step()
        optimizer.zero_grad()
    with model.record_memory() as log:
        step(model, torch.ones(4, 4))
    whole = next(report for _, report in log.moments if report.at == "before the backward of 3")
    amounts = {(a.category, a.group): a.nbytes for a in whole.amounts}
    kept = [amounts.get((Category.ACTIVATIONS, name), 0) / MIB for name in ("0", "1", "3")]
    last = log.moments[-1][1].by_category[Category.ACTIVATIONS]
    path = Path(f"memory{rank}.html")
    log.save(str(path))
    by_group = log.drawing(by="group").coloured
    page = path.read_text()
    path.unlink()
    after = model.memory().by_category[Category.ACTIVATIONS]
    inside, text = seen[-2].by_category[Category.ACTIVATIONS] / MIB, str(log)
    assert kept == [pytest.approx(mib, rel=0.05) for mib in (8, 24, 4)]
    assert inside == pytest.approx(32, rel=0.05)  # model.memory(), in the middle of a forward
    assert last < MIB and not after
    assert {name for name, _ in by_group} == {"0", "1", "3", NO_GROUP}
    assert len({colour for _, colour in by_group}) == 4
    rows = {line.split()[0] for line in text.splitlines()[1:]}
    assert {"MiB", "0", "1", "3", "all", NO_GROUP.split()[0]} <= rows, text
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert [name for name, _ in data["categories"]] == list(Category)
    held = [sum(nbytes) for _, nbytes, _ in data["levels"]]
    assert max(held) > 36 * MIB and any("the backward of 1" in label for _, _, label in data["levels"])


@on_ranks(1)
def test_a_recording_is_entered_between_steps_and_ends_with_its_block():
    model = fully_shard(nn.Sequential(Inside(lambda: model.record_memory().__enter__()), nn.Linear(2, 2)))
    with pytest.raises(StageError, match="between steps"):
        model(torch.ones(1, 2))
    with pytest.raises(StageError), model.record_memory():
        raise StageError("of a step")
    assert len(model._unit().runtime.executor.memory.watchers) == 0


# ---- out of memory


class Capacity(LiveStorages):
    """A device of ``nbytes``, whose allocator raises where an operation would hold more."""

    def __init__(self, without, nbytes):
        super().__init__(without)
        self.capacity_nbytes, self.peak_nbytes = nbytes, 0

    def _see(self, storage):
        if storage.device.type != "meta":  # which has no memory: a step that is priced is traced there
            super()._see(storage)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        made = sum([leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)])
        if self.nbytes > self.capacity_nbytes:
            del out  # what doesn't fit isn't there
            raise torch.OutOfMemoryError(f"out of memory: tried to allocate {made} bytes")
        return out


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def exhausted(rank, world, mib, rows):
    """Two steps on a device of ``mib`` MiB: what was raised, with its notes; else the peak."""
    others = storages_here()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(8)), nn.Linear(128, 4))
    fully_shard(model, groups=[[str(place)] for place in range(9)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(rows, 128)
    gc.collect()
    with Capacity(others, mib * MIB) as device:
        try:
            for _ in range(2):
                step(model, x)
                optimizer.step()
                optimizer.zero_grad()
        except torch.OutOfMemoryError as error:
            return "".join(traceback.format_exception(error))
    return device.peak_nbytes / MIB


def test_running_out_of_memory_ends_with_what_was_alive_and_changes_that_do_fit():
    whole = max(run_ranks(2, exhausted, 1000, 2048))
    for rank, text in enumerate(run_ranks(2, exhausted, int(whole * 0.7), 2048)):
        assert text.count("ran out of memory") == 1
        note = text.partition(f"rank {rank} of 2 ran out of memory in its forward. Alive on it:\n")[2]
        table, _, changes = note.partition("As it is, a step takes ")
        assert "activations" in table.splitlines()[0] and table.splitlines()[-1].startswith("all ")
        lines = changes.splitlines()[1:]
        assert len(lines) == 3 and all(
            re.search(r": [\d.,]+ MiB, a step takes \+", line) for line in lines
        ), note
        assert "blocks again in the backward" in changes
        assert "1/2 of the rows in a microbatch" in changes or "1/4 of the rows" in changes
    share = re.search(r"1/(\d) of the rows in a microbatch", changes)
    fits = run_ranks(2, exhausted, int(whole * 0.7), 2048 // int(share[1]))
    assert all(peak < whole * 0.7 for peak in fits), "what it says fits, fits"


def without_price(rank, world, kind):
    """What is said of a model that no plan can trace, of which activations and shards are alive."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(4)))
    if kind == "quantised":
        quantize_(model[:2])
        fully_shard(model, groups=[[str(place)] for place in range(4)])
    else:
        model = FSDP(model, use_orig_params=False).module
    x = torch.randn(512, 128)
    loss_of(model(x)).backward()
    amounts = [Amount(Category.ACTIVATIONS, "0", 64 * MIB), Amount(Category.UNSHARDED, "1", 8 * MIB)]
    report = replace(memory_of(model), amounts=(*amounts, Amount(Category.STATES, "1", 40 * MIB)))
    return changes_that_fit(Exhausted(model, ((x,), {}), report, 100 * MIB))


@pytest.mark.parametrize("kind", ["flat", "quantised"])
def test_running_out_of_memory_names_three_changes_also_of_a_model_that_no_plan_can_trace(kind):
    head, *lines = run_ranks(2, without_price, kind)[0]
    assert "is flat or quantised, so no step can be priced. Of what was alive these can free most" in head
    assert lines == [
        "  compute blocks again in the backward (torch.utils.checkpoint): 64.0 MiB",
        "  half of the rows in a microbatch, and twice as many microbatches: 32.0 MiB",
        "  twice as many ranks: 20.0 MiB",
    ]


def over_budget(rank, world):
    """Rank 1 has a budget of 120 MiB more than it holds, and takes 60 MiB in each of four modules."""
    if rank == 1:
        os.environ[VARIABLE] = f"{resident_nbytes() // MIB + 120}MiB"
    model = nn.Sequential(Keeps(8), *(Keeps(60) for _ in range(4)))
    fully_shard(model, groups=[[str(place)] for place in range(5)])
    try:
        step(model, torch.ones(4, 4))
    finally:
        print(f"holds {resident_nbytes() / MIB:.0f} MiB", file=sys.stderr)


def test_a_rank_that_comes_over_its_budget_says_so_before_the_kernel_ends_it():
    other, own = run_scripts(2, over_budget)
    assert other.error == "RankFailed" and "rank 1 raised OutOfMemory" in other.text
    assert own.error == "OutOfMemory"
    holds = r"rank 1, (?:unsharding|the (?:end of the )?forward of) .*: this process holds ([\d,.]+) MiB"
    said = re.search(rf"{holds}.*expected at most ([\d,.]+) MiB \({VARIABLE}=\d+MiB\)", own.text)
    assert said, own.text
    assert own.stderr.count("rank 1 of 2 ran out of memory in its forward. Alive on it:") == 1, own.stderr
    most, held = float(said[2].replace(",", "")), float(re.search(r"holds (\d+) MiB", own.stderr)[1])
    assert held < most + 130  # what one module takes at once, and no more of them


class TakesInBackward(torch.autograd.Function):
    """Takes 100 times the bytes of its gradient in its backward, and keeps them."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        TakesInBackward.kept.append(grad.repeat(100, 1))
        return grad


class Hungry(nn.Module):
    def forward(self, x):
        return TakesInBackward.apply(x)


def over_budget_in_backward(rank, world):
    os.environ[VARIABLE] = f"{resident_nbytes() // MIB + 200}MiB"
    model = nn.Sequential(*(Block(128) for _ in range(4)), Hungry(), nn.Linear(128, 4))
    fully_shard(model, groups=[["0"], ["1"], ["2"], ["3"], ["5"]])
    step(model, torch.randn(4096, 128))


def test_a_budget_that_runs_out_in_a_backward_gives_three_changes_too_where_fewer_kinds_fit():
    (one,) = run_scripts(1, over_budget_in_backward)
    assert one.error == "OutOfMemory"
    note = one.stderr.partition("rank 0 of 1 ran out of memory in its backward. Alive on it:")[2]
    assert "As it is, a step takes " in note and "No change could be priced" not in note, one.stderr
    assert "fake_tensor" not in one.stderr
    changes = note.partition("the fastest first:")[2].splitlines()
    assert sum(", a step takes " in line for line in changes) == 3, one.stderr
    assert len({re.sub(r"[\d.,]+", "", line) for line in changes if ", a step takes " in line}) < 3
