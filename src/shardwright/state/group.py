"""A group: parameters that share one all-gather and one reduce-scatter.

    stage        legal next      what it holds
    SHARDED      GATHERING       shards
    GATHERING    UNSHARDED       shards, and the buffer being filled
    UNSHARDED    SHARDED         shards, and the filled buffer; modules show the unsharded parameters

A group knows nothing of its neighbours, of the order they run in, or of hooks.
"""

from collections.abc import Sequence
from enum import StrEnum

import torch

from shardwright.comm.base import Gather, Reduction
from shardwright.comm.mesh import Axis
from shardwright.errors import StageError
from shardwright.plan.layout import GroupLayout
from shardwright.policy import MixedPrecisionPolicy
from shardwright.state.buffer import Buffer
from shardwright.state.param import ShardedParam


class Stage(StrEnum):
    """Where a group's parameters are (see the table above)."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_MOVES = {
    Stage.SHARDED: Stage.GATHERING,
    Stage.GATHERING: Stage.UNSHARDED,
    Stage.UNSHARDED: Stage.SHARDED,
}


class ParamGroup:
    """Parameters of one or several modules on one axis, moved together.

    name: for messages; of the first module. policy: replaced as a whole by setters, never edited.
    requires_sync: False keeps gradients unsharded and adds them up (gradient accumulation).
    """

    def __init__(
        self, name: str, params: Sequence[ShardedParam], axis: Axis, policy: MixedPrecisionPolicy
    ) -> None:
        self.name = name
        self.params = tuple(params)
        self.axis = axis
        self.policy = policy
        self.requires_sync = True
        self.stage = Stage.SHARDED
        self.buffer: Buffer | None = None
        self.num_trainable = 0
        self._bound: tuple[torch.dtype, ...] = ()
        self._gathered_versions: tuple[tuple[int, int], ...] = ()
        self._gather: Gather | None = None
        self._reduction: tuple[Reduction, list[ShardedParam]] | None = None

    # ---- parameters

    def _follow(self) -> None:
        """Follow what was done to the parameters at rest: replaced, frozen or unfrozen, cast."""
        for param in self.params:
            param.adopt()
        dtypes = tuple(param.compute_dtype(self.policy) for param in self.params)
        if dtypes != self._bound:
            self._bind(dtypes)
        for param in self.params:
            if param.unsharded.requires_grad != param.trainable:
                param.unsharded.requires_grad_(param.trainable)
        self.num_trainable = sum(param.trainable for param in self.params)

    @property
    def is_stale(self) -> bool:
        """Whether a shard has changed since the group was unsharded (an optimizer step, a load)."""
        return self.stage is not Stage.SHARDED and self._versions() != self._gathered_versions

    def _versions(self) -> tuple[tuple[int, int], ...]:
        return tuple((id(param.local), param.local._version) for param in self.params)

    def _bind(self, dtypes: tuple[torch.dtype, ...]) -> None:
        layout = GroupLayout(tuple(p.layout for p in self.params), tuple(d.itemsize for d in dtypes))
        self.buffer = Buffer(layout.nbytes, self.axis.device)
        self.buffer.alloc()
        for param, offset, dtype in zip(self.params, layout.offsets_nbytes, dtypes, strict=True):
            param.bind(self.buffer, offset, dtype)
        self.buffer.free()
        self._bound = dtypes

    # ---- the all-gather

    def unshard(self) -> None:
        """Take the buffer, fill this rank's part, and issue the all-gather.

        Raises: StageError for a parameter that is still on the meta device or was replaced by something else.
        """
        self._follow()
        self._check_materialised()
        self._move(Stage.GATHERING)
        assert self.buffer is not None
        self._gathered_versions = self._versions()
        self.buffer.alloc()
        with torch.no_grad():
            for param in self.params:
                param.own.copy_(param.local)
        pieces = [param.gather_piece() for param in self.params if param.layout.dim is not None]
        self._gather = self.axis.comm.all_gather(pieces, f"all-gather {self.name}")

    def wait(self) -> None:
        """Wait for the all-gather; from now on modules show the unsharded parameters."""
        assert self._gather is not None
        self._gather.wait()
        self._gather = None
        self._move(Stage.UNSHARDED)
        for param in self.params:
            param.show(param.unsharded)

    def reshard(self) -> None:
        """Modules show the shards again; the buffer's memory is freed."""
        assert self.buffer is not None
        if self.stage is Stage.GATHERING:
            self.wait()
        self._move(Stage.SHARDED)
        for param in self.params:
            param.show(param.sharded)
        self.buffer.free()

    # ---- the reduce-scatter

    def reduce(self) -> bool:
        """Issue the reduce-scatter of the gradients that this backward has brought; False where none.

        Without ``requires_sync`` the gradients stay here, unsharded, to be reduced with later ones.
        """
        assert self._reduction is None, f"{self.name}: wait_reduce() first"
        if not self.requires_sync:
            for param in self.params:
                param.accumulate_grad(self.policy)
            return False
        taken = [(param, param.take_grad()) for param in self.params if param.trainable]
        grads = [(param, grad) for param, grad in taken if grad is not None]
        if not grads:
            return False
        pieces = [param.reduce_piece(grad, self.policy) for param, grad in grads]
        dtypes = [param.reduce_dtype(self.policy) for param, _ in grads]
        reduction = self.axis.comm.reduce_scatter(pieces, dtypes, f"reduce-scatter {self.name}")
        self._reduction = (reduction, [param for param, _ in grads])
        return True

    def wait_reduce(self) -> None:
        """Wait for the reduce-scatter and add the averages to ``sharded.grad``. No-op where none is out."""
        if self._reduction is None:
            return
        reduction, params = self._reduction
        self._reduction = None
        totals = reduction.wait()
        if not params:
            return
        if self.axis.world > 1:
            torch._foreach_div_(totals, self.axis.world)  # pyright: ignore[reportPrivateImportUsage]
        for param, total in zip(params, totals, strict=True):
            param.add_sharded_grad(total)

    def rehearse_reduce(self) -> None:
        """Reduce zeros in place of gradients and forget the result: to time the collective alone."""
        zeros = [(param, torch.zeros_like(param.unsharded)) for param in self.params if param.trainable]
        pieces = [param.reduce_piece(grad, self.policy) for param, grad in zeros]
        dtypes = [param.reduce_dtype(self.policy) for param, _ in zeros]
        self.axis.comm.reduce_scatter(pieces, dtypes, f"rehearsal {self.name}").wait()

    def drop_grads(self) -> None:
        """Forget the gradients of a backward that failed; a reduction in flight ends unseen."""
        if self._reduction is not None:
            self._reduction = (self._reduction[0], [])
        for param in self.params:
            param.accumulated = None
            if self.buffer is not None:
                param.unsharded.grad = None

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the buffer while unsharded (0 before the first unshard)."""
        return 0 if self.buffer is None else self.buffer.nbytes

    @property
    def is_reducing(self) -> bool:
        """Whether a reduce-scatter is in flight."""
        return self._reduction is not None

    @property
    def has_grads(self) -> bool:
        """Whether a backward has brought gradients that are not reduced yet."""
        return self.buffer is not None and any(param.unsharded.grad is not None for param in self.params)

    # ---- stages

    def _move(self, to: Stage) -> None:
        if _MOVES[self.stage] is not to:
            raise StageError(
                f"group {self.name!r} can't go from {self.stage} to {to}: "
                f"from {self.stage} it only goes to {_MOVES[self.stage]}"
            )
        self.stage = to

    def _check_materialised(self) -> None:
        for param in self.params:
            if param.local.device.type == "meta":
                raise StageError(
                    f"parameter {param.fqn!r} is still on the meta device; before the first forward call "
                    'model.to_empty(device="cpu" or "cuda") and initialise or load every parameter'
                )
