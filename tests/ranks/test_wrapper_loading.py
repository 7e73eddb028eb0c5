"""State goes by name and never by place: optimizers that list parameters in an order of their own, state that
rank 0 alone has loaded, keys that modules rename, names without the wrapper's."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.parametrizations import weight_norm

from shardwright import checkpoint, fully_shard
from shardwright.errors import Diverged, InputError, MisuseError
from shardwright.torch_private import ShardedTensor
from shardwright.wrapper import (
    FSDP,
    FullOptimStateDictConfig,
    ModuleWrapPolicy,
    OptimStateKeyType,
    StateDictType,
)
from tests.ranks.models import Block, Run, batches, build, full, loss_of, train_by
from tests.ranks.pool import on_ranks

FLAT = pytest.mark.parametrize("flat", [False, True], ids=["original", "flat"])
RANK0 = FullOptimStateDictConfig(rank0_only=True)


def alike(seed: int = 0) -> nn.Sequential:
    """Layers of one shape: taken for each other they give no error."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def by_layer(model: nn.Module, flat: bool) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=not flat)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(rank)
    losses = (model(torch.randn(3, 4, generator=generator)).square().sum() for _ in range(2))
    train_by(Run(model, optimizer), losses)
    return optimizer


def whole_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options):
    return FSDP.full_optim_state_dict(model, optimizer, rank0_only=False, **options)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def same_states(one, other):
    assert one["state"].keys() == other["state"].keys()
    for name, entry in one["state"].items():
        assert entry.keys() == other["state"][name].keys()
        for key, value in entry.items():
            assert torch.equal(full(value), full(other["state"][name][key])), (name, key)


@FLAT
@on_ranks(2, 3)
def test_an_optimizer_that_lists_parameters_in_another_order_on_a_rank_is_saved_by_name(rank, flat, tmp_path):
    folder = str(tmp_path / "checkpoint")
    model = by_layer(alike(), flat)
    expected = whole_of(model, stepped(model, momentum(model.parameters()), rank))
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        model = by_layer(alike(), flat)
        params = list(model.parameters())
        optimizer = stepped(model, momentum(reversed(params) if rank else params), rank)
        FSDP.set_state_dict_type(model, kind)
        found = FSDP.optim_state_dict(model, optimizer)
        same_states(found, expected)
        other = by_layer(alike(1), flat)
        params = list(other.parameters())
        fresh = momentum(params if rank else [*params[1:], params[0]])
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, found))
        same_states(whole_of(other, fresh), expected)
        whole = whole_of(model, optimizer)
        ready = FSDP.shard_full_optim_state_dict(whole, model, optim=optimizer)
        optimizer.load_state_dict(ready)
        same_states(whole_of(model, optimizer), expected)
    checkpoint.save(folder, model=model, optimizer=optimizer, step=1)
    fresh = momentum(params if rank else reversed(params))
    checkpoint.load(folder, model=other, optimizer=fresh)
    same_states(whole_of(other, fresh), expected)


@FLAT
@on_ranks(2)
def test_ranks_whose_optimizers_have_state_of_other_parameters_all_learn_it(rank, flat):
    model = by_layer(alike(), flat)
    optimizer = stepped(model, momentum(model.parameters()), rank)
    whole = whole_of(model, optimizer)
    if rank:
        optimizer.state.pop(list(model.parameters())[-1])
    with pytest.raises(Diverged, match=r"different states.*\n.*rank 0: '2\.(_flat_param|bias)'"):
        FSDP.optim_state_dict(model, optimizer)
    if rank:
        del whole["state"]["1.weight"], whole["state"]["1.bias"]
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    sharded = torchs.get_optimizer_state_dict(model, stepped(model, momentum(model.parameters()), rank))
    if rank:
        del sharded["state"]["1.weight"], sharded["state"]["1.bias"]
    if flat:
        with pytest.raises(Diverged, match=r"rank 0: '1\._flat_param'"):
            FSDP.optim_state_dict_to_load(model, optimizer, sharded)
    dist.barrier()


@FLAT
@on_ranks(2, 3)
def test_a_state_that_rank_0_alone_has_is_sent_to_the_others(rank, flat):
    model = by_layer(alike(), flat)
    optimizer = stepped(model, torch.optim.Adam(model.parameters(), lr=0.1), rank)
    expected = whole_of(model, optimizer)
    for config in (RANK0, None):
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, RANK0):
            state = FSDP.optim_state_dict(model, optimizer)
        assert bool(state) == (rank == 0)
        other = by_layer(alike(1), flat)
        fresh = torch.optim.Adam(other.parameters(), lr=0.5, betas=(0.5, 0.6))
        with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT, None, config):
            ready = FSDP.optim_state_dict_to_load(other, fresh, state, load_directly=True)
        assert fresh.param_groups[0]["betas"] == (0.9, 0.999)
        assert ready["param_groups"][0]["params"] == list(range(len(list(other.parameters()))))
        same_states(whole_of(other, fresh), expected)
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT, None, RANK0):
        # What other ranks have isn't looked at, as in torch.
        given = expected if rank == 0 else {"state": {}, "param_groups": []}
        FSDP.optim_state_dict_to_load(other, fresh, given)
        with pytest.raises(InputError, match=r"can't be sent to the others.*a object can't be saved"):
            FSDP.optim_state_dict_to_load(other, fresh, {"state": {}, "it": object()} if rank == 0 else {})
    with pytest.raises(InputError, match="is empty, and other ranks have none"):
        FSDP.optim_state_dict_to_load(other, fresh, {} if rank == 0 else expected)


def as_older(value):
    if not isinstance(value, DTensor):
        return value
    rows = value.to_local()
    begin = [sum(sizes_before(rows.shape[0])), *[0] * (rows.ndim - 1)]
    place = f"rank:{dist.get_rank()}/cpu"
    metadata = torch.distributed._shard.metadata.ShardMetadata(begin, list(rows.shape), place)
    shard = torch.distributed._shard.sharded_tensor.Shard(rows, metadata)
    return ShardedTensor._init_from_local_shards([shard] if len(rows) else [], *value.shape)


def sizes_before(own):
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own]))
    return [int(each) for each in sizes[: dist.get_rank()]]


@FLAT
@on_ranks(2)
def test_every_form_of_an_optimizers_state_that_torch_takes_is_taken(rank, flat):
    model = by_layer(alike(), flat)
    params = list(model.parameters())
    optimizer = stepped(model, torch.optim.Adam(params, lr=0.1), rank)
    whole = whole_of(model, optimizer)
    # What the optimizer was built from, in place of it; neither: model.parameters().
    for given in ([{"params": params}], params, iter(params)):
        found = whole_of(model, optimizer, optim_input=given)
        same_states(found, whole)
    for given in ({"optim_input": params}, {"optim": optimizer}, {}):
        fresh = torch.optim.Adam(params, lr=0.5)
        fresh.load_state_dict(FSDP.shard_full_optim_state_dict(whole, model, **given))
        same_states(whole_of(model, fresh), whole)
    with pytest.raises(InputError, match="optim_input has no parameters"):
        FSDP.shard_full_optim_state_dict(whole, model, optim_input=iter(()))
    # Without groups, and with state that is of no parameter.
    state = optimizer.state_dict()
    state["state"]["seen"] = 3
    found = FSDP.optim_state_dict(model, optimizer, {"state": state["state"]})
    assert set(found) == {"state"}
    assert found["state"].pop("seen") == 3
    same_states(found, whole)
    found["state"]["seen"] = 4
    ready = FSDP.optim_state_dict_to_load(model, optimizer, found)
    assert set(ready) == {"state"}
    assert ready["state"]["seen"] == 4
    # By numbers, in the order of the optimizer that has them.
    plain = alike(3)
    backwards = momentum(reversed(list(plain.parameters())))
    for _ in range(2):
        plain(torch.ones(1, 4)).sum().backward()
        backwards.step()
    keys, rekey = OptimStateKeyType, FSDP.rekey_optim_state_dict
    named = rekey(backwards.state_dict(), keys.PARAM_NAME, plain, optim=backwards)
    forwards = momentum(plain.parameters())
    forwards.load_state_dict(rekey(named, keys.PARAM_ID, plain, optim=forwards))
    for name, param in plain.named_parameters():
        expected = backwards.state[param]["momentum_buffer"]
        for found in (named["state"][name], forwards.state[param]):
            assert torch.equal(found["momentum_buffer"], expected)
    by_number = rekey(whole, keys.PARAM_ID, plain)
    with pytest.raises(InputError, match="rekey_optim_state_dict"):
        FSDP.optim_state_dict_to_load(model, optimizer, by_number)
    if flat:
        with pytest.raises(InputError, match="takes the model that isn't wrapped"):
            rekey(whole, keys.PARAM_ID, model)
    # What torch's older checkpoints load: shards that aren't DTensors.
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = FSDP.optim_state_dict(model, optimizer)
        older = {name: {k: as_older(v) for k, v in e.items()} for name, e in sharded["state"].items()}
        fresh = torch.optim.Adam(params, lr=0.5)
        ready = FSDP.optim_state_dict_to_load(model, fresh, {**sharded, "state": older})
    fresh.load_state_dict(ready)
    same_states(whole_of(model, fresh), whole)


# ---- names and memory of the model's state


class Renames(nn.Sequential):
    """Its layers had other names in files of its former version, as torchvision's ``MLPBlock``."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for index in range(len(self)):
            for kind in ("weight", "bias"):
                old = f"{prefix}linear_{index}.{kind}"
                if old in state_dict:
                    state_dict[f"{prefix}{index}.{kind}"] = state_dict.pop(old)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@on_ranks(2)
def test_keys_that_a_module_renames_while_it_is_loaded_are_found():
    def make(seed):
        torch.manual_seed(seed)
        layers = Renames(nn.Linear(5, 5), nn.Linear(5, 5))
        return nn.Sequential(layers, weight_norm(nn.Linear(5, 3)), nn.Linear(3, 3))

    expected = make(0).state_dict()
    renamed = {"0.0.": "0.linear_0.", "0.1.": "0.linear_1."}
    renamed |= {f"parametrizations.weight.original{i}": f"weight_{kind}" for i, kind in enumerate("gv")}
    former = dict(expected)
    for now, then in renamed.items():
        former = {name.replace(now, then): value for name, value in former.items()}
    assert len(former.keys() - expected.keys()) == 6
    inside = ModuleWrapPolicy({Renames})
    flat = {"use_orig_params": False}
    options = ({}, {"auto_wrap_policy": inside}, flat, {"auto_wrap_policy": inside, **flat})
    for way in (fully_shard, *(functools.partial(FSDP, **each) for each in options)):
        for assign in (False, True):
            model = way(make(1))
            before = sum(len(each._load_state_dict_pre_hooks) for each in model.modules())
            assert not any(model.load_state_dict(former, assign=assign))
            found = {name: full(value) for name, value in model.state_dict().items()}
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            model(torch.ones(2, 5)).sum().backward()
            # What is missing is told by its present name, also after a load that an error ended.
            gone = {name: value for name, value in former.items() if name != "0.linear_1.weight"}
            with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.1.weight"\. $'):
                model.load_state_dict(gone)
            assert model.load_state_dict(gone, strict=False).missing_keys == ["0.1.weight"]
            assert not any(model.load_state_dict(former))
            hooks = [len(each._load_state_dict_pre_hooks) for each in model.modules()]
            assert sum(hooks) == before


@FLAT
@on_ranks(2)
def test_loads_tell_plain_names_and_later_steps_leave_a_state_dict_alone(rank, flat):
    model = nn.Sequential(by_layer(alike(), flat))
    state = model.state_dict()
    del state["0.1.weight"]
    state |= {"0.else": torch.ones(1), "0.2.weight": torch.ones(7, 7)}
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(state)
    told = str(raised.value)
    assert "_fsdp_wrapped_module" not in told
    assert 'Missing key(s) in state_dict: "0.1.weight"' in told
    assert 'Unexpected key(s) in state_dict: "0.else"' in told
    assert "size mismatch for 0.2.weight" in told
    del state["0.2.weight"]
    found = model.load_state_dict(state, strict=False)
    assert sorted(found.missing_keys) == ["0.1.weight", "0.2.weight"]
    assert found.unexpected_keys == ["0.else"]
    # A state dict is of the time when it was made.
    model = by_layer(alike(), flat)
    optimizer = stepped(model, torch.optim.Adam(model.parameters()), rank)
    for kind in StateDictType:
        FSDP.set_state_dict_type(model, kind)
        saved = model.state_dict(), FSDP.optim_state_dict(model, optimizer)["state"]
        before = copy.deepcopy(saved)
        stepped(model, optimizer, rank)
        for name, value in before[0].items():
            assert torch.equal(full(value), full(saved[0][name])), (kind, name)
        same_states({"state": before[1]}, {"state": saved[1]})


@FLAT
@on_ranks(2)
def test_a_wrapper_in_two_places_and_one_around_another_are_saved_and_loaded(rank, flat):
    options = {"use_orig_params": not flat}

    def in_two_places():
        model = alike()
        model[1] = model[2] = FSDP(model[1], **options)
        return FSDP(model, **options)

    def inside_of_itself():
        model = alike()
        model[1] = FSDP(FSDP(model[1], **options), **options)
        return FSDP(FSDP(model, **options), **options)

    for make in (in_two_places, inside_of_itself):
        model, other = make(), make()
        optimizer = stepped(model, torch.optim.Adam(model.parameters(), lr=0.1), rank)
        fresh = torch.optim.Adam(other.parameters(), lr=0.1)
        for kind in StateDictType:
            for each in (model, other):
                FSDP.set_state_dict_type(each, kind)
            other.load_state_dict(model.state_dict())
            state = FSDP.optim_state_dict(model, optimizer)
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, state))
        for each in (model, other):
            FSDP.set_state_dict_type(each, StateDictType.FULL_STATE_DICT)
        found, expected = other.state_dict(), model.state_dict()
        assert list(found) and set(found) == set(alike().state_dict())
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        same_states(FSDP.optim_state_dict(other, fresh), FSDP.optim_state_dict(model, optimizer))
    layer = nn.Linear(4, 4)
    FSDP(layer, **options)
    with pytest.raises(MisuseError, match="only be applied to a module once"):
        FSDP(layer, **options)
    with pytest.raises(InputError, match="param_init_fn must be a function"):
        FSDP(alike(), param_init_fn=42, **options)


# ---- torch's functions


OPTIONS = [
    torchs.StateDictOptions(),
    torchs.StateDictOptions(full_state_dict=True),
    torchs.StateDictOptions(full_state_dict=True, cpu_offload=True),
    torchs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    torchs.StateDictOptions(cpu_offload=True),
    torchs.StateDictOptions(flatten_optimizer_state_dict=True),
    torchs.StateDictOptions(ignore_frozen_params=True, strict=False),
]


@FLAT
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_ranks(2)
def test_torchs_functions_take_a_wrapped_model_with_every_option(rank, world, flat, compiled):
    def make(seed):
        model = build(seed)
        model.norm.requires_grad_(False)
        options = {"use_orig_params": not flat}
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
        model = torch.compile(model, backend="eager") if compiled else model
        return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)

    model, optimizer = make(7)
    train_by(Run(model, optimizer), [loss_of(model, batches(0, world)[rank])])
    whole = torchs.get_model_state_dict(model, options=OPTIONS[1])
    expected = torchs.get_optimizer_state_dict(model, optimizer, options=OPTIONS[1])
    assert whole.keys() == build().state_dict().keys()
    for options in OPTIONS:
        other, fresh = make(8)
        state = torchs.get_model_state_dict(model, options=options)
        alone = options.full_state_dict and options.cpu_offload
        assert bool(state) == (not alone or rank == 0)
        assert all(isinstance(v, DTensor) != options.full_state_dict for k, v in state.items() if "up" in k)
        assert ("norm.weight" in state) == (bool(state) and not options.ignore_frozen_params)
        optimizer_state = torchs.get_optimizer_state_dict(model, optimizer, options=options)
        from_rank0 = alone or options.broadcast_from_rank0
        state = {} if from_rank0 and rank else state
        loading = OPTIONS[3] if from_rank0 else options
        torchs.set_model_state_dict(other, state, options=loading)
        torchs.set_optimizer_state_dict(other, fresh, optimizer_state, options=options)
        found = torchs.get_model_state_dict(other, options=OPTIONS[1])
        frozen = {"norm.weight", "norm.bias"} if options.ignore_frozen_params else set()
        assert all(torch.equal(found[name], whole[name]) for name in whole.keys() - frozen)
        same_states(torchs.get_optimizer_state_dict(other, fresh, options=OPTIONS[1]), expected)
        loss_of(other, batches(0, world)[rank]).backward()
        fresh.step()


@on_ranks(2)
def test_torchs_functions_still_take_torchs_own_wrapper(rank):
    FSDP(nn.Linear(2, 2))  # from here on torch's functions know ours, too
    warnings.simplefilter("ignore")
    model = TorchsFSDP(alike(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = stepped(model, torch.optim.Adam(model.parameters(), lr=0.1), rank)
    state, entry = torchs.get_model_state_dict(model), torchs.get_optimizer_state_dict(model, optimizer)
    assert state.keys() == entry["state"].keys() == alike().state_dict().keys()
    torchs.set_model_state_dict(model, state)
    torchs.set_optimizer_state_dict(model, optimizer, entry)
    plain = alike()
    assert torchs.get_model_state_dict(plain).keys() == state.keys()
    sharded = fully_shard(alike())
    assert torchs.get_model_state_dict(sharded).keys() == state.keys()


# ---- two dimensions


@on_ranks(4)
def test_states_of_a_model_that_tensor_parallelism_cuts_too_are_exact():
    """Rows cut by both tensor parallelism and the wrapper, unevenly: ``_StridedShard``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def make(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3))

    def split(seed):
        model = make(seed)
        return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def stepped_once(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for param in model.parameters():
            param.grad = param.detach().clone()
        optimizer.step()
        return optimizer

    plain = make(0)
    reference = stepped_once(plain)
    model = FSDP(split(0), device_mesh=mesh["dp"])
    optimizer = stepped_once(model)
    whole = FSDP.optim_state_dict(model, optimizer)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.state_dict()[name], param.detach())
        torch.testing.assert_close(whole["state"][name]["exp_avg"], reference.state[param]["exp_avg"])
    kinds = [(StateDictType.FULL_STATE_DICT, None), (StateDictType.FULL_STATE_DICT, RANK0)]
    kinds += [(StateDictType.SHARDED_STATE_DICT, None), (StateDictType.LOCAL_STATE_DICT, None)]
    for kind, config in kinds:
        other = FSDP(split(1), device_mesh=mesh["dp"])
        fresh = torch.optim.Adam(other.parameters(), lr=0.5)
        with FSDP.state_dict_type(model, kind, None, config), FSDP.state_dict_type(other, kind, None, config):
            other.load_state_dict(model.state_dict())
            state = FSDP.optim_state_dict(model, optimizer)
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, state))
        found, expected = other.state_dict(), model.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        same_states(FSDP.optim_state_dict(other, fresh), whole)
    with pytest.raises(InputError, match=r"'0.weight' is a DTensor already"):
        FSDP(split(0), device_mesh=mesh["dp"], use_orig_params=False)
