"""What torch's wrapper class shows of itself, and what may be wrapped."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import fully_shard
from shardwright.errors import InputError
from shardwright.wrapper import FSDP, ModuleWrapPolicy, ShardingStrategy, size_based_auto_wrap_policy
from tests.ranks.models import Block, batches, build, loss_of
from tests.ranks.pool import on_ranks
from tests.ranks.wrapped import nested


@on_ranks(4)
def test_a_wrapper_tells_its_ranks_its_device_and_what_it_was_given(rank, world):
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    model = nested(build(), forward_prefetch=True, limit_all_gathers=False)
    assert (model.rank, model.world_size) == (rank, world)
    assert model.process_group is dist.group.WORLD
    assert model.compute_device == torch.device("cpu")
    assert (model.forward_prefetch, model.limit_all_gathers) == (True, False)
    inner = ("blocks.0", "blocks.1")
    own = [param for name, param in model.named_parameters() if not any(path in name for path in inner)]
    assert {id(param) for param in model.params} == set(map(id, own))
    assert [tuple(param.shape) for param in FSDP(nn.Linear(3, 5), use_orig_params=False).params] == [(20,)]
    half = FSDP(build(), process_group=pair)
    assert (half.rank, half.world_size) == (rank % 2, 2)
    assert half.process_group is pair
    copied = FSDP(build(), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert (copied.rank, copied.world_size) == (rank, world)
    across = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    hybrid = FSDP(build(), process_group=(pair, across), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert (hybrid.rank, hybrid.world_size) == (rank % 2, 2)  # of the shards, as in torch


class Towers(nn.Module):
    """Modules in containers that have no forward, called one by one."""

    def __init__(self, wrapped):
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        self.layers = nn.ModuleList(FSDP(layer) if wrapped else layer for layer in layers)
        if wrapped:
            self.layers = FSDP(self.layers)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@on_ranks(2)
def test_a_container_without_a_forward_may_be_wrapped_and_warns_where_it_holds_parameters(rank, world):
    x = torch.randn(world, 5, 4)
    ours, plain = FSDP(Towers(True)), Towers(False)
    assert isinstance(ours.layers, FSDP)
    ours(x[rank]).sum().backward()
    torch.stack([plain(rows).sum() for rows in x]).mean().backward()
    expected = dict(plain.named_parameters())
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), expected[name].grad)
    with pytest.warns(UserWarning, match="ModuleList has no forward of its own"):
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))


@on_ranks(1)
def test_the_sets_of_the_size_policy_stand_where_torch_has_them_and_errors_name_what_is_wrapped():
    assert {nn.ModuleList, nn.ModuleDict} == size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    assert {nn.MultiheadAttention} == size_based_auto_wrap_policy.FORCE_LEAF_MODULES
    model = build()
    model.blocks[1].up = FSDP(model.blocks[1].up)
    with pytest.raises(InputError, match=r"'blocks\.1\.up' is wrapped already"):
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


class Apart(nn.Module):
    """Layers that all ranks share; between them as many as the rank has of its own."""

    def __init__(self, num_own):
        super().__init__()
        torch.manual_seed(0)
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = [nn.Linear(4, 4) for _ in range(num_own)]
        self.layers = nn.Sequential(first, *self.own, last)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("flat", [False, True], ids=["apart", "flat"])
@on_ranks(3)
def test_ranks_may_ignore_different_numbers_of_modules(rank, flat):
    model = Apart(num_own=rank + 1)
    inner, options = model.own, {"use_orig_params": not flat}
    model.layers = FSDP(model.layers, ignored_modules=inner, **options)
    model = FSDP(model, ignored_modules=inner, **options)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert not any(isinstance(param, DTensor) for layer in inner for param in layer.parameters())
    assert all(param.grad is not None for param in model.parameters())


class Marked(nn.Module):
    """Two parameters with attributes of the caller's, and a forward that reads one."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        self.plain = nn.Parameter(torch.ones(5))
        for param in self.parameters():
            param.expert = True
        self.weight.rank_of = {"a": 1}
        self.bias.decay = 0.5

    def forward(self, x):
        assert self.weight.expert and self.weight.rank_of == {"a": 1} and self.bias.decay == 0.5
        assert not hasattr(self.plain, "decay")
        return nn.functional.linear(x, self.weight, self.bias) * self.plain.sum()


@pytest.mark.parametrize("api", ["fully_shard", "wrapper", "flat"])
@pytest.mark.each_case
@on_ranks(2)
def test_attributes_of_parameters_survive_sharding_copies_and_unsharding(api):
    flat = api == "flat"
    model = fully_shard(Marked()) if api == "fully_shard" else FSDP(Marked(), use_orig_params=not flat)
    for each in (model, copy.deepcopy(model)):
        assert all(param.expert for param in each.parameters())
        assert flat or (each.weight.rank_of == {"a": 1} and each.bias.decay == 0.5)
        each(torch.ones(2, 3)).sum().backward()
        assert each.weight.expert and each.weight.rank_of == {"a": 1} and each.bias.decay == 0.5
        if flat:
            assert not hasattr(next(each.parameters()), "decay")  # which not all in it have
    if api != "fully_shard":
        with FSDP.summon_full_params(model):
            assert model.weight.expert and model.bias.decay == 0.5 and not hasattr(model.plain, "decay")
        return
    with torch.device("meta"):
        late = fully_shard(Marked())
    late.to_empty(device="cpu").double()
    assert late.weight.expert and late.bias.decay == 0.5
    late.float()(torch.ones(2, 3)).sum().backward()
    assert late.weight.expert and late.bias.decay == 0.5


class Scaled(torch.Tensor):
    """A subclass that says itself what is gathered, and has attributes of its own."""

    @staticmethod
    def __new__(cls, held, scale):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held, scale):
        self.held, self.scale = held, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        scales = [arg.scale for arg in args if isinstance(arg, Scaled)]
        args = [arg.held if isinstance(arg, Scaled) else arg for arg in args]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, (tuple, list)):
            return [Scaled(part, scales[0]) for part in out]
        return Scaled(out, scales[0]) if scales and isinstance(out, torch.Tensor) else out

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.held,), self.scale

    def fsdp_post_all_gather(self, outputs, scale, dtype, *, out=None):
        if out is None:
            return outputs[0] * scale, ()
        return out.copy_(outputs[0] * scale)


@on_ranks(2)
def test_attributes_of_a_subclass_are_its_own_and_the_callers_survive():
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(Scaled(torch.ones(4, 4), 2.0))
    model.weight.expert = True
    fully_shard(model)
    assert model.weight.expert and not hasattr(model.weight, "scale")
    assert model.weight._local_tensor.scale == 2.0
    seen = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.weight.expert))
    assert model(torch.ones(1, 4))[0, 0].item() == 8.0
    assert seen == [True]


@on_ranks(2)
def test_options_of_torch_itself_are_taken_as_ours(rank, world):
    options = {
        "sharding_strategy": theirs.ShardingStrategy.SHARD_GRAD_OP,
        "cpu_offload": theirs.CPUOffload(False),
        "backward_prefetch": theirs.BackwardPrefetch.BACKWARD_POST,
        "mixed_precision": theirs.MixedPrecision(torch.bfloat16, torch.float32),
    }
    model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    loss_of(model, batches(0, world)[rank]).backward()
    assert model.sharding_strategy.name == "SHARD_GRAD_OP" and not model.sharding_strategy.is_hybrid
    assert model.mixed_precision.param_dtype is torch.bfloat16
    whole = theirs.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, theirs.StateDictType.FULL_STATE_DICT, whole):
        assert bool(model.state_dict()) == (rank == 0)
    with FSDP.state_dict_type(model, theirs.StateDictType.SHARDED_STATE_DICT):
        assert isinstance(model.state_dict()["head.weight"], DTensor)
