"""What ranks that share sequences or layers of a module do in its forward, for a trace of one of them.

Sequences: the exchange of ``parallel.ulysses``, by a group that only counts. Layers: the parts that
``parallel.tensor`` leaves a rank, by the model's plan.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.parallel.exchange import reduced
from shardwright.parallel.tensor import styles_of
from shardwright.parallel.ulysses import exchanged_by
from shardwright.plan.axes import AxisSizes
from shardwright.plan.workload import Op, OpKind

Note = Callable[[Op], None]

_CUT = {"colwise": 0, "rowwise": 1, "rowwise_split_input": 1, "embedding_rowwise": 0}
"""The dim of a weight that is cut; what isn't here stays whole. A bias is cut with its dim 0."""


class _Counted:
    """Stands for the process group of an all-to-all, and exchanges nothing."""

    def __init__(self, axis: str, ranks: int, note: Note) -> None:
        self.axis, self.ranks, self.note = axis, ranks, note

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0

    def alltoall_base(self, _: Tensor, sent: Tensor, *__: Any) -> None:
        self.note(Op(OpKind.EXCHANGE, nbytes=float(sent.nbytes), axis=self.axis))

    all_to_all_single = alltoall_base  # as newer versions of torch call it

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """A reduce-scatter and an all-gather."""
        self.note(Op(OpKind.EXCHANGE, nbytes=2.0 * tensor.nbytes, kernels=2, axis=self.axis))
        return torch.empty_like(tensor)


@contextmanager
def exchanging(model: nn.Module, axes: AxisSizes, note: Note) -> Iterator[None]:
    """Meanwhile its attention and its layers call ``note`` with what a rank exchanges, on its microbatch's
    part. Raises: InputError for axes of which that isn't known."""
    if axes.ep > 1 or axes.pp > 1:
        raise InputError(
            f"how ranks share experts or stages of {type(model).__name__} isn't known ({axes.axes}): pass "
            "its numbers (shardwright.plan.Architecture; for the command a folder's config.json or a row), "
            "or leave ep, pp and chunks out"
        )
    with ExitStack() as stack:
        if axes.cp > 1:
            stack.enter_context(exchanged_by(_Counted("cp", axes.cp, note)))
        group = _Counted("tp", axes.tp, note)
        for path, style in styles_of(model).items() if axes.tp > 1 else ():
            if style in _CUT:
                module = model.get_submodule(path)
                own, given = vars(module), [each for each in vars(module).items() if each[0] == "forward"]
                stack.callback(own.update, given)
                stack.callback(own.pop, "forward")
                own["forward"] = _exchanged(module.forward, style != "colwise", group.all_reduce)
        yield


def _exchanged(forward: Any, rowwise: bool, reduce: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    if rowwise:
        return lambda *args: reduced(forward(*args), reduce, True)
    return lambda given, *args: forward(reduced(given, reduce, False), *args)


@contextmanager
def cut_layers(model: nn.Module, axes: AxisSizes) -> Iterator[None]:
    """Meanwhile it has the parameters of one rank of tp, on the meta device. Raises: InputError where its
    plan isn't known, or a dim can't be cut evenly."""
    with ExitStack() as stack:
        for path, style in styles_of(model).items() if axes.tp > 1 else ():
            module = model.get_submodule(path)
            for name, whole in [*module.named_parameters(recurse=False)] if style in _CUT else ():
                dim = _CUT[style]
                if dim >= whole.dim():  # a bias, which is added once
                    continue
                if whole.shape[dim] % axes.tp:
                    raise InputError(f"tp={axes.tp} doesn't divide {list(whole.shape)} of {path}.{name}")
                shape = [size // axes.tp if at == dim else size for at, size in enumerate(whole.shape)]
                part = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), whole.requires_grad)
                stack.callback(setattr, module, name, whole)
                setattr(module, name, part)
        yield
