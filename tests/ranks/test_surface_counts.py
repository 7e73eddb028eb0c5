"""How many collectives a step takes and how many bytes it sends, as torch's CommDebugMode counts them."""

from collections.abc import Callable
from functools import partial
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from shardwright import MixedPrecisionPolicy, SchedulePolicy, checkpoint, fully_shard, set_transport, stats
from shardwright.errors import StageError
from shardwright.params.binding import Buffer
from shardwright.params.smaller_world import SmallerWorld
from tests.ranks.models import Run, batches, build, loss_of, shard_decoder, sharded
from tests.ranks.pool import on_ranks
from tests.ranks.routes import built, inputs

GATHER = torch.ops.c10d._allgather_base_
REDUCE = torch.ops.c10d._reduce_scatter_base_
ALL_REDUCE = torch.ops.c10d.allreduce_
WIDTH = 48
NBYTES = 3 * WIDTH * WIDTH * 4  # of all blocks' weights


def blocks(**options) -> nn.Sequential:
    """Three groups and a root that owns nothing."""
    return sharded(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))), **options)


def counted(model: nn.Module, step: Callable[[], None]) -> tuple[int, int, int, int]:
    """All-gathers, reduce-scatters, all-reduces and bytes sent by this rank in ``step`` (one forward)."""
    before = stats(model).sent_nbytes
    with CommDebugMode() as mode:
        step()
    counts = mode.get_comm_counts()
    return counts[GATHER], counts[REDUCE], counts[ALL_REDUCE], stats(model).sent_nbytes - before


def train(model: nn.Module) -> Callable[[], None]:
    return lambda: model(torch.ones(2, WIDTH)).sum().backward()


@on_ranks(2)
def test_a_step_takes_one_gather_before_each_use_and_one_reduction_of_each_group(world):
    set_transport("sockets")  # shared memory sends nothing
    part = NBYTES * (world - 1) // world  # one collective over all groups, at its optimum
    model = blocks(reshard_after_forward=True)
    train(model)()  # records the order, and compares the ranks' models: 16 bytes each
    assert counted(model, train(model)) == (6, 3, 0, 3 * part)
    model.set_reshard_after_forward(False)
    assert counted(model, train(model)) == (3, 3, 0, 2 * part)
    # By default the group that the backward needs first is kept: one of three is not gathered again.
    model = blocks()
    train(model)()
    assert counted(model, train(model)) == (5, 3, 0, 3 * part - part // 3)
    with torch.no_grad():
        assert counted(model, lambda: model(torch.ones(2, WIDTH))) == (3, 0, 0, part)


@on_ranks(2)
def test_accumulation_reduces_once_and_may_gather_once(world):
    set_transport("sockets")
    part = NBYTES * (world - 1) // world
    model = blocks(reshard_after_forward=True)
    train(model)()
    shards = list(model.parameters())
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        assert counted(model, train(model)) == (6, 0, 0, 2 * part)
    model.set_requires_gradient_sync(True)
    assert counted(model, train(model)) == (6, 3, 0, 3 * part)
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    train(model)()
    assert counted(model, train(model)) == (0, 3, 0, part)  # nothing was resharded since
    with torch.no_grad():
        for shard in shards:
            shard.mul_(1.5)  # an optimizer's step: what was kept is not what the shards are now
    assert counted(model, train(model)) == (3, 3, 0, 2 * part)


@on_ranks(4)
def test_hybrid_sharding_all_reduces_each_group_once_and_only_where_asked():
    set_transport("sockets")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shard"))
    model = blocks(mesh=mesh, reshard_after_forward=True)
    train(model)()
    half = NBYTES // 2  # over two shards; the copies all-reduce those halves
    assert counted(model, train(model)) == (6, 3, 3, 3 * half + half)
    model.set_requires_all_reduce(False)
    for _ in range(2):
        assert counted(model, train(model)) == (6, 3, 0, 3 * half)
    model.set_requires_all_reduce(True)
    assert counted(model, train(model)) == (6, 3, 3, 3 * half + half)


@on_ranks(4)
def test_a_smaller_world_and_several_modules_in_a_group_take_the_collectives_they_say():
    set_transport("sockets")
    model = blocks(reshard_after_forward=2)
    train(model)()
    # Gathered over four ranks in forward, over two in backward; reduced over four.
    assert counted(model, train(model)) == (6, 3, 0, 2 * NBYTES * 3 // 4 + NBYTES // 2)
    together = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    fully_shard([together[0], together[1]], reshard_after_forward=True)
    fully_shard(together[2], reshard_after_forward=True)
    fully_shard(together)
    train(together)()
    assert counted(together, train(together)) == (4, 2, 0, 3 * NBYTES * 3 // 4)


class Headed(nn.Module):
    """Blocks of which the second may stay, and a head of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def headed(shard: Callable, root: bool | None) -> nn.Module:
    torch.manual_seed(0)
    model = Headed()
    for number, block in enumerate(model.blocks):
        shard(block, reshard_after_forward=number != 1)
    shard(model, reshard_after_forward=root)
    return model


@pytest.mark.each_case
@pytest.mark.parametrize("root", [None, True])
@on_ranks(2)
def test_after_an_evaluation_the_root_and_what_is_to_stay_are_not_gathered_again(rank, root):
    found = []
    for shard in (fully_shard, torch_fully_shard):
        model = headed(shard, root)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts, results = [], []

        def run(what: Callable[[], torch.Tensor], counts=counts, results=results) -> None:
            with CommDebugMode() as mode:
                results.append(what().detach().clone())
            counts.append(mode.get_comm_counts()[GATHER])

        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) + rank
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            with mode():
                for _ in range(3):
                    run(lambda x=x, model=model: model(x))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            model.zero_grad()
        model.reshard()
        found.append((counts, results))
    (ours, exact), (theirs, expected) = found
    assert ours == theirs
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(exact, expected, strict=True))
    assert ours == ([4, 2, 2] * 3 if root is None else [4, 3, 3] * 3)


@pytest.mark.each_case
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_an_edit_in_place_of_what_stays_after_an_evaluation_is_kept(mode, dtype):
    """What ``model.parameters()`` shows after an evaluation may be edited in place, as shards may."""

    def seen() -> dict[str, torch.Tensor]:  # as the forward sees it
        return {name: value.full_tensor().to(dtype) for name, value in model.state_dict().items()}

    shard = partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    model, x = headed(shard, None), torch.ones(2, WIDTH)
    for factor in (0.5, 2.0, 0.25):  # powers of two: exact in any dtype
        before = seen()
        with mode():
            model(x)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)
            found = model(x)
        if factor == 2.0:
            model(x).sum().backward()
        after, fresh = seen(), headed(shard, None)
        assert all(torch.equal(after[name], value * factor) for name, value in before.items())
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(found, fresh(x))


@on_ranks(2)
def test_what_stays_after_an_evaluation_is_gathered_anew_where_a_rank_has_written_its_shard(rank):
    """What stays unsharded is gathered anew where any rank's shard was written, in whatever way."""
    model = headed(fully_shard, None)
    shards = list(model.parameters())
    x = torch.ones(2, WIDTH)

    class Silent(torch.optim.Optimizer):
        def step(self, closure=None):
            for param in shards:
                param.data.mul_(0.5)  # leaves no mark on the parameter

    silent = Silent(shards, {})
    with torch.no_grad():
        kept = model(x)
        model.reshard()
        local = model.head.weight.to_local()
        for write in (lambda: local.add_(rank == 0), silent.step):
            model(x)
            write()
            found = model(x)
            fresh = headed(fully_shard, None)
            fresh.load_state_dict(model.state_dict())
            assert torch.equal(found, fresh(x)) and not torch.equal(found, kept)


@on_ranks(2)
def test_an_optimizer_that_was_built_after_an_evaluation_trains_and_on_unsharded_parameters_is_refused():
    model = headed(fully_shard, None)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert all(kinds(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.full_tensor() for param in model.parameters()]
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    after = [param.full_tensor() for param in model.parameters()]
    assert not any(map(torch.equal, before, after))
    model.unshard()
    with pytest.raises(StageError, match=r"unsharded.*head.weight.*reshard"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def kinds(model: nn.Module) -> list[bool]:
    """Of each parameter whether it is shown as its shard."""
    return [isinstance(param, DTensor) for param in model.parameters()]


@on_ranks(2)
def test_between_forward_and_backward_modules_show_shards_whatever_the_plan_keeps():
    model = blocks()
    for _ in range(3):
        loss = model(torch.ones(2, WIDTH)).sum()
        assert kinds(model) == [True] * 3  # also of the group that is kept for the backward
        assert stats(model).unsharded_nbytes in (0, NBYTES // 3)
        loss.backward()
        assert kinds(model) == [True] * 3
        assert stats(model).unsharded_nbytes == 0
    loss = model(torch.ones(2, WIDTH)).sum()
    model[2].unshard()  # by hand: what was kept is shown
    assert kinds(model) == [True, True, False]
    model[2].reshard()


class Held:
    """Counts the bytes of buffers and of shards over a smaller world as they come and go."""

    def __init__(self) -> None:
        self.peak_nbytes = 0
        self.buffers: WeakSet = WeakSet()
        self.nears: WeakSet = WeakSet()
        self.watch(Buffer, "__init__", self.buffers)
        self.watch(SmallerWorld, "__init__", self.nears)
        self.watch(Buffer, "alloc", self.buffers)
        self.watch(SmallerWorld, "keep", self.nears)

    def watch(self, kind: type, name: str, known: WeakSet) -> None:
        method = getattr(kind, name)

        def watched(it, *args):
            result = method(it, *args)
            known.add(it)
            self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes)
            return result

        setattr(kind, name, watched)

    @property
    def now_nbytes(self) -> int:
        shards = [shard for near in self.nears for shard in getattr(near, "_shards", ())]
        return sum(b._storage.nbytes() for b in self.buffers) + sum(shard.nbytes for shard in shards)


@pytest.mark.each_case
@pytest.mark.parametrize("agreement", ["strict", "off"])
@pytest.mark.slow
@on_ranks(4)
def test_bytes_are_counted_as_they_are_held_where_shards_lie_over_a_smaller_world(
    rank, world, agreement, tmp_path
):
    folder = str(tmp_path)
    held = Held()
    model = shard_decoder(build(), fully_shard, reshard_after_forward=2)
    model.set_schedule_policy(SchedulePolicy(agreement=agreement))
    run, tokens = Run.of(model), batches(0, world)[rank]

    def check(peak=True):
        now = stats(model)
        assert now.unsharded_nbytes == held.now_nbytes
        if peak:
            assert now.peak_unsharded_nbytes == held.peak_nbytes
        return held.now_nbytes

    def train():
        loss_of(model, tokens).backward()
        check()
        run.step()

    for _ in range(3):
        train()
    loss = loss_of(model, tokens)
    assert check() > 0  # shards over the smaller world
    with torch.no_grad():
        loss_of(model, tokens)
    check()
    del loss
    model.unshard()
    check()
    model.reshard()
    check()
    with model.unsharded():
        check()
    check()
    checkpoint.save(folder, model=model, step=3)
    check()
    train()
    loss_of(model, tokens)
    model.reset_iter_state()
    check()
    loss_of(model, tokens)
    model.set_reshard_after_forward(True)
    check(peak=False)
    assert loss_of(model, tokens).isfinite()
    check(peak=False)
    train()


@pytest.mark.slow
@on_ranks(4)
def test_bytes_over_a_smaller_world_are_counted_where_ranks_use_different_groups(rank):
    held = Held()
    model = built()
    sharded(model, model.parts.values(), reshard_after_forward=2)
    for step in range(6):
        route = ("ab", "bc", "ca", "", "b", "abc")[(step + rank) % 6]
        loss = model(inputs(rank, step), route).square().mean()
        assert stats(model).unsharded_nbytes == held.now_nbytes, step
        loss.backward()
        assert stats(model).unsharded_nbytes == held.now_nbytes, step


@on_ranks(1)
def test_a_world_of_one_reports_no_collectives():
    """What a world of one doesn't send it doesn't report."""
    model = blocks()
    for _ in range(2):
        assert counted(model, train(model)) == (0, 0, 0, 0)
