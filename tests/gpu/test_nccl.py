"""The same promises on one accelerator, over its own backend (NCCL on CUDA), in a world of one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwright import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, stats
from shardwright.engine.unit import unit_of
from shardwright.errors import StageError
from shardwright.transport.process_group import ProcessGroupComm
from tests.ranks.models import Run, assert_same, batches, build, loss_of, shard_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine"),
]
KIND = getattr(torch.accelerator.current_accelerator(), "type", "cpu")


@pytest.fixture
def nccl():
    backend = dist.get_default_backend_for_device(KIND)
    dist.init_process_group(f"cpu:gloo,{KIND}:{backend}", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(KIND, (1,))
    dist.destroy_process_group()


def test_three_steps_over_nccl_equal_one_process(nccl):
    model, reference = shard_decoder(build(), fully_shard, mesh=nccl), build().to(KIND)
    assert isinstance(unit_of(model).group.axis.comm, ProcessGroupComm)
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(3):
        tokens = batches(step, 1)[0].to(KIND)
        for run in (ours, theirs):
            loss_of(run.model, tokens).backward()
            run.step()
        assert_same(model, reference, 1e-5)
    assert stats(model).unsharded_nbytes == 0
    assert stats(model).exposed_s is None


def test_memory_of_a_step_stays_the_same(nccl):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard_decoder(build(), fully_shard, mesh=nccl, mp_policy=policy)
    run, reserved = Run.of(model), []
    for step in range(10):
        loss_of(model, batches(step, 1)[0].to(KIND)).backward()
        run.step()
        torch.accelerator.synchronize()
        reserved.append(torch.accelerator.memory_reserved())
    assert len(set(reserved[3:])) == 1


def test_an_optimizer_steps_shards_with_foreach_by_default(nccl):
    model = fully_shard(build(), mesh=nccl)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batches(0, 1)[0].to(KIND)).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["foreach"] is True


def test_no_memory_is_held_by_record_stream(nccl, monkeypatch):
    def refuse(*_):
        raise AssertionError("record_stream holds memory until the host looks again")

    monkeypatch.setattr(torch.Tensor, "record_stream", refuse)
    run = Run.of(shard_decoder(build(), fully_shard, mesh=nccl))
    for step in range(2):
        loss_of(run.model, batches(step, 1)[0].to(KIND)).backward()
        run.step()


@pytest.mark.skipif(KIND != "cuda", reason="CUDA's graphs")
def test_a_forward_inside_of_a_captured_graph_is_refused_and_the_next_one_works(nccl):
    model, tokens = shard_decoder(build(), fully_shard, mesh=nccl), batches(0, 1)[0].to(KIND)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(StageError, match="captures"):
        model(tokens)
    loss_of(model, tokens).backward()


@pytest.mark.skipif(KIND != "cuda", reason="of these backends CUDA alone has a kernel that waits")
def test_a_compute_stream_that_lags_far_behind_changes_nothing(nccl):
    model, reference = shard_decoder(build(), fully_shard, mesh=nccl), build().to(KIND)
    ours, theirs = Run.of(model), Run.of(reference)
    for block in model.blocks:  # the host runs ahead: copy-ins and casts are launched long before their turn
        block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(20_000_000))
    for step in range(3):
        tokens = batches(step, 1)[0].to(KIND)
        for run in (ours, theirs):
            loss_of(run.model, tokens).backward()
            torch.cuda._sleep(20_000_000)
            run.step()
        assert_same(model, reference, 1e-5)


def test_a_model_on_the_meta_device_is_offloaded_to_pinned_memory_and_trains(nccl):
    with torch.device("meta"):
        model = build()
    shard_decoder(model, fully_shard, mesh=nccl, offload_policy=CPUOffloadPolicy())
    reference = build().to(KIND)
    model.to_empty(device="cpu")
    model.load_state_dict(build().state_dict(), assign=True)
    for block in model.blocks:
        block.shift = block.shift.to(KIND)  # buffers are computed with where they are
    ours, theirs = Run.of(model), Run.of(reference)
    for step in range(3):
        tokens = batches(step, 1)[0].to(KIND)
        for run in (ours, theirs):
            loss_of(run.model, tokens).backward()
            run.step()
        assert all(param.to_local().is_pinned() for param in model.parameters())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.to_local(), theirs.detach().cpu(), atol=1e-5, rtol=1e-5)
