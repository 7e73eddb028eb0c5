"""The runtime's device path on a simulated accelerator (sim.py) gives the bits of the same model on the CPU.

Each seed draws a model, what happens in its steps, which stream lags and how far, when each collective ends,
and how far each rank's host runs ahead.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import fully_shard, quantize_
from shardwright.checkpoint.agree import ranks
from shardwright.engine.groups.decoding import Decoding
from shardwright.engine.groups.group import Stage
from shardwright.engine.unit import units_in
from shardwright.schedule.schedule import Phase
from shardwright.transport.process import LaunchLog
from shardwright.transport.streams import Streams
from tests.device import cases, mutants
from tests.device.cases import KINDS, OTHERS, is_supported, on_cpu, setting
from tests.device.ranks import Job
from tests.device.sim import Device
from tests.pure.test_streams import NoRule1, NoRule2, NoRule4, NoRule6, NoRule6Either, NoRule7
from tests.ranks.pool import on_ranks, run_ranks, start_server

MODELS = 5
# What the tests see, not what the package does: minutes of both cores.
NOT_IN_CI = (pytest.mark.exhaustive, pytest.mark.slow)
ALL = tuple(kind for kind in (*KINDS, *OTHERS) if is_supported(kind))
EACH = -(-int(os.environ.get("SHARDWRIGHT_TEST_SCHEDULES", "1000")) // len(ALL))
"""Seeds of each kind: .ci/run, which has 90 minutes for all, takes fewer than ``make test-all``."""
DOCUMENT = Path(__file__).parents[2] / "docs/design/streams.md"
_wanted = {}
"""By ``(kind, number)``, what each rank of a CPU run gives."""


def on_device(kind, seed, rules=Streams):
    """What each rank gives."""
    return Job(kind, seed, rules).run(seed % MODELS)


def wanted_of(schedules):
    """What CPU ranks give, which each model is run on once."""
    missing = {(kind, seed % MODELS) for kind, seed in schedules} - _wanted.keys()
    for world in {setting(kind)[0] for kind, _ in missing}:
        models = sorted(model for model in missing if setting(model[0])[0] == world)
        by_rank = run_ranks(world, on_cpu, models, limit_s=300.0)
        _wanted.update(zip(models, zip(*by_rank, strict=True), strict=True))
    return _wanted


def same(ours, theirs):
    """Whether two ranks give the same bits."""
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and a.shape == b.shape and bits_of(a).equal(bits_of(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def bits_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def differing(rank, world, schedules, wanted, rules=Streams, enough=1000):
    """Of ``(kind, seed)`` those that give other bits, until there are enough; in a process of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    found = []
    for kind, seed in schedules:
        if not all(map(same, on_device(kind, seed, rules), wanted[kind, seed % MODELS])):
            found.append((kind, seed))
        if len(found) == enough:
            break
    return found


def differing_and_reached(rank, world, schedules, wanted, sites):
    """Besides ``differing``, the functions of sites that were called."""
    with mutants.reached(sites) as called:
        return differing(rank, world, schedules, wanted), called


def in_two_processes(function, items, *args):
    """What it returns of each half."""
    start_server()
    with ThreadPoolExecutor(2) as pool:
        halves = [
            pool.submit(run_ranks, 1, function, items[half::2], *args, limit_s=1200.0) for half in (0, 1)
        ]
    return [half.result()[0] for half in halves]


def differing_of(schedules, **options):
    first, second = in_two_processes(differing, schedules, wanted_of(schedules), *options.values())
    return first + second


def reaching(rank, world, schedules, sites, wanted):
    """By schedule the functions of sites that it calls; in a process of its own, as the next."""
    found = {}
    with mutants.reached(sites) as called:
        for schedule in schedules:
            called.clear()
            assert differing(rank, world, [schedule], wanted) == []
            found[schedule] = set(called)
    return found


def first_seen(rank, world, sites, reached, wanted):
    """By site the first schedule that shows, by other bits or by an error, that it is left out. Those that
    have shown another one of its file are tried first."""
    found, lately = {}, {}
    for site in sites:
        kinds = mutants.KINDS_OF.get(site.file, ALL)
        may = [s for s, called in reached.items() if s[0] in kinds and (site.file, site.function) in called]
        helpful = lately.setdefault(site.file, set())
        found[site] = _first_seen(site, sorted(may, key=lambda s: s not in helpful), wanted)
        helpful |= {found[site]} - {None}
    return found


def _first_seen(site, schedules, wanted):
    with mutants.left_out(site):
        for schedule in schedules:
            try:
                shows = differing(0, 1, [schedule], wanted) != []
            except Exception:
                shows = True
            if shows:
                return schedule
    return None


BESIDE = "different layers by rank", 1


@pytest.fixture(scope="module")
def few():
    """Of a schedule for each way to gather, and of one more, those that differ; and the functions with waits,
    records and releases that they come to."""
    schedules = [*((kind, seed) for seed, kind in enumerate(KINDS) if is_supported(kind)), BESIDE]
    args = wanted_of(schedules), mutants.sites()
    (first, called), (second, others) = in_two_processes(differing_and_reached, schedules, *args)
    return first + second, called | others


def test_losses_gradients_and_weights_are_those_of_the_cpu_however_parameters_are_gathered(few):
    assert [schedule for schedule in few[0] if schedule != BESIDE] == []


def test_what_is_gathered_for_others_beside_ones_own_is_held_until_the_collective_has_ended(few):
    assert BESIDE not in few[0]


@pytest.mark.slow
def test_so_they_are_in_schedules_of_random_models():
    assert differing_of([(kind, seed) for seed in range(100, 100 + EACH) for kind in ALL]) == []


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(NoRule2, marks=pytest.mark.slow),
        *(pytest.param(r, marks=NOT_IN_CI) for r in (NoRule1, NoRule4, NoRule6, NoRule6Either, NoRule7)),
    ],
)
def test_some_schedule_shows_that_a_rule_is_left_out(rules):
    offloads = rules in (NoRule6, NoRule6Either, NoRule7)
    schedules = [("offloaded" if offloads else "plain", seed) for seed in range(50)]
    assert differing_of(schedules, rules=rules, enough=1) != []


def launches(rank, world, kind):
    """What the first rank's host does, in order: what it launches, and where it waits for the device."""
    seen = []
    job = Job(kind, seed=0)
    first = job.world.devices[0]

    def launch(log, key, launched=LaunchLog.launch):
        if job.world.device is first:
            seen.append(key)
        return launched(log, key)

    def wait():
        seen.append("the host waits")
        Device.wait(first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchLog, "launch", launch)
        patch.setattr(first, "wait", wait)
        job.run(0)
    return seen


def test_the_all_reduce_over_copies_is_launched_behind_each_reduce_scatter():
    [seen] = run_ranks(1, launches, "hybrid")
    scattered = [place for place, key in enumerate(seen) if key.startswith("reduce-scatter ")]
    assert len(scattered) >= 6
    assert [seen[place + 1] for place in scattered] == [
        seen[place].replace("reduce-scatter", "all-reduce") for place in scattered
    ]
    assert not [key for key in seen if "spread" in key or "host waits" in key]


_INTERRUPTED = "only what an interrupt has left half done; tests/device/test_interrupts.py shows it"
_ALONE = (
    "communication_s() drops what it sums, and the host waits for the whole device before it returns: each "
    "schedule that calls it looks whether anything is still queued then"
)
NOT_SEEN = {
    "ops/bucketer.py ReduceScatterHandle._call: self.wait()": (
        "a callback runs once the sums of its collective have landed, and nothing is left to wait for"
    ),
    "engine/groups/group.py restore: group._free()": _INTERRUPTED,
    "engine/step/runtime.py Runtime.running: self._turn.settle()": _INTERRUPTED,
    "engine/step/runtime.py Turn.__enter__: self.settle()": _INTERRUPTED,
    "engine/step/batches.py rehearse: reduction.wait()": _ALONE,
    "engine/step/batches.py rehearse: "
    "reducer.copies.all_reduce(totals, f'all-reduce {reducer.name}').wait()": _ALONE,
    "engine/step/executor.py Executor._finalize: streams.settle()": (
        "the last sums are copied after compute has waited for the backward's gathers, but for one that was "
        "launched ahead for nothing, which is dropped here; another rank may use it, after this one's "
        "backward only of a frozen group, for gradients of its inputs"
    ),
}
"""What schedules come to and can be left out without a trace here, with the reason."""
FILLED = "engine/groups/group.py ParamGroup.fill: streams.filled([segment.flat for segment in segments])"
"""What isn't said to be filled waits for compute: later, and right. A test of its own shows it."""
BEGIN_FORGETS = "engine/step/runtime.py Runtime.abandon: self.backward.forget()"
END_FORGETS = "engine/step/backward.py Backward.end: self.forget()"
"""What a backward has counted: of one that failed, or of calls whose inputs ask for no gradient."""
RESET_FORGETS = "engine/step/hooks.py reset_step: group.reducer.gradients.forget()"
"""What earlier microbatches have left: tests/ranks/test_surface_setters.py shows it."""
GIVES_UP = "engine/groups/group.py ParamGroup.wait: self.give_up()"
GIVES_BACK = "engine/groups/group.py ParamGroup.give_up: self._free()"
"""What can't be decoded, of a call by hand; the end of a step that fails brings to rest by itself."""
OWN_TESTS = {FILLED, RESET_FORGETS, END_FORGETS, GIVES_UP, GIVES_BACK}
_ON_HOSTS = "only hosts have it: an accelerator's collectives are launched at once, and its streams wait"
_SAVES = "ranks come to a save by words in a store, which a test of its own shows"
_SUMS = "no schedule here sums its memory; tests/ranks/test_flips.py shows that"
NOT_REACHED = {
    "checkpoint/save.py save: asked.arrive(f'save(step={step})', pp)": _SAVES,
    "checkpoint/save.py async_save: asked.arrive(f'async_save(step={step})', pp)": _SAVES,
    "checkpoint/save.py _Save.arrive: self.group.arrive(call)": _SAVES,
    "clients/strategies.py on_rank_0: group.arrive(what)": _SAVES,
    "engine/groups/summed.py Sums.check: self.forget(tensor)": _SUMS,
    "engine/groups/summed.py SummedGroup.wait: super().wait()": _SUMS,
    "engine/groups/summed.py SummedGroup.write_back: self.sums.forget(face)": _SUMS,
    "lora.py save_adapter: ranks().arrive('save_adapter')": _SAVES,
    "module.py _save_pretrained: ranks().arrive(f'{own.__name__}.save_pretrained')": _SAVES,
    "module.py GradientReductionHandle.wait: backward.settle(self._number)": (
        "no schedule here is finalized by hand; tests/ranks/test_torch_versions.py shows the wait"
    ),
    "transport/base.py Comm.exchange: self.all_gather([Segment(table.view(-1), equal_spans(len(words), "
    "self.world))], key).wait()": "words of hosts: exchanged on an accelerator's transport they fail here",
    "transport/base.py AllReduce.spread: self._reduction.wait()": _ON_HOSTS,
    "transport/base.py AllReduce.spread: self._reduction, kept": _ON_HOSTS,
    "transport/base.py AllReduce.wait: self._gather.wait()": _ON_HOSTS,
    "transport/link.py _measure: comm.all_gather([Segment(flat, equal_spans(nbytes, comm.world))], "
    "'measure the link').wait()": "it measures a link of hosts",
    "transport/two_level.py _TwoGathers.issue: self._first.wait()": _ON_HOSTS,
    "transport/two_level.py _TwoGathers.issue: self._first, kept": _ON_HOSTS,
    "transport/two_level.py _TwoGathers.wait: self._second.wait()": _ON_HOSTS,
}
"""What no schedule comes to, since it isn't on a device's way, with the reason."""


def test_files_that_no_device_has_to_do_with_and_kinds_of_schedules_are_listed_for_files_with_such_calls():
    assert mutants.KINDS_OF.keys() <= {site.file for site in mutants.sites()}
    assert {kind for kinds in mutants.KINDS_OF.values() for kind in kinds} <= KINDS.keys() | OTHERS.keys()
    others = [site.file for site in mutants.sites(elsewhere=True)]
    assert [start for start in mutants.ELSEWHERE if not any(file.startswith(start) for file in others)] == []


def test_the_document_says_how_many_places_are_left_out_in_turn_and_how_many_are_seen():
    sites = [str(site) for site in mutants.sites()]
    assert {*NOT_SEEN, *NOT_REACHED, *OWN_TESTS} <= {*sites}
    num_seen = len(sites) - len(NOT_REACHED) - len(NOT_SEEN) - len(OWN_TESTS)
    told = (
        f"({len(sites)} places)",
        f"{num_seen} of them are seen so",
        f"{len(OWN_TESTS)} more",
        f"{len(NOT_REACHED)} aren't on a device's way",
        f"{len(NOT_SEEN)} can be left out without a trace",
    )
    document = " ".join(DOCUMENT.read_text().split())
    assert [each for each in told if each not in document] == []


def _functions(told):
    return {(site.file, site.function) for site in mutants.sites() if str(site) in told}


def test_no_way_to_gather_comes_to_what_is_not_on_the_way_of_a_device(few):
    assert few[1] & _functions(NOT_REACHED) == set()


class Noting(Streams):
    """num_late: gathers of what wasn't said to be filled, so that they wait for compute."""

    num_late = 0

    @contextmanager
    def gathering(self, flats):
        places = [*flats]
        Noting.num_late += not {place.data_ptr() for place in places} <= self._filled
        with super().gathering(places):
            yield


def late_gathers(rank, world, sites):
    """Of a training that only steps."""
    Noting.num_late = 0
    with (
        patch.object(cases, "HAPPENS", ("step",)),
        patch.object(cases, "BETWEEN", ("nothing",)),
        ExitStack() as stack,
    ):
        for site in sites:
            stack.enter_context(mutants.left_out(site))
        Job("plain", 0, Noting).run(0)
    return Noting.num_late


def test_no_gather_of_a_group_waits_for_what_compute_queues_after_its_copy_in():
    [site] = [site for site in mutants.sites() if str(site) == FILLED]
    assert run_ranks(1, late_gathers, []) == [0]
    assert run_ranks(1, late_gathers, [site])[0] > 0


def backward_events(rank, world, fails, sites):
    """Of a backward that follows another at once, which failed in the middle of the first group or whose
    first group's inputs asked for no gradient: kinds of events of that group."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = nn.Sequential(block, nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(2, 4)
    with ExitStack() as stack:
        for site in sites:
            stack.enter_context(mutants.left_out(site))
        if fails:
            handle = block[0].register_forward_hook(
                lambda *args: args[-1].register_hook(cases._fail) and None
            )
            first = model(x).sum()
            handle.remove()
            second = model(x).sum()
            with suppress(cases._Failed):
                first.backward()
            model.zero_grad()
        else:
            model(x).sum().backward()
            second = model(x.requires_grad_()).sum()
        second.backward()
    return [str(entry.event.kind) for entry in model.trace().phases[Phase.BACKWARD] if not entry.event.group]


@pytest.mark.parametrize(
    ("fails", "site", "right", "wrong"),
    [(True, BEGIN_FORGETS, "B+ G", "B+ G G"), (False, END_FORGETS, "B+ G B-", "B+ G")],
)
def test_a_backward_counts_neither_gradients_nor_calls_of_the_one_before(fails, site, right, wrong):
    [left] = [each for each in mutants.sites() if str(each) == site]
    assert run_ranks(1, backward_events, fails, []) == [right.split()]
    assert run_ranks(1, backward_events, fails, [left]) == [wrong.split()]


def left_by_a_failed_decode(rank, world, sites):
    """Whether ``unshard()``, whose weights can't be decoded, leaves the group at rest; the bytes it holds."""
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, "int8")
    fully_shard(model)
    groups = [group for unit in units_in(model) for group in unit.groups]
    [group] = [group for group in groups if not group.gatherer.decoding.is_idle]
    with ExitStack() as stack:
        for site in sites:
            stack.enter_context(mutants.left_out(site))
        stack.enter_context(patch.object(Decoding, "arrive", side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            model.unshard()
        return group.stage is Stage.SHARDED, group.held_nbytes


@pytest.mark.parametrize("site", [GIVES_UP, GIVES_BACK])
def test_an_unshard_whose_weights_cannot_be_decoded_leaves_nothing(site):
    [left] = [each for each in mutants.sites() if str(each) == site]
    assert run_ranks(1, left_by_a_failed_decode, []) == [(True, 0)]
    assert run_ranks(1, left_by_a_failed_decode, [left]) != [(True, 0)]


class Operations(TorchDispatchMode):
    """seen: names of what torch does with tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_ranks_come_to_a_save_without_a_tensor():
    with Operations() as operations:
        ranks().arrive("save(step=0)")
        ranks().arrive("async_save(step=1)")
    assert operations.seen == []


@pytest.fixture(scope="module")
def seen():
    sites, schedules = mutants.sites(), [(kind, seed) for seed in range(4) for kind in ALL]
    schedules += [*(("rows in use", seed) for seed in range(4, 9)), ("offloaded", 5), ("another dim", 4)]
    wanted = wanted_of(schedules)
    one, other = in_two_processes(reaching, schedules, sites, wanted)
    reached = one | other
    first, second = in_two_processes(first_seen, sites, reached, wanted)
    return first | second, set().union(*reached.values())


@pytest.mark.parametrize("site", [pytest.param(site, marks=NOT_IN_CI) for site in mutants.sites()], ids=str)
def test_some_schedule_shows_that_a_wait_a_record_or_a_reference_is_left_out(site, seen):
    shown, reached = seen
    assert (shown[site] is None) == (str(site) in {*NOT_SEEN, *NOT_REACHED, *OWN_TESTS}), shown[site]
    assert ((site.file, site.function) not in reached) == (str(site) in NOT_REACHED)
