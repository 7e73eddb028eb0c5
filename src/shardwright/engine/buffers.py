"""Says once that ranks compute with different buffers: each keeps its own, where DistributedDataParallel
sends rank 0's before each forward."""

import warnings
from weakref import WeakKeyDictionary

from torch import nn

from shardwright.engine.runtime import Runtime
from shardwright.params.first_weights import differing, hash_of
from shardwright.schedule.schedule import Phase
from shardwright.transport.channel import compare

_compared: WeakKeyDictionary[Runtime, set[Phase]] = WeakKeyDictionary()


def compare_buffers(module: nn.Module, runtime: Runtime, phase: Phase) -> None:
    """Before the first forward that trains, and the first evaluation after one; every rank calls it."""
    done = _compared.setdefault(runtime, set())
    if phase in done or (phase is Phase.EVALUATION and Phase.FORWARD not in done):
        return
    done.add(phase)
    lines = [f"{name} {hash_of(buffer)}" for name, buffer in module.named_buffers()]
    for comm in runtime.comms() if lines else ():
        texts = compare(comm, "\n".join(lines), f"compare buffers {phase}")
        found = differing([text.splitlines() for text in texts]) if texts else None
        if found is not None:
            name, other = found
            warnings.warn(
                f"buffer {name!r} isn't the same on rank 0 as on rank {other} of the mesh in this {phase}: "
                "each rank keeps its own, where DistributedDataParallel sends rank 0's. Running statistics "
                "are those of a rank's own batches: use nn.SyncBatchNorm, or dist.broadcast(buffer, src=0) "
                "each of model.buffers() before an evaluation (this warning is given once)",
                stacklevel=2,
            )
            return
