"""The lock of a folder of objects, where there is no ``flock``: an object ``.lock`` that its holder rewrites.

    take     put new; it is there: look at it for LOST_S. It changes: it is held. Else its holder has ended,
             however it ended: replace it
    hold     rewrite it every BEAT_S, unless another has replaced it
    close    remove it

No clock is compared with another host's. That two hold it at once takes a holder that stood still for LOST_S
and goes on, or a store without "put new": so nothing that is published depends on it (see ``remote``). It
says who else writes, and whose leftovers may be removed.
"""

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress

from shardwright.checkpoint.lock import LOCK, Held
from shardwright.errors import StorageError
from shardwright.storage import ObjectStore, RemotePath

BEAT_S = 5.0
LOST_S = 20.0
_LOOK_S = 0.5


class Lease:
    """The lock of ``path``, held from here on, until ``close`` or the end of this process.

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
        said = {
            "holder": f"pid {os.getpid()} on {socket.gethostname()}",
            "token": self._token,
            "beats": self._beats,
        }
        return json.dumps(said).encode()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            with suppress(OSError):  # a store that can't be reached now may be at the next beat
                if self._token_there() != self._token:
                    return
                self._beats += 1
                self._store.put(self._object, self._text())

    def _wait_for_its_end(self) -> None:
        first, began = self._read(), time.monotonic()
        while time.monotonic() - began < LOST_S:
            time.sleep(_LOOK_S)
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
