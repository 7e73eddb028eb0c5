"""What stands for a gradient in ``param.grad`` while those of microbatches are kept unsharded, to be reduced
with a later one's: so that clearing it (``zero_grad()``, ``p.grad = None``) clears them, as in one process,
and nothing takes them for none.

It takes no memory. What reads it raises; to clear it in place is all that can be done with it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.errors import StageError
from shardwright.torch_private import foreach_zero_, local_of, make_wrapper, spec_of, tree_leaves, tree_map

_CLEARS = ("aten::zero_", "aten::_foreach_zero_")
_SAME = ("aten::detach", "aten::alias", "aten::detach_", "aten::view")  # as zero_grad() and to_local() do


@dataclass
class Mark:
    """What stands for gradients of a parameter that wait to be reduced.

    earlier: the gradient of earlier backwards in whose place it stands, or None. cleared: in place. lost:
    they were dropped, since a backward failed.
    """

    fqn: str
    earlier: torch.Tensor | None = None
    cleared: bool = False
    lost: bool = False


class _Unreduced(torch.Tensor):
    """The local tensor of the gradient; those that are detached from it share its mark."""

    mark: Mark

    @staticmethod
    def make(shard: torch.Tensor, mark: Mark) -> "_Unreduced":
        """Like the local shard, without memory."""
        made: Any = make_wrapper(
            _Unreduced, shard.shape, strides=shard.stride(), dtype=shard.dtype, device=shard.device
        )
        made.mark = mark
        return made

    def __repr__(self, **_: Any) -> str:
        return f"<gradients of {self.mark.fqn!r} that aren't reduced yet>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        marked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        name = func._schema.name
        if name in _SAME:
            return cls.make(marked[0], marked[0].mark)
        if name in _CLEARS or (name == "aten::fill_" and args[1] == 0):
            for each in marked:
                each.mark.cleared = True
            if name != "aten::_foreach_zero_":
                return args[0]
            foreach_zero_([each for each in args[0] if not isinstance(each, cls)])
            return None
        waiting = [each.mark.fqn for each in marked if not each.mark.cleared]
        if waiting:
            raise StageError(f"{name.removeprefix('aten::')} reads the gradient of {waiting[0]!r}, {_WHY}")
        args, kwargs = tree_map(lambda leaf: _zeros(leaf) if isinstance(leaf, cls) else leaf, (args, kwargs))
        return func(*args, **(kwargs or {}))


_WHY = (
    "which isn't reduced yet: the last backward was one of set_requires_gradient_sync(False), no_sync() or "
    "set_requires_all_reduce(False). Read gradients, and step, after a backward that synchronises, or drop "
    "them with zero_grad()"
)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def mark_of(grad: torch.Tensor | None) -> Mark | None:
    """The mark; None of a gradient that is one."""
    local = local_of(grad) if isinstance(grad, DTensor) else None
    return local.mark if isinstance(local, _Unreduced) else None


def zeros_of(grad: DTensor) -> torch.Tensor:
    """The gradient of zeros that a cleared one is."""
    local = local_of(grad)
    return DTensor(_zeros(local), spec_of(grad), requires_grad=False)  # type: ignore[call-arg]


class Waiting:
    """The gradients of a parameter that wait to be reduced, in sight of who clears ``.grad`` of its shard
    (``sharded``, which may be replaced)."""

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn
        self._grad: torch.Tensor | None = None
        self._mark: Mark | None = None

    def begin(self, sharded: nn.Parameter) -> None:
        """Something waits from here on, if nothing did before."""
        if self.is_cleared(sharded):
            grad: Any = sharded.grad
            self._mark = Mark(self._fqn, grad if mark_of(grad) is None else None)
            local: Any = local_of(sharded)
            sharded.grad = DTensor(_Unreduced.make(local, self._mark), spec_of(sharded), requires_grad=False)  # type: ignore[call-arg]

    def is_cleared(self, sharded: nn.Parameter) -> bool:
        """Whether nothing waits, or the caller has cleared it."""
        return self._mark is None or self._mark.cleared or mark_of(sharded.grad) is not self._mark

    def keep(self, grad: torch.Tensor | None, sharded: nn.Parameter) -> None:
        """The unsharded gradient that waits; None: it was taken."""
        self._grad = grad
        if grad is not None:
            self.begin(sharded)

    def grad_of(self, sharded: nn.Parameter) -> torch.Tensor | None:
        """The unsharded gradient that waits."""
        if self._grad is not None and self.is_cleared(sharded):
            self._grad = None
        return self._grad

    def lose(self, sharded: nn.Parameter) -> None:
        """What waited was dropped, as the backward failed that had taken it."""
        if self._mark is not None and not self.is_cleared(sharded):
            self._mark.lost = True

    def drop(self, sharded: nn.Parameter) -> None:
        """Forget it, and what stands for it."""
        if self._mark is not None and not self.is_cleared(sharded):
            sharded.grad = self._mark.earlier
        self._grad = self._mark = None
