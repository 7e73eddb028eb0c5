"""What of ``torch.distributed.fsdp`` is touched here, and the only file that imports it: its names, not its
runtime. Taken when this package is imported, so they are torch's own also while ours are installed there.

Names that a supported torch may lack are None then, or left out: only what needs them is missing.
"""

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.fsdp import api, fully_sharded_data_parallel, wrap

from shardwright.errors import InputError
from shardwright.torch_private import FSDP_MODULES

__all__ = [
    "PLACES",
    "SUMS_AT_REST",
    "RefusingFSDPModule",
    "TorchCPUOffloadPolicy",
    "TorchDataParallelMeshDims",
    "TorchFSDPModule",
    "TorchMixedPrecisionPolicy",
    "TorchOffloadPolicy",
    "originals",
]

PLACES: tuple[ModuleType, ...] = (
    fsdp,
    api,
    fully_sharded_data_parallel,
    wrap,
    *map(import_module, FSDP_MODULES),
)
"""The modules that clients take its names from."""


TorchDataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", None)  # not in torch 2.11

SUMS_AT_REST = "param_dtype_override_fn" in {field.name for field in fields(TorchMixedPrecisionPolicy)}
"""Whether this torch's ``MixedPrecisionPolicy(reduce_dtype=None)`` sums gradients in the dtype that the
parameter has at rest. It does from 2.15 on, which also brought that field; before, in ``param_dtype``."""


def originals(names: tuple[str, ...]) -> dict[str, Any]:
    """Torch's own object of each name that this torch has."""
    found = {name: getattr(fsdp, name, None) or getattr(wrap, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            f"{name} is a method of FSDPModule in torch {torch.__version__} that Shardwright hasn't: it "
            "would act on torch's own state, which this module hasn't. "
            + _INSTEAD.get(name, "Leave the call out")
        )

    refuse.__name__ = name
    refuse.__doc__ = "Not supported: it acts on torch's own state. Raises: InputError, always."
    return refuse


_INSTEAD = {
    "set_keep_unsharded_storage": "Memory of unsharded parameters is freed by each reshard here, and has "
    "another address afterwards, so a CUDA graph can't record it. Leave the call out, and run the module "
    "without CUDA graphs",
}


def refusing(theirs: type) -> type:
    """A subclass of a class of torch's, each method of which raises."""
    methods = [name for name, value in vars(theirs).items() if callable(value) and not name.startswith("__")]
    return type("RefusingFSDPModule", (theirs,), {name: _refused(name) for name in methods})


RefusingFSDPModule: Any = refusing(TorchFSDPModule)
"""What our class is derived from: a method that it doesn't define, in whatever torch is installed, is never
inherited by accident."""


OPTIONS_MODULE = api.__name__
"""Where the classes of the wrapper's options are from."""
