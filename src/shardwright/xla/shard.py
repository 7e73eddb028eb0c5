"""``xla.fully_shard``: take the parameters out of torch modules and keep them sharded over XLA devices."""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from jax.sharding import Mesh
from torch import nn

from shardwright.errors import InputError, warn
from shardwright.torch_private import parameters_of
from shardwright.xla.mesh import resolve
from shardwright.xla.options import UnitOptions
from shardwright.xla.placeholder import LEAF, PlaceholderUsed, placeholder, watch_optimizers
from shardwright.xla.spmd_model import spmd_model_of
from shardwright.xla.torch_bridge import from_numpy
from shardwright.xla.trace import current, enter
from shardwright.xla.unit import UNIT, Leaf, XlaUnit, unit_of
from shardwright.xla.wrap import AutoWrap, modules_to_wrap

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    mesh: Mesh | int | Sequence[int] | None = None,
    auto_wrap_policy: AutoWrap | None = None,
    reshard_after_forward: bool = True,
    flatten_parameters: bool = False,
    shard_param_on_dim_0: bool = False,
    pad_multiple: int = 128,
    compute_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    fp32_reduce_scatter: bool = False,
    sharding_groups: Sequence[Sequence[int]] | None = None,
    checkpoint_activations: bool = False,
    pin_layout_in_collective_ops: bool | None = None,
) -> M:
    """Shard the parameters of a module over XLA devices, as one unit; in place.

    Call it bottom-up: on each block, then on the whole model, or once with ``auto_wrap_policy``. Every
    process must make the same calls with the same values. Parameters that a nested call has taken are left
    out. Afterwards modules show parameters of the same names, shapes and dtypes on the meta device; the
    values are jax arrays, a shard on each device, and the original memory is freed. Set ``requires_grad``
    before. Train with ``make_train_step``; calling the model runs its forward.

    Parameters that several units share are taken by the innermost unit around all of them. A module on the
    meta device stays without values until ``materialize`` or ``load_full_state_dict``.

    Args:
        module: the module to shard.
        mesh: a jax Mesh, a number of devices, ``(copies, devices per copy)``, or None for all devices.
        auto_wrap_policy: classes of modules, or ``policy(module=, recurse=, unwrapped_params=) -> bool``, to
            make units of their own below ``module``, with the same options.
        reshard_after_forward: all-gather again in the backward instead of keeping unsharded parameters; False
            keeps them. The outermost unit always keeps its own (they would be gathered again at once).
        flatten_parameters: store all parameters of the unit as one array (frozen ones as another).
        shard_param_on_dim_0: split parameters in rows, padded only to the number of devices; no effect with
            ``flatten_parameters``. Otherwise they are stored as one row of numbers.
        pad_multiple: the shard of a device is padded to a multiple of so many numbers (not with rows).
        compute_dtype: dtype of the all-gather, of floating-point inputs and so of the arithmetic; None: as at
            rest.
        buffer_dtype: dtype of floating-point buffers in the forward; None: as they are.
        fp32_reduce_scatter: sum gradients in fp32 though ``compute_dtype`` is smaller.
        sharding_groups: positions in the mesh, each group holding one copy; gradients are averaged over all.
        checkpoint_activations: keep nothing but the unit's input for the backward and run its forward again;
            only for units with none inside (around others it would run theirs a third time).
        pin_layout_in_collective_ops: has no counterpart (XLA chooses the layouts of a whole program); it is
            warned of once.

    Returns:
        The argument ``module``.

    Raises:
        InputError: the module is a container without forward, or is sharded already; there are fewer devices,
            groups don't cover them, or an option is out of range. Nothing is changed then.
    """
    options = UnitOptions(
        reshard_after_forward,
        flatten_parameters,
        shard_param_on_dim_0,
        pad_multiple,
        compute_dtype,
        buffer_dtype,
        fp32_reduce_scatter,
        checkpoint_activations,
    )
    axes = resolve(mesh, sharding_groups)
    inner: list[nn.Module] = []
    if auto_wrap_policy is not None:
        inner = modules_to_wrap(module, auto_wrap_policy, lambda m: unit_of(m) is not None)
    for m in (*inner, module):
        _check(m)
    if pin_layout_in_collective_ops is not None:
        # Python shows a warning once for each line that it comes from.
        warn("pin_layout_in_collective_ops has no effect: XLA chooses the layouts of the whole program")
    watch_optimizers()
    for m in (*inner, module):
        _shard(m, XlaUnit(m, axes, options))
    return module


def _check(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(f"expected an nn.Module, got {type(module).__name__}")
    name = type(module).__name__
    if unit_of(module) is not None:
        raise InputError(
            f"{name} is sharded already; call fully_shard once on each module, the outermost last"
        )
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:  # as ModuleList
        raise InputError(f"{name} has no forward of its own; shard its children and the module around it")
    for path, owner in module.named_modules():
        if isinstance(owner, nn.RNNBase):
            raise InputError(
                f"module {path!r} ({type(owner).__name__}) is not supported: it holds its weights a second "
                "time, and would go on with the unsharded ones; build it from RNN cells"
            )
        for p_name, p in owner.named_parameters(path, recurse=False):
            if p.dtype in (torch.float64, torch.complex128):
                raise InputError(f"{p_name} is {p.dtype}; XLA programs have 32 bits at most: convert it")


def _shard(module: nn.Module, unit: XlaUnit) -> None:
    values: dict[Leaf, torch.Tensor | None] = {}
    for owner in _own_modules(module):
        for name, p in list(parameters_of(owner).items()):
            if p is None:
                continue
            leaf = p.__dict__.get(LEAF)
            if leaf is None:
                leaf = Leaf(placeholder(p), [])
                setattr(leaf.placeholder, LEAF, leaf)
                setattr(p, LEAF, leaf)
                values[leaf] = None if p.is_meta else p.detach().cpu()
            if (owner, name) not in leaf.sites:
                leaf.sites.append((owner, name))
            parameters_of(owner)[name] = leaf.placeholder
    module.__dict__[UNIT] = unit
    module.__class__ = type(f"Xla{type(module).__name__}", (XlaModule, type(module)), {})
    unit.store({**values, **_hoisted(module, unit)})


def _own_modules(module: nn.Module) -> list[nn.Module]:
    """``module`` and those below it that are in no nested unit."""
    found, todo = [], [module]
    while todo:
        m = todo.pop()
        if m in found:
            continue
        found.append(m)
        todo += [child for child in m.children() if unit_of(child) is None][::-1]
    return found


def _hoisted(module: nn.Module, unit: XlaUnit) -> dict[Leaf, torch.Tensor | None]:
    """Parameters of nested units that are also used outside of them, taken from there."""
    found: dict[Leaf, torch.Tensor | None] = {}
    for inner in {u: None for m in module.modules() if (u := unit_of(m)) is not None and u is not unit}:
        inside = set(inner.module.modules())
        shared = [leaf for leaf in inner.leaves if not all(owner in inside for owner, _ in leaf.sites)]
        if not shared:
            continue
        values: dict[Leaf, torch.Tensor | None] = {}
        for stored in inner.stored:
            host = None if stored.array is None else stored.values()
            for i, leaf in enumerate(stored.leaves):
                values[leaf] = None if host is None else from_numpy(host[i])
        found |= {leaf: values.pop(leaf) for leaf in shared}
        inner.stored = []
        inner.store(values)
    return found


_INSTEAD = {
    "clip_grad_norm_": "use xla.make_train_step(..., clip_norm=)",
    "no_sync": "use xla.make_train_step(..., accumulation=)",
    "set_gradient_divide_factors": "gradients are averaged; scale the loss",
    "get_shard_metadata": "use save_rank_files of shardwright.xla.checkpoint",
    "get_original_names_and_sharded_parameters": "names don't change; use xla.full_state_dict",
}


class XlaModule:
    """What a module is besides its own class once ``xla.fully_shard`` was called on it."""

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise AttributeError(f"a model of xla.fully_shard has no {name}: {_INSTEAD[name]}")
        return super().__getattr__(name)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise PlaceholderUsed(
            "load_state_dict finds no values to overwrite in an XLA model: use "
            "xla.load_full_state_dict(model, state_dict), or load_xla of shardwright.checkpoint.xla"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace = current()
        call = super().__call__  # type: ignore[misc]
        if trace is not None:
            return enter(trace, self.__dict__[UNIT], call, args, kwargs)
        return spmd_model_of(self).forward(args, kwargs)  # type: ignore[arg-type]
