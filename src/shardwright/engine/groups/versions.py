"""Version counters of unsharded parameters: by them autograd sees whether a backward reads what its forward
has saved, and a group sees what was edited.

Autograd saves with a tensor how often it was changed in place, and raises where that is another number in the
backward. So a counter here goes up by what was written into either face of its parameter, the shard by an
optimizer or a load, the unsharded one by an edit; and while the memory isn't whole, it is one higher than
any that a forward can have saved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.errors import StageError
from shardwright.params.param import ShardedParam, Versions
from shardwright.torch_private import local_of, set_versions, version_of


class FaceVersions:
    """The counters of a group's unsharded parameters.

    is_whole: whether their memory is filled. gathered: versions of the shards that it was filled from; ()
    where they may have been written without a mark since.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.gathered: Versions = ()
        self._faces: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()  # of each face, as of the last call
        self._shards: Versions = ()  # that they stand for

    def follow(self, faces: tuple[torch.Tensor, ...], shards: Versions) -> None:
        """The memory of ``faces`` holds the shards, which have the versions ``shards``, one for each face."""
        before = zip(self._faces, self._versions, self._shards, strict=True)
        known = {id(face): (version, shard) for face, version, shard in before}
        versions = []
        for face, shard in zip(faces, shards, strict=True):
            version, counted = known.get(id(face), (version_of(face), shard))
            version = version_of(face) if self.is_whole else version
            versions.append(version if shard == counted else version + 1)
        self._faces, self._shards = faces, shards
        self._set(versions)
        self.is_whole = True

    def edited(self) -> list[bool]:
        """Of each face whether it was edited since its memory was filled."""
        pairs = zip(self._faces, self._versions, strict=True)
        return [self.is_whole and version_of(face) != version for face, version in pairs]

    def write_back(self, params: Sequence[ShardedParam], decoding: Any, unmarked: bool) -> None:
        """Copy what was edited of this rank's rows into the shards; with ``unmarked`` also what was edited
        without a mark."""
        with torch.no_grad():
            for param, is_edited in zip(params, self.edited(), strict=True):
                if param in decoding.parts:
                    if is_edited:
                        decoding.write_back(param)
                    continue
                if is_edited or (unmarked and not param.extended and _differs(param)):
                    param.write_back()

    def count(self, shards: Versions) -> None:
        """The edits are in the shards now, which have the versions ``shards``."""
        self.gathered = self._shards = shards
        self._set(list(map(version_of, self._faces)))

    def hide(self) -> None:
        """The memory is given back."""
        if self.is_whole:
            versions = list(map(version_of, self._faces))  # also those of edits that were dropped
            self._set([version + 1 for version in versions])
            self._versions, self.is_whole = tuple(versions), False

    def _set(self, versions: Sequence[int]) -> None:
        self._versions = tuple(versions)
        set_versions(self._faces, self._versions)
        # Of a DTensor (tensor parallelism) also the local tensor's, which ``to_local()`` shares.
        pairs = zip(self._faces, versions, strict=True)
        inner = [(local_of(face), version) for face, version in pairs if isinstance(face, DTensor)]
        if inner:
            set_versions(tuple(face for face, _ in inner), tuple(version for _, version in inner))


def moved_memory(params: Sequence[ShardedParam], faces: Sequence[torch.Tensor]) -> StageError | None:
    """What to raise where one of ``faces``, whose memory was given back, has other memory."""
    for param, face in zip(params, faces, strict=True):
        if not param.extended and has_memory(face):
            return StageError(
                f"parameter {param.fqn!r} was given other memory while it was unsharded (`.to()`, "
                "`param.data = ...`), which its shards don't follow. Edit it in place, inside of "
                "`with model.unsharded():`, or convert the model between steps, after model.reshard()"
            )
    return None


def has_memory(face: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, and not a buffer's that was freed."""
    plain = local_of(face) if isinstance(face, DTensor) else face
    return plain.untyped_storage().nbytes() > 0


def _differs(param: ShardedParam) -> bool:
    """Whether its unsharded rows aren't its shard in the dtype that was sent, in theirs."""
    rows = param.rows.to(param.local.device)
    return not torch.equal(rows, param.local.to(param.own.dtype).to(rows.dtype))
