"""Edits of unsharded parameters, on their way back into the shards."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from shardwright.state.extended import ExtendedParam
from shardwright.state.group import ParamGroup, Stage
from shardwright.state.param import ShardedParam


def unsharded_versions(group: ParamGroup) -> list[int]:
    """How often each unsharded parameter has been changed in place; for ``write_back``."""
    return [param.unsharded._version for param in group.params] + group.decoding.versions()


def write_back(group: ParamGroup, before: Sequence[int]) -> None:
    """Copy this rank's rows of the unsharded parameters into the shards, where they may have changed.

    Where the dtype is that of the shards all are copied, since an edit of ``.data`` leaves no mark;
    else those whose version isn't the one ``before``, so that nothing is rounded without need.
    """
    if group.stage is not Stage.UNSHARDED:
        return
    with torch.no_grad():
        group.decoding.write_back(before[len(group.params) :])
        for param, version in zip(group.params, before, strict=False):
            if param in group.decoding.parts:
                continue
            if isinstance(param, ExtendedParam):
                if param.unsharded._version != version:
                    param.write_back()
            elif param.own.dtype == param.local.dtype or param.unsharded._version != version:
                param.local.copy_(_rows(param))


def _rows(param: ShardedParam) -> torch.Tensor:
    """This rank's rows of the unsharded parameter, as code has left them."""
    if param.layout.in_order:
        return param.own
    face = param.unsharded.detach()
    return param.rows_of(face._local_tensor if isinstance(face, DTensor) else face)
