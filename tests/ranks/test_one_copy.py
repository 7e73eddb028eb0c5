"""One copy of unsharded parameters per host: the same bits, nothing gathered, each rank's edits its own."""

import logging
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from shardwright import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    SchedulePolicy,
    WatchPolicy,
    fully_shard,
    set_transport,
    set_watch,
    stats,
)
from shardwright.errors import CommError, StageError
from shardwright.motion.unit import unit_of
from shardwright.plan.soundness import check
from shardwright.state.hosted import HostedBuffer
from tests.ranks.models import Block, Run, batches, build, loss_of
from tests.ranks.pool import run_ranks

pytestmark = pytest.mark.slow  # of an option; make test has a case of what everybody uses

OWN = SchedulePolicy(bucket_cap_mb=0)
ONE = replace(OWN, one_copy_per_host=True)


def groups_of(model):
    return unit_of(model).runtime.groups


def hosted(model):
    return [group.name for group in groups_of(model) if isinstance(group.buffer, HostedBuffer)]


def sharded(policy, mesh=None, **options):
    """A decoder of uneven weights and scalars, a group for each block."""
    model = build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    model.set_schedule_policy(policy)
    return model


def bits(model):
    shards = [value for value in model.state_dict().values() if isinstance(value, DTensor)]
    return [shard.to_local().float().numpy().tobytes() for shard in shards]


def trained(rank, world, policy, shape=None, **options):
    """Losses and shards of four steps with an evaluation between, and the groups that were hosted."""
    names = ("copies", "shards")
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = sharded(policy, mesh, **options)
    run, losses = Run.of(model), []
    for step in range(4):
        loss = loss_of(model, batches(step, world)[rank])
        loss.backward()
        run.step()
        with torch.no_grad():
            losses += [loss.item(), loss_of(model, batches(9, world)[rank]).item()]
    check(model.schedule())
    assert model.trace().schedule() == model.schedule()
    return losses, bits(model), hosted(model)


def columns(param):
    return Shard(1) if param.ndim > 1 else None


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"shard_placement_fn": columns},
    ],
    ids=["plain", "kept", "bf16", "columns"],
)
def test_it_trains_as_a_copy_on_each_rank_does_bit_for_bit(world, options):
    pairs = [(OWN, ONE)]
    if not options:
        pairs.append(tuple(replace(p, depth=3, keep_last=2, agreement="off") for p in pairs[0]))
    for own, one in pairs:
        apart, together = (run_ranks(world, run_trained, policy, None, options) for policy in (own, one))
        assert [found[:2] for found in together] == [found[:2] for found in apart]
        assert all(len(found[2]) == 4 for found in together)
        assert not any(found[2] for found in apart)


def run_trained(rank, world, policy, shape, options):
    return trained(rank, world, policy, shape, **options)


def test_each_copy_of_a_model_that_is_sharded_and_copied_has_one():
    apart, together = (run_ranks(4, run_trained, policy, (2, 2), {}) for policy in (OWN, ONE))
    assert [found[:2] for found in together] == [found[:2] for found in apart]
    assert all(len(found[2]) == 4 for found in together)


class Editing(nn.Module):
    """Writes to its weight in its forward, in ways that are seen and one that leaves no mark."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(700, 700)  # several pages
        self.norm = nn.LayerNorm(700)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight[::3].mul_(0.5)
            self.linear.weight.data[-1] += 1.0
        self.linear.bias.data.add_(x.sum())  # other values on each rank
        return self.norm(self.linear(x))


def edited(rank, world, policy):
    torch.manual_seed(3)
    model = fully_shard(nn.Sequential(fully_shard(Editing()), fully_shard(Editing())))
    model.set_schedule_policy(policy)
    run, found = Run.of(model), []
    for step in range(3):
        x = torch.randn(4, 700, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = checkpoint(model, x, use_reentrant=False).square().mean() if step == 1 else model(x).mean()
        loss.backward()
        found.append(loss.item())
        run.step()
    return found, bits(model), len(hosted(model))


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_forward_writes_to_its_weights_is_its_rank_s_own(world):
    apart, together = (run_ranks(world, edited, policy) for policy in (OWN, ONE))
    assert [found[:2] for found in together] == [found[:2] for found in apart]
    assert all(found[2] == 2 for found in together)


def marks_nothing(rank, world, policy):
    """Shards are written between passes in a way that leaves no mark, of some ranks only, and some skip."""
    model = sharded(policy)
    seen = []
    for step in range(6):
        model.reshard()  # the root, which stays after an evaluation: no mark, so nobody could know
        for param in model.parameters():
            if rank != 1 or step % 2:
                param.data.to_local().mul_(0.9)
        loss = loss_of(model, batches(step, world)[rank])
        seen.append(loss.item())
        if step != 2:
            loss.backward()
        model.zero_grad()
        with torch.no_grad():
            seen.append(loss_of(model, batches(9, world)[rank]).item())
    return seen


def test_an_edit_of_shards_that_leaves_no_mark_is_seen_by_all():
    apart, together = (run_ranks(3, marks_nothing, policy) for policy in (OWN, ONE))
    assert together == apart


def held(rank, world):
    """Rank 0 keeps a group unsharded by hand, while the others go on without it."""
    model = sharded(ONE)
    loss_of(model, batches(0, world)[rank]).backward()
    block = model.blocks[1]
    before = block.up.weight.full_tensor().clone()
    block.unshard()
    if rank:
        block.reshard()
    with torch.no_grad():
        for param in model.parameters():
            if hasattr(param, "to_local"):
                param.mul_(2)
    kept = block.up.weight.detach() if rank == 0 else None
    assert rank or torch.equal(kept, before)
    for step in range(2):
        with torch.no_grad():
            loss_of(model, batches(step, world)[rank])
    return True


def test_a_rank_that_holds_a_group_by_hand_reads_on_while_others_gather_it():
    assert all(run_ranks(3, held))


class Calling(nn.Module):
    """Its forward calls another sharded module in the middle, where it is told to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 40)
        self.call = lambda x: x

    def forward(self, x):
        return self.linear(self.call(self.linear(x)))


class Crossed(nn.Module):
    """Rank 0 is in the middle of ``first`` while the others, which are done with it, need it once more."""

    def __init__(self, rank):
        super().__init__()
        self.first = fully_shard(Calling(), reshard_after_forward=True)
        self.second = fully_shard(nn.Linear(40, 40), reshard_after_forward=True)
        self.rank = rank
        if rank == 0:
            self.first.call = lambda x: self.second(x)  # not a child of it

    def forward(self, x):
        if self.rank == 0:
            return self.first(x)
        x = self.first(x)
        with torch.no_grad():  # so that what the others gather now isn't what rank 0 has
            self.first.linear.weight.mul_(0.5)
        return self.second(self.first(x))


def crossed(rank, world, policy):
    detached = []
    detach = HostedBuffer.detach
    HostedBuffer.detach = lambda buffer: (detached.append(buffer), detach(buffer))
    torch.manual_seed(4)
    model = fully_shard(Crossed(rank))
    model.set_schedule_policy(policy)
    run, losses = Run.of(model), []
    for step in range(4):
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        run.step()
    return losses, bits(model), len(detached), len(hosted(model))


def test_a_rank_in_the_middle_of_a_group_reads_on_while_others_gather_it_again():
    apart, together = (run_ranks(3, crossed, policy) for policy in (OWN, ONE))
    assert [found[:2] for found in together] == [found[:2] for found in apart]
    assert together[0][2] > 0
    assert all(found[3] == 2 for found in together)


def summoned(rank, world, policy):
    torch.manual_seed(2)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 9)))
    model.module.set_schedule_policy(policy)
    x = torch.ones(2, 40)
    model(x).sum().backward()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False), torch.no_grad():
        model.module[0].weight.zero_()
    first = model(x).sum().item()
    with FullyShardedDataParallel.summon_full_params(model, writeback=True), torch.no_grad():
        model.module[0].weight.fill_(0.25)
    assert model(x).sum().item() != first
    return first, model(x).sum().item(), bool(hosted(model.module))


def test_edits_of_summoned_parameters_are_written_back_or_gone():
    apart, together = (run_ranks(2, summoned, policy) for policy in (OWN, ONE))
    assert [found[:2] for found in together] == [found[:2] for found in apart]
    assert all(found[2] for found in together)


def switched(rank, world):
    """The policy is switched on and off between steps, and while a group is unsharded by hand."""
    seen, losses = [], []
    model = sharded(OWN)
    reference = sharded(OWN)
    runs = Run.of(model), Run.of(reference)
    for step, policy in enumerate((OWN, ONE, ONE, OWN, ONE)):
        if rank == 0:
            model.blocks[0].reshard()
        model.set_schedule_policy(policy)
        tokens = batches(step, world)[rank]
        for run in runs:
            loss_of(run.model, tokens).backward()
            run.step()
        losses.append(bits(model) == bits(reference))
        seen.append(len(hosted(model)))
        with torch.no_grad():
            model.blocks[0].unshard()
    return seen, losses, stats(model).unsharded_nbytes


def test_it_can_be_switched_on_and_off_between_steps():
    for seen, same, held_nbytes in run_ranks(2, switched):
        assert seen == [0, 4, 4, 0, 4]
        assert all(same)
        assert held_nbytes > 0


def between(rank, world):
    model = sharded(OWN)
    tokens = batches(0, world)[rank]
    loss = loss_of(model, tokens)
    model.set_schedule_policy(ONE)
    with torch.no_grad():
        loss_of(model, tokens)
    with pytest.raises(StageError, match=r"group '.*': between this forward and its backward"):
        loss.backward()
    loss_of(model, tokens).backward()  # the next step is clean
    Run.of(model).step()


def test_a_switch_between_a_forward_and_its_backward_is_an_error():
    run_ranks(2, between)


def refused(rank, world, transport):
    set_transport(transport)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("shardwright.motion.hosting")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = nn.Sequential(
        nn.Embedding(300, 40), nn.Linear(40, 40), nn.Linear(40, 40, bias=False), nn.Linear(40, 9)
    )
    fully_shard(model[0])
    fully_shard(model[1], reshard_after_forward=2)
    for layer in (model[2], model[3], model):
        fully_shard(layer)
    model.set_schedule_policy(replace(ONE, row_wise=True, bucket_cap_mb=0.002))
    for _ in range(2):
        model(torch.arange(4)).sum().backward()
    return sorted(records), hosted(model)


def test_the_log_says_once_which_groups_can_t_share_a_copy():
    for records, found in run_ranks(4, refused, "auto"):
        assert found == ["2"]
        assert [record.partition(" (said once)")[0] for record in records] == [
            "group 0 has an unsharded copy on each rank: it moves rows in use only",
            "group 1 has an unsharded copy on each rank: it is resharded to a smaller world",
            "group 3 has an unsharded copy on each rank: it is small, and shares collectives instead "
            "(bucket_cap_mb=0.002)",
        ]
    for records, found in run_ranks(2, refused, "sockets"):
        assert not found
        assert all("its ranks don't share memory" in record for record in records)


def no_room(rank, world):
    """One rank can't map the memory: all take a buffer of their own."""
    if rank == 1:
        from_kernel = os.open

        def refusing(path, *rest, **named):
            if str(path).startswith("/proc/") and "/fd/" in str(path) and refusing.on:
                raise PermissionError(13, "no")
            return from_kernel(path, *rest, **named)

        refusing.on = False
        os.open = refusing
    model = build()
    fully_shard(model)
    if rank == 1:
        os.open.on = True
    model.set_schedule_policy(ONE)
    loss_of(model, batches(0, world)[rank]).backward()
    return hosted(model)


def test_where_one_rank_can_t_map_it_each_has_its_own():
    assert run_ranks(2, no_room) == [[], []]


class Copying:
    """A caller's own all-gather, by torch's."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def replaced(rank, world, policy):
    model = sharded(policy)
    run, losses, before = Run.of(model), [], 0
    for step in range(4):
        if step == 2:
            before = len(hosted(model))
            model.blocks[1].set_custom_all_gather(Copying())
        loss = loss_of(model, batches(step, world)[rank])
        loss.backward()
        run.step()
        losses.append(loss.item())
    return losses, bits(model), before, len(hosted(model))


def test_a_group_whose_all_gather_the_caller_replaces_gets_memory_of_its_own():
    apart, together = (run_ranks(2, replaced, policy) for policy in (OWN, ONE))
    assert [found[:2] for found in together] == [found[:2] for found in apart]
    assert all(found[2:] == (4, 3) for found in together)


def mappings():
    with open("/proc/self/maps") as file:
        return sum("memfd:shardwright" in line for line in file)


def litter(rank, world):
    model = sharded(OWN)
    loss_of(model, batches(0, world)[rank]).backward()
    before = mappings(), len(os.listdir("/proc/self/fd"))
    model.set_schedule_policy(ONE)
    loss_of(model, batches(0, world)[rank]).backward()
    during = mappings()
    model.set_schedule_policy(OWN)
    for _ in range(2):
        loss_of(model, batches(0, world)[rank]).backward()
    return before, during, (mappings(), len(os.listdir("/proc/self/fd")))


def test_nothing_is_left_of_it_once_it_is_switched_off():
    for before, during, after in run_ranks(2, litter):
        assert during == before[0] + 2 * 4  # a shared and a private one of each group
        assert after == before


def never_leaves(rank, world):
    set_watch(WatchPolicy(on=False))
    block = fully_shard(Block(64))
    block.set_schedule_policy(replace(ONE, agreement="off"))
    x = torch.ones(2, 64)
    with torch.no_grad():
        block(x)
        block.unshard()
        if rank == 1:
            time.sleep(4)
            return
        block.reshard()
        with pytest.raises(CommError, match=r"waited 2 s for rank 1 \(pid \d+\) in 'all-gather Block'"):
            block(x)


def test_a_rank_that_never_leaves_a_copy_is_named_after_the_timeout():
    run_ranks(2, never_leaves, timeout_s=2.0)


def faults(rank, world):
    """Bytes are copied into pages that are there: page faults of a steady state, and private pages."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(*[fully_shard(nn.Linear(1024, 1024)) for _ in range(3)]))
    model.set_schedule_policy(ONE)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(1, 1024))
        dist.barrier()
        before = minor_faults()
        for _ in range(5):
            model(torch.ones(1, 1024))
            dist.barrier()
        return minor_faults() - before


def minor_faults():
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[7])


def test_a_steady_state_touches_no_fresh_page():
    assert all(found < 200 for found in run_ranks(2, faults)), "15 unshards of 4 MiB are 15,000 pages"
