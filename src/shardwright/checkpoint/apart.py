"""Tensor subclasses as checkpoints see them: by the tensors that they are made of.

    OptimState8bit [6, 512]    codes [6, 512]    as the tensor itself lies
    blocks of 256              scale [24]        [6, 2]: rows of blocks, cut as the tensor's rows are
                               qmap [256]        one for all

Files hold plain tensors, which any number of ranks reads. Of a class that isn't known here, what hasn't the
shape of the tensor is stored as it lies on each rank, [ranks, ...], and only as many ranks can load it.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from shardwright.errors import CheckpointError
from shardwright.params.placement import Cut, RaggedShard, cuts_of
from shardwright.quantized.interchange import NF4_ROWS, STATE_ROWS, is_nf4_tensor
from shardwright.torch_private import AsyncCollectiveTensor, DTensorSpec, TensorMeta, local_of


@dataclass(frozen=True)
class Apart:
    """A tensor of a subclass: what it is made of, by name, in the same memory.

    ``kind`` says what else a tensor must agree in that is to be filled with it; "" where that is nothing.
    """

    whole: torch.Tensor
    inner: Mapping[str, torch.Tensor]
    kind: str


def taken_apart(key: str, value: torch.Tensor) -> Apart | None:
    """None of a tensor that has memory of its own. Local.

    Raises:
        CheckpointError: parts of ranks that don't fit together.
    """
    local = local_of(value) if isinstance(value, DTensor) else value
    if not hasattr(local, "__tensor_flatten__") or isinstance(local, AsyncCollectiveTensor):
        return None
    names, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    name, is_nf4 = type(local).__name__, is_nf4_tensor(local)
    in_rows = NF4_ROWS if is_nf4 else STATE_ROWS.get(name)
    kind = "" if is_nf4 else name if in_rows is not None else f"{name} {context!r}"
    if " at 0x" in kind:
        raise CheckpointError(
            f"{key}: a {name} with the context {context!r} can't be saved (nothing is pickled); have its "
            "__tensor_flatten__ give numbers, strings and tuples of them"
        )
    cut = _Cut(key, value)
    inner = dict[str, torch.Tensor]()
    for each in names:
        part = getattr(local, each).detach()
        if type(part) is not torch.Tensor:
            raise CheckpointError(
                f"{key}: {each!r} of a {name} is a {type(part).__name__}, expected a plain tensor; save "
                "what it decodes to"
            )
        if part.shape == local.shape:
            inner[each] = cut.cut(part, value.shape)
        elif in_rows is None or (each in in_rows and not cut.rows_alone):
            inner[each] = cut.stacked(part, f"{each!r} of a {name}")
            kind += cut.told
        elif each not in in_rows:
            inner[each] = cut.made(part, part.shape, [Replicate()] * len(cut.placements))
        elif not is_nf4 and part.numel() % len(local) == 0:
            rows = part.view(len(local), -1)
            inner[each] = cut.cut(rows, (len(value), rows.shape[1]))
        else:  # blocks that end within rows
            inner[each] = cut.in_order(part, f"{each!r} of a {name}")
    return Apart(value, inner, kind)


class _Cut:
    """How a tensor is cut, for what it is made of."""

    def __init__(self, key: str, value: torch.Tensor) -> None:
        self._key, self._value = key, value
        self.placements = value.placements if isinstance(value, DTensor) else ()
        cuts = cuts_of(self.placements)
        sizes = value.device_mesh.shape if isinstance(value, DTensor) else ()
        self.rows_alone = all(cut.dim == 0 for _, cut in cuts)
        self._parts = prod(sizes[axis] for axis, _ in cuts)
        by_dim = [prod(sizes[axis] for axis, cut in cuts if cut.dim == dim) for dim in range(value.ndim)]
        self._is_even = all(size % parts == 0 for size, parts in zip(value.shape, by_dim, strict=True))
        self.told = f" in {self._parts} parts by {self.placements}" if self._parts > 1 else ""

    def cut(self, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Cut as the tensor is."""
        return self.made(part, shape, self.placements)

    def in_order(self, part: torch.Tensor, what: str) -> torch.Tensor:
        """Those of all ranks, one after another. Raises: CheckpointError where they aren't of one size, nor
        of whole blocks."""
        local: Any = local_of(self._value) if isinstance(self._value, DTensor) else self._value
        ragged = [p for p in self.placements if isinstance(p, RaggedShard)]
        if len(ragged) == 1 == len(cuts_of(self.placements)) and part.numel():
            block, left = divmod(local.numel(), part.numel())
            numels = [size * prod(local.shape[1:]) for size in ragged[0].sizes]
            if not left and not any(numel % block for numel in numels):
                # Blocks end where ranks do, so that they are those of one process.
                sizes = RaggedShard([numel // block for numel in numels])
                cuts = [sizes if p is ragged[0] else p for p in self.placements]
                return self.made(part, (sum(sizes.sizes),), cuts)
        self._check_even(part, what)
        return self.made(part, (self._parts * len(part), *part.shape[1:]), self.placements)

    def stacked(self, part: torch.Tensor, what: str) -> torch.Tensor:
        """Those of all ranks, along a dim of their own. Raises: as ``in_order``."""
        self._check_even(part, what)
        placements = [Shard(0) if isinstance(p, Cut) else p for p in self.placements]
        return self.made(part.unsqueeze(0), (self._parts, *part.shape), placements)

    def _check_even(self, part: torch.Tensor, what: str) -> None:
        if not self._is_even:
            raise CheckpointError(
                f"{self._key}: {what} has shape {list(part.shape)} on this rank, which isn't cut as rows of "
                f"{list(self._value.shape)} are, and ranks hold different numbers of these: use a number of "
                "ranks that divides them, or an optimizer with plain state for this parameter"
            )

    def made(self, part: torch.Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> torch.Tensor:
        """``part`` where the tensor is plain, else a DTensor over it."""
        if not isinstance(self._value, DTensor):
            return part
        return dtensor_over(part, self._value.device_mesh, placements, shape)


def dtensor_over(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    kind: Any = DTensor,
) -> DTensor:
    """A DTensor of this shape over the memory of ``local``, wherever it lies: ``from_local`` moves what is
    offloaded."""
    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), local.dtype)
    return kind(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def made_state(optimizer: Optimizer, p: torch.Tensor, group: Mapping[str, Any], default: torch.device) -> Any:
    """The state that the optimizer would make for a parameter: by its own step, of a stand-in of zeros.

    Changes no parameter, no group, no other state and no random state; calls no hook. The optimizer's method
    says of what class its state is, which a file must not: reading one runs no code that it names.
    default: where the state of a parameter on the meta device lies. Raises: what the step raises.
    """
    device = state_device("", p, group, default)
    like = nn.Parameter(torch.zeros_like(p, device=device, requires_grad=False))
    like.grad = torch.zeros_like(like)
    groups, devices = optimizer.param_groups, [] if device.type == "cpu" else [device]
    own = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    optimizer.param_groups = [{**own, "params": [like]}]
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices, device_type=device.type),
            torch.compiler.set_stance("force_eager"),  # a step of a compiled kernel would compile it first
        ):
            inspect.unwrap(type(optimizer).step)(optimizer)
        return optimizer.state.pop(like)
    finally:
        optimizer.param_groups = groups
        optimizer.state.pop(like, None)


def state_device(key: str, p: torch.Tensor, group: Mapping[str, Any], default: torch.device) -> torch.device:
    """torch.optim keeps ``step`` on the host unless the step runs captured or fused on the device."""
    device = default if p.is_meta else p.device
    if key.endswith("/step") and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return device
