"""What docs/from-fsdp1.md calls the same as in torch is done with both wrapper classes, row by row."""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_policies
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardwright.wrapper as ours
from tests.ranks.models import Block, Run, batches, build, full, loss_of, train_by
from tests.ranks.pool import on_ranks

TORCH = SimpleNamespace(**{**vars(their_policies), **vars(theirs), "FSDP": theirs.FullyShardedDataParallel})
PAGE = Path(__file__).parents[2] / "docs" / "from-fsdp1.md"
ROWS: dict[str, Callable[..., Any]] = {}


def rows_of_page() -> list[str]:
    """The first cell of each row whose second one begins with "same", or with "without effect"."""
    rows = re.findall(r"^\| (.+?) \| (?:same|without effect)\b", PAGE.read_text(), flags=re.MULTILINE)
    return [row for row in rows if row != "argument"]


def row(name: str) -> Callable[..., Any]:
    """``function(lib, rank, world)`` gives what is to be equal for both libraries."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        ROWS[name] = function
        return function

    return keep


def built(seed: int = 7) -> nn.Module:
    """Without the scalars, which torch's wrapper refuses."""
    model = build(seed)
    for block in model.blocks:
        block.scale = nn.Parameter(block.scale.detach().reshape(1))
    return model


ORIGINAL = {"device_id": torch.device("cpu"), "use_orig_params": True}


def wrapped(lib: Any, model: nn.Module | None = None, **options: Any) -> Any:
    policy = options.pop("auto_wrap_policy", lib.ModuleWrapPolicy({Block}))
    model = built() if model is None else model
    return lib.FSDP(model, auto_wrap_policy=policy, **ORIGINAL | options)


def whole(lib: Any, model: Any) -> dict[str, torch.Tensor]:
    with lib.FSDP.state_dict_type(model, lib.StateDictType.FULL_STATE_DICT):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def momentum(model: Any) -> torch.optim.Optimizer:
    """One buffer of state: of two, torch 2.13 over Gloo gathers the second in the place of the first."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(lib: Any, model: Any, rank: int, world: int, steps: int = 2) -> Any:
    losses = (loss_of(model, batches(step, world)[rank]) for step in range(steps))
    return torch.tensor(train_by(Run(model, momentum(model)), losses)), whole(lib, model)


# ---- the constructor


@row("`module`")
def _(lib, rank, world):
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, 0.5)
    nn.init.zeros_(layer.bias)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 3
    return lib.FSDP(layer, **ORIGINAL)(torch.ones(2, 4)).detach()


@row("`process_group`")
def _(lib, rank, world):
    alone = dist.new_group([rank], use_local_synchronization=True)
    found = []
    for group in (dist.new_group([0, 1]), alone):
        model = wrapped(lib, process_group=group)
        found.append(trained(lib, model, rank, world))
    return found


@row("`sharding_strategy`")
def _(lib, rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("copies", "shards"))
    found = []
    for strategy in lib.ShardingStrategy:
        hybrid = {"device_mesh": mesh} if "HYBRID" in strategy.name else {}
        model = wrapped(lib, sharding_strategy=strategy, **hybrid)
        found.append(trained(lib, model, rank, world))
    return found


@row("`cpu_offload`")
def _(lib, rank, world):
    # Without an accelerator torch's wrapper can't train so; one that isn't offloaded has the same numbers.
    offload = lib.CPUOffload(offload_params=lib is not TORCH)
    model = wrapped(lib, cpu_offload=offload)
    return trained(lib, model, rank, world), {str(param.device) for param in model.parameters()}


@row("`auto_wrap_policy`")
def _(lib, rank, world):
    policies = [
        lib.ModuleWrapPolicy({Block}),
        lib.always_wrap_policy,
        functools.partial(lib.size_based_auto_wrap_policy, min_num_params=500),
        functools.partial(lib.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
        functools.partial(lib.lambda_auto_wrap_policy, lambda_fn=lambda each: isinstance(each, nn.LayerNorm)),
        lib.CustomPolicy(lambda each: isinstance(each, nn.Embedding)),
    ]
    found = []
    for policy in policies:
        # Containers, which torch wraps in a wrapper that never runs, belong to their parent's here.
        model = wrapped(lib, auto_wrap_policy=policy)
        paths = [path for path, each in model.named_modules() if isinstance(each, lib.FSDP)]
        names = [path.replace("_fsdp_wrapped_module.", "") for path in paths]
        found.append([name for name in names if name != "blocks"])
    return found


@row("`backward_prefetch`")
def _(lib, rank, world):
    models = [wrapped(lib, backward_prefetch=value) for value in (*lib.BackwardPrefetch, None)]
    return [trained(lib, model, rank, world) for model in models]


@row("`mixed_precision`")
def _(lib, rank, world):
    seen: list[Any] = []
    precision = lib.MixedPrecision(torch.bfloat16, torch.float32, torch.float16)
    model = wrapped(lib, mixed_precision=precision)
    inner = next(each for each in model.modules() if isinstance(each, Block))

    def look(each, args):
        seen.append((args[0].dtype, each.up.weight.dtype, each.shift.dtype))

    inner.register_forward_pre_hook(look)
    loss_of(model, batches(0, world)[rank]).backward()
    grads = {param.grad.dtype for param in model.parameters() if param.grad is not None}
    return seen, grads, {name: value.dtype for name, value in whole(lib, model).items()}


@row("`ignored_modules`, `ignored_states`")
def _(lib, rank, world):
    found: list[Any] = []
    for choose in (
        lambda model: {"ignored_modules": [model.blocks[0]]},
        lambda model: {"ignored_states": [model.blocks[0]]},
        lambda model: {"ignored_states": list(model.blocks[0].parameters())},
    ):
        plain = built()
        ignored = list(plain.blocks[0].parameters())
        policy = lib.ModuleWrapPolicy({nn.Embedding})
        model = wrapped(lib, plain, auto_wrap_policy=policy, **choose(plain))
        loss_of(model, batches(0, world)[rank]).backward()
        found.append([(type(param) is nn.Parameter, param.grad.clone()) for param in ignored])
        found.append(whole(lib, model))
    return found


@row("`param_init_fn`")
def _(lib, rank, world):
    def init(module):
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 0.25)

    with torch.device("meta"):
        model = built()
    return whole(lib, wrapped(lib, model, param_init_fn=init))


@row("`sync_module_states`")
def _(lib, rank, world):
    if lib is TORCH:  # which refuses it on the CPU: rank 0's
        return built(7).state_dict()
    return whole(lib, wrapped(lib, built(7 + rank), sync_module_states=True, use_orig_params=False))


@row("`limit_all_gathers`")
def _(lib, rank, world):
    models = [wrapped(lib, limit_all_gathers=value) for value in (False, True)]
    return [trained(lib, model, rank, world) for model in models]


@row("`use_orig_params=False`")
def _(lib, rank, world):
    model = wrapped(lib, use_orig_params=False)
    return trained(lib, model, rank, world), len(list(model.parameters()))


@row("`device_mesh`")
def _(lib, rank, world):
    mesh = init_device_mesh("cpu", (world,))
    return trained(lib, wrapped(lib, device_mesh=mesh), rank, world)


# ---- methods


@row("`.module`, attributes, `[index]`, `apply`, `check_is_root`, `fsdp_modules`")
def _(lib, rank, world):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers.note = 5
    layers[1] = lib.FSDP(layers[1], **ORIGINAL)
    model = lib.FSDP(layers, **ORIGINAL)
    seen: list[str] = []

    def fill(module):
        seen.append(type(module).__name__.removeprefix("FSDP"))
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 2.0)

    model.apply(fill)
    return (
        model.module is layers,
        model.note,
        model[0] is layers[0],
        [name for name in seen if name in ("Linear", "Sequential")],
        whole(lib, model),
        model.check_is_root(),
        [each is not model for each in lib.FSDP.fsdp_modules(model)],
        len(lib.FSDP.fsdp_modules(model, root_only=True)),
    )


@row("`rank`, `world_size`, `process_group`, `compute_device`, `params`")
def _(lib, rank, world):
    model = wrapped(lib, use_orig_params=False)
    group = model.process_group
    return model.rank, model.world_size, dist.get_process_group_ranks(group), str(model.compute_device)


@row("`apply_activation_checkpointing` before or after wrapping, `torch.compile` around the model")
def _(lib, rank, world):
    def is_block(module):
        return isinstance(module, Block)

    before = built()
    apply_activation_checkpointing(before, check_fn=lambda each: isinstance(each, nn.Linear))
    after = wrapped(lib)
    apply_activation_checkpointing(after, check_fn=is_block)
    compiled = torch.compile(wrapped(lib), backend="eager")
    models = (wrapped(lib, before), after, compiled)
    found = [trained(lib, model, rank, world) for model in models]
    model = models[0]
    optimizer = momentum(model)
    loss_of(model, batches(0, world)[rank]).backward()
    optimizer.step()
    return found, lib.FSDP.optim_state_dict(model, optimizer)["state"]


@row("`no_sync`")
def _(lib, rank, world):
    model = wrapped(lib)
    with model.no_sync():
        loss_of(model, batches(5, world)[rank]).backward()
    return trained(lib, model, rank, world)


@row("`summon_full_params`")
def _(lib, rank, world):
    model = wrapped(lib)
    loss_of(model, batches(0, world)[rank]).backward()
    found: list[Any] = []
    with lib.FSDP.summon_full_params(model, with_grads=True):
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with torch.no_grad():
            model.head.weight.add_(1)
    with lib.FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        model.norm.weight.zero_()
    with lib.FSDP.summon_full_params(model, recurse=False):
        found.append(model.head.weight.shape)
    refused = pytest.raises((ValueError, NotImplementedError))
    with refused, lib.FSDP.summon_full_params(model, rank0_only=True, writeback=True):
        pass
    return found, whole(lib, model)


@row("`state_dict_type`, `set_state_dict_type`, `get_state_dict_type`")
def _(lib, rank, world):
    model = wrapped(lib)
    found: list[Any] = []

    def note(settings):
        configs = settings.state_dict_config, settings.optim_state_dict_config
        found.append((settings.state_dict_type.name, [type(each).__name__ for each in configs]))

    note(lib.FSDP.get_state_dict_type(model))
    note(lib.FSDP.set_state_dict_type(model, lib.StateDictType.SHARDED_STATE_DICT))
    note(lib.FSDP.get_state_dict_type(model))
    with lib.FSDP.state_dict_type(model, lib.StateDictType.LOCAL_STATE_DICT):
        note(lib.FSDP.get_state_dict_type(model))
    note(lib.FSDP.get_state_dict_type(model))
    mesh = init_device_mesh("cpu", (world,))
    sharded = wrapped(lib, device_mesh=mesh)
    lib.FSDP.set_state_dict_type(sharded, lib.StateDictType.SHARDED_STATE_DICT)
    state = sharded.state_dict()
    found.append({name: type(value).__name__ for name, value in state.items()})
    return found, {name: full(value) for name, value in state.items()}


def stepped(lib: Any, rank: int, world: int, seed: int = 7, **options: Any) -> Any:
    model = wrapped(lib, built(seed), **options)
    optimizer = momentum(model)
    train_by(Run(model, optimizer), [loss_of(model, batches(0, world)[rank])])
    return model, optimizer


@row("`torch.distributed.checkpoint.state_dict`")
def _(lib, rank, world):
    mesh = init_device_mesh("cpu", (world,))
    found: list[Any] = []
    for flat in (False, True):
        setup = {"use_orig_params": not flat, "device_mesh": mesh}
        model, optimizer = stepped(lib, rank, world, 7, **setup)
        other = wrapped(lib, built(8), **setup)
        fresh = momentum(other)
        for options in (None, StateDictOptions(full_state_dict=True), StateDictOptions(cpu_offload=True)):
            state, entries = get_state_dict(model, optimizer, options=options)
            found.append({name: type(value).__name__ for name, value in state.items()})
            found.append(sorted(entries["state"]))
            set_state_dict(other, fresh, model_state_dict=state, optim_state_dict=entries, options=options)
            state, entries = get_state_dict(other, fresh, options=options)
            found.append({name: full(value) for name, value in state.items()})
            found.append({name: full(each["momentum_buffer"]) for name, each in entries["state"].items()})
    return found


@row("`optim_state_dict`, `optim_state_dict_to_load`")
def _(lib, rank, world):
    model, optimizer = stepped(lib, rank, world)
    found = []
    kinds = lib.StateDictType
    for kind, config in (
        (kinds.FULL_STATE_DICT, None),
        (kinds.FULL_STATE_DICT, lib.FullOptimStateDictConfig(rank0_only=True)),
        (kinds.SHARDED_STATE_DICT, None),
    ):
        other, fresh = stepped(lib, rank, world, 8)
        with (
            lib.FSDP.state_dict_type(model, kind, None, config),
            lib.FSDP.state_dict_type(other, kind, None, config),
        ):
            state = lib.FSDP.optim_state_dict(model, optimizer)
            found.append(sorted(state.get("state", {})))
            fresh.load_state_dict(lib.FSDP.optim_state_dict_to_load(other, fresh, state))
        found.append(lib.FSDP.optim_state_dict(other, fresh)["state"])
    return found


@row("`full_optim_state_dict`, `shard_full_optim_state_dict`, `rekey_optim_state_dict`")
def _(lib, rank, world):
    model, optimizer = stepped(lib, rank, world)
    found = [bool(lib.FSDP.full_optim_state_dict(model, optimizer))]
    state = lib.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = built()
    keys, rekey = lib.OptimStateKeyType, lib.FSDP.rekey_optim_state_dict
    numbered = rekey(state, keys.PARAM_ID, plain, optim=momentum(plain))
    alone = momentum(plain)
    alone.load_state_dict(numbered)
    found.append(numbered["state"])
    found.append([alone.state[param]["momentum_buffer"] for param in plain.parameters()])
    named = rekey(alone.state_dict(), keys.PARAM_NAME, plain, optim=alone)
    other, fresh = stepped(lib, rank, world, 8)
    fresh.load_state_dict(lib.FSDP.shard_full_optim_state_dict(named, other, optim=fresh))
    found.append(lib.FSDP.full_optim_state_dict(other, fresh, rank0_only=False)["state"])
    return found


@row("`register_comm_hook`")
def _(lib, rank, world):
    seen: list[Any] = []

    def hook(state, whole, shard):
        seen.append((state, whole.ndim, whole.numel() == world * shard.numel()))
        dist.reduce_scatter_tensor(shard, whole)
        shard.div_(2 * world)

    model = wrapped(lib, use_orig_params=False)
    model.register_comm_hook(3, hook)
    return trained(lib, model, rank, world), set(seen)


# ---- both


def compare(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(full(other), full(one), atol=2e-5, rtol=2e-4, msg=path, check_dtype=False)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), (path, one.keys() ^ other.keys())
        for key in one:
            compare(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), (path, one, other)
        for place, (first, second) in enumerate(zip(one, other, strict=True)):
            compare(first, second, f"{path}/{place}")
    else:
        assert one == other, (path, one, other)


@pytest.mark.parametrize("name", rows_of_page(), ids=lambda name: re.sub(r"\W+", " ", name).strip())
@on_ranks(2)
def test_what_the_page_calls_the_same_is_the_same(rank: int, world: int, name):
    warnings.simplefilter("ignore")
    expected = ROWS[name](TORCH, rank, world)
    compare(expected, ROWS[name](ours, rank, world))


def test_every_row_that_is_run_is_on_the_page():
    assert list(ROWS) == rows_of_page()
