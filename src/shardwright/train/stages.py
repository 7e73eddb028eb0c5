"""The stages of a pipeline that a recipe's model is cut into, and their microbatches in torch's schedules.

    stage 0: embedding, blocks  ->  ...: blocks  ->  last: blocks, norm, head -> losses

A stage has the model's own names, so a checkpoint of all stages is that of the whole model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from shardwright.errors import InputError
from shardwright.parallel import Mesh


class Elsewhere(nn.Module):
    """In the place of a part that another stage has: returns what it is given."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return ``hidden``."""
        return hidden


class Parts(NamedTuple):
    """Names in a model: what comes before its list of blocks, that list, and what comes after it."""

    first: Sequence[str]
    blocks: str
    last: Sequence[str]


def cut(model: nn.Module, parts: Parts, mesh: Mesh) -> list[str]:
    """Leave of ``model`` the stage of this rank, in place. Returns the names of what was taken out.

    Raises: InputError where there are fewer blocks than stages; nothing is changed then.
    """
    if mesh.pp is None:
        return []
    stage, stages = mesh.pp.get_local_rank(), mesh.pp.size()
    count = len([*model.get_submodule(parts.blocks).children()])
    if stages > count:
        raise InputError(
            f"mesh.pp = {stages}: {type(model).__name__} has {count} blocks; 1 to {count} would fit"
        )
    first, end = (count * number // stages for number in (stage, stage + 1))
    gone = [f"{parts.blocks}.{i}" for i in range(count) if not first <= i < end]
    gone += [*parts.first] if stage else []
    gone += [*parts.last] if stage < stages - 1 else []
    for name in gone:
        model.set_submodule(name, Elsewhere())
    return gone


class Pipeline:
    """The stage of this rank in torch's schedule; every rank of ``mesh.pp`` makes one and calls the same.

    model: the stage, sharded. It is called with tokens, int64 [rows, length], or what the stage before has
    returned, and with the keywords of ``losses``. how: torch's name of the schedule, and how many
    microbatches there are. tensors: of one of them, on the meta device: tokens, what is handed on, and what
    the last stage returns. loss_of: the loss of that and of targets.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        how: tuple[str, int],
        tensors: tuple[Tensor, Tensor, Tensor],
        loss_of: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
    ) -> None:
        assert mesh.pp is not None
        group = mesh.pp.get_group()
        stage, stages = group.rank(), group.size()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.stages, self._device, self._scale = stages, device, 1.0
        tokens, hidden, out = tensors
        for tensor in (hidden, out):
            tensor.requires_grad_()

        def made() -> Any:  # one that trains, one that doesn't: torch prepares a stage for either
            part = PipelineStage(
                model,
                stage,
                stages,
                device,
                group=group,
                input_args=(tokens if self.is_first else hidden,),
                output_args=(out if self.is_last else hidden,),
            )
            scaled = lambda out, targets: loss_of(out, targets) * self._scale  # noqa: E731
            return get_schedule_class(how[0])(part, how[1], loss_fn=scaled, scale_grads=False)

        self._training, self._evaluation = made(), made()

    def losses(self, inputs: Tensor, targets: Tensor, scale: float = 1.0, **more: Any) -> Tensor:
        """Forward, and with gradients backward, of all microbatches: [microbatches * rows, length] tokens and
        targets, and ``more`` tensors like them, which each stage gets its part of.

        Returns:
            The sum of their losses times ``scale``, fp32 (), on the last stage; 0 on others.
        """
        self._scale, found = scale, list[Tensor]()
        run = self._training.step if torch.is_grad_enabled() else self._evaluation.eval
        target = targets if self.is_last else None
        run(*((inputs,) if self.is_first else ()), target=target, losses=found, return_outputs=False, **more)
        if not self.is_last:
            return torch.zeros((), device=self._device)
        return torch.stack([loss.detach() for loss in found]).sum()
