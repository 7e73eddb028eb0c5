"""Every public name of the package, for type checkers; a program gets them by the table in `__init__.py`."""

from shardwright.api import (
    communication_s,
    full_state_dict,
    fully_shard,
    offload_states,
    reload_states,
    stats,
    stream_state_dict,
)
from shardwright.clients.install import install, uninstall
from shardwright.engine.building.build import ShardPlacementResult
from shardwright.engine.costs import Stats
from shardwright.engine.optimizers.in_backward import StepInBackward
from shardwright.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwright.observe.explain import Explanation, explain
from shardwright.observe.watch.lifecycle import set_watch
from shardwright.ops.bucketer import ReduceScatterBucketer, ReduceScatterHandle
from shardwright.ops.clip import clip_grad_norm_
from shardwright.ops.gather import gathered, scattered
from shardwright.ops.linear_loss import linear_cross_entropy
from shardwright.ops.lockstep import lockstep
from shardwright.ops.loss import loss_weights
from shardwright.ops.owned import other_params, owned_params
from shardwright.parallel import Mesh, context_parallel, expert_parallel, mesh
from shardwright.params.at_rest import pickle_shards
from shardwright.params.ragged import Blocks, Owned
from shardwright.policy import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    DiskOffloadPolicy,
    Grouping,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimizerOffloadPolicy,
    SchedulePolicy,
    WatchPolicy,
)
from shardwright.publishing.publisher import Publisher, publish
from shardwright.publishing.receiver import Receiver, receive
from shardwright.quantize import quantize_
from shardwright.quantized import nf4
from shardwright.transport.mesh import set_transport
from shardwright.transport.process import record_function, set_process
from shardwright.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "Blocks",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DiskOffloadPolicy",
    "Explanation",
    "FSDPModule",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "Grouping",
    "Mesh",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimizerOffloadPolicy",
    "Owned",
    "Publisher",
    "Receiver",
    "ReduceScatterBucketer",
    "ReduceScatterHandle",
    "SchedulePolicy",
    "ShardPlacementResult",
    "Stats",
    "StepInBackward",
    "UnshardHandle",
    "WatchPolicy",
    "clip_grad_norm_",
    "communication_s",
    "context_parallel",
    "expert_parallel",
    "explain",
    "full_state_dict",
    "fully_shard",
    "gathered",
    "install",
    "linear_cross_entropy",
    "lockstep",
    "loss_weights",
    "mesh",
    "nf4",
    "offload_states",
    "other_params",
    "owned_params",
    "pickle_shards",
    "publish",
    "quantize_",
    "receive",
    "record_function",
    "register_fsdp_forward_method",
    "reload_states",
    "scattered",
    "set_process",
    "set_transport",
    "set_watch",
    "share_comm_ctx",
    "stats",
    "stream_state_dict",
    "uninstall",
]
