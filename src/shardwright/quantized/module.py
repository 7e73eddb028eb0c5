"""Modules with encoded weights: what they show, compute with, and keep for the backward.

    module._parameters        the codes under the weight's own name, the scales beside them
    module.weight             the weight itself, decoded where it is read, or by its group on arrival
    kept for the backward     the codes: what was decoded is decoded again there

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
from shardwright.torch_private import parameters_of

_DECODED = "_shardwright_decoded"


class _Source(NamedTuple):
    """A weight decoded in the running forward, and what it was decoded from."""

    weight: torch.Tensor
    decode: Callable[[], torch.Tensor]


class _Handle(NamedTuple):
    """What the backward keeps of a decoded weight, or of a view of one."""

    decode: Callable[[], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class EncodedModule(nn.Module):
    """What a module is besides its own class once one of its weights is encoded."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; its backward keeps codes and no decoded weight."""
        decoded: dict[int, _Source] = {}
        self.__dict__[_DECODED] = decoded
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(pack_codes, decoded), _unpack):
                return super().forward(*args, **kwargs)
        finally:
            del self.__dict__[_DECODED]
            decoded.clear()  # the graph keeps the hook, and with it this table

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (type(self).__mro__[2], tuple(encodings(self))), self.__dict__

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        encode_entries(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def pack_codes(decoded: dict[int, _Source], tensor: torch.Tensor) -> Any:
    """What the backward keeps of ``tensor``: itself, or a handle where it is (a view of) a decoded weight."""
    if not decoded or tensor.layout is not torch.strided or isinstance(tensor, DTensor):
        return tensor
    source = decoded.get(tensor.untyped_storage().data_ptr())
    if source is None or source.weight.dtype != tensor.dtype:
        return tensor
    return _Handle(source.decode, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, _Handle):
        return kept
    return kept.decode().as_strided(kept.size, kept.stride, kept.offset)


def _revive(cls: type, names: tuple[str, ...]) -> nn.Module:
    own: Any = encoded_class(cls, names)
    return own.__new__(own)


@cache
def encoded_class(cls: type, names: tuple[str, ...]) -> type:
    """The subclass of ``cls`` with these weights encoded, one for each class."""
    shown = {name: property(partial(_read, name=name)) for name in names}
    return type(f"Quantised{cls.__name__}", (EncodedModule, cls), {"__module__": cls.__module__, **shown})


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
    table = {**encodings(module), name: encoding}
    module.__dict__[ENCODINGS] = table
    parameters_of(module)[name] = parts[0]
    parameters_of(module)[scales_name(name, encoding.codec)] = parts[1]
    module.__class__ = encoded_class(own_class(type(module)), tuple(table))


def _read(module: nn.Module, name: str) -> Any:
    """What ``module.weight`` is: decoded from the codes; what the module shows where that is no codes."""
    codes = parameters_of(module)[name]
    encoding = encodings(module)[name]
    scales = parameters_of(module)[scales_name(name, encoding.codec)]
    if codes is None or isinstance(codes, DTensor) or codes.is_floating_point():
        return codes  # at rest and sharded, or decoded by its group
    if scales is None:
        missing = scales_name(name, encoding.codec)
        raise InputError(
            f"{name!r} has codes, and {missing!r} is None; set it to the scales of these codes again"
        )
    decode = partial(encoding.decode, codes.detach(), scales.detach())
    weight = decode()
    decoded = module.__dict__.get(_DECODED)
    if decoded is not None:
        decoded[weight.untyped_storage().data_ptr()] = _Source(weight, decode)
    return weight
