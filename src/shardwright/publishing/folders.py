"""Versions as folders: on a file system, in a bucket, or in shared memory, which is a folder in /dev/shm.

    runs/weights/step-000007/   model-00001-of-00002.safetensors   whole tensors, by rank 0
                                model-00002-of-00002.safetensors   others, by rank 1
                                model.safetensors.index.json       which is where
                                config.json                        of a model of transformers
                                manifest.json                      as a checkpoint has it, last: CRC-32s

Of each file one rank has one tensor at a time whole; other ranks send it their pieces, in one order. The
folder is a checkpoint of the model alone, with all that holds for one: published at once, verified when it is
read, one writer at a time.
"""

import contextlib
import copy
import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint.agree import Ranks
from shardwright.checkpoint.folder import step_folders, storage_of
from shardwright.checkpoint.format import ITEM_NBYTES, Box, Manifest, Piece, TensorEntry, dumps, prove
from shardwright.checkpoint.shardfile import TORCH_DTYPE, by_file, bytes_of, header_of, write_whole
from shardwright.checkpoint.storage import Unpublished, sync_folder
from shardwright.checkpoint.url import Location, location_of
from shardwright.checkpoint.writer import Keep, Writer
from shardwright.checksum import crc32
from shardwright.errors import CheckpointError, InputError
from shardwright.module import original_class
from shardwright.publishing.destination import Destination
from shardwright.publishing.shards import Layout
from shardwright.transport.attempt import new_group
from shardwright.transport.process import close

MAX_FILE_NBYTES = 5 * 10**9
GROUP_TIMEOUT = timedelta(seconds=300)  # for one exchange between living ranks
INDEX = "model.safetensors.index.json"
ORDER = "published"
"""Of a manifest's state: its tensors, in the model's order."""
_MEMORY = Path("/dev/shm")


def location_at(address: str | PurePath) -> Location:
    """The folder of an address. Raises: InputError."""
    name = str(address).removeprefix("shm://")
    if name == str(address):
        return location_of(address)
    if not name or "/" in name or not _MEMORY.is_dir():
        raise InputError(
            f"the address is {address!s}, expected shm://NAME without a slash, where /dev/shm is"
        )
    return _MEMORY / f"shardwright-{name}"


def config_of(model: nn.Module) -> Any:
    """The configuration of a model of transformers, to be written beside weights; None of any other."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "save_pretrained"):
        return None
    config.architectures = [original_class(type(model)).__name__]
    return config


class Folder(Destination):
    """See ``Destination``: subfolders of ``path``. number: the newest version that is there already."""

    takes_each = True

    def __init__(self, path: Location, group: Ranks, layout: Layout, keep: int, config: Any) -> None:
        self.address, self._path = str(path), path
        self._group, self._layout, self._keep, self._config = group, layout, Keep(keep), config
        self._is_memory = isinstance(path, Path) and path.parent == _MEMORY
        (self.number, host), *others = group.together("publish()", self._begin)
        if self._is_memory and (far := [name for _, name in others if name != host]):
            raise InputError(
                f"{path}: ranks are on {host} and {far[0]}, and share no memory; publish to tcp://"
            )
        self._files = _files_of(layout.entries, group.world)
        self._senders: dict[str, list[tuple[int, Box]]] = {name: [] for name in layout.entries}
        for rank, held in enumerate(layout.held):
            for name, box in held:
                self._senders[name].append((rank, box))
        # Beside that of `together`, which goes on while pieces are sent.
        self._pieces = None if group.world == 1 else new_group(range(group.world), "gloo", GROUP_TIMEOUT)

    def _begin(self) -> tuple[int, str]:
        storage, number = storage_of(self._path), 0
        if self._group.rank == 0:
            storage.check(self._path, write=True)
            with contextlib.suppress(FileNotFoundError):
                number = max((step for step, _ in step_folders(self._path)), default=0)
        return number, platform.node()

    def is_due(self, number: int) -> bool:
        """See ``Destination``."""
        return number > self.number

    def take(self, number: int, pieces: Sequence[torch.Tensor]) -> None:
        """See ``Destination``: every rank's thread, together."""
        group, what = self._group, f"publishing version {number} to {self._path}"
        storage = storage_of(self._path)
        with contextlib.ExitStack() as stack:
            writer: Writer | None = None

            def begin() -> Unpublished | None:
                nonlocal writer
                if group.rank == 0:
                    writer = Writer(self._path, number)
                    stack.callback(writer.close)
                return writer and writer.attempt

            attempt: Any = group.together(what, begin)[0]
            stack.callback(storage.discard, attempt)
            written = group.together(what, lambda: self._write(attempt, pieces))

            def finish() -> None:
                if writer is not None:
                    self._publish(writer, number, dict(each for own in written for each in own))

            group.together(what, finish)
        self.number = number

    def close(self, timeout: float) -> None:
        """See ``Destination``: shared memory is freed."""
        if self._is_memory and self._group.rank == 0:
            shutil.rmtree(str(self._path), ignore_errors=True)

    def _write(self, attempt: Unpublished, pieces: Sequence[torch.Tensor]) -> list[tuple[str, Any]]:
        """Write this rank's files; what is in them: ``(name, Piece)``, and ``(file, bytes)`` of each."""
        storage, found = storage_of(self._path), list[tuple[str, Any]]()
        try:
            for number, names in enumerate(self._files):
                wholes = self._wholes(names, number % self._group.world, pieces)
                if number % self._group.world != self._group.rank:
                    for _ in wholes:
                        pass
                    continue
                name = f"model-{number + 1:05d}-of-{len(self._files):05d}{attempt.tag}.safetensors"
                file = storage.scratch(attempt) / name
                found += _write_file(file, names, self._layout.entries, wholes)
                storage.send(attempt, file)
        except BaseException:
            if self._pieces is not None:
                close(self._pieces)  # others wait for pieces that don't come
            raise
        return found

    def _wholes(self, names: Sequence[str], writer: int, pieces: Sequence[torch.Tensor]) -> Iterator[Any]:
        """Each tensor whole on the rank that writes it; all ranks iterate, which send their pieces."""
        rank, layout = self._group.rank, self._layout
        own = dict(zip(layout.held[rank], pieces, strict=True))
        for name in names:
            entry = layout.entries[name]
            whole = torch.empty(entry.shape, dtype=TORCH_DTYPE[entry.dtype]) if rank == writer else None
            for sender, box in self._senders[name]:
                if rank == sender != writer:
                    dist.send(_flat(own[name, box]), writer, group=self._pieces)
                elif whole is not None:
                    part = own[name, box] if rank == sender else torch.empty(box.shape, dtype=whole.dtype)
                    if rank != sender:
                        dist.recv(_flat(part), sender, group=self._pieces)
                    whole[box.slices_in(Box.whole(entry.shape))] = part
            yield whole

    def _publish(self, writer: Writer, number: int, written: Mapping[str, Any]) -> None:
        """What rank 0 does when all files are there."""
        storage, attempt = storage_of(self._path), writer.attempt
        place = storage.scratch(attempt)
        files = {name: size for name, size in written.items() if isinstance(size, int)}
        tensors = {
            f"model/{name}": replace(
                entry,
                pieces=(written[f"model/{name}"],) if entry.numel else (),
                aliases=tuple(f"model/{alias}" for alias in entry.aliases),
            )
            for name, entry in self._layout.entries.items()
        }
        where = {name: written[f"model/{name}"].file for name in self._layout.entries}
        nbytes = sum(entry.nbytes for entry in tensors.values())
        index = {"metadata": {"total_size": nbytes, "version": number}, "weight_map": where}
        (place / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        if self._config is not None:
            self._config.save_pretrained(place)
        for file in (place / name for name in (INDEX, "config.json")):
            if file.exists():
                sync_folder(file)
                files[file.name] = file.stat().st_size
                storage.send(attempt, file)
        state = {"model": {}, "rng": [], "line": writer.line.state(), ORDER: [*tensors]}
        manifest = Manifest(number, tensors, files, state)
        prove(manifest)
        writer.publish(dumps(manifest))
        writer.prune(self._keep)


def _flat(piece: torch.Tensor) -> torch.Tensor:
    return piece.reshape(-1).view(torch.uint8)


class _Sized(NamedTuple):
    name: str
    nbytes: int


def _files_of(entries: Mapping[str, TensorEntry], world: int) -> list[list[str]]:
    """The tensors of each file: as many files as ranks at least, where tensors are small enough."""
    sized = [_Sized(name, entry.nbytes) for name, entry in entries.items()]
    most = min(MAX_FILE_NBYTES, -(-sum(each.nbytes for each in sized) // world))
    files = [[each.name for each in found] for found in by_file(sized, most).values()]
    # So that every tensor is aligned to its items.
    return [sorted(names, key=lambda n: -ITEM_NBYTES[entries[n].dtype]) for names in files]


def _write_file(
    file: Path, names: Sequence[str], entries: Mapping[str, TensorEntry], wholes: Iterator[torch.Tensor]
) -> list[tuple[str, Any]]:
    """Write tensors, with the checksum of each; what ``Folder._write`` returns of a file."""
    described = [(name, entries[name].dtype, entries[name].shape, entries[name].nbytes) for name in names]
    found, at = list[tuple[str, Any]](), len(header_of(described))

    def checked() -> Iterator[torch.Tensor]:
        nonlocal at
        for (name, _, shape, nbytes), whole in zip(described, wholes, strict=True):
            crc = crc32(bytes_of(whole).data)
            found.append((f"model/{name}", Piece(file.name, at, nbytes, crc, (0,) * len(shape), shape)))
            at += nbytes
            yield whole

    try:
        write_whole(file, described, checked())
    except OSError as error:
        raise CheckpointError(f"{file}: can't be written: {error.strerror or error}") from error
    return [*found, (file.name, at)]
