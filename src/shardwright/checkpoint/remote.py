"""Checkpoints in an object store, which has no rename and no fsync, and whose one atomic act is a put.

    s3://bucket/run/
        step-000200/shard-00000-7d2e41.safetensors    put first, under names that no other save uses
                    shard-00001-7d2e41.safetensors
                    manifest.json                     put last, and never replaced: from here on it exists
        latest                                        put after it; names it
        .lock                                         while somebody saves (``Lease``)

A folder without a manifest is no checkpoint, to anybody. As each save has its own names, a writer that was
thought to be dead can't change what another has published, and its own manifest is refused.

Each rank writes its file on this host first, then uploads it; once it is published the file stays, as the
copy that a load finds (``ObjectStore.fetch``). A copy counts by what the store says of the object, and its
bytes are verified like any others; copies of older checkpoints are removed.
"""

import json
import os
import shutil
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from shardwright import clock
from shardwright.checkpoint.format import MANIFEST
from shardwright.checkpoint.storage import LATEST, LOCK, TORN, Held, Storage, Unpublished, this_process
from shardwright.checkpoint.url import ObjectStore, RemotePath, cached, forget
from shardwright.errors import StorageError

BEAT_S = 5.0
LOST_S = 20.0
_LOOK_S = 0.5


class Lease:
    """The lock of ``path``, held from here on, until ``close`` or the end of this process: an object
    ``.lock`` that its holder rewrites.

        take     put new; it is there: look at it for LOST_S. It changes: it is held. Else its holder has
                 ended, however it ended: replace it
        hold     rewrite it every BEAT_S, unless another has replaced it
        close    remove it

    No clock is compared with another host's. That two hold it at once takes a holder that stood still for
    LOST_S and goes on, or a store without "put new": so nothing that is published depends on it. It says who
    else writes, and whose leftovers may be removed.

    Raises: Held, if another process holds it; OSError, if the object can't be put. Waits up to ``LOST_S``
    where a process that was killed has left one.
    """

    def __init__(self, store: ObjectStore, path: RemotePath) -> None:
        self._store = store
        self._object = path / LOCK
        self._token = uuid.uuid4().hex
        self._beats = 0
        self._closed = threading.Event()
        while not store.put_new(self._object, self._text()):
            self._wait_for_its_end()
        self._thread = threading.Thread(target=self._beat, name="shardwright-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises: StorageError if another process has taken it, because this one stood still."""
        if self._token_there() != self._token:
            raise StorageError(
                f"{self._object}: another process writes here now, as this one stood still for {LOST_S:g} s"
            )

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            with suppress(OSError):  # left behind, it is nobody's after LOST_S
                if self._token_there() == self._token:
                    self._store.remove(self._object)

    def _text(self) -> bytes:
        said = {"holder": this_process(), "token": self._token, "beats": self._beats}
        return json.dumps(said).encode()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            with suppress(OSError):  # a store that can't be reached now may be at the next beat
                if self._token_there() != self._token:
                    return
                self._beats += 1
                self._store.put(self._object, self._text())

    def _wait_for_its_end(self) -> None:
        first, began = self._read(), clock.monotonic()
        while clock.monotonic() - began < LOST_S:
            clock.sleep(_LOOK_S)
            now = self._read()
            if not now:
                return
            if now != first:
                raise Held(_said(now).get("holder", "unknown"))
        self._store.remove(self._object)

    def _read(self) -> bytes:
        try:
            return self._store.read(self._object)
        except FileNotFoundError:
            return b""

    def _token_there(self) -> str:
        return _said(self._read()).get("token", "")


def _said(text: bytes) -> dict[str, str]:
    try:
        return json.loads(text)
    except ValueError:
        return {}


class RemoteStorage(Storage):
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
