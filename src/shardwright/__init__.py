"""Shardwright: fully sharded data parallelism for PyTorch.

from shardwright import fully_shard

for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())

A name's module is imported, and torch with it, when that name is first asked for: `shardwright --help` needs
none, and a program loads only what it uses.
"""

import importlib.util
from importlib.metadata import version
from typing import TYPE_CHECKING

_NAMES = {
    "api": "communication_s full_state_dict fully_shard offload_states reload_states stats stream_state_dict",
    "ops.bucketer": "ReduceScatterBucketer ReduceScatterHandle",
    "ops.clip": "clip_grad_norm_",
    "engine.building.build": "ShardPlacementResult",
    "engine.costs": "Stats",
    "engine.optimizers.in_backward": "StepInBackward",
    "observe.explain": "Explanation explain",
    "ops.gather": "gathered scattered",
    "ops.owned": "other_params owned_params",
    "clients.install": "install uninstall",
    "ops.linear_loss": "linear_cross_entropy",
    "ops.loss": "loss_weights",
    "module": "FSDPModule GradientReductionHandle UnshardHandle register_fsdp_forward_method share_comm_ctx",
    "observe.watch.lifecycle": "set_watch",
    "parallel": "Mesh context_parallel expert_parallel mesh",
    "params.at_rest": "pickle_shards",
    "params.ragged": "Blocks Owned",
    "policy": """
        BackwardPrefetch CPUOffloadPolicy DataParallelMeshDims DiskOffloadPolicy Grouping
        MixedPrecisionPolicy OffloadPolicy OptimizerOffloadPolicy SchedulePolicy WatchPolicy
    """,
    "publishing.publisher": "Publisher publish",
    "publishing.receiver": "Receiver receive",
    "quantize": "quantize_",
    "transport.mesh": "set_transport",
    "transport.process": "record_function set_process",
    "ops.lockstep": "lockstep",
    "wrapper": "FullyShardedDataParallel",
}
"""Module -> the public names that are from it; `public.py` says the same to type checkers."""

if TYPE_CHECKING:
    from shardwright.public import *  # noqa: F403
    from shardwright.public import __all__ as __all__

    __version__: str
else:
    _MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
    __all__ = sorted({"nf4", *_MODULES})

    def __getattr__(name):
        """A public name, a module of the package, or ``__version__``."""
        if name == "__version__":
            return version("shardwright")
        if name in _MODULES:
            found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
            return globals().setdefault(name, found)
        if not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({"__version__", *__all__})
