"""The runtime's device path on a simulated accelerator (sim.py) gives the bits of the same model on the CPU.

Each seed draws a model, what happens in its steps, which stream lags and how far, when each collective ends,
and how far each rank's host runs ahead.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.transport.launches import LaunchLog
from shardwright.transport.streams import Streams
from tests.device import mutants
from tests.device.cases import KINDS, OTHERS, on_cpu, setting
from tests.device.ranks import Job
from tests.device.sim import Device
from tests.pure.test_streams import NoRule1, NoRule2, NoRule4, NoRule6, NoRule6Either, NoRule7
from tests.ranks.pool import run_ranks, start_server

MODELS = 5
ALL = (*KINDS, *OTHERS)
EACH = -(-1000 // len(ALL))
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


def first_seen(rank, world, sites, schedules, wanted):
    """By site the first schedule that shows, by other bits or by an error, that it is left out."""
    reached = {}
    for schedule in schedules:
        with mutants.reached(sites) as found:
            assert differing(rank, world, [schedule], wanted) == []
        reached[schedule] = found
    return {
        site: _first_seen(
            site,
            [s for s in schedules if _may_show(s[0], site) and (site.file, site.function) in reached[s]],
            wanted,
        )
        for site in sites
    }


def _may_show(kind, site):
    return kind in (mutants.FILES[site.file] or ALL)


def _first_seen(site, schedules, wanted):
    with mutants.left_out(site):
        for kind, seed in schedules:
            try:
                found = differing(0, 1, [(kind, seed)], wanted)
            except Exception as error:
                found = [(kind, seed, repr(error))]
            if found:
                return found[0]
    return None


def test_losses_gradients_and_weights_are_those_of_the_cpu_however_parameters_are_gathered():
    assert differing_of([(kind, seed) for seed, kind in enumerate(ALL)]) == []


def test_what_is_gathered_for_others_beside_ones_own_is_held_until_the_collective_has_ended():
    assert differing_of([("different layers by rank", 1)]) == []


@pytest.mark.slow
def test_so_they_are_in_1000_schedules():
    assert differing_of([(kind, seed) for seed in range(100, 100 + EACH) for kind in ALL]) == []


@pytest.mark.parametrize("rules", [NoRule1, NoRule2, NoRule4, NoRule6, NoRule6Either, NoRule7])
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


_CHANGED = "streams.filling(changed=before != self._gathered_versions or gatherer.rows is not None)"
_ALONE = "only communication_s() calls it, between steps, and drops the sums"
_ON_HOSTS = "only hosts have it: an accelerator's second hop is launched at once, and its stream waits"
NOT_SEEN = {
    "transport/nccl.py _NcclReduction.wait: self._streams.land(self._due)": (
        "a collective was launched after it on that stream, and what waits for its end has waited for this"
    ),
    "transport/shared.py SharedGather.__init__: self._segments, kept": (
        "of 80 schedules none shows it: in a batch only what this rank gathers for others is held by nobody "
        "else, and compute must take that memory anew before the collective ends"
    ),
    "engine/group.py ParamGroup.fill: streams.filled([segment.flat for segment in segments])": (
        "what isn't said to be filled waits for compute: later than it could, and right"
    ),
    f"engine/group.py ParamGroup.fill: {_CHANGED}, gatherer.rows is not None": (
        "the host has waited for compute by then, to count the rows in use"
    ),
    "engine/group.py ParamGroup.give_up: self._release()": (
        "the error has ended the phase, and the next one's gathers wait for compute; only unshard() by hand, "
        "called again, doesn't"
    ),
    "engine/group.py ParamGroup.give_up: self.gatherer.comm.streams.forget_filled()": (
        "memory that gather has filled is handed out to gather alone, until a cache is emptied"
    ),
    "engine/group.py ParamGroup.let_go: self.gatherer.smaller_world.forget()": (
        "it is of offload_states(), which no schedule calls"
    ),
    "engine/batches.py rehearse: reduction.wait()": _ALONE,
    "engine/batches.py rehearse: reducer.copies.all_reduce(totals, f'all-reduce {reducer.name}').wait()": (
        _ALONE
    ),
    "transport/two_level.py _TwoGathers.wait: self._first.wait()": _ON_HOSTS,
    "transport/two_level.py _TwoGathers.wait: self._node.all_gather(self._places, self._key).wait()": (
        _ON_HOSTS
    ),
    "engine/group.py ParamGroup.reshard: self.wait()": (
        "of 100 schedules none shows it: a later all-gather into that memory ends after the one that nobody "
        "waited for, and only its own part, copied in before that, would be written over"
    ),
}
"""What can be left out without a trace here, with the reason."""


def test_the_document_says_how_many_places_are_left_out_in_turn():
    sites = mutants.sites()
    assert f"({len(sites)} places)" in DOCUMENT.read_text()
    assert NOT_SEEN.keys() <= {str(site) for site in sites}


@pytest.fixture(scope="module")
def seen():
    schedules = [(kind, seed) for seed in range(3) for kind in ALL]
    schedules += [("rows in use", seed) for seed in range(3, 6)]
    first, second = in_two_processes(first_seen, mutants.sites(), schedules, wanted_of(schedules))
    return first | second


@pytest.mark.slow
@pytest.mark.parametrize("site", mutants.sites(), ids=str)
def test_some_schedule_shows_that_a_wait_a_record_or_a_reference_is_left_out(site, seen):
    assert (seen[site] is None) == (str(site) in NOT_SEEN), seen[site]
