"""Checkpoints in an object store, which has no rename and no fsync, and whose one atomic act is a put.

    s3://bucket/run/
        step-000200/shard-00000-7d2e41.safetensors    put first, under names that no other save uses
                    shard-00001-7d2e41.safetensors
                    manifest.json                     put last, and never replaced: from here on it exists
        latest                                        put after it; names it
        .lock                                         while somebody saves (``lease``)

A folder without a manifest is no checkpoint, to anybody. As each save has its own names, a writer that was
thought to be dead can't change what another has published, and its own manifest is refused.

Each rank writes its file on this host first, then uploads it; once it is published the file stays, as the
copy that a load finds (``ObjectStore.fetch``). A copy counts by what the store says of the object, and its
bytes are verified like any others; copies of older checkpoints are removed.
"""

import os
import shutil
import uuid
from pathlib import Path

from shardwright.checkpoint.format import MANIFEST
from shardwright.checkpoint.lease import Lease
from shardwright.checkpoint.storage import LATEST, TORN, Unpublished
from shardwright.storage import ObjectStore, RemotePath, cached, forget


class RemoteStorage:
    """See ``Storage``: objects below ``root``, through fsspec."""

    copies = True

    def __init__(self, root: RemotePath) -> None:
        self._store = ObjectStore(root)

    def check(self, path: RemotePath, write: bool) -> None:
        """See ``Storage``. Raises: StorageError, saying what is missing; Held, if another process saves."""
        self._store.objects(path)
        if write:
            self.lock(path).close()

    def lock(self, path: RemotePath) -> Lease:
        """See ``Storage``."""
        return Lease(self._store, path)

    def names(self, path: RemotePath) -> list[str]:
        """See ``Storage``: those with a manifest."""
        parts = [name.split("/") for name in self._store.objects(path)]
        return sorted(folder[0] for folder in parts if folder[1:] == [MANIFEST])

    def sizes(self, folder: RemotePath) -> dict[str, int]:
        """See ``Storage``."""
        return self._store.objects(folder)

    def read_text(self, file: RemotePath) -> str:
        """See ``Storage``."""
        return self._store.read(file).decode()

    def readable(self, file: RemotePath) -> Path:
        """See ``Storage``: the copy in the cache, downloaded if it isn't there."""
        return self._store.fetch(file)

    def forget(self, folder: RemotePath) -> None:
        """See ``Storage``."""
        forget(folder)

    def leftovers(self, path: RemotePath) -> list[RemotePath]:
        """See ``Storage``: what is called a checkpoint and has no manifest."""
        objects = self._store.objects(path)
        folders = {name.split("/")[0] for name in objects if "/" in name and name.startswith("step-")}
        return [path / name for name in sorted(folders) if f"{name}/{MANIFEST}" not in objects]

    def begin(self, final: RemotePath) -> Unpublished:
        """See ``Storage``."""
        return Unpublished(final, final, f"-{uuid.uuid4().hex[:12]}")

    def scratch(self, attempt: Unpublished) -> Path:
        """See ``Storage``: in the cache, where a writer that was killed may have left its own."""
        run = cached(attempt.final.parent)
        for left in run.glob(f"{TORN}*"):
            if attempt.tag not in left.name:
                shutil.rmtree(left, ignore_errors=True)
        own = self._scratch(attempt)
        own.mkdir(parents=True, exist_ok=True)
        return own

    def _scratch(self, attempt: Unpublished) -> Path:
        return cached(attempt.final.parent) / f"{TORN}{os.getpid()}{attempt.tag}"

    def send(self, attempt: Unpublished, file: Path) -> None:
        """See ``Storage``: uploads it."""
        self._store.upload(file, attempt.at / file.name)

    def publish(self, attempt: Unpublished, manifest_text: str) -> None:
        """See ``Storage``."""
        manifest, text = attempt.final / MANIFEST, manifest_text.encode()
        # A request that was answered too late is sent again, and then refused on account of the first.
        if not self._store.put_new(manifest, text) and self._store.read(manifest) != text:
            raise FileExistsError(f"{manifest} has come to exist; nothing was overwritten")

    def keep(self, attempt: Unpublished, file: Path) -> None:
        """See ``Storage``: the older ones are not."""
        self._store.keep(file, attempt.final / file.name)
        for other in cached(attempt.final.parent).glob("step-*"):
            if other.name != attempt.final.name:
                shutil.rmtree(other, ignore_errors=True)

    def discard(self, attempt: Unpublished) -> None:
        """See ``Storage``."""
        shutil.rmtree(self._scratch(attempt), ignore_errors=True)

    def abandon(self, attempt: Unpublished) -> None:
        """See ``Storage``."""
        objects = self._store.objects(attempt.at)
        for name in objects if MANIFEST not in objects else ():
            if attempt.tag in name:
                self._store.remove(attempt.at / name)

    def name_latest(self, path: RemotePath, name: str) -> None:
        """See ``Storage``."""
        self._store.put(path / LATEST, f"{name}\n".encode())

    def move(self, folder: RemotePath, to: RemotePath) -> None:
        """See ``Storage``: copies inside of the store, the manifest last."""
        for name in sorted(self._store.objects(folder), key=lambda name: name == MANIFEST):
            self._store.copy(folder / name, to / name)
        self.remove(folder)

    def remove(self, what: RemotePath) -> None:
        """See ``Storage``: the manifest first."""
        for name in sorted(self._store.objects(what), key=lambda name: name != MANIFEST):
            self._store.remove(what / name)
        forget(what)
