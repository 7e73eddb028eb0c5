"""Taking part in a group's reductions for the sake of other ranks."""

from collections.abc import Callable

import torch

from shardwright.engine.grads import add_sharded_grad
from shardwright.errors import StageError
from shardwright.params.param import ShardedParam
from shardwright.torch_private import IN_BACKWARD_OPTIMIZERS


class Joined:
    """What a reducer has got for parameters that this rank had no gradient of.

    Whether some rank had one is known at the end of the backward; until then what was reduced is put aside.
    brought: the parameters that this rank has had a gradient of, since the last ``decide``.
    keeps: gradients of earlier microbatches are kept on this rank, unsharded.
    """

    def __init__(self) -> None:
        self.brought: set[ShardedParam] = set()
        self.keeps = False
        self._aside: dict[ShardedParam, torch.Tensor] = {}

    def add(self, param: ShardedParam, total: torch.Tensor) -> None:
        """Add a reduced gradient to the shard's, or put it aside (see ``add_sharded_grad``).

        Raises: StageError for a parameter that torch's ``_apply_optimizer_in_backward`` should step.
        """
        if hasattr(param.sharded, IN_BACKWARD_OPTIMIZERS):
            raise StageError(
                f"{param.fqn!r} was given to torch's _apply_optimizer_in_backward, whose hook never fires "
                "for a sharded parameter, so nothing would step it: use shardwright.StepInBackward instead"
            )
        if param in self.brought:
            add_sharded_grad(param, total)
        else:
            earlier = self._aside.get(param)
            self._aside[param] = total if earlier is None else earlier.add_(total)

    def decide(self, brought: Callable[[ShardedParam], bool], again: bool) -> None:
        """Add what was put aside of the parameters that some rank had a gradient of, and drop the rest.

        brought: whether one is of these. again: gradients of this rank are still on their way.
        """
        aside, self._aside = self._aside, {}
        for param, total in aside.items():
            if brought(param):
                add_sharded_grad(param, total)
        if not again:
            self.brought.clear()

    def drop(self) -> None:
        """Forget a backward that failed."""
        self._aside = {}
        self.brought.clear()
        self.keeps = False
