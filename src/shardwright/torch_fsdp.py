"""What of ``torch.distributed.fsdp`` is touched here, and the only file that imports it: its names, not its
runtime. Taken when this package is imported, so they are torch's own also while ours are installed there."""

from importlib import import_module
from types import ModuleType
from typing import Any

from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import DataParallelMeshDims as TorchDataParallelMeshDims
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.fsdp import api, fully_sharded_data_parallel, wrap

from shardwright.torch_private import FSDP_MODULES

__all__ = [
    "PLACES",
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


def originals(names: tuple[str, ...]) -> dict[str, Any]:
    """Torch's own object of each name."""
    return {name: getattr(fsdp, name, None) or getattr(wrap, name) for name in names}


OPTIONS_MODULE = api.__name__
"""Where the classes of the wrapper's options are from."""
