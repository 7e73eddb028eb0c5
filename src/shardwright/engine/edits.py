"""Edits of unsharded parameters, on their way back into the shards."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from shardwright.engine.group import ParamGroup, Stage
from shardwright.torch_private import version_of


def unsharded_versions(group: ParamGroup) -> list[int]:
    """How often each unsharded parameter has been changed in place; for ``write_back``."""
    return [version_of(param.unsharded) for param in group.params] + group.gatherer.decoding.versions()


def write_back(group: ParamGroup, before: Sequence[int], unmarked: bool = True) -> None:
    """Copy this rank's rows of the unsharded parameters into the shards, where they may have changed.

    With ``unmarked``, where the dtype is that of the shards all are copied, since an edit of ``.data`` leaves
    no mark; else those whose version isn't the one ``before``, so that nothing is rounded without need.
    """
    if group.stage is not Stage.UNSHARDED:
        return
    with torch.no_grad():
        group.gatherer.decoding.write_back(before[len(group.params) :])
        for param, version in zip(group.params, before, strict=False):
            if param in group.gatherer.decoding.parts:
                continue
            may_be_edited = unmarked and not param.extended and param.own.dtype == param.local.dtype
            if may_be_edited or version_of(param.unsharded) != version:
                param.write_back()


_shown: WeakKeyDictionary[ParamGroup, list[int]] = WeakKeyDictionary()
"""Groups that have stayed unsharded after an evaluation, for anybody to edit: ``unsharded_versions`` then."""


def show(group: ParamGroup) -> None:
    """From here on what the caller edits of the unsharded parameters is an edit, as one of shards is."""
    _shown.setdefault(group, unsharded_versions(group))


def reshard(group: ParamGroup, post_forward: bool) -> None:
    """``ParamGroup.reshard``, after edits that were made since ``show`` have gone into the shards; where the
    shards were written themselves since, by an optimizer, they stay."""
    before = _shown.pop(group, None)
    if before is not None and not group.is_stale:
        write_back(group, before, unmarked=False)  # of shards there may be edits without a mark, too
    group.reshard(post_forward)
