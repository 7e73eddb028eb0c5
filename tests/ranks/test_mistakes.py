"""Mistakes that were silent, or told in words of another layer: each is told at once, with what to do."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from shardwright import FullyShardedDataParallel, fully_shard
from shardwright.errors import InputError, MisuseError
from shardwright.motion.unit import units_in
from tests.ranks.pool import run_ranks


def small():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4)))


def wrap(module):
    """In torch's wrapper class."""
    return torchs.FullyShardedDataParallel(module, device_id=torch.device("cpu"))


DOORS = {
    "fully_shard": fully_shard,
    "groups": lambda model: fully_shard(model, groups=[["1"]]),
    "wrapper": FullyShardedDataParallel,
    "policy": lambda model: FullyShardedDataParallel(
        model, auto_wrap_policy=lambda recurse, module, **_: recurse or isinstance(module, nn.Linear)
    ),
}
INSIDE = {
    "torch.distributed.fsdp.fully_shard": torchs.fully_shard,
    "torch.distributed.fsdp.FullyShardedDataParallel": wrap,
    "DistributedDataParallel": DistributedDataParallel,
    "replicate": replicate,
}


def ours_around(rank, world):
    for name, inside in INSIDE.items():
        for door, shard in DOORS.items():
            model = small()
            model[0] = inside(model[0])
            with pytest.raises(MisuseError, match=f"'0', .*{name}.* shardwright.fully_shard") as told:
                shard(model)
            assert "instead" in str(told.value), (name, door)
            assert not units_in(model)  # nothing half done
        with pytest.raises(MisuseError, match=name):
            fully_shard(inside(small()))
    model = small()  # who leaves it alone may have it
    model[0] = DistributedDataParallel(model[0])
    fully_shard(model, ignored_params=set(model[0].parameters()))
    model(torch.ones(2, 4)).sum().backward()
    model = small()
    model[0] = DistributedDataParallel(model[0])
    FullyShardedDataParallel(model, ignored_modules=[model[0]])(torch.ones(2, 4)).sum().backward()


def test_other_data_parallelism_inside_of_ours_is_refused_and_both_are_named():
    run_ranks(2, ours_around)


def torchs_around(rank, world):
    named = r"torch's fully_shard.* shardwright.fully_shard has sharded.* instead"
    for shard in (lambda model: fully_shard(model[0]), fully_shard):
        model = small()
        shard(model)
        with pytest.raises(MisuseError, match=named):
            torchs.fully_shard(model)
    with pytest.raises(MisuseError, match=named):
        torchs.fully_shard(nn.Sequential(FullyShardedDataParallel(small())))
        with pytest.raises(MisuseError, match=named):
            wrap(model)
    model = small()
    fully_shard(model[0])
    assert get_model_state_dict(model).keys() == model.state_dict().keys()  # asks the same registry
    FullyShardedDataParallel(model)(torch.ones(2, 4)).sum().backward()


def test_torchs_data_parallelism_around_ours_is_refused_and_both_are_named():
    run_ranks(2, torchs_around)


def empty(rank, world):
    with pytest.warns(UserWarning, match=r"ReLU has no parameter.*nothing was sharded"):
        fully_shard(nn.ReLU())
    with pytest.warns(UserWarning, match=r"Flatten has no parameter.*nothing was sharded"):
        FullyShardedDataParallel(nn.Flatten())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = small()
        fully_shard(list(model))
        fully_shard(model)  # a root around sharded modules
        FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4)), nn.ReLU()))


def test_a_module_without_a_parameter_anywhere_is_told_of_and_a_root_around_sharded_ones_is_not():
    run_ranks(2, empty)


def other_meshes(rank, world):
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    model = nn.Linear(4, 4)
    torch.distributed.tensor.parallel.parallelize_module(
        model, mesh, torch.distributed.tensor.parallel.ColwiseParallel()
    )
    with pytest.raises(InputError, match=r"'weight' is a DTensor already .* one init_device_mesh"):
        fully_shard(model)


def test_a_dtensor_on_a_mesh_without_names_is_refused_by_its_name():
    run_ranks(2, other_meshes)
