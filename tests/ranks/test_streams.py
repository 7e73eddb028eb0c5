"""Real models trained on streams that are only lists (tests/pure/test_streams.py): whatever gathers, no race.

One process plays rank 0 of several whose other ranks have the same numbers. Every operation of torch is put
down on the stream that is current, with the memory that it reads and writes. Memory is handed out again to
the stream that it was taken on as soon as its storage is freed, whatever its size. Collectives run on streams
of their own, as NCCL's do. Shards that are offloaded lie on the host, which runs in program order.
"""

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from shardwright import CPUOffloadPolicy, MixedPrecisionPolicy, SchedulePolicy, fully_shard
from shardwright.engine.building import build as building
from shardwright.engine.unit import units_in
from shardwright.policy import OptimizerOffloadPolicy
from shardwright.transport import mesh as meshes
from shardwright.transport.process import LaunchLog
from shardwright.transport.process_group import ProcessGroupComm
from shardwright.transport.streams import Streams
from tests.pure.test_streams import Device, FakeStream, NoRule1, NoRule2, NoRule4
from tests.ranks import quantised
from tests.ranks.models import Run, build, loss_of, shard_decoder
from tests.ranks.pool import on_ranks
from tests.ranks.test_extended import Bf16Gathered, ScaledInt8
from tests.ranks.test_rows import Scores, shard, tokens_of

WORLD, WIDTH = 4, 12


class Recorder(TorchDispatchMode):
    """Puts every operation down on ``device``, and what the host computes on its own."""

    def __init__(self, device):
        super().__init__()
        self.device, self.host = device, device.host
        self.places, self.on_host = {}, set()
        self.resize = torch.UntypedStorage.resize_

    def __enter__(self):
        recorder = self

        def resize_(storage, nbytes):
            recorder.forget(storage)
            recorder.resize(storage, nbytes)
            recorder.place(storage)
            return storage

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *raised):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*raised)

    def place(self, storage):
        """Where a storage lies; None for one without memory. Where it is new it takes memory first."""
        if not storage.nbytes():
            return None
        key = storage._cdata
        if key not in self.places:
            for gone in [k for k, (ref, _) in self.places.items() if ref.expired()]:
                self.device.give_back(self.places.pop(gone)[1])
                self.on_host.discard(gone)
            self.places[key] = StorageWeakRef(storage), self.device.take()
        return self.places[key][1]

    def forget(self, storage):
        if storage._cdata in self.places:
            self.device.give_back(self.places.pop(storage._cdata)[1])

    def places_of(self, values):
        tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
        places = [self.place(t.untyped_storage()) for t in tensors if t.device.type != "meta" and t.numel()]
        return {place for place in places if place is not None}

    def put_on_host(self, tensor):
        storage = tensor.untyped_storage()
        self.forget(storage)
        self.device.current.append(self.host)
        self.place(storage)
        self.device.current.pop()
        self.on_host.add(storage._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = pytree.tree_leaves((args, kwargs or {}))
        if any(is_traceable_wrapper_subclass(t) for t in inputs):
            return NotImplemented
        before, name = self.places_of(inputs), func._schema.name
        hosted = {place for key, (_, place) in self.places.items() if key in self.on_host}
        by_host = bool(before) and before <= hosted and name != "aten::_to_copy"
        if name == "aten::is_pinned":
            return bool(before) and before <= hosted
        if (kwargs or {}).pop("pin_memory", False):  # which a build of torch without a device refuses
            out = func(*args, **kwargs)
            self.put_on_host(out)
            return out
        out = func(*args, **(kwargs or {}))
        written = [
            value
            for place, each in enumerate(func._schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
            for value in [args[place] if place < len(args) else (kwargs or {}).get(each.name)]
        ]
        self.device.current.append(self.host if by_host else self.device.current[-1])
        made = self.places_of(out) - before
        if by_host:
            self.on_host |= {key for key, (_, place) in self.places.items() if place in made}
        if not func.is_view and not name.startswith(("aten::empty", "aten::set_")):
            writes = self.places_of(written) | made
            self.device.run(name, before - writes, writes)
        self.device.current.pop()
        return out


class Group:
    """A process group whose ranks have the same numbers as this one. Its collectives have a stream."""

    def __init__(self, recorder, ranks):
        self.recorder, self.ranks = recorder, ranks
        self.stream = FakeStream(recorder.device)

    def size(self):
        return len(self.ranks)

    def rank(self):
        return self.ranks.index(dist.get_rank())

    def _run(self, name, reads, writes):
        current = self.recorder.device.current
        self.stream.before |= current[-1].before
        current.append(self.stream)
        written = self.recorder.places_of(writes)
        self.recorder.device.run(name, self.recorder.places_of(reads) - written, written)
        current.pop()
        return Work(self.recorder.device, self.stream.before)

    def all_gather_single_coalesced(self, outputs, inputs, _=None):
        for whole, own in zip(outputs, inputs, strict=True):
            with torch.utils._python_dispatch._disable_current_modes():
                whole.view(self.size(), -1).copy_(own.clone())
        return self._run("all-gather", inputs, outputs)

    def reduce_scatter_single_coalesced(self, outputs, inputs, _=None):
        for own, whole in zip(outputs, inputs, strict=True):
            with torch.utils._python_dispatch._disable_current_modes():
                own.copy_(whole.view(self.size(), -1)[self.rank()] * self.size())
        return self._run("reduce-scatter", inputs, outputs)

    # The names that torch 2.11 and 2.12 have.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allreduce_coalesced(self, tensors, _=None):
        with torch.utils._python_dispatch._disable_current_modes():
            for each in tensors:
                each.mul_(self.size())
        return self._run("all-reduce", [], tensors)


class Work:
    def __init__(self, device, before):
        self.device, self.before = device, before

    def wait(self):
        self.device.current[-1].before |= self.before


class OwnGather:
    """A caller's own collective."""

    def __init__(self, recorder):
        self.group = Group(recorder, range(WORLD))

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return self.group.all_gather_single_coalesced([output_tensor], [input_tensor])


class OwnScatter(OwnGather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return self.group.reduce_scatter_single_coalesced([output_tensor], [input_tensor])


def decoder(**options):
    model = shard_decoder(build(), fully_shard, **options)
    return model, lambda: loss_of(model, torch.arange(24).view(4, 6) % 17)


def linears(*convert, **options):
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in model:
        for kind in convert:
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, lambda: model(torch.ones(2, WIDTH)).square().mean()


def quantised_layers(dequantise="group", **options):
    model = quantised.shard(quantised.build(dequantise=dequantise, layers=3), **options)
    return model, lambda: model(torch.ones(2, quantised.COLS)).square().mean()


def lookup(mesh):
    model = shard(Scores(), SchedulePolicy(), mesh)
    return model, lambda: model(tokens_of(0, 0)).square().mean()


HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
SMALLER = {"reshard_after_forward": 2}
OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
KEPT = {"offload_policy": OptimizerOffloadPolicy()}
ON_DIM_1 = {"shard_placement_fn": lambda param: Shard(param.ndim - 1) if param.ndim else None}
GATHERERS = {
    "plain": (decoder, {}),
    "half": (decoder, HALF),
    "another dim": (linears, ON_DIM_1),
    "smaller world": (decoder, SMALLER),
    "rows in use": (lookup, {}),
    "subclass": (linears, {"convert": (Bf16Gathered,)}),
    "subclass of two tensors": (linears, {"convert": (ScaledInt8,)}),
    "quantised": (quantised_layers, {}),
    "quantised, decoded where it is read": (quantised_layers, {"dequantise": "layer"}),
    "quantised in a smaller world": (quantised_layers, SMALLER),
    "own": (decoder, {"own": True}),
    "offloaded": (decoder, OFFLOADED),
    "offloaded, half": (decoder, OFFLOADED | HALF),
    "offloaded optimizer": (decoder, KEPT),
    "offloaded and quantised": (quantised_layers, OFFLOADED),
    "offloaded in a smaller world": (decoder, OFFLOADED | SMALLER),
}


def races_of(rules, gatherer, hybrid, bucket_cap_mb):
    """What three steps of a gatherer's model raced; memory takes as many places after each but the first."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2 * WORLD)
    mesh = init_device_mesh("cpu", (2, WORLD), mesh_dim_names=("copies", "shards"))
    recorder = Recorder(Device())
    device = recorder.device

    streams = rules(lambda: FakeStream(device), lambda: device.current[-1])

    def make_comm(ranks, device_type, within, host=None):
        groups = [Group(recorder, ranks) for _ in range(2)]
        return ProcessGroupComm(*groups, LaunchLog(ranks, device_type), streams, host)

    building.keep_watch = lambda: None  # over ranks that aren't there
    meshes._make_comm = make_comm
    make, options = GATHERERS[gatherer]
    options = {"mesh": mesh if hybrid else mesh["shards"], **options}
    own, convert = options.pop("own", False), options.pop("convert", ())
    model, loss = make(*convert, **options)
    row_wise = make is lookup
    model.set_schedule_policy(SchedulePolicy(agreement="off", bucket_cap_mb=bucket_cap_mb, row_wise=row_wise))
    for block in model.blocks[:2] if own else ():
        block.set_custom_all_gather(OwnGather(recorder))
        block.set_custom_reduce_scatter(OwnScatter(recorder))
    run, num_places = Run.of(model), []
    for param in (param for unit in units_in(model) for param in unit.params):
        if param.split.on_host:
            recorder.put_on_host(param.local)
    with recorder:
        for _ in range(3):
            with torch.no_grad():
                loss()
            loss().backward()
            run.step()
            num_places.append(device.num_places)
    assert device.num_ops > 200
    assert len(set(num_places[1:])) == 1
    return device.races


@pytest.mark.each_case
@pytest.mark.parametrize("gatherer", GATHERERS)
@pytest.mark.slow
@on_ranks(1)
def test_no_gatherer_writes_memory_that_is_still_read(gatherer):
    for hybrid, bucket_cap_mb in ((False, 0), (True, 1)):
        races = races_of(Streams, gatherer, hybrid, bucket_cap_mb)
        assert not races, (hybrid, bucket_cap_mb, races)


@on_ranks(1)
def test_a_real_model_races_without_any_one_of_the_rules_that_it_needs():
    for rules in (NoRule1, NoRule2, NoRule4):  # a collective's end waits for what rule 3 does
        assert races_of(rules, "plain", False, 0), rules
