"""Losses weighted by what they stand for: a step over uneven batches has the gradient of one process."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shardwright.engine.unit import units_in
from shardwright.errors import InputError


def loss_weights(model: nn.Module, weights: Sequence[float]) -> list[float]:
    """What to multiply each of this rank's mean losses by in the coming step: its share of the whole.

        shares = loss_weights(model, [batch.num_targets for batch in microbatches])
        for batch, share in zip(microbatches, shares):
            (mean_loss(model, batch) * share).backward()

    The gradient is then that of the mean over all targets of all ranks and microbatches, however unevenly
    these are spread; averaging over ranks would weigh a rank's few targets as much as another's many. From
    here on the model's gradients are sums over ranks (``set_gradient_averaging("average")`` goes back).

    weights: of each backward of the step on this rank, what its mean is over: numbers of targets. One of 0
        still takes part in the step's collectives: give it a loss of 0, since a mean over nothing is none.
    Every rank of the model's mesh calls it once before the step; 8 bytes travel.
    Raises: InputError for a model that isn't sharded, weights below 0, or where those of all ranks are 0.
    """
    groups = [group for unit in units_in(model) for group in unit.groups]
    if not groups:
        raise InputError(f"{type(model).__name__} has no sharded parameters; call fully_shard on it first")
    own = [float(weight) for weight in weights]
    if any(weight < 0 or not math.isfinite(weight) for weight in own):
        raise InputError(f"weights of losses must be finite and at least 0, got {own}")
    axis = max((group.axis for group in groups), key=lambda axis: axis.world * axis.num_copies)
    whole = sum(own)
    for comm in (axis.comm, axis.replicate):
        if comm is not None:  # as words, for which a rank needs connections to few others
            (word,) = struct.unpack("q", struct.pack("d", whole))
            rows = comm.host.exchange([word], "the weights of a step's losses")
            whole = sum(struct.unpack("d", struct.pack("q", word))[0] for (word,) in rows)
    if whole == 0:
        raise InputError("the weights of this step's losses are 0 on all ranks; skip a step without targets")
    for group in groups:
        group.reducer.policy = replace(group.reducer.policy, weighted=True)
    return [weight / whole for weight in own]
