"""What a step asks of the host is the same in a world of any size: this process plays rank 0 of all of them.

Counted are the instructions of the package's Python code, the kernels that a GPU would be given, and the
tensors that operations are called with. A collective itself is one call here: its hops are the backend's.
"""

import gc
import random
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

import shardwright
from bench.counting import KernelCount, count_instructions
from bench.rankzero import rank_zero_of
from shardwright import SchedulePolicy, full_state_dict, fully_shard, lockstep, loss_weights
from shardwright.engine.unit import unit_of
from shardwright.schedule.layout import align
from shardwright.transport import collect
from tests.device.cases import HALF, KINDS, ON_DIM_1, Layer

FOLDER = shardwright.__file__.rpartition("/")[0]
WORLDS = (8, 64, 512, 4096)


class Table(nn.Module):
    """Two parameters of as many rows, or columns, as are asked for."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        shapes = ((size, width) if dim == 0 else (width, size) for width in (2, 3))
        self.first, self.second = (nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.first.sum() + self.second.sum()


def tables(size, dim=0):
    return lambda draw: (nn.Sequential(*(Table(size, dim) for _ in range(3))), 1)


def mixed(draw):
    """Parameters of two dtypes in one group."""
    layers = [Layer(5, 6) for _ in range(2)]
    for layer in layers:
        layer.norm.double().register_forward_pre_hook(lambda _, args: args[0].double())
        layer.norm.register_forward_hook(lambda _, args, out: out.float())
    return nn.Sequential(*layers, nn.Linear(5, 3)), 5


class Own:
    """A caller's collectives, which do nothing."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False, op=None):
        return None


EVEN, PARTIAL, FEW = 4096, 8191, 5  # each rank has as many rows; the last has fewer; most have none
MADE = {
    "even rows": (2, tables(EVEN), {}),
    "a last rank with fewer rows": (2, tables(PARTIAL), {}),
    "ranks without rows": (2, tables(FEW), {}),
    "even columns": (2, tables(EVEN, 1), ON_DIM_1),
    "a last rank with fewer columns": (2, tables(PARTIAL, 1), ON_DIM_1),
    "ranks without columns": (2, tables(FEW, 1), ON_DIM_1),
    "ranks without columns, half": (2, tables(FEW, 1), ON_DIM_1 | HALF),
    "two dtypes": (2, mixed, {}),
    "many copies": (4, tables(FEW), {"hybrid": True, "shards": 2}),
    "a caller's collectives": (2, tables(FEW), {"own": Own()}),
}
IN_SMALL_WORLDS = ("alone", "subclass of two tensors")  # whose class takes no more ranks than it has rows
# What is offloaded is copied to pinned memory, which there is only where there is an accelerator.
OFFLOADED = [kind for kind, (*_, options) in KINDS.items() if "offload_policy" in options]
OTHERS = [kind for kind in KINDS if kind not in (*IN_SMALL_WORLDS, *OFFLOADED)]
WAYS = MADE | {kind: KINDS[kind] for kind in OTHERS}
EVEN_IN_8 = ("subclass", "hybrid", "hybrid, half")  # and in no larger world
QUICK = ("ranks without rows", "a last rank with fewer columns", "many copies", "rows in use")


class Counted(KernelCount):
    """How many tensors operations were called with, too."""

    num_tensors = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_tensors += sum(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs)))
        return super().__torch_dispatch__(func, types, args, kwargs)


def sharded(way, world):
    """A model whose groups are gathered in one way, and a batch of it."""
    _, make, options = WAYS[way]
    options = dict(options)
    row_wise, own = options.pop("row_wise", False), options.pop("own", None)
    shards = options.pop("shards", world // 2)
    shape = (world // shards, shards) if options.pop("hybrid", False) else (world,)
    torch.manual_seed(0)
    model, width = make(random.Random(51))  # layers whose sizes no world divides
    mesh = init_device_mesh("cpu", shape)
    for module in [*list(model.children())[:-1], model]:
        fully_shard(module, mesh=mesh, **options)
        if own is not None:
            module.set_custom_all_gather(own)
            module.set_custom_reduce_scatter(own)
    model.set_schedule_policy(SchedulePolicy(bucket_cap_mb=0, row_wise=row_wise))
    batch = torch.randn(4, width)
    batch[0] = 0  # of a table, the row that rank 0 has
    return model, batch


def counted(way, world):
    """Of a steady step: instructions by function, kernels by operation and line, tensors."""
    with rank_zero_of(world):
        model, batch = sharded(way, world)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step():
            with torch.no_grad():
                model(batch)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        gc.collect()  # an optimizer's step goes through all models that there are
        instructions = count_instructions(step, FOLDER)
        with Counted(FOLDER) as kernels:
            step()
    return instructions, kernels.kernels, kernels.num_tensors


@pytest.mark.sampled
@pytest.mark.parametrize(
    "way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_what_a_step_asks_of_the_host_does_not_grow_with_the_world(way):
    if way == "rows in use" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("this torch's fake backend writes no sums, so which rows change is left to chance")
    worlds = WORLDS[1:] if way in EVEN_IN_8 else WORLDS
    first, *others = [counted(way, world) for world in worlds]
    assert first[0].total() > 10_000 and first[1].total() > 3
    for world, found in zip(worlds[1:], others, strict=True):
        assert differing(first[0], found[0]) == differing(first[1], found[1]) == {}, f"{world} ranks"
        assert first[2] == found[2], f"{world} ranks"


def differing(ours, theirs):
    """What was counted otherwise, with both numbers."""
    return {each: (ours[each], theirs[each]) for each in ours | theirs if ours[each] != theirs[each]}


def test_sharding_a_model_asks_the_host_no_more_of_4096_ranks_than_of_64():
    def sharding(world):
        with rank_zero_of(world):
            mesh = init_device_mesh("cpu", (world,))
            model = nn.Sequential(*(Layer(5, 6) for _ in range(5)))
            both = [*model, model]
            return count_instructions(lambda: [fully_shard(each, mesh=mesh) for each in both], FOLDER)

    sharding(8)  # what is made once, for every model
    others_come = ("transport/attempt.py", "transport/process.py")  # once in a process; here they never do
    grown = differing(sharding(64), sharding(4096))
    assert [each for each in grown if not each.startswith(others_come)] == []


def looped(world):
    """A loop over three batches in lockstep, and the weights of a step's losses."""
    with rank_zero_of(world):
        mesh = init_device_mesh("cpu", (2, world // 2))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        loader = lockstep(range(3), mesh=mesh)
        batches = count_instructions(lambda: [*loader], FOLDER)
        return batches, count_instructions(lambda: loss_weights(model, [3, 1]), FOLDER)


def test_batches_in_lockstep_and_weights_of_losses_ask_the_host_no_more_of_4096_ranks_than_of_8():
    first, *others = map(looped, WORLDS)
    assert first[0]["ops/lockstep.py Lockstep._said"] > 100 and first[1]["ops/loss.py loss_weights"] > 100
    for world, found in zip(WORLDS[1:], others, strict=True):
        assert [differing(a, b) for a, b in zip(first, found, strict=True)] == [{}, {}], f"{world} ranks"


@pytest.mark.parametrize("world", [8, 1024])
def test_a_full_state_dict_takes_an_all_gather_per_window_of_bytes_and_nothing_between_two_ranks(world):
    def launched():
        """By a full state dict of 12 matrices and as many vectors."""
        with rank_zero_of(world):
            mesh = init_device_mesh("cpu", (world,))
            model = nn.Sequential(*(nn.Linear(world, 12, dtype=torch.float16) for _ in range(12)))
            for each in [*model, model]:
                fully_shard(each, mesh=mesh)
            log = unit_of(model[0]).group.axis.comm.log
            before = log.launched
            whole = full_state_dict(model)
            assert [each.shape for each in whole.values()] == [(12, world), (12,)] * 12
            return list(log.ring)[-(log.launched - before) :]

    with mock.patch.object(ProcessGroup, "send", None), mock.patch.object(ProcessGroup, "recv", None):
        assert [launch.key.partition(" ")[0] for launch in launched()] == ["collect"]
        row_nbytes = 12 * (align(-(-12 // world) * world * 2) + 64)  # of each rank
        with mock.patch.object(collect, "WINDOW_NBYTES", world << 10):
            assert len(launched()) == -(-row_nbytes // 1024) > 1
