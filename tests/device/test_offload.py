"""Where the host waits for the simulated device with offloaded shards: at the documented points alone."""

import random
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from shardwright import FSDPModule, offload_states, reload_states
from shardwright.engine.optimizers.away import _leaves
from shardwright.engine.unit import units_in
from shardwright.transport.streams import Streams
from shardwright.wrapper import FSDP, CPUOffload, ModuleWrapPolicy
from tests.device import cases
from tests.device.cases import KINDS
from tests.device.kernels import Kernels
from tests.device.ranks import Job, Simulated
from tests.device.test_runtime import MODELS, same
from tests.ranks.pool import run_ranks

OFFLOADED = [kind for kind in KINDS if kind.startswith("offloaded")]


class Counted(Streams):
    """num_offloads: groups of gradients that went to the host."""

    num_offloads = 0

    @contextmanager
    def offloading(self, sums):
        Counted.num_offloads += 1
        with super().offloading(sums):
            yield


class CountedJob(Job):
    num_trained = 0

    def _offload(self, model):
        super()._offload(model)
        groups = [group for unit in units_in(model) for group in unit.groups]
        self.num_trained = sum(any(param.trainable for param in group.params) for group in groups)
        self.world.device.waits.clear()  # before shards lay on the host


def counted(rank, world, kind, seed):
    """Of one run: what the hosts waited for, groups copied to the host, groups, backwards that reduce their
    gradients, and steps."""
    if dist.is_initialized():
        dist.destroy_process_group()
    Counted.num_offloads = 0
    job, backward, step = CountedJob(kind, seed, Counted), torch.Tensor.backward, torch.optim.SGD.step
    sync = FSDPModule.set_requires_gradient_sync
    with (
        patch.object(cases, "HAPPENS", ("step", "evaluation", "accumulation")),
        patch.object(cases, "BETWEEN", ("clipping",)),
        patch.object(torch.Tensor, "backward", autospec=True, side_effect=backward) as backwards,
        patch.object(torch.optim.SGD, "step", autospec=True, side_effect=step) as steps,
        patch.object(FSDPModule, "set_requires_gradient_sync", autospec=True, side_effect=sync) as syncs,
    ):
        job.run(seed % MODELS)
    waits = [each for device in job.world.devices for each in device.waits]
    num_kept = sum(call.args[1] is False for call in syncs.call_args_list)  # each before one backward
    num_reduced = backwards.call_count - num_kept
    return waits, Counted.num_offloads, job.num_trained, num_reduced, steps.call_count


@pytest.mark.parametrize(
    "kind", [OFFLOADED[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in OFFLOADED[1:])]
)
def test_the_host_waits_once_a_backward_and_once_before_a_step_and_one_event_brings_a_group(kind):
    for seed in range(3):
        [(waits, num_offloads, num_trained, backwards, steps)] = run_ranks(1, counted, kind, seed)
        assert waits == ["event"] * (backwards + steps)
        assert num_offloads == num_trained * backwards


def test_where_gradients_stay_on_the_device_the_host_waits_as_often():
    for seed in range(2):
        [(waits, num_offloads, num_trained, backwards, steps)] = run_ranks(
            1, counted, "gradients stay on the device", seed
        )
        assert waits == ["event"] * (backwards + steps)
        assert num_offloads == num_trained * backwards


def test_where_the_state_alone_is_on_the_host_it_waits_once_after_a_step():
    for seed in range(2):
        [(waits, num_offloads, _, backwards, steps)] = run_ranks(1, counted, "state alone on the host", seed)
        assert waits == ["event"] * steps and backwards >= steps == num_offloads > 0


RESIDENT = [kind for kind in KINDS if "offload_policy" not in KINDS[kind][2]]


@pytest.mark.parametrize(
    "kind", [RESIDENT[0], *(pytest.param(each, marks=pytest.mark.slow) for each in RESIDENT[1:])]
)
def test_where_nothing_is_on_the_host_it_waits_for_nothing(kind):
    [(waits, *_)] = run_ranks(1, counted, kind, 1)
    assert waits == []


def _shards(model):
    return [param.sharded for unit in units_in(model) for param in unit.params]


class WrappedJob(Job):
    """Trains two steps of a model in torch's wrapper class. Returns by moment whether each of the shards and
    of the gradients that there are lies on the host."""

    def _train(self, rank, number):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=self.size)
        device, seen = self.world.devices[rank], {}
        self._places[rank] = Simulated(device, self._offload)

        def look(moment):
            shards = [shard.to_local().detach() for shard in _shards(model)]
            grads = [shard.grad.to_local() for shard in _shards(model) if shard.grad is not None]
            seen[moment] = [device.memory.is_on_host(each) for each in shards + grads]

        try:
            with Kernels(device):
                with _disable_current_modes():
                    torch.manual_seed(number)
                    model, width = cases.layers(random.Random(number))
                    mesh = init_device_mesh("cpu", (self.size,))
                wrapped = {"device_mesh": mesh, "cpu_offload": self.offload}
                model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({cases.Layer}), **wrapped)
                self._offload(model)
                look("after wrapping")
                optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
                for _ in range(2):
                    loss = model(torch.ones(4, width)).square().mean()
                    look("after the forward")
                    loss.backward()
                    look("after the backward")
                    optimizer.step()
                    optimizer.zero_grad()
                look("before whole ones are collected")
                device.synchronize()
                return seen
        finally:
            dist.destroy_process_group()


def wrapped(rank, world, offload):
    if dist.is_initialized():
        dist.destroy_process_group()
    job = WrappedJob("offloaded", 1)
    job.offload = offload
    return job.run(0)


@pytest.mark.parametrize("offload", [CPUOffload(True), None], ids=["offloaded", "on the device"])
def test_the_wrappers_offloaded_parameters_lie_on_the_host_at_every_moment(offload):  # P16-P19 P22
    [by_rank] = run_ranks(1, wrapped, offload)
    assert len(by_rank) == 2
    for seen in by_rank:
        assert len(seen) == 4
        for moment, on_host in seen.items():
            assert on_host and set(on_host) == {bool(offload)}, moment


class AwayJob(Job):
    """Trains three steps; with ``away`` its states go to the host in the second: before the step of the
    optimizer, and after an evaluation that follows it. Returns losses and shards, and what was seen."""

    away = True

    def _train(self, rank, number):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=self.size)
        device = self.world.devices[rank]
        self._places[rank] = Simulated(device, self._offload)
        try:
            with Kernels(device):
                model, inputs = cases.model_of(self.kind, number, rank, random.Random(number))
                self._offload(model)
                params = [param for param in model.parameters() if param.requires_grad]
                optimizer = torch.optim.SGD(params, 0.1, momentum=0.9)
                losses, seen = [], []
                for step in range(3):
                    losses.append(model(next(inputs)).square().mean())
                    losses[-1].backward()
                    if self.away and step == 1:
                        seen.append(self._go_and_return(device, model, optimizer))
                    optimizer.step()
                    optimizer.zero_grad()
                    with torch.no_grad():
                        losses.append(model(next(inputs)).square().mean())
                    if self.away and step == 1:
                        seen.append(self._go_and_return(device, model, optimizer))
                shards = [cases.inner_of(shard.to_local().detach()) for shard in _shards(model)]
                device.synchronize()
                return [device.read(each.detach()) for each in losses + shards], seen
        finally:
            dist.destroy_process_group()

    def _go_and_return(self, device, model, optimizer):
        """Names of what changed its identity, bytes of states on the device, those given back, host waits."""
        memory = device.memory

        def objects():
            grads = [shard.grad for shard in _shards(model)]
            states = [value for state in optimizer.state.values() for value in state.values()]
            return [each for each in [*_shards(model), *grads, *states] if each is not None]

        def held():
            live = [
                place
                for place in memory._places.values()
                if not torch.UntypedStorage._expired(place.ref.cdata)
            ]
            return sum(place.nbytes for place in live if place.stream is not None)

        before, before_nbytes = objects(), held()
        on_device = [cases.inner_of(each.to_local()) for each in before]
        on_device = [leaf for each in on_device for leaf in _leaves(each)]
        states_nbytes = sum(t.nbytes for t in on_device if memory.find(t).stream is not None)
        del on_device
        num_waits = len(device.waits)
        offload_states(model, optimizer)
        offload_states(model, optimizer)  # a second time there is nothing to do
        waits, given_back = device.waits[num_waits:], before_nbytes - held()
        num_waits = len(device.waits)
        reload_states(model)
        reload_states(model)
        assert device.waits[num_waits:] == []
        assert all(one is other for one, other in zip(before, objects(), strict=True))
        return states_nbytes, given_back, waits


class StayJob(AwayJob):
    away = False


def beside(rank, world, schedules):
    """By kind, of each rank: whether states that were away give the same bits, and what was seen."""
    if dist.is_initialized():
        dist.destroy_process_group()
    found = {}
    for kind, seed in schedules:
        stayed = StayJob(kind, seed).run(seed % MODELS)
        gone = AwayJob(kind, seed + 1).run(seed % MODELS)
        bits = [same(a, b) for (a, _), (b, _) in zip(stayed, gone, strict=True)]
        found[kind, seed] = bits, [seen for _, seen in gone]
    return found


QUICK = ["plain", "offloaded optimizer", "subclass"]


@pytest.mark.parametrize(
    "kinds",
    [QUICK, pytest.param([kind for kind in KINDS if kind not in QUICK], marks=pytest.mark.exhaustive)],
)
def test_states_that_were_away_on_the_host_give_the_same_bits_and_the_devices_memory_meanwhile(kinds):
    [found] = run_ranks(1, beside, [(kind, seed) for kind in kinds for seed in range(2)], limit_s=300.0)
    for (kind, seed), (bits, seen) in found.items():
        assert all(bits), (kind, seed)
        for states_nbytes, given_back_nbytes, waits in (time for times in seen for time in times):
            assert given_back_nbytes >= states_nbytes, kind
            assert given_back_nbytes > 0 or kind != "offloaded optimizer"  # whose copies go, too
            assert waits == (["event"] if states_nbytes else []), kind
