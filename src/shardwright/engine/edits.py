"""Edits of unsharded parameters, on their way back into the shards; and of shards, in sight of autograd."""

from shardwright.engine.group import ParamGroup, Stage


def write_back(group: ParamGroup, unmarked: bool = False) -> None:
    """Copy this rank's rows of the unsharded parameters into the shards, where they were edited in place.

    With ``unmarked`` they are compared, since an edit of ``.data`` leaves no mark.
    """
    if group.stage is Stage.UNSHARDED:
        group.face_versions.write_back(group.params, group.gatherer.decoding, unmarked)
        group.face_versions.count(group.shard_versions())


def reshard(group: ParamGroup, post_forward: bool) -> None:
    """``ParamGroup.reshard``, after edits have gone into the shards; where the shards were written themselves
    since, by an optimizer, they stay."""
    if group.stage is Stage.UNSHARDED and any(group.face_versions.edited()) and not group.is_stale:
        write_back(group)
    group.reshard(post_forward)


def follow_writes(group: ParamGroup) -> None:
    """Before a backward of parameters that have stayed unsharded: of those whose shards were written since,
    what autograd has saved isn't what they are."""
    if group.stage is Stage.UNSHARDED and group.is_stale:
        group.face_versions.follow(group.faces, group.shard_versions())
