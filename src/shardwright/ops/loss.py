"""Losses weighted by what they stand for: a step over uneven batches has the gradient of one process."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from torch import nn

from shardwright.engine.unit import units_in
from shardwright.errors import InputError


def loss_weights(model: nn.Module, weights: Sequence[float]) -> list[float]:
    """The factors for this rank's mean losses in the coming step: each loss's share of the whole step.

    Multiply each loss by its factor. The step's gradient is then that of the mean over all targets of all
    ranks and microbatches, even if these are unevenly spread. Averaging over ranks would give a rank with few
    targets the same weight as one with many. From here on the model's gradients are sums over ranks;
    ``set_gradient_averaging("average")`` undoes that. Every rank of the model's mesh calls it once before the
    step; 8 bytes are exchanged.

    Args:
        model: a model with at least one sharded parameter.
        weights: for each backward of the step on this rank, the number of targets that its mean loss is over.
            A backward without targets (0) still takes part in the step's collectives; use a loss of 0 for it,
            since a mean over nothing is NaN.

    Returns:
        One factor for each of ``weights``. The factors of all ranks add up to 1.

    Raises:
        InputError: the model isn't sharded, a weight is below 0 or not finite, or all weights of all ranks
            are 0.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 1))
        >>> microbatches = [torch.ones(3, 8), torch.ones(1, 8)]
        >>> shares = shardwright.loss_weights(model, [len(batch) for batch in microbatches])
        >>> shares
        [0.75, 0.25]
        >>> for batch, share in zip(microbatches, shares):
        ...     (model(batch).mean() * share).backward()
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
            # A row of each rank: words that are combined on their way may be counted twice in a sum.
            rows = comm.host.exchange([word], "the weights of a step's losses")
            whole = sum(struct.unpack(f"{len(rows)}d", struct.pack(f"{len(rows)}q", *chain(*rows))))
    if whole == 0:
        raise InputError("the weights of this step's losses are 0 on all ranks; skip a step without targets")
    for group in groups:
        group.reducer.policy = replace(group.reducer.policy, weighted=True)
    return [weight / whole for weight in own]
