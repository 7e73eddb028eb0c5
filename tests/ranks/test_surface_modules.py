"""What may be done with sharded modules: copied, saved, loaded, edited, hooked, called in any way."""

import copy
import io
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwright import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    pickle_shards,
    register_fsdp_forward_method,
    stats,
)
from shardwright.errors import InputError, StageError
from tests.ranks.cases import Record
from tests.ranks.models import (
    Block,
    Run,
    assert_same,
    assert_same_grads,
    batches,
    both_backward,
    build,
    equal_steps,
    full,
    loss_of,
    shard_decoder,
    train_beside,
    twins,
    waits,
    warned,
)
from tests.ranks.pool import on_ranks, run_ranks


@on_ranks(1, 2, 3)
def test_a_copy_of_a_sharded_model_is_a_model_of_its_own_that_trains_exactly(rank, world):
    model = shard_decoder(build(tied=True), fully_shard)
    run, reference = Run.of(model), Run.of(build(tied=True))
    train_beside(run, reference, rank, world, 1)
    other = copy.deepcopy(model)
    assert isinstance(other, FSDPModule) and isinstance(other.blocks[0], FSDPModule)
    assert other.head.weight is other.embedding.weight  # still tied
    assert other.head.weight is not model.head.weight
    assert all(
        torch.equal(full(p), full(q)) for p, q in zip(other.parameters(), model.parameters(), strict=True)
    )
    frozen = copy.deepcopy(reference.model)
    train_beside(run, reference, rank, world, 1)  # the copy doesn't change with the original ...
    assert_same(other, frozen)
    train_beside(Run.of(other), Run.of(frozen), rank, world, 2)  # ... and trains by itself
    assert stats(other).num_groups == stats(model).num_groups
    assert_same(model, reference.model)


@on_ranks(4)
def test_a_copy_keeps_its_options_and_the_callers_hooks(world):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(
        model[0],
        reshard_after_forward=2,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
    )
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    model[0].set_requires_gradient_sync(False)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    other = copy.deepcopy(model)
    other(torch.ones(1, 4)).sum().backward()
    assert seen == [1]
    assert waits(other[0].weight)  # not synchronised, as it was told
    assert torch.equal(full(other[2].bias.grad), torch.full((4,), float(world)))
    assert len(model._forward_pre_hooks) == len(other._forward_pre_hooks) == 1
    with pytest.raises(InputError, match="shared with modules outside"):
        pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
        fully_shard(pair)
        copy.deepcopy(pair[0])


@on_ranks(1, 2)
def test_pickling_a_sharded_module_is_refused_with_the_remedy_and_deepcopy_is_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner = fully_shard(model[0])
    wrapped = [FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=orig) for orig in (True, False)]
    remedy = r"Linear is sharded.*can't be pickled.*checkpoint\.save.*full_state_dict.*copy\.deepcopy"
    for each in (inner, model, *wrapped):  # also inside of a model that isn't sharded
        for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO()), ForkingPickler.dumps):
            with pytest.raises(InputError, match=remedy):
                save(each)
        copy.deepcopy(each)(torch.ones(1, 4)).sum().backward()
    with pytest.raises(InputError, match=remedy):
        copy.copy(inner)
    with pickle_shards(), pytest.raises(InputError, match=remedy):
        pickle.dumps(model)
    pickle.dumps(nn.Linear(4, 4))  # no business of ours


@on_ranks(1, 2, 3)
def test_an_exponential_average_of_a_sharded_model_equals_one_process(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run, other = Run.of(model), Run.of(reference)
    for _ in range(3):
        train_beside(run, other, rank, world, 1)
        ema.update_parameters(model)
        expected.update_parameters(reference)
    assert_same(ema.module, expected.module)
    with torch.no_grad():
        tokens = batches(0, world)[rank]
        assert torch.allclose(loss_of(ema.module, tokens), loss_of(expected.module, tokens))


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(1, 2, 3)
def test_a_plain_full_state_dict_loads_into_a_sharded_model(rank, world, assign):
    tied = not assign  # torch's assign unties
    model, source = shard_decoder(build(tied=tied), fully_shard), build(seed=9, tied=tied)
    loss_of(model, batches(0, world)[rank])  # the root is unsharded now
    missing = model.load_state_dict(source.state_dict(), assign=assign)
    assert not missing.missing_keys and not missing.unexpected_keys
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_same(model, source, 0.0)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.norm\.weight"):
        model.load_state_dict({**source.state_dict(), "blocks.0.norm.weight": torch.ones(3)})
    train_beside(Run.of(model), Run.of(source), rank, world, 2)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_a_plain_full_state_dict_loads_into_a_model_that_was_sharded_without_memory(rank, world, assign):
    source = build(seed=9, tied=False)
    with torch.device("meta"):
        model = shard_decoder(build(tied=False), fully_shard)
    if not assign:  # as transformers puts memory into a model that was sharded on the meta device
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty_like(param, device="cpu")))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    model.load_state_dict(source.state_dict(), assign=assign)
    assert_same(model, source, 0.0)
    train_beside(Run.of(model), Run.of(source), rank, world, 2)


@on_ranks(1, 2, 3)
def test_edits_of_unsharded_weights_are_written_back(rank, world):
    model, reference = shard_decoder(build(tied=True), fully_shard), build(tied=True)
    with model.unsharded():
        assert_same(model, reference, 0.0)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        for m in (model, reference):
            with torch.no_grad():
                m.head.weight[3] = 2.0
            m.blocks[1].scale.data.fill_(0.5)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert stats(model).unsharded_nbytes == 0
    assert_same(model, reference, 0.0)
    train_beside(Run.of(model), Run.of(reference), rank, world, 2)


@on_ranks(2)
def test_weights_that_were_not_edited_keep_their_precision():
    model = fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    before = full(model.weight).detach().clone()
    with model.unsharded(), torch.no_grad():
        assert model.weight.dtype == torch.bfloat16
        model.bias.fill_(1.0)
    assert torch.equal(full(model.weight), before)  # not rounded on the way
    assert torch.equal(full(model.bias), torch.ones(8))


@on_ranks(2)
def test_a_weight_at_rest_has_its_logical_shape_and_compute_with_it_is_an_error():
    model = shard_decoder(build(), fully_shard)
    assert all(
        p.numel() and tuple(p.shape) == tuple(q.shape)
        for p, q in zip(model.parameters(), build().parameters(), strict=True)
    )
    with pytest.raises(RuntimeError, match="DTensor"):
        nn.functional.linear(torch.ones(1, 13), model.head.weight)

    class Inside(nn.Linear):
        def forward(self, x):
            with self.unsharded():
                return x

    with pytest.raises(StageError, match="inside a forward"):
        fully_shard(Inside(2, 2))(torch.ones(1, 2))


@on_ranks(1)
def test_dtypes_are_cast_inside_of_dataclasses():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16)

    class Gives(nn.Linear):
        def forward(self, record):
            assert record.out.dtype == record.more["x"][0].dtype == torch.bfloat16
            return Record(super().forward(record.out), {"y": record.out})

    model = fully_shard(Gives(4, 4), mp_policy=policy)
    result = model(Record(torch.ones(2, 4), {"x": [torch.ones(1)]}))
    assert result.out.dtype == result.more["y"].dtype == torch.float16


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.side = Block(), nn.Linear(13, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side(x)  # its output isn't used
        return self.block(x)


@on_ranks(2)
def test_a_module_whose_output_is_not_used_is_left_alone():
    pair = Pair()
    fully_shard(pair.side)
    fully_shard(pair)
    for _ in range(3):
        pair(torch.ones(2, 13)).sum().backward()
        assert pair.side.weight.grad is None
        assert pair.block.up.weight.grad is not None
        assert stats(pair).unsharded_nbytes == 0


@on_ranks(1, 2, 3)
def test_an_optimizer_that_steps_in_backward_through_parameter_hooks_equals_one_process(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        tokens = batches(number, world)
        both_backward(model, reference, tokens, rank)
        plain.step()
        plain.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert_same(model, reference)


@on_ranks(2)
def test_ignored_parameters_are_left_as_they_are(rank, world):
    model, reference = build(), build()
    out = {model.head.weight, model.blocks[0].up.bias}
    kept = [p.data_ptr() for p in out]
    shard_decoder(model, fully_shard, ignored_params=out)
    assert not any(isinstance(p, DTensor) for p in out)
    assert [p.data_ptr() for p in out] == kept
    tokens = batches(0, world)
    loss_of(model, tokens[rank]).backward()
    loss_of(reference, tokens[rank]).backward()
    assert torch.allclose(model.head.weight.grad, reference.head.weight.grad)  # this rank's own, not reduced
    assert isinstance(model.norm.weight.grad, DTensor)


class Scaled(nn.Module):
    """A module that reads parameters of lists, which have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.linspace(1, 2, 6) + i for i in range(2))
        self.shifts = nn.ParameterDict({"first": nn.Parameter(torch.ones(6))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0] * self.scales[1] + self.shifts["first"]


@on_ranks(2)
def test_lists_of_parameters_are_sharded_by_the_module_around_them_or_by_hand():
    model, reference = fully_shard(Scaled()), Scaled()
    x = torch.ones(2, 6)
    assert torch.equal(model(x), reference(x))
    model(x).sum().backward()
    reference(x).sum().backward()
    assert_same_grads(model, reference)
    alone = Scaled()
    fully_shard(alone.scales)  # as torch takes it: no forward unshards it
    alone.scales.unshard()
    assert torch.equal(alone(x), reference(x))
    alone.scales.reshard()
    assert isinstance(alone.scales[0], DTensor)


@on_ranks(2)
def test_a_child_may_run_before_and_between_the_roots_forwards(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build()
    x = torch.randn(5, 13)
    assert torch.equal(model.blocks[1](x), reference.blocks[1](x))
    model.blocks[0](x).sum().backward()
    model.zero_grad()
    train_beside(Run.of(model), Run.of(reference), rank, world, 2)
    assert torch.allclose(model.blocks[1](x), reference.blocks[1](x), atol=1e-6)
    train_beside(Run.of(model), Run.of(reference), rank, world, 2)


def rootless(rank, world):
    model, reference = build(), build()
    for block in model.blocks:
        fully_shard(block)
    # What no call has taken is the caller's to reduce.
    left = [p for name, p in model.named_parameters() if not name.startswith("blocks")]

    def reduced(*_):
        for param in left:
            dist.all_reduce(param.grad)
            param.grad /= world

    ours, theirs = Run.of(model), Run.of(reference)
    ours.optimizer.register_step_pre_hook(reduced)
    told = warned(lambda: train_beside(ours, theirs, rank, world))
    (said,) = (each for each in told if "two separate models" in each)
    assert "Call fully_shard on the module that holds them" in said


def rooted(rank, world):
    with warnings.catch_warnings(action="error"):
        train_beside(Run.of(shard_decoder(build(), fully_shard)), Run.of(build()), rank, world)
        teacher, student = (shard_decoder(build(seed=seed), fully_shard) for seed in (1, 2))
        tokens = batches(0, world)[rank]
        (teacher(tokens).detach() - student(tokens)).square().mean().backward()


@pytest.mark.each_case
@pytest.mark.parametrize("way", [rootless, rooted])
def test_a_model_whose_root_was_left_out_is_exact_and_warns_once_and_others_do_not(way):
    run_ranks(2, way)


@on_ranks(2)
def test_two_models_with_interleaved_forwards_and_backwards_are_exact(rank, world):
    models = [shard_decoder(build(seed=seed), fully_shard) for seed in (1, 2)]
    references = [build(seed=seed) for seed in (1, 2)]
    ours, theirs = [Run.of(m) for m in models], [Run.of(m) for m in references]
    for step in range(3):
        tokens = batches(step, world)
        losses = [loss_of(m, tokens[rank]) for m in models]
        for loss in losses[:: 1 if step % 2 else -1]:
            loss.backward()
        joint = [torch.stack([loss_of(m, rows) for rows in tokens]).mean() for m in references]
        sum(joint).backward()
        for run in (*ours, *theirs):
            run.step()
        for model, reference in zip(models, references, strict=True):
            assert_same(model, reference)


@on_ranks(1, 2, 3)
def test_a_grad_scaler_skips_and_scales_as_in_one_process(rank, world):
    model, reference = shard_decoder(build(), fully_shard), build()
    ours, theirs = Run.of(model), Run.of(reference)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in range(2)]
    for step in range(4):
        tokens = batches(step, world)
        poison = float("inf") if step == 2 else 1.0
        loss = loss_of(model, tokens[rank]) * (poison if rank == world - 1 else 1.0)
        scalers[0].scale(loss).backward()
        losses = [loss_of(reference, rows) for rows in tokens]
        losses[-1] = losses[-1] * poison
        scalers[1].scale(torch.stack(losses).mean()).backward()
        for scaler, run in zip(scalers, (ours, theirs), strict=True):
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(model, reference)


class Coder(nn.Module):
    """No forward: two other entries."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def encode(self, x, scale=1.0):
        return self.block(x) * scale

    def decode(self, x):
        if x is None:
            raise RuntimeError("on purpose")
        return self.block(x)


@on_ranks(1, 2)
def test_other_methods_run_as_forwards(rank, world):
    model, reference = twins(Coder)
    fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "decode")
    register_fsdp_forward_method(nn.Linear(1, 1), "nothing")  # not sharded: no-op
    with pytest.raises(InputError, match="does not have a method sing"):
        register_fsdp_forward_method(model, "sing")
    with pytest.raises(RuntimeError, match="on purpose"):
        model.decode(None)
    equal_steps(model, reference, rank, world, lambda m, x: m.decode(m.encode(x, scale=2.0)).square().mean())
    other, expected = copy.deepcopy(model), copy.deepcopy(reference)
    equal_steps(other, expected, rank, world, lambda m, x: m.encode(x).square().mean(), steps=1)


@on_ranks(2)
def test_a_slice_of_a_sharded_sequential_is_a_plain_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    part = model[:2]
    assert type(part) is nn.Sequential and part[0] is model[0]
    assert tuple(part(torch.ones(1, 4)).shape) == (1, 4)
