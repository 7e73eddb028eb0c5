"""Torch's own policies are taken, its FSDPModule and what asks for it knows our modules, and install()."""

import copy
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import shardwright
from shardwright.engine.building.build import GroupOptions
from shardwright.errors import InputError
from tests.ranks.models import assert_same_grads, full
from tests.ranks.pool import on_ranks, run_ranks

TORCH = Path(torch.__file__).parent


def layer(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


# ---- torch's own policies


@on_ranks(2)
def test_torchs_own_policies_mean_what_ours_of_the_same_fields_mean(world):
    theirs = fsdp.MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, torch.float64, cast_forward_inputs=False
    )
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("r", "s"))
    kind = getattr(fsdp, "DataParallelMeshDims", shardwright.DataParallelMeshDims)  # torch 2.11 hasn't it
    dims = kind(shard="s", replicate="r")
    assert GroupOptions(
        None, None, theirs, fsdp.OffloadPolicy(), dims
    ).dims == shardwright.DataParallelMeshDims("s", "r")
    options = {"mp_policy": theirs, "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}
    model = shardwright.fully_shard(layer(1), mesh=mesh, **options)
    out = model(torch.randn(2, 8, dtype=torch.bfloat16))
    assert out.dtype == torch.float64
    unit = model._unit()
    assert unit.policy == shardwright.MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, torch.float64, False
    )
    assert unit.groups[0].params[0].split.offload == shardwright.CPUOffloadPolicy(pin_memory=False)
    plain = shardwright.fully_shard(layer(1), offload_policy=fsdp.OffloadPolicy())
    assert plain._unit().groups[0].params[0].split.offload == shardwright.OffloadPolicy()
    with pytest.raises(InputError, match="mp_policy must be a MixedPrecisionPolicy, got dict"):
        shardwright.fully_shard(layer(1), mp_policy={})


# ---- torch's FSDPModule

ASKS = {
    "distributed/pipelining/schedules.py": "right: test_a_pipeline_of_sharded_stages",
    "distributed/pipelining/stage.py": "right: test_a_pipeline_of_sharded_stages",
    "distributed/fsdp/_fully_shard/_fully_shard.py": "right: its two functions, below; its methods are ours",
    "distributed/_tools/fsdp2_mem_tracker.py": "kept away: asks for internals, and is told there are none",
    "_dynamo/guards.py": "kept away: only for compiled code that is written to a file",
}
"""The files of torch that branch on FSDPModule."""


def test_every_place_in_torch_that_asks_for_fsdp_modules_is_known():
    asking = re.compile(r"(isinstance|issubclass)\([^()]*\bFSDPModule\b|is not [\w.]*\bFSDPModule\b")
    files = [path for path in TORCH.rglob("*.py") if "testing" not in path.parts]
    found = {p.relative_to(TORCH).as_posix() for p in files if asking.search(p.read_text(errors="ignore"))}
    assert found == ASKS.keys()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = layer(1)

    def encode(self, x):
        return self.inner(x)


@on_ranks(2)
def test_torchs_functions_for_fsdp_modules_act_on_ours_or_are_told(rank, world):
    model = shardwright.fully_shard(Encoder())
    whole = Encoder()
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(copy.deepcopy(model), fsdp.FSDPModule)
    own = {
        name for name in vars(fsdp.FSDPModule) if not name.startswith("__") and name != "_orig_cls_mro_index"
    }
    inherited = [n for n in own if getattr(type(model), n) is vars(fsdp.FSDPModule)[n]]
    assert not inherited, "torch's methods, which would act on torch's own state"
    fsdp.register_fsdp_forward_method(model, "encode")
    model.encode(x).square().mean().backward()
    whole.encode(x).square().mean().backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.distributed.all_reduce(q.grad)
        assert torch.allclose(full(p.grad), q.grad / world, atol=1e-6)
    models = [model, shardwright.fully_shard(layer(2))]
    if "_fsdp_param_groups" in inspect.getsource(fsdp.share_comm_ctx):
        fsdp.share_comm_ctx(models)
    else:  # torch 2.11 and 2.12 look into the state
        with pytest.raises(InputError, match="torch asks for '_fsdp_param_group' of its own FSDPState"):
            fsdp.share_comm_ctx(models)
    tracker = FSDPMemTracker(model)
    with pytest.raises(InputError, match="torch asks for '_fsdp_param_group' of its own FSDPState"):
        tracker.track_inputs((x,))
        tracker.__enter__()


def stage_of(number):
    return nn.Sequential(layer(number), layer(number + 10))


SCHEDULES = [ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble]


@pytest.mark.parametrize("after", [None, True, False])
@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.slow
@on_ranks(4)
def test_a_pipeline_of_sharded_stages_trains_as_one_process(make, after):
    """Two places, each sharded over two ranks, with one stage or two; three steps as one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, dp = mesh.get_coordinate()
    second = {ScheduleGPipe: [], ScheduleZBVZeroBubble: [3 - place]}.get(make, [place + 2])
    numbers, splits = [place, *second], make in (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
    count = 2 * len(numbers)
    parts = [stage_of(n) for n in numbers]
    for part in parts:
        for module in (part[0], part):
            shardwright.fully_shard(module, mesh=mesh["dp"], reshard_after_forward=after)
    stages = [
        PipelineStage(part, n, count, torch.device("cpu"), group=mesh["pp"].get_group())
        for part, n in zip(parts, numbers, strict=True)
    ]
    loss_fn = nn.functional.mse_loss
    num_parts = 4 if splits else 2
    schedule = make(stages if len(stages) > 1 else stages[0], n_microbatches=num_parts, loss_fn=loss_fn)
    whole = nn.Sequential(*(stage_of(n) for n in range(count)))
    ours = [torch.optim.Adam(part.parameters(), 0.05) for part in parts]
    theirs = torch.optim.Adam(whole.parameters(), 0.05)
    for step in range(3):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(2)[dp]
        args = (mine,) if place == 0 else ()
        schedule.step(*args, target=torch.ones(4, 8) if count - 1 in numbers else None)
        loss_fn(whole(batch), torch.ones(8, 8)).backward()
        for n, part in zip(numbers, parts, strict=True):
            assert_same_grads(part, whole[n])
        for optimizer in (*ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


# ---- install


def installed(rank, world):
    theirs = {name: getattr(fsdp, name) for name in fsdp.__all__}
    with warnings.catch_warnings(record=True, action="always") as caught:
        shardwright.install()
        shardwright.install()
    ours = {name: getattr(fsdp, name) for name in fsdp.__all__}
    stays = [name for name, value in ours.items() if value is theirs[name]]
    from torch.distributed._composable.fsdp import fully_shard as second  # noqa: PLC0415
    from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType  # noqa: PLC0415
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: PLC0415

    assert second is ours["fully_shard"] is shardwright.fully_shard
    assert StateDictType is ours["StateDictType"] is shardwright.wrapper.StateDictType
    assert ModuleWrapPolicy is shardwright.wrapper.ModuleWrapPolicy
    model = ours["fully_shard"](layer(1), mp_policy=ours["MixedPrecisionPolicy"](torch.bfloat16))
    assert isinstance(model, ours["FSDPModule"])
    shardwright.uninstall()
    shardwright.uninstall()
    assert {name: getattr(fsdp, name) for name in fsdp.__all__} == theirs
    return stays, [str(warning.message) for warning in caught]


early = fsdp.fully_shard


def test_install_puts_every_name_into_torchs_place_and_uninstall_puts_it_back():
    for stays, warned in run_ranks(1, installed):
        assert stays == []
        assert len(warned) == 1
        assert "tests imported names of torch.distributed.fsdp before" in warned[0]
