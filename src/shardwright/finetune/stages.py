"""A model of transformers as a stage of a pipeline, cut by its own plan (``_pp_plan``)."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.data.windows import IGNORED, Batch
from shardwright.errors import InputError
from shardwright.finetune.objective import Objective
from shardwright.hf import library
from shardwright.parallel import Mesh
from shardwright.train.stages import Elsewhere, Parts, cut


def cut_model(model: Any, empty: Any, mesh: Mesh) -> None:
    """Leave of ``model``, on the meta device, the stage of this rank, in place; files with the weights of all
    stages fit it. empty: another one like it, which is taken apart.

    Raises: InputError where it can't be cut; ``model`` is as it was then.
    """
    if mesh.pp is None:
        return
    name, plan = type(model).__name__, getattr(model, "_pp_plan", None) or {}
    lists = [path for path in plan if isinstance(model.get_submodule(path), nn.ModuleList)]
    if len(lists) != 1:
        raise InputError(f"mesh.pp: {name} has no plan of stages (_pp_plan); leave pp out")
    if tied := library.tied_names(model):
        raise InputError(
            f"mesh.pp: {min(tied)} of {name} is the embedding's weight, and they are on different stages; "
            "leave pp out, or untie them in the base (tie_word_embeddings)"
        )
    first = [path for path, (given, _) in plan.items() if "input_ids" in given]
    parts = Parts(first, lists[0], [path for path in plan if path not in (*first, *lists)])
    _check_between(empty, parts)
    gone = cut(model, parts, mesh)
    known = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*known, *(rf"^{re.escape(path)}\." for path in gone)}


@torch.no_grad()
def _check_between(model: Any, parts: Parts) -> None:
    """Raises: InputError where a model without its parts does more than to hand on what it is given."""
    count = len(model.get_submodule(parts.blocks))
    for path in (*parts.first, *(f"{parts.blocks}.{i}" for i in range(count)), *parts.last):
        model.set_submodule(path, Elsewhere())
    library.rebuild_buffers(model, torch.device("cpu"))
    given = torch.linspace(-1, 1, 4 * model.config.hidden_size).view(1, 4, -1)
    try:
        same = torch.equal(model.base_model(inputs_embeds=given, use_cache=False).last_hidden_state, given)
    except Exception as error:
        raise InputError(f"mesh.pp: {type(model).__name__} doesn't run in stages ({error})") from error
    if not same:
        raise InputError(
            f"mesh.pp: {type(model).__name__} changes hidden states outside of its layers, which each stage "
            "would do; leave pp out"
        )


def run_as_stage(model: Any, mesh: Mesh, objective: Any) -> Objective:
    """Let ``model``, a stage, be called as ``Pipeline`` does it, with ``labels`` and ``position_ids``: it
    returns hidden states, the last one the sum of its losses [1], or without labels its logits.

    objective: given what calls the model on what the stage is given, returns the ``Objective`` of it.
    """
    assert mesh.pp is not None
    whole, is_last = model.forward, mesh.pp.get_local_rank() == mesh.pp.size() - 1
    key = "inputs_embeds" if mesh.pp.get_local_rank() else "input_ids"

    def call(input_ids: Tensor, **more: Any) -> Any:
        return whole(**{key: input_ids}, **more)

    made = objective(call)

    def forward(inputs: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        given = {key: inputs, "position_ids": position_ids, "use_cache": False}
        if not is_last:
            return model.base_model(**given).last_hidden_state
        if labels is None:
            return whole(**given).logits
        return made.total(Batch(inputs, labels, position_ids, 0)).view(1)

    model.forward = forward
    return made


def filled(batch: Batch, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and positions of ``batch``, int64 [rows, length]: what is added isn't learned."""
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
    more = (0, length - batch.inputs.shape[1], 0, rows - len(batch.inputs))
    values = (batch.inputs, 0), (batch.targets, IGNORED), (positions.expand_as(batch.inputs), 0)
    inputs, targets, positions = (F.pad(tensor, more, value=value) for tensor, value in values)
    return inputs, targets, positions
