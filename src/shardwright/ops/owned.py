"""Whole matrices for optimizers that need them: on the rank that owns each (``layout="owner"``), as plain
parameters."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine.unit import units_in
from shardwright.errors import InputError
from shardwright.params.placement import SHARD, shard_behind
from shardwright.params.ragged import placed_as
from shardwright.torch_private import local_of, parameters_of


class OwnedParameter(nn.Parameter):
    """What a rank owns of a parameter, in the memory of the shard: plain, for an optimizer on that rank. Its
    ``grad`` is that of the shard.

    Args:
        shard: the parameter of the model, a DTensor.
        name: its name there.
    """

    fqn: str

    def __new__(cls, shard: Any, name: str) -> "OwnedParameter":
        made: Any = super().__new__(cls, local_of(shard).detach(), shard.requires_grad)
        setattr(made, SHARD, shard)
        made.fqn = name
        return made

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """This rank's part of the shard's gradient."""
        grad = shard_behind(self).grad
        return None if grad is None else local_of(grad)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        shard = shard_behind(self)
        shard.grad = None if value is None else placed_as(shard.detach(), value)

    def follow(self) -> None:
        """Lie in the shard's memory again, where that has moved (``offload_states``, ``to``)."""
        local = local_of(shard_behind(self)).detach()
        if local.data_ptr() != self.data_ptr():
            self.data = local


def owned_params(model: nn.Module) -> list[OwnedParameter]:
    """What this rank owns of a model, as plain parameters for an optimizer that needs whole units. Local.

    Of ``layout="owner"`` and ``Owned`` placements whole matrices, or of a stack [experts, rows, columns] this
    rank's experts; of ``Blocks`` placements this rank's blocks, which are rows. They lie in the memory of the
    model's own, and have ``grad`` after a backward. Build the optimizer of them after ``fully_shard``; it
    sends nothing. The rest is ``other_params``.

    Args:
        model: a sharded model, with memory (not on the meta device).

    Returns:
        This rank's, in the order of the model, each with its name there as ``fqn``. A rank may own none:
            torch's optimizers take an empty list as ``[{"params": []}]``.

    Raises:
        InputError: nothing of the model is owned by any rank, or it is on the meta device.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4), layout="owner")
        >>> muon = torch.optim.Muon([{"params": shardwright.owned_params(model)}])
        >>> adamw = torch.optim.AdamW(shardwright.other_params(model))
        >>> [(each.fqn, tuple(each.shape)) for each in muon.param_groups[0]["params"]]
        [('weight', (4, 8))]
    """
    owned = _owned_of(model)
    if not owned:
        raise InputError(
            'nothing of this model is owned; call fully_shard(..., layout="owner"), or return '
            "shardwright.Owned() or Blocks(...) from shard_placement_fn"
        )
    if any(param.is_meta for param in owned.values()):
        raise InputError("the model is on the meta device; load its weights, or call to_empty(), before this")
    mine = {name: param for name, param in owned.items() if local_of(param).numel()}
    made: Any = OwnedParameter
    return [made(param, name) for name, param in mine.items()]


def other_params(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that ``owned_params`` has on no rank: with ``layout="owner"`` biases, norms, embeddings,
    the output head. Local.

    Args:
        model: a sharded model.

    Returns:
        The model's own parameters, in its order, for a second optimizer (mostly AdamW).
    """
    owned = {id(param) for param in _owned_of(model).values()}
    return [param for param in model.parameters() if id(param) not in owned]


def _owned_of(model: nn.Module) -> dict[str, Any]:
    """The shards of what ranks own, by name, in the order of the model."""
    params = [param for unit in units_in(model) for param in unit.params]
    owned = {
        (id(param.sites[0].module), param.sites[0].name): param.sharded
        for param in params
        if param.split.layout is not None
    }
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, shown in parameters_of(module).items():
            if (id(module), name) in owned:
                # What a load has put in place of one on the meta device is taken over in the next forward.
                shard = shown if isinstance(shown, DTensor) else owned[id(module), name]
                found[f"{path}.{name}".removeprefix(".")] = shard
    return found
