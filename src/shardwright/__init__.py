"""Shardwright: fully sharded data parallelism for PyTorch.

from shardwright import fully_shard

for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
"""

from shardwright.api import FSDPModule, communication_s, full_state_dict, fully_shard, stats
from shardwright.comm.mesh import set_transport
from shardwright.motion.runtime import Stats
from shardwright.policy import BackwardPrefetch, MixedPrecisionPolicy, SchedulePolicy

__all__ = [
    "BackwardPrefetch",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "SchedulePolicy",
    "Stats",
    "communication_s",
    "full_state_dict",
    "fully_shard",
    "set_transport",
    "stats",
]
