"""Where shards lie between uses: by group, with a copy on the device, or in files."""

import os
from pathlib import Path

import pytest
import torch

from shardwright import (
    CPUOffloadPolicy,
    DiskOffloadPolicy,
    MixedPrecisionPolicy,
    OptimizerOffloadPolicy,
    explain,
    fully_shard,
)
from shardwright.engine.unit import unit_of, units_in
from shardwright.errors import InputError, StageError
from shardwright.params import offload as host
from tests.ranks.models import Run, batches, build, full, loss_of, shard_decoder, train_beside
from tests.ranks.pool import on_ranks


@pytest.mark.parametrize("combined", [False, True])
@on_ranks(2)
def test_groups_offload_to_the_host_keep_a_copy_or_lie_in_files_and_equal_one_process(
    rank, world, tmp_path, combined
):
    folder = str(tmp_path)
    model = build()
    policies = [CPUOffloadPolicy(False), OptimizerOffloadPolicy(False), DiskOffloadPolicy(folder=folder)]
    if combined:
        policies = [CPUOffloadPolicy(grads=False), CPUOffloadPolicy(params=False, grads=False), *policies[2:]]
    for block, policy in zip(model.blocks, policies, strict=True):
        fully_shard(block, offload_policy=policy)
    fully_shard(model)
    train_beside(Run.of(model), Run.of(build()), rank, world)
    said = str(explain(model))
    assert all(f"{type(policy).__name__}(pin_memory=" in said for policy in policies)
    assert os.listdir(folder) == []  # the files have no names, and end with the process
    maps = Path("/proc/self/maps").read_text()
    owned = sum(param.to_local().numel() > 0 for param in model.blocks[2].parameters())
    assert maps.count(f"{folder}/") >= owned
    state = model.state_dict()
    model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    loss_of(model, batches(0, world)[rank]).backward()  # what was assigned is mapped too
    assert Path("/proc/self/maps").read_text().count(f"{folder}/") >= owned


@pytest.mark.parametrize(
    ("policy", "options", "remedy"),
    [
        (CPUOffloadPolicy, {"optimizer_state": False}, "leave optimizer_state=True"),
        (CPUOffloadPolicy, {"grads": False, "pin_memory": False}, "leave pin_memory=True"),
        (DiskOffloadPolicy, {"grads": False, "params": False, "folder": "/"}, "nothing would be in files"),
    ],
)
def test_what_can_not_be_offloaded_apart_is_refused_with_the_remedy(policy, options, remedy):
    with pytest.raises(InputError, match=remedy):
        policy(**options)


@pytest.mark.slow
@on_ranks(2)
def test_the_copy_on_the_device_is_made_once_after_each_change_of_the_shard(rank, world):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard_decoder(
        build(), fully_shard, offload_policy=OptimizerOffloadPolicy(False), mp_policy=policy
    )
    run = Run.of(model)
    param = unit_of(model.blocks[0]).groups[0].params[1]
    made = []
    for step in range(3):
        model.set_requires_gradient_sync(False)
        loss_of(model, batches(step, world)[rank]).backward()
        first = param._device_copy.of(param.local, param.version, param.own)
        model.set_requires_gradient_sync(True)
        loss = loss_of(model, batches(step, world)[rank])
        assert param._device_copy.of(param.local, param.version, param.own) is first  # gathered from again
        loss.backward()
        assert first.dtype == torch.bfloat16
        made.append(first)
        torch.testing.assert_close(first, param.local.bfloat16())
        run.step()
    assert len({id(copy) for copy in made}) == 3  # and made anew by each optimizer step
    assert full(model.blocks[0].norm.weight).dtype == torch.float32


@pytest.mark.parametrize("by_data", [False, True])
@on_ranks(2)
def test_a_step_that_no_version_counter_shows_reaches_the_copy_on_the_device(rank, world, by_data):
    """Beside a model without offloading: each loss, with steps that shards' version counters don't show."""
    losses = []
    for policy in (None, OptimizerOffloadPolicy(False)):
        model = shard_decoder(build(), fully_shard, **({"offload_policy": policy} if policy else {}))
        params = [*model.parameters()]
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        losses.append([])
        for step in range(4):
            loss = loss_of(model, batches(step, world)[rank])
            loss.backward()
            losses[-1].append(loss.item())
            with torch.no_grad():
                loss_of(model, batches(step, world)[rank])  # copies the shards before the step
            if by_data:
                for param in params:
                    param.data.add_(param.grad, alpha=-0.5)
            else:
                optimizer.step()
            model.zero_grad()
    assert losses[0] == losses[1], losses


class Pinning:
    """Page-locked memory without a device that wants it: which storages are, and what was asked in order."""

    def __init__(self):
        self.asked, self.pinned = [], {}
        torch.Tensor.is_pinned = lambda tensor: tensor.untyped_storage()._cdata in self.pinned
        self._empty, torch.empty = torch.empty, self.empty
        host._pins = lambda _: True

    def empty(self, *sizes, pin_memory=False, **options):
        made = self._empty(*sizes, **options)
        if pin_memory:
            self.asked.append(made.nbytes)
            self.pinned[made.untyped_storage()._cdata] = made
        return made


@on_ranks(2)
def test_shards_on_the_host_are_pinned_once_they_have_memory_and_again_when_it_was_replaced(rank, world):
    with torch.device("meta"):
        model = build()
    pinning = Pinning()
    shard_decoder(model, fully_shard, offload_policy=CPUOffloadPolicy())
    num_groups = len({group for unit in units_in(model) for group in unit.groups})
    nbytes = sum(param.to_local().nbytes for param in model.parameters())

    def used():
        """How many blocks were pinned by the next steps; all shards are pinned then."""
        pinning.asked.clear()
        for step in range(2):
            loss_of(model, batches(step, world)[rank]).backward()
        assert all(param.to_local().is_pinned() for param in model.parameters())
        assert not pinning.asked or nbytes <= sum(pinning.asked) < 1.5 * nbytes
        return len(pinning.asked)

    assert not pinning.asked  # on the meta device there is nothing to pin
    with pytest.raises(StageError, match="still on meta device"):
        loss_of(model, batches(0, world)[rank])
    model.to_empty(device="cpu")
    model.load_state_dict(build().state_dict())
    assert used() == num_groups
    assert used() == 0
    Run.of(model).step()
    assert used() == 0  # an optimizer writes where they lie
    model.to_empty(device="cpu")
    model.load_state_dict(build().state_dict())
    assert used() == num_groups
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert used() == num_groups
    model.load_state_dict(build().state_dict(), assign=True)
    assert used() == num_groups
    model.zero_grad()
    train_beside(Run.of(model), Run.of(build()), rank, world, 1)


@on_ranks(2)
def test_shards_in_files_lie_in_files_again_after_to_empty(rank, world, tmp_path):
    folder = str(tmp_path)
    model = fully_shard(build(), offload_policy=DiskOffloadPolicy(folder=folder))
    for _ in range(2):
        model.to_empty(device="cpu")
        model.load_state_dict(build().state_dict())
        loss_of(model, batches(0, world)[rank]).backward()
        owned = sum(param.to_local().numel() > 0 for param in model.parameters())
        assert Path("/proc/self/maps").read_text().count(f"{folder}/") == owned


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="existing folder"):
        DiskOffloadPolicy(folder=tmp_path / "none")
