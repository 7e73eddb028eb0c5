"""Every setter and handle of ``FSDPModule`` does what its name says; none grows a flag nobody reads."""

import inspect
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import shardwright
from shardwright import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    SchedulePolicy,
    UnshardHandle,
    explain,
    fully_shard,
    set_transport,
    share_comm_ctx,
    stats,
)
from shardwright.engine.unit import unit_of
from shardwright.errors import InputError, StageError
from shardwright.observe.steps.recording import ring
from shardwright.schedule.schedule import Event, EventKind, Phase
from shardwright.torch_private import all_gather_of, reduce_scatter_of
from tests.ranks.models import (
    Block,
    Run,
    assert_same_grads,
    batches,
    both_backward,
    both_step,
    build,
    loss_of,
    shard_decoder,
    sharded,
    train_beside,
    twins,
)
from tests.ranks.pool import on_ranks

PUBLIC = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "GradientReductionHandle",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

OURS_ALONE = {
    "CPUOffloadPolicy": {"params": True, "grads": True, "optimizer_state": True},
    "MixedPrecisionPolicy": {"gather_dtype": None},
    "fully_shard": dict.fromkeys(("groups", "layout", "plan", "cluster", "sample"))
    | {"shard_over_all": False},
}


# What newer torches have, and ours has with each.
NEWER = {"MixedPrecisionPolicy": {"param_dtype_override_fn": None}, "fully_shard": {"dp_mesh_dims": None}}


@pytest.mark.each_case
@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_of_torch_is_here_with_its_parameters_and_defaults(name):
    if not hasattr(fsdp, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    ours, theirs = getattr(shardwright, name), getattr(fsdp, name)
    if name != "FSDPModule":
        # Those that are ours alone are by name, and left out they change nothing.
        found = parameters(ours)
        alone = [p for p in found if p not in parameters(theirs)]
        assert [p for p in found if p not in alone] == parameters(theirs)
        newer = NEWER.get(name, {}).keys() - {name for name, _, _ in parameters(theirs)}
        expected = OURS_ALONE.get(name, {}) | {each: NEWER[name][each] for each in newer}
        assert {name: default for name, _, default in alone} == expected
        assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in alone)
        return
    for method, function in inspect.getmembers(theirs, inspect.isfunction):
        if not method.startswith("_") and method != "set_keep_unsharded_storage":  # which is refused
            assert parameters(getattr(ours, method)) == parameters(function), method


def parameters(thing):
    """Names, kinds and defaults (frozen policies compared by their fields that are set)."""

    def default(value):
        fields = getattr(value, "__dict__", None)
        return value if fields is None else {k: v for k, v in fields.items() if v is not None}

    return [(p.name, p.kind, default(p.default)) for p in inspect.signature(thing).parameters.values()]


@on_ranks(2)
def test_unshard_and_reshard_by_hand(rank, world):
    model = shard_decoder(build(), fully_shard)
    block = model.blocks[0]
    assert isinstance(model, FSDPModule) and isinstance(block, FSDPModule)
    assert block.unshard() is None
    assert torch.equal(block.up.weight, build().blocks[0].up.weight)
    assert hasattr(model.blocks[1].up.weight, "placements")  # not recursive
    block.reshard()
    assert stats(model).unsharded_nbytes == 0
    handle = block.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    handle.wait()
    assert torch.equal(block.up.weight, build().blocks[0].up.weight)
    block.reshard()
    run = Run.of(model)
    model.blocks[1].unshard(async_op=True)  # the forward waits for it
    train_beside(run, Run.of(build()), rank, world, 2)
    out = loss_of(model, batches(0, world)[rank])
    model.reshard()
    out.backward()
    assert stats(model).unsharded_nbytes == 0


@on_ranks(2)
def test_parameters_kept_through_accumulation_are_not_gathered_again(rank, world):
    set_transport("sockets")  # shared memory sends nothing
    model, reference = shard_decoder(build(), fully_shard), build()
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(2):
        sent = []
        for micro in range(3):
            last = micro == 2
            model.set_reshard_after_backward(last)
            model.set_reshard_after_forward(False)
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            tokens, before = batches(10 * step + micro, world), stats(model).sent_nbytes
            both_backward(model, reference, tokens, rank, parts=3)
            assert (stats(model).unsharded_nbytes == 0) == last
            sent.append(stats(model).sent_nbytes - before)
        assert sent[1] == 0 < sent[0]  # the second microbatch gathers and reduces nothing
        both_step(ours, theirs)


@on_ranks(3)
def test_gradients_are_divided_by_the_factor_that_was_set(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_separate_reduce_scatter_group()
    tokens = batches(0, world)
    loss_of(model, tokens[rank]).backward()
    (torch.stack([loss_of(reference, rows) for rows in tokens]).sum() / 2).backward()
    assert_same_grads(model, reference)
    with pytest.raises(InputError, match="must be positive, got -1"):
        model.set_gradient_divide_factor(-1.0)
    with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(4.0)


class Routed(nn.Module):
    """Each rank uses another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.branches[choice](x)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.routed = Block(), Routed()

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.routed(self.first(x), choice)


@on_ranks(2)
def test_ranks_may_use_different_parameters_when_unused_ones_are_reduced(rank, world):
    model, reference = twins(Router)
    sharded(model, [model.routed])
    model.set_reduce_scatter_unused_params(True)
    x = torch.randn(world, 5, 13, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model(x[rank], rank).square().mean().backward()
        torch.stack([reference(rows, r).square().mean() for r, rows in enumerate(x)]).mean().backward()
    assert_same_grads(model, reference)


@on_ranks(2)
def test_parameters_that_the_backward_does_not_read_are_not_gathered_for_it(rank, world):
    model, reference = build(), build()
    for each in (model, reference):  # not a mere lookup, whose backward is known to read no weight
        each.embedding.register_forward_hook(lambda module, args, output: output * 1.0)
    fully_shard(model.embedding)
    shard_decoder(model, fully_shard)
    model.embedding.set_unshard_in_backward(False)
    group = unit_of(model.embedding).group
    index = unit_of(model).runtime.groups.index(group)
    train_beside(Run.of(model), Run.of(reference), rank, world)
    stops = model.schedule().phases[Phase.BACKWARD]
    assert Event(EventKind.BACKWARD_BEGIN, index) in [stop.event for stop in stops]
    assert not any(a.group == index and a.kind == "unshard" for stop in stops for a in stop.actions)


class Collective:
    """A caller's own collective that counts; the plain one of torch.distributed."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class OwnGather(Collective):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return all_gather_of(dist)(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnScatter(Collective):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        return reduce_scatter_of(dist)(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@on_ranks(1, 2, 3)
def test_custom_collectives_move_the_bytes(rank, world):
    model = shard_decoder(build(), fully_shard)
    gather, scatter = OwnGather(), OwnScatter()
    for block in model.blocks:
        block.set_custom_all_gather(gather)
        block.set_custom_reduce_scatter(scatter)
    train_beside(Run.of(model), Run.of(build()), rank, world, 2)
    assert scatter.calls == 2 * 3 and gather.calls >= 2 * 3
    made = [r for r in ring().records if r.kind == "collective" and "blocks" in "".join(r.groups)]
    counts = Counter(r.action for r in made)
    assert counts == {"all-gather": gather.calls, "reduce-scatter": scatter.calls}
    assert all(r.nbytes > 0 and r.met is (world > 1) and r.issue <= r.end for r in made)


@pytest.mark.parametrize("native", [False, True])
@on_ranks(4)
def test_a_hook_sees_and_changes_the_reduced_gradients(rank, world, native):
    """Copies kept equal by a hook on a 1-D mesh, or the hook of a 2-D mesh after its own all-reduce."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = shard_decoder(build(), fully_shard, mesh=mesh if native else mesh["shard"]), build()
    seen = []

    def hook(flat):
        seen.append(flat.shape)
        if native:
            flat.mul_(0.5)
        else:
            dist.all_reduce(flat, group=mesh.get_group("replicate"))
            flat.div_(4)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)
    tokens = batches(0, world)
    loss_of(model, tokens[rank]).backward()
    (torch.stack([loss_of(reference, rows) for rows in tokens]).mean() / 2).backward()
    assert len(seen) == 4 and all(len(shape) == 1 for shape in seen)
    assert_same_grads(model, reference)
    if native:
        with pytest.raises(InputError, match="stream cannot be set when using native HSDP"):
            model.set_all_reduce_hook(hook, stream=object())


@pytest.mark.slow
@on_ranks(2)
def test_reset_iter_state_forgets_the_failed_step_and_its_microbatches(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build()
    tokens = batches(0, world)
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens[rank]).backward()
    model.set_requires_gradient_sync(True)
    handle = model.blocks[1].norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, tokens[rank])
    handle.remove()
    with pytest.raises(StageError, match="must be called on the root FSDP module"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    assert stats(model).unsharded_nbytes == 0
    train_beside(Run.of(model), Run.of(reference), rank, world, 2)  # the microbatch before is forgotten


@on_ranks(2)
def test_each_other_setter_does_its_work_or_says_why_not(rank, world):
    model = shard_decoder(build(), fully_shard)
    share_comm_ctx([model, *model.blocks])
    share_comm_ctx([])
    with pytest.raises(InputError, match="list of FSDPModules"):
        share_comm_ctx([nn.Linear(1, 1)])
    with pytest.raises(InputError, match="Expects FSDPModule"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(InputError, match="should be a bool"):
        model.set_reshard_after_forward(2)
    with pytest.raises(TypeError, match="must be an int"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(InputError, match="positive int, got 0"):
        model.set_reduce_scatter_max_input_buffers(0)
    model.set_reduce_scatter_max_input_buffers(1)
    assert unit_of(model).runtime.policy.max_reductions == 1
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_allocate_memory_from_process_group_for_comm(False)
    with pytest.raises(NotImplementedError, match="symmetric memory"):
        model.set_symm_mem_for_comm()

    class Event:
        waited = 0

        def wait(self):
            self.waited += 1

    event = Event()
    model.set_post_optim_event(event)
    train_beside(Run.of(model), Run.of(build()), rank, world, 2)
    assert event.waited == 1


@on_ranks(4)
def test_explain_says_what_is_where_and_what_is_not_the_default(world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = build(tied=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model.blocks[0], mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    fully_shard(model.blocks[1], mesh=mesh, reshard_after_forward=world // 2)
    fully_shard(model, mesh=mesh, ignored_params={model.norm.bias})
    model.set_schedule_policy(SchedulePolicy(keep_last=0))
    model.blocks[1].set_gradient_divide_factor(1.0)
    explanation = explain(model)
    assert [group.modules for group in explanation.groups] == [("blocks.0",), ("blocks.1",), ("",)]
    first, second, root = explanation.groups
    row = {param.name: param for param in first.params}["blocks.0.up.weight"]
    assert (row.shape, row.placements) == ((29, 13), "R, S(0)")
    assert (row.at_rest_dtype, row.compute_dtype, row.reduce_dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    numel = sum(p.numel() for p in build().blocks[0].parameters())
    assert first.unsharded_nbytes == 2 * numel
    assert sum(group.at_rest_nbytes for group in explanation.groups) == stats(model).at_rest_nbytes
    assert second.gradients == f"summed over {world} ranks"
    assert root.gradients == f"averaged over {world} ranks"
    assert explanation.unmanaged == ("norm.bias",)
    text = str(explanation)
    offload = "CPUOffloadPolicy(pin_memory=True, params=True, grads=True, optimizer_state=True)"
    for part in ("param_dtype=torch.bfloat16", offload, "not sharded: norm.bias"):
        assert part in text
    with pytest.raises(InputError, match="no sharded module"):
        explain(nn.Linear(1, 1))
