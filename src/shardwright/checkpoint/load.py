"""Loading: every rank reads its own part of every tensor, whatever the checkpoint's world size, and proves
the result.

    match    names, shapes and dtypes against the live state; all that doesn't fit, in one list
    check    read this rank's byte ranges and verify the checksums; the live state is untouched
    fill     read again (from the page cache) into the live tensors
    prove    checksum the live state itself against the manifest, each part as soon as it is filled

A failure in the first two leaves model and optimizer as they were. The others can only fail if a file changes
or the memory is bad between two reads, and say so.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright import clock
from shardwright.checkpoint import background
from shardwright.checkpoint.agree import Partial, Ranks, ranks
from shardwright.checkpoint.flat import base_tensor
from shardwright.checkpoint.folder import complete_steps, read_manifest, step_folder, storage_of
from shardwright.checkpoint.format import (
    ITEM_NBYTES,
    Box,
    Manifest,
    Piece,
    TensorEntry,
    crc32_in_chunks,
    run_crc32,
)
from shardwright.checkpoint.live import model_tensors, set_rng_state
from shardwright.checkpoint.shardfile import TORCH_DTYPE, Reader, bits_in_chunks, bits_of, bytes_of, tensor_of
from shardwright.checkpoint.sources import Source, locate, open_source
from shardwright.checkpoint.target import LoadTargets, Target, allocated, matched, overlapping, without_params
from shardwright.checkpoint.tree import decode, keys_in
from shardwright.checkpoint.url import Location, location_of
from shardwright.checkpoint.verify import Verifier, crc_in, parts_of
from shardwright.checkpoint.writer import loaded
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, DamagedError, UnreadError
from shardwright.files import reading
from shardwright.params.placement import shard_behind
from shardwright.torch_private import (
    COMPILED,
    EXTRA_STATE,
    buffers_of,
    local_of,
    look_up_again,
    parameters_of,
)

T = TypeVar("T")
_ATTEMPTS = 3  # of a load that finds a file that can't be read
_PAUSE_S = 0.2
STEP_NBYTES = 512 << 10
"""Copied and checksummed at a time, in a core's own cache: 0.11 s/GiB, in twos of MiB 0.13 to 0.17."""


@dataclass(frozen=True)
class Restored:
    """What ``load`` restored, and from where.

    Attributes:
        path: the folder or file of the checkpoint.
        step: number of optimizer steps done at the save.
        extra: the ``extra`` of ``save``, without what was restored into live objects; tensors are unsharded,
            on the host.
        num_tensors: how many tensors of the model and the optimizer were restored, each verified bit by bit.
        nbytes: bytes of all of these.
        read_nbytes: bytes that this rank read.
        skipped: why newer checkpoints were skipped.
        cast: names of tensors whose dtype was converted.
        rng: this rank's random state at the save; None if the checkpoint has none for this number of ranks.
    """

    path: Location
    step: int
    extra: Any
    num_tensors: int
    nbytes: int
    read_nbytes: int
    skipped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    rng: Any = None

    def restore_rng(self) -> bool:
        """Restore this process's random state of the save. Local.

        Returns:
            False, without any change, if the checkpoint has none for this number of ranks.

        Raises:
            CheckpointError: it is of another form.
        """
        if self.rng is None:
            return False
        with reading(self.path, "a checkpoint with the random state of this release"):
            set_rng_state(self.rng)
        return True


def load(
    path: str | PurePath,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    pp: DeviceMesh | None = None,
) -> Restored:
    """Restore a model, and an optimizer, from a checkpoint of any number of ranks. Every rank must call it.

    Weights are also read from a folder or file of safetensors, a ``torch.distributed.checkpoint`` folder, or
    a ``torch.save`` file. Each rank reads only the byte ranges of its own parts. Live tensors are filled in
    place. Parameters on the meta device, and the optimizer's state if it has none yet, are allocated,
    sharded, without running a step. Every checksum is verified on read, and the live state afterwards.

    Args:
        path: one checkpoint, or a folder of them: then its newest complete one; or the URL of either, as
            ``s3://bucket/run``. With a URL, each file that a rank needs is copied into the cache of its host,
            unless it is still there from the save.
        model: sharded or plain, of the saved names and shapes; dtypes are converted.
        optimizer: of the model's parameters; None doesn't load the saved state.
        extra: live objects with ``load_state_dict``, by their keys in the ``extra`` of ``save``; they are
            restored.
        pp: the stages of a pipeline (``Mesh.pp``): ``model`` and ``optimizer`` are this rank's stage, with
            the names of the whole model. However many stages there were at the save.

    Returns:
        What was restored, with the step and ``extra``.

    Raises:
        DamagedError: the checkpoint is damaged; raised on all ranks. It is a CheckpointError, and names file,
            tensor and the older checkpoints.
        CheckpointError: raised on all ranks: the checkpoint is incomplete, or doesn't fit; every missing,
            unexpected and misshapen tensor is listed. Model and optimizer are then unchanged. Or a
            ``load_state_dict`` of ``extra`` has raised: the error says what was loaded before it.
        UnreadError: raised on all ranks: a file can't be read, in three attempts. Nothing was loaded.
        InputError: the URL is of an unknown kind.
        MissingExtra: the package for this kind of URL isn't installed.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> _ = shardwright.checkpoint.save("run", model=model, step=7, extra={"epoch": 2})
        >>> restored = shardwright.checkpoint.load("run", model=model)
        >>> restored.step, restored.extra
        (7, {'epoch': 2})
    """
    background.finish()
    path, group = location_of(path), ranks()
    storage_of(path)  # raises here, on every rank, for a URL that can't be used
    group.arrive(f"load({path})" if pp is None else f"load({path}), of a pipeline with pp=")

    def once() -> Restored:
        locations = group.together(f"loading {path}", lambda: locate(path) if group.rank == 0 else None)
        assert locations[0] is not None
        return _load(locations[0], model, optimizer, extra, group, pp is not None)

    # A save has removed it meanwhile, and there is a newer one; or the disk had a passing error.
    return _retried(once)


def _retried(work: Callable[[], T]) -> T:
    """What ``work`` gives, in the first of some attempts in which each rank can read its files."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(UnreadError):
            return work()
        clock.sleep(_PAUSE_S)
    return work()


def _load(
    located: tuple[Location, tuple[str, ...]],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    group: Ranks,
    is_stage: bool,
) -> Restored:
    found, skipped = located
    what = f"loading {found}"
    prepared: list[tuple[Source, LoadTargets]] = []

    def prepare() -> tuple[set[str], set[str]]:
        prepared.append(_prepare(found, model, optimizer, extra, group.rank, is_stage))
        todo = prepared[0][1]
        targets = [each for each in todo.targets.values() if not base_tensor(each.whole).is_meta]
        return overlapping(targets), todo.unused

    shared, unused = zip(*group.together(what, prepare), strict=True)
    shared = set[str]().union(*shared)
    if unused := set.intersection(*unused):
        raise CheckpointError(
            f"the checkpoint has what no stage of the pipeline has: {', '.join(sorted(unused)[:20])}; stages "
            "need the names of the whole model"
        )
    (source, todo), manifest = prepared[0], prepared[0][0].manifest
    verifier = Verifier(group)
    with Reader(source.folder) as reader:
        try:
            small = _check(verifier, what, reader, todo)
        except UnreadError:
            raise
        except CheckpointError as error:
            if any(group.together(what, lambda: _is_replaced(found, manifest))):
                raise UnreadError(f"{found}: another run has saved this step again meanwhile") from None
            raise DamagedError(f"{error}{_older(found, manifest.step)}") from None
        read_nbytes = reader.nbytes
        rng = manifest.state.get("rng", [])
        own_rng = rng[group.rank] if len(rng) == group.world else None
        group.here(what, lambda: install_whole(todo, small))
        filled = allocated(todo.targets.values())
        fill_and_prove(verifier, what, reader, filled, shared)
    group.here(what, lambda: install(todo, filled, small))
    loaded(model, found, manifest)
    return Restored(
        path=found,
        step=manifest.step,
        extra=decode(
            {k: v for k, v in (manifest.state.get("extra") or {}).items() if k not in todo.extra},
            small.__getitem__,
        ),
        num_tensors=len(filled),
        nbytes=sum(t.entry.nbytes for t in filled.values()),
        read_nbytes=read_nbytes,
        skipped=skipped,
        cast=tuple(t.key for t in filled.values() if t.casts),
        rng=decode(own_rng, small.__getitem__),
    )


def _is_replaced(found: Location, manifest: Manifest) -> bool:
    """Whether another checkpoint has that name since the manifest was read: files are opened later."""
    with suppress(CheckpointError):
        return read_manifest(found) != manifest
    return False


def latest(path: str | PurePath) -> Location | None:
    """The newest complete checkpoint in a folder: the one that ``load(path)`` would load.

    Every rank must call it, and all get the result of rank 0.

    Args:
        path: a folder of checkpoints, or its URL.

    Returns:
        The checkpoint's folder; None if there is no checkpoint, or no such folder.

    Raises:
        CheckpointError: raised on all ranks if they can't agree, because one is missing.
        InputError: the URL is of an unknown kind.
        MissingExtra: the package for this kind of URL isn't installed.
    """
    background.finish()
    group, path = ranks(), location_of(path)
    storage_of(path)
    group.arrive(f"latest({path})")
    found = group.together(f"looking into {path}", lambda: complete_steps(path) if group.rank == 0 else [])
    return step_folder(path, found[0][0]) if found[0] else None


def _older(found: Location, step: int) -> str:
    """What a message about the damaged checkpoint ``found`` of ``step`` says of the older ones beside it."""
    names = list[str]()
    with suppress(OSError):  # what is said of the damage doesn't depend on it
        names = [
            step_folder(found.parent, older).name for older in complete_steps(found.parent) if older < step
        ]
    if not names:
        return ""
    return f"\nolder complete checkpoints: {', '.join(names)}; rename {found}, and load takes {names[0]}"


def _prepare(
    found: Location,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    rank: int,
    is_stage: bool,
) -> tuple[Source, LoadTargets]:
    named, aliases = model_tensors(model)
    source = open_source(found, {*named, *(alias for names in aliases.values() for alias in names)})
    return source, matched(source.manifest, model, optimizer, extra, rank, is_stage=is_stage)


def _check(verifier: Verifier, what: str, reader: Reader, todo: LoadTargets) -> dict[str, torch.Tensor]:
    """Verify all that this rank will read, before anything is touched; returns the small tensors, whole.

    Where copies on this host were read and are damaged, once more, of what is copied anew.
    """
    small: dict[str, torch.Tensor] = {}
    wanted = [(t.key, t.entry, box) for t in todo.targets.values() for box in t.boxes]

    def look() -> list[Partial]:
        for key in sorted(todo.small):
            entry = todo.manifest.tensors[key]
            box = Box.whole(entry.shape)
            verifier.checksums([(key, entry, box)], crc_in(reader))
            small[key] = torch.empty(entry.shape, dtype=TORCH_DTYPE[entry.dtype])
            fill(reader, [Target(key, entry, small[key], (box,), small[key].device)])
        return verifier.checksums(wanted, crc_in(reader))

    try:
        verifier.verify(what, look)
    except CheckpointError:
        if not reader.copies:
            raise
        verifier.group.together(what, reader.forget)
        verifier.verify(what, look)
    return small


def fill(reader: Reader, targets: Iterable[Target]) -> None:
    """Copy what this rank owns from the files into the targets, in place."""
    for t in targets:
        if t.boxes:
            torch.autograd.graph.increment_version(t.local)  # what autograd saved of it is no longer valid
        for held, view in t.views():
            for key, entry, piece, part in parts_of([(t.key, t.entry, held)]):
                for box, bits in reader.chunks(key, entry, piece, part):
                    _copy(key, bits, view[box.slices_in(held)], entry.dtype)


def _copy(key: str, bits: np.ndarray, into: torch.Tensor, dtype: str) -> None:
    """Fill ``into`` with ``bits`` of ``dtype``. (Without ``copy_`` where it can be: that starts threads.)"""
    casts = into.dtype != TORCH_DTYPE[dtype]
    if not casts and into.device.type == "cpu" and into.is_contiguous():
        np.copyto(bits_of(into), bits)
        return
    source = tensor_of(bits, dtype)
    into.copy_(source)
    # A converted tensor has no checksum in the manifest; it is compared with what was read.
    if casts and not np.array_equal(bits_of(into), bits_of(source.to(into.dtype))):
        raise CheckpointError(f"{key}: the live tensor differs from the checkpoint after the copy")


def fill_and_prove(
    verifier: Verifier, what: str, reader: Reader, filled: Mapping[str, Target], shared: Collection[str] = ()
) -> None:
    """Fill the targets, and checksum the live state itself: each part once it is filled, while it is in the
    cache. What others are filled after that lie in its memory (``shared``, the same on every rank) is
    checksummed again at the end."""
    same = {key: t for key, t in filled.items() if not t.casts and t.boxes}
    wanted = [(t.key, t.entry, box) for t in same.values() for box in t.boxes]
    views = {key: tuple(t.views()) for key, t in same.items()}

    def live(key: str, box: Box) -> torch.Tensor:
        return next(view[box.slices_in(held)] for held, view in views[key] if held.intersect(box) == box)

    def live_crc(key: str, entry: TensorEntry, piece: Piece, part: Box) -> int:
        chunks = bits_in_chunks(live(key, part), part)
        return crc32_in_chunks(part, piece.box, ITEM_NBYTES[entry.dtype], chunks)

    def filled_crc(key: str, entry: TensorEntry, piece: Piece, part: Box) -> int:
        into, run = live(key, part), reader.run(key, entry, piece, part)
        if run is None or into.device.type != "cpu" or not into.is_contiguous():
            for box, bits in reader.chunks(key, entry, piece, part):
                _copy(key, bits, into[box.slices_in(part)], entry.dtype)
            return live_crc(key, entry, piece, part)
        rest, crc = bytes_of(into), 0
        for read in run:
            for at in range(0, read.nbytes, STEP_NBYTES):
                step = read[at : at + STEP_NBYTES]
                place, rest = rest[: step.nbytes], rest[step.nbytes :]
                np.copyto(place, step)
                crc = crc32(place.data, crc)
        return run_crc32(crc, part, piece.box, ITEM_NBYTES[entry.dtype])

    def look() -> list[Partial]:
        fill(reader, [t for t in filled.values() if t.casts])
        for t in same.values():
            torch.autograd.graph.increment_version(t.local)  # what autograd saved of it is no longer valid
        return verifier.checksums(wanted, filled_crc)

    def prove() -> None:
        verifier.verify(what, look)
        if shared:
            again = [part for part in wanted if part[0] in shared]
            verifier.verify(what, lambda: verifier.checksums(again, live_crc))

    try:
        _retried(prove)
    except CheckpointError as error:
        raise CheckpointError(
            f"the live state differs from what was read, it is half loaded and must not be used: {error}"
        ) from error


# ---- in its place: parameters, the optimizer's state and groups, extra objects


def install_whole(todo: LoadTargets, small: Mapping[str, torch.Tensor]) -> None:
    """Restore what code of the user's does, from whole tensors: extra state of modules, and extra objects
    that hold nothing sharded. Before any weight is touched, so that what fails here leaves those. Local.

    Raises: CheckpointError, saying which object, and which were restored before it.
    """
    restored: list[str] = []

    def whole(what: str, restore: Callable[[Any], object], tree: Any) -> None:
        before = f" Restored before it: {', '.join(restored)}." if restored else ""
        then = "Model and optimizer are as they were; what the object has changed by then stays changed."
        _restore(what, restore, decode(tree, small.__getitem__), then + before)
        restored.append(what)

    state = todo.manifest.state
    for name, module in todo.model.named_modules():
        key = f"{name}.{EXTRA_STATE}".lstrip(".").replace(COMPILED, "")
        if key in state.get("model", {}):
            whole(f"set_extra_state of {name or 'the model'}", module.set_extra_state, state["model"][key])
    sharded = _sharded_extra(todo)
    for key, value in todo.extra.items():
        if key not in sharded:
            whole(f"load_state_dict of extra/{key}", value.load_state_dict, state["extra"][key])


def _sharded_extra(todo: LoadTargets) -> set[str]:
    """Keys of extra objects of which tensors are filled in place: these are restored after the fill."""
    saved = todo.manifest.state.get("extra", {})
    return {key for key in todo.extra if not todo.targets.keys().isdisjoint(keys_in(saved[key]))}


def _restore(what: str, restore: Callable[[Any], object], state: Any, then: str) -> None:
    try:
        restore(state)
    except Exception as error:
        raise CheckpointError(f"{what} raised {type(error).__qualname__}: {error}. {then}") from error


def install(todo: LoadTargets, filled: Mapping[str, Target], small: Mapping[str, torch.Tensor]) -> None:
    """Put what was allocated in place, and set the small state: groups, steps, sharded extra objects. Local.

    Raises: CheckpointError, where an extra object can't take what the model and the optimizer have by then.
    """

    def value_of(key: str) -> torch.Tensor:
        if key in todo.wholes:  # filled by what it is made of
            return todo.wholes[key]
        return base_tensor(filled[key].whole) if key in filled else small[key]

    _replace_meta(todo, filled)
    if todo.optimizer is not None:
        saved = todo.manifest.state["optimizer"]
        for group, index in zip(todo.optimizer.param_groups, todo.groups, strict=True):
            _set_group(group, decode(without_params(saved["groups"][index]), value_of))
            for p in group["params"]:
                shard = shard_behind(p)
                tree = saved["state"].get(next(iter(todo.held[id(shard)])))
                if tree is None:
                    todo.optimizer.state.pop(p, None)
                    continue
                todo.optimizer.state[p] = state = decode(tree, value_of)
                if shard is not p:  # a matrix that this rank owns: plain, as its state is
                    for key, each in state.items():
                        state[key] = local_of(each) if isinstance(each, DTensor) else each
    for key in _sharded_extra(todo):
        _restore(
            f"load_state_dict of extra/{key}",
            todo.extra[key].load_state_dict,
            decode(todo.manifest.state["extra"][key], value_of),
            "Model and optimizer are restored, and so are the sharded tensors of this object; the rest of it "
            "isn't",
        )


def _set_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), torch.Tensor):  # in place: compiled and captured steps hold on to it
            group[key].fill_(value)
        else:
            group[key] = value


def _replace_meta(todo: LoadTargets, filled: Mapping[str, Target]) -> None:
    if not todo.replaced:
        return
    new: dict[int, Any] = {}
    for module in todo.model.modules():
        for tensors in (parameters_of(module), buffers_of(module)):
            for name, old in tensors.items():
                if old is None or todo.replaced.get(id(old)) not in filled:
                    continue
                if id(old) not in new:  # tied parameters stay one object
                    whole: Any = base_tensor(filled[todo.replaced[id(old)]].whole)
                    if isinstance(old, nn.Parameter):
                        whole = nn.Parameter(whole, requires_grad=old.requires_grad)
                        whole.__dict__.update(old.__dict__)
                    new[id(old)] = whole
                tensors[name] = new[id(old)]
    for group in todo.optimizer.param_groups if todo.optimizer else ():
        for i, p in enumerate(group["params"]):
            if id(p) in new:
                group["params"][i] = new[id(p)]
                todo.held[id(new[id(p)])] = todo.held[id(p)]
    look_up_again(todo.model)
