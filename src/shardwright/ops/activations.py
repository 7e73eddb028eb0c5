"""What recomputed blocks were given lies on the host until the backward recomputes them."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.params.offload import empty_on_host
from shardwright.transport.streams import Due, Streams


def inputs_on_host(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.utils.checkpoint.checkpoint`` that keeps what it is given in pinned memory of the host.

    Only tensors that a gradient flows to are moved: what blocks share (masks, angles) stays. Inside of the
    block torch's own hooks keep nothing, so no weight comes here. On CPUs it changes nothing. One of these is
    for all blocks of a model: it fetches them in the reverse order of its calls.

    Args:
        checkpoint: the function, which is called with ``use_reentrant=False``.

    Returns:
        A function that is called in its place.
    """
    last: list[ref[_OnHost]] = []

    def pack(tensor: Tensor) -> Any:
        streams = Streams.of(tensor.device)
        moves = tensor.requires_grad and not tensor.is_leaf and tensor.is_contiguous()
        if streams is None or not moves:
            return tensor
        kept = _OnHost(tensor.detach(), streams, last[0] if last else None)
        last[:] = [ref(kept)]
        return kept

    @wraps(checkpoint)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, lambda kept: kept.take() if isinstance(kept, _OnHost) else kept):
            return checkpoint(*args, **kwargs)

    return keeping


class _OnHost:
    """A tensor of a device in pinned memory. before: the one that the backward most likely needs next, which
    is fetched while compute recomputes the block of this one."""

    def __init__(self, tensor: Tensor, streams: Streams, before: "ref[_OnHost] | None") -> None:
        self._streams, self._before, self._device = streams, before, tensor.device
        [self._there] = empty_on_host([tensor])
        with streams.offloading([tensor]):
            self._there.copy_(tensor, non_blocking=True)
        self._back: tuple[Tensor, Due] | None = None

    def fetch(self) -> None:
        """Begin to copy it back, unless that was done."""
        if self._back is None:
            self._back = self._streams.fetch(self._there, self._device)

    def take(self) -> Tensor:
        """The tensor on the device, for compute."""
        self.fetch()
        assert self._back is not None
        (back, due), self._back = self._back, None
        self._streams.land(due)
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return back
