"""Modules with encoded or adapted weights: what they show, compute with, and keep for the backward.

    module._parameters        the codes under the weight's own name, the scales beside them
    module.weight             the weight itself, decoded where it is read, or by its group on arrival; the sum
                              of that and an adapter's product
    kept for the backward     the codes and the adapter's factors: the weight is made of them again there

The module's class becomes a subclass with a property for each such weight; its forward is its own.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import InputError
from shardwright.quantized import ENCODINGS, encodings
from shardwright.quantized.codec import Encoding, encode_entries, scales_name
from shardwright.torch_private import parameters_of, tree_map

_ADDED = "_shardwright_added"
_READS = "_shardwright_reads"


class _Source(NamedTuple):
    """A weight made in the running forward, and how some of it (along dim 0) is made again."""

    weight: torch.Tensor
    make: Callable[[slice], torch.Tensor]


class _Handle(NamedTuple):
    """What the backward keeps of a made weight, or of a view of one."""

    make: Callable[[], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class EncodedModule(nn.Module):
    """What a module is besides its own class once one of its weights is encoded or adapted."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; its backward keeps codes and factors and no weight made of them."""
        made: dict[int, _Source] = {}
        self.__dict__[_READS] = made, {}
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(pack_codes, made), _unpack):
                return super().forward(*args, **kwargs)
        finally:
            self.__dict__.pop(_READS)[1].clear()
            made.clear()  # the graph keeps the hook, and with it this table

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (type(self).__mro__[2], *_shown(self)), self.__dict__

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        encode_entries(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def pack_codes(made: dict[int, _Source], tensor: torch.Tensor) -> Any:
    """What the backward keeps of ``tensor``: itself, or a handle where it is (a view of) a made weight."""
    if not made or tensor.layout is not torch.strided or isinstance(tensor, DTensor):
        return tensor
    source = made.get(tensor.untyped_storage().data_ptr())
    if source is None or source.weight.dtype != tensor.dtype:
        return tensor
    rows, offset = slice(None), int(tensor.storage_offset())
    if source.weight.ndim == 3 and tensor.numel():
        # One expert's view: the backward makes that expert's matrix again, and not all of them for each.
        one = source.weight.stride(0)
        last = offset + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
        if offset // one == last // one:
            rows, offset = slice(offset // one, offset // one + 1), offset % one
    return _Handle(partial(source.make, rows), tensor.size(), tensor.stride(), offset)


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, _Handle):
        return kept
    with torch.no_grad():
        return kept.make().as_strided(kept.size, kept.stride, kept.offset)


def _revive(cls: type, encoded: tuple[str, ...], adapted: tuple[str, ...]) -> nn.Module:
    own: Any = encoded_class(cls, encoded, adapted)
    return own.__new__(own)


@cache
def encoded_class(cls: type, encoded: tuple[str, ...], adapted: tuple[str, ...] = ()) -> type:
    """The subclass of ``cls`` with these weights encoded and adapted, one for each class; ``cls`` without."""
    names = (*encoded, *adapted)
    if not names:
        return cls
    shown = {name: property(partial(_read, name=name)) for name in names}
    kind = "Quantised" if encoded else "Adapted"
    return type(f"{kind}{cls.__name__}", (EncodedModule, cls), {"__module__": cls.__module__, **shown})


def added_to(module: nn.Module) -> dict[str, Any]:
    """What is added to weights of this very module (``LoraStacked``), by name."""
    return module.__dict__.get(_ADDED, {})


def set_added(module: nn.Module, added: dict[str, Any]) -> None:
    """Add these to weights of the module where they are read, and nothing else."""
    module.__dict__[_ADDED] = added
    become(module, own_class(type(module)))


def become(module: nn.Module, cls: type) -> None:
    """Give a module the class ``cls``, with its weights encoded and adapted as they are."""
    module.__class__ = encoded_class(cls, *_shown(module))


def _shown(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(encodings(module)), tuple(added_to(module))


def own_class(cls: type) -> type:
    """The class that a module had before weights of it were encoded."""
    return cls.__mro__[2] if len(cls.__mro__) > 2 and cls.__mro__[1] is EncodedModule else cls


def is_base(param: nn.Parameter, names: Sequence[str], modules: Sequence[nn.Module]) -> bool:
    """Whether a parameter is quantised where nothing else is said. names, modules: all that show it."""
    linear = param.ndim == 2 and all(isinstance(module, nn.Linear) for module in modules)
    experts = param.ndim == 3 and not any(isinstance(m, nn.Conv1d | nn.ConvTranspose1d) for m in modules)
    return param.is_floating_point() and (linear or experts) and not any(".lora_" in name for name in names)


def set_encoded(
    module: nn.Module, name: str, encoding: Encoding, parts: tuple[nn.Parameter, nn.Parameter]
) -> None:
    """Show codes and scales in place of a weight. The module must not be an ``FSDPModule`` at this moment."""
    module.__dict__[ENCODINGS] = {**encodings(module), name: encoding}
    parameters_of(module)[name] = parts[0]
    parameters_of(module)[scales_name(name, encoding.codec)] = parts[1]
    become(module, own_class(type(module)))


def _read(module: nn.Module, name: str) -> Any:
    """What ``module.weight`` is: decoded from the codes and with its adapter added. What the module shows
    where that is neither."""
    stored = parameters_of(module)[name]
    encoding, added = encodings(module).get(name), added_to(module).get(name)
    if stored is None or isinstance(stored, DTensor):
        return stored  # at rest and sharded
    scales = None
    if encoding is not None and not stored.is_floating_point():  # and not decoded by its group
        missing = scales_name(name, encoding.codec)
        scales = parameters_of(module)[missing]
        if scales is None:
            raise InputError(
                f"{name!r} has codes, and {missing!r} is None; set it to the scales of these codes again"
            )
    factors = added.factors() if added is not None else None
    if scales is None and factors is None:
        return stored
    made, read = module.__dict__.get(_READS, ({}, {}))
    key = name, torch.is_grad_enabled()
    if key not in read:  # once in a forward: experts may read theirs one after another
        parts = stored, scales, factors
        weight = read[key] = _make(encoding, *parts, slice(None))
        kept = tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, parts)
        made[weight.untyped_storage().data_ptr()] = _Source(weight.detach(), partial(_make, encoding, *kept))
    return read[key]


def _make(encoding: Any, stored: torch.Tensor, scales: Any, factors: Any, rows: slice) -> torch.Tensor:
    """Some of a weight, along dim 0."""
    weight = stored[rows] if scales is None else encoding.decode(stored[rows], scales[rows])
    if factors is None:
        return weight
    left, right, scaling = factors
    # In the weight's own dtype, as peft adds it, also under autocast.
    with torch.autocast(weight.device.type, enabled=False):
        left, right = left[rows].to(weight.dtype), right[rows].to(weight.dtype)
        return torch.baddbmm(weight, left, right, alpha=scaling)
