"""Saving: every rank writes its own pieces beside the others', rank 0 proves coverage and publishes.

rank 0                        rank 1
lock, .torn-1f3a/             -                       one small agreement: where to write
shard-00000.safetensors       shard-00001.safetensors   no collective; checksummed while written, synced
pieces of all ranks  <-----   its pieces               one small agreement: what was written
prove coverage, manifest.json, rename, latest          one small agreement: it is published

Under a URL the files are uploaded under names that no other save uses, and the manifest last: ``remote``.
"""

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwright.checkpoint import background
from shardwright.checkpoint.agree import Written, ranks
from shardwright.checkpoint.folder import step_folder, storage_of
from shardwright.checkpoint.format import Box, Manifest, Piece, TensorEntry, crc32_in_chunks, dumps, prove
from shardwright.checkpoint.live import Part, collect, part_of, rng_state
from shardwright.checkpoint.shardfile import DTYPE_NAME, Item, bits_in_chunks, write_shard
from shardwright.checkpoint.storage import Unpublished
from shardwright.checkpoint.tree import Tensors, encode, keys_in, leaves
from shardwright.checkpoint.url import Location, location_of
from shardwright.checkpoint.writer import Keep, Writer, keep_of, line_of, saved, whole_number
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, warn
from shardwright.transport.process import span
from shardwright.transport.streams import wait_for_stream

Told = tuple[dict[str, TensorEntry], dict[str, Any]]
"""See ``Snapshot.told``."""


@span("save")
def save(
    path: str | PurePath,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    step: int,
    keep: int | Keep | None = None,
    pp: DeviceMesh | None = None,
) -> Location:
    """Save the state of training as ``path/step-000123``. Every rank must call it, between steps.

    It saves the parameters and persistent buffers of ``model``, the state and groups of ``optimizer`` (by the
    names of the parameters), ``extra``, and the random state of every rank. Nothing is pickled. Each rank
    writes its own pieces; no tensor is sent, and host memory grows by 2 MiB. When it returns, the checkpoint
    is on the disk, or in the bucket, and ``path/latest`` names it; until then the previous one is untouched.

    Args:
        path: the folder of checkpoints, visible to all ranks; it is created if it is missing. Or a URL, as
            ``s3://bucket/run``; each rank then writes its file into the cache of its host and uploads it.
        model: a sharded model, or a plain one that is equal on all ranks.
        optimizer: of the model's parameters; None saves none.
        extra: numbers, strings, lists, dicts, tensors, and objects with ``state_dict()``, by name; equal on
            all ranks.
        step: number of optimizer steps done, 0 or more; names the folder.
        keep: how many of the newest checkpoints to keep (or a ``Keep``); None keeps all.
        pp: the stages of a pipeline (``Mesh.pp``): ``model`` and ``optimizer`` are this rank's stage, with
            the names of the whole model, which is what is saved.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: raised on all ranks, naming rank, file and tensor. Nothing is published, and the
            previous checkpoint stays the latest.
        InputError: ``step`` or ``keep`` is out of range, or the URL is of an unknown kind.
        MissingExtra: the package for this kind of URL isn't installed.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> folder = shardwright.checkpoint.save("run", model=model, optimizer=optimizer, step=100, keep=3)
        >>> str(folder)
        'run/step-000100'
    """
    asked = _Save(path, model, step, keep)
    asked.arrive(f"save(step={step})", pp)
    return asked.run(_snapshot(asked.group.rank, asked.first, model, optimizer, extra))


@span("save")
def async_save(
    path: str | PurePath,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    step: int,
    keep: int | Keep | None = None,
    pp: DeviceMesh | None = None,
) -> background.Pending:
    """``save`` in the background: it returns as soon as the state is copied to the host. Every rank must call
    it.

    The copy has this rank's pieces. Its host memory is kept until the process ends and reused by the next
    call, since allocating new memory takes several times as long as the copy. It is written without the page
    cache. One save runs at a time: a second call first waits for the first. Call ``wait()`` on the result
    before the process group is destroyed.

    Args:
        path: as ``save``.
        model: as ``save``.
        optimizer: as ``save``.
        extra: as ``save``.
        step: as ``save``.
        keep: as ``save``.
        pp: as ``save``.

    Returns:
        An object whose ``wait()`` returns the checkpoint's folder when it is on the disk, or raises the error
            of the save.

    Raises:
        CheckpointError: the save *before* this one failed (this one was not started, call again), or the
            state can't be saved. An error of this save is raised by ``wait()``, by the next save or load, or
            printed at exit.
        InputError: ``step`` or ``keep`` is out of range, or the URL is of an unknown kind.
        MissingExtra: the package for this kind of URL isn't installed.

    Examples:
        >>> model = shardwright.fully_shard(nn.Linear(8, 4))
        >>> pending = shardwright.checkpoint.async_save("run", model=model, step=1)
        >>> str(pending.wait())  # after more training steps
        'run/step-000001'
    """
    asked = _Save(path, model, step, keep)
    asked.arrive(f"async_save(step={step})", pp)
    snapshot = staged(_snapshot(asked.group.rank, asked.first, model, optimizer, extra))
    return background.start(lambda pace: asked.run(snapshot, pace))


@dataclass(frozen=True)
class Snapshot:
    """What this rank is about to write: its part of every tensor, and the small state.

    ``rng`` is this rank's own random state, its tensors under ``rng/RANK``. ``fault`` is why the state
    could not be collected; it is raised where all ranks can hear it. ``owned``: of which parameters this rank
    alone may have the optimizer's state. ``crcs`` is the CRC-32 of each piece, by
    key and offset, as it was copied for a save in the background.
    """

    parts: Mapping[str, Part]
    aliases: Mapping[str, tuple[str, ...]]
    state: Mapping[str, Any]
    rng: Any = None
    rng_parts: Mapping[str, Part] = field(default_factory=dict)
    fault: str = ""
    owned: frozenset[str] = frozenset()
    crcs: Mapping[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    def told(self) -> Told:
        """What rank 0 is to know of it: its tensors, no pieces yet, and the small state."""
        tensors = {
            key: TensorEntry(p.shape, DTYPE_NAME[p.local.dtype], (), self.aliases.get(key, ()), p.sharded)
            for key, p in self.parts.items()
        }
        return tensors, dict(self.state)

    def told_of_owned(self) -> Told:
        """The same, of the optimizer's state that this rank alone may have."""
        tensors, state = self.told()
        optimizer = state.get("optimizer", {"groups": (), "state": {}})
        groups = [[name for name in group["params"] if name in self.owned] for group in optimizer["groups"]]
        own = {name: tree for name, tree in optimizer["state"].items() if name in self.owned}
        keys = {key for tree in own.values() for key in keys_in(tree)}
        return {key: tensors[key] for key in keys}, {"groups": groups, "state": own}

    @property
    def of_all(self) -> "Snapshot":
        """What every rank has: without that."""
        if not self.owned:
            return self
        tensors, own = self.told_of_owned()
        optimizer = self.state["optimizer"]
        groups = [
            {**group, "params": [name for name in group["params"] if name not in self.owned]}
            for group in optimizer["groups"]
        ]
        state = {name: tree for name, tree in optimizer["state"].items() if name not in own["state"]}
        optimizer = {**optimizer, "groups": groups, "state": state}
        parts = {key: part for key, part in self.parts.items() if key not in tensors}
        return replace(self, parts=parts, state={**self.state, "optimizer": optimizer}, owned=frozenset())

    def described(self) -> dict[str, str]:
        """What must be equal on all ranks, as text by key."""
        tensors = {k: f"{p.local.dtype} {list(p.shape)}" for k, p in self.parts.items()}
        state = dict(self.state)
        optimizer = state.pop("optimizer", {})
        groups = optimizer.get("groups", [])
        trees = {
            **state,
            "optimizer": optimizer.get("state", {}),
            "optimizer kind": optimizer.get("kind"),
            "optimizer groups": [group["params"] for group in groups],
            **{f"optimizer/<group {i}>": {**group, "params": []} for i, group in enumerate(groups)},
        }
        return tensors | {path: text for key, tree in trees.items() for path, text in leaves(tree, key)}


def _snapshot(
    rank: int, first: int, model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any] | None
) -> Snapshot:
    """This rank's parts of the live state, and its random state; references, no copies. first: the rank that
    writes what is equal on all."""
    rng_tensors: Tensors = {}
    try:
        live = collect(model, optimizer, extra)
        alone = {f"optimizer/{name}" for name in live.owned}
        parts = {
            # Nobody else may have what is plain in the state of a matrix that this rank owns.
            key: part_of(key, tensor, 0 if "/".join(key.split("/")[:2]) in alone else rank - first)
            for key, tensor in live.tensors.items()
        }
        rng = encode(rng_state(), f"rng/{rank}", rng_tensors)
        rng_parts = {key: part_of(key, tensor, 0) for key, tensor in rng_tensors.items()}
    except CheckpointError as error:
        return Snapshot({}, {}, {}, fault=str(error))
    return Snapshot(parts, live.aliases, live.state, rng, rng_parts, owned=live.owned)


_staging: dict[str, torch.Tensor] = {}


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def staged(snapshot: Snapshot) -> Snapshot:
    """The pieces that this rank writes, copied to host memory that is kept for the next call."""
    parts = {}
    for key, part in snapshot.parts.items():
        local = part.local
        if part.owner and part.boxes:
            on_device = _is_on_device(local)
            buffer = _staging.get(key)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=on_device)
                _staging[key] = buffer
            local = buffer.copy_(local, non_blocking=on_device)
        parts[key] = replace(part, local=local, boxes=part.boxes if part.owner else ())
    for key in _staging.keys() - parts.keys():
        del _staging[key]
    if any(_is_on_device(part.local) for part in snapshot.parts.values()):
        wait_for_stream()
    return replace(snapshot, parts=parts, crcs=_crcs(parts, owned=True))


class _Save:
    """One save, as each rank does it. Raises: InputError, MissingExtra, as ``save``."""

    def __init__(self, path: str | PurePath, model: nn.Module, step: int, keep: int | Keep | None) -> None:
        background.finish()
        self.model, self.path = model, location_of(path)
        self.storage = storage_of(self.path)
        self.step = whole_number(step, "step", "the number of optimizer steps done, 0 or more", 0)
        self.keep = keep_of(keep)
        self.group = ranks()
        self.stages = [0] * self.group.world
        self._writer: Writer | None = None  # of rank 0

    def arrive(self, call: str, pp: DeviceMesh | None) -> None:
        """All ranks have come; of a pipeline's, which stage each has is known."""
        call += "" if pp is None else ", of a pipeline with pp="
        self.group.arrive(call)
        if pp is not None:
            self.stages = self.group.together(call, pp.get_local_rank)

    @property
    def first(self) -> int:
        """The first rank of this one's stage."""
        return self.stages.index(self.stages[self.group.rank])

    def run(self, snapshot: Snapshot, pace: background.Pace | None = None) -> Location:
        """Every rank writes its pieces, rank 0 publishes. pace: of a save in the background."""
        group, what = self.group, f"saving step {self.step} to {self.path}"
        common = snapshot.of_all
        described = {**common.described(), "path": str(self.path)}
        with contextlib.ExitStack() as stack:
            begun = group.together(what, lambda: self._begin(stack, snapshot, hash_of(described)))
            attempt: Any = begun[0][0]
            stack.callback(self.storage.discard, attempt)
            prints = [fingerprint for _, fingerprint, _ in begun]
            if len({*zip(self.stages, prints, strict=True)}) > len({*self.stages}):
                empty = {k for k, part in snapshot.parts.items() if part.sharded and not part.local.numel()}
                compared = group.together(what, lambda: (described, empty))
                for stage in sorted({*self.stages}):
                    ranks_of = [rank for rank, each in enumerate(self.stages) if each == stage]
                    if len({prints[rank] for rank in ranks_of}) > 1:
                        _raise_difference(what, {rank: compared[rank] for rank in ranks_of})
            told = [common.told()]
            if any(self.stages):
                is_first = group.rank == self.first
                of_ranks = group.together(what, lambda: told[0] if is_first else ({}, {}))
                told = [of_ranks[self.stages.index(stage)] for stage in sorted({*self.stages})]
            owned: Sequence[Told] = ()
            if any(owns for _, _, owns in begun):
                owned = group.together(what, snapshot.told_of_owned)
            written = group.together(what, lambda: self._write_pieces(snapshot, attempt, pace))
            diverged = _diverged(written)
            group.together(what, lambda: self._publish(told, owned, written, [*diverged]))
            with contextlib.suppress(OSError):  # it is published; a copy is fetched where it is needed
                self.storage.keep(attempt, self.storage.scratch(attempt) / written[group.rank].file)
        if diverged and group.rank == 0:
            warn(
                f"{len(diverged)} tensors that should be equal on all ranks are not; one copy was saved: "
                + ", ".join(f"{key} ({which})" for key, which in [*diverged.items()][:5]),
            )
        return step_folder(self.path, self.step)

    def _begin(
        self, stack: contextlib.ExitStack, snapshot: Snapshot, fingerprint: int
    ) -> tuple[Unpublished | None, int, bool]:
        """Return where to write, on rank 0; on each rank, what it is about to write, and whether it alone has
        some of that."""
        if snapshot.fault:
            raise CheckpointError(snapshot.fault)
        owns = bool(snapshot.owned)
        if self.group.rank:
            return None, fingerprint, owns
        self._writer = Writer(self.path, self.step, line_of(self.model, self.path))
        stack.callback(self._writer.close)
        return self._writer.attempt, fingerprint, owns

    def _write_pieces(
        self, snapshot: Snapshot, attempt: Unpublished, pace: background.Pace | None
    ) -> Written:
        items = [
            Item(key, view, box, number)
            for key, part in {**snapshot.parts, **snapshot.rng_parts}.items()
            if part.owner
            for number, (box, view) in enumerate(part.views())
        ]
        file = self.storage.scratch(attempt) / f"shard-{self.group.rank:05d}{attempt.tag}.safetensors"
        pieces, nbytes = write_shard(file, items, pace)
        for key, piece in ((key, piece) for key, found in pieces.items() for piece in found):
            if snapshot.crcs.get((key, piece.offset), piece.crc32) != piece.crc32:
                raise CheckpointError(
                    f"{key} at {list(piece.offset)} of rank {self.group.rank} changed in the memory of "
                    f"{platform.node()} between async_save(step={self.step}) and its file, by its CRC-32: "
                    "that memory is damaged, or something writes to it. Nothing is published: save again, "
                    "without that host where it happens again"
                )
        self.storage.send(attempt, file)
        copies = _crcs(snapshot.parts, owned=False)
        rng = snapshot.rng_parts.items()
        entries = {k: TensorEntry(p.shape, DTYPE_NAME[p.local.dtype], tuple(pieces[k])) for k, p in rng}
        return Written(file.name, nbytes, pieces, copies, snapshot.rng, entries)

    def _publish(
        self, told: Sequence[Told], owned: Sequence[Told], written: Sequence[Written], diverged: list[str]
    ) -> None:
        if self._writer is None:  # not on rank 0
            return
        line = self._writer.line
        about = {"diverged": diverged, "line": line.state()}
        manifest = _merge(told, owned, written, self.step, about)
        prove(manifest)
        self._writer.publish(dumps(manifest))
        if self.keep:
            self._writer.prune(self.keep)
        saved(self.model, self._writer.continued())


def hash_of(described: Mapping[str, str]) -> int:
    """A checksum of a description, to compare it across ranks in one integer."""
    return crc32("\n".join(f"{k}={v}" for k, v in sorted(described.items())).encode(errors="surrogatepass"))


def _raise_difference(what: str, compared: Mapping[int, tuple[Mapping[str, str], set[str]]]) -> None:
    """Name what differs, by rank. A rank that holds nothing of a tensor can't know of which subclass the
    others' parts are: what it says of that doesn't count."""
    lines = []
    own = min(compared)
    for key in sorted({key for described, _ in compared.values() for key in described}):
        texts = {rank: described.get(key, "absent") for rank, (described, _) in compared.items()}
        others = [
            rank
            for rank, (_, empty) in compared.items()
            if texts[rank] != texts[own] and not {key, key.rpartition(".")[0]} & empty
        ]
        if others:
            first, other = _shortened(texts[own], texts[others[0]])
            more = " (and others)" if others[1:] else ""
            lines.append(f"{key}: {first} on rank {own}, {other} on rank {others[0]}{more}")
    if not lines:
        return
    raise CheckpointError(
        f"{what}: the ranks hold different state\n  "
        + "\n  ".join(lines[:20] + [f"and {len(lines) - 20} more"] * (len(lines) > 20))
        + "\nGive all ranks the same path, model, optimizer (by group) and extra: where they have computed "
        "a value each, take one rank's (torch.distributed.broadcast_object_list), the mean, or a list of "
        "all (all_gather_object). Where an optimizer's class of state depends on the size of a rank's part, "
        "use a number of ranks that divides the rows"
    )


def _shortened(*texts: str) -> list[str]:
    """80 characters, of which the 31st is the first that differs."""
    same = next((i for i, each in enumerate(zip(*texts, strict=False)) if len({*each}) > 1), 0)
    at = max(0, same - 30)
    return [("…" if at else "") + text[at : at + 80] + ("…" if text[at + 80 :] else "") for text in texts]


def crc32_of(box: Box, view: torch.Tensor) -> int:
    """The CRC-32 of what this rank holds, as if it were one piece."""
    return crc32_in_chunks(box, box, view.element_size(), bits_in_chunks(view, box))


def _crcs(parts: Mapping[str, Part], owned: bool) -> dict[tuple[str, tuple[int, ...]], int]:
    """The CRC-32 of each piece that this rank writes, or that another rank does, by key and offset."""
    return {
        (key, box.offset): crc32_of(box, view)
        for key, part in parts.items()
        if part.owner is owned
        for box, view in part.views()
    }


def _diverged(written: Sequence[Written]) -> dict[str, str]:
    """The tensors of which ranks hold other copies, and which two ranks."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    found: dict[str, str] = {}
    for rank, w in enumerate(written):
        held = [((key, p.offset), p.crc32) for key, pieces in w.pieces.items() for p in pieces]
        for (key, at), crc in [*held, *w.copies.items()]:
            other, expected = first.setdefault((key, at), (rank, crc))
            if crc != expected:
                found.setdefault(key, f"ranks {other} and {rank}")
    return dict(sorted(found.items()))


def _pieces(key: str, written: Sequence[Written]) -> tuple[Piece, ...]:
    """In order. What several ranks have written is taken of the first: a parameter that is sharded on one
    axis of a mesh, and not on the other, has an owner in each row of that mesh."""
    found = {(p.offset, p.shape): p for w in reversed(written) for p in w.pieces.get(key, ())}
    return tuple(sorted(found.values(), key=lambda p: p.offset))


def _merge(
    told: Sequence[Told],
    owned: Sequence[Told],
    written: Sequence[Written],
    step: int,
    about: Mapping[str, Any],
) -> Manifest:
    tensors = {
        key: replace(entry, pieces=_pieces(key, written))
        for found, _ in (*told, *owned)
        for key, entry in found.items()
    }
    for w in written:
        tensors.update(w.rng_entries)
    whole = _of_all_stages([state for _, state in told])
    for _, own in owned:
        for group, names in zip(whole["optimizer"]["groups"], own["groups"], strict=True):
            group["params"] = [*dict.fromkeys([*group["params"], *names])]  # of copies, several ranks own it
        whole["optimizer"]["state"].update(own["state"])
    state = {**whole, "rng": [w.rng for w in written], **about}
    by = {"torch": torch.__version__, "python": platform.python_version(), "num_writers": len(written)}
    return Manifest(step, tensors, {w.file: w.nbytes for w in written}, state, by)


def _of_all_stages(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The small state of a whole model. Raises: CheckpointError where stages differ in what all have."""

    def same(state: dict[str, Any]) -> dict[str, Any]:
        optimizer = state.get("optimizer", {})
        groups = [{**group, "params": []} for group in optimizer.get("groups", ())]
        return {**state, "model": {}, "optimizer": [optimizer.get("kind"), groups]}

    first, *others = map(same, states)
    for stage, other in enumerate(others, 1):
        if differs := sorted(k for k in {*first, *other} if first.get(k) != other.get(k)):
            raise CheckpointError(
                f"stage {stage} of the pipeline has another {' and '.join(differs)} than stage 0; give all "
                "the same extra, the same kind of optimizer, and groups with the same options"
            )
    whole = {**states[0], "model": {name: value for each in states for name, value in each["model"].items()}}
    if "optimizer" in whole:
        optimizers = [state["optimizer"] for state in states]
        groups = [
            {**group[0], "params": [name for each in group for name in each["params"]]}
            for group in zip(*(each["groups"] for each in optimizers), strict=True)
        ]
        state = {name: value for each in optimizers for name, value in each["state"].items()}
        whole["optimizer"] = {**optimizers[0], "groups": groups, "state": state}
    return whole
