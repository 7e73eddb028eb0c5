"""One rank's side of ``tcp://``: receivers connect and ask, and get what brings them to the newest version.

Nothing is sent that wasn't asked for, so that a receiver that is slow, stopped or dead holds no queue: one
message is on its way to it at most. Each has a thread, which waits for its socket; training waits for none.
"""

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright import clock
from shardwright.checkpoint.background import yield_to_training
from shardwright.errors import warn
from shardwright.publishing import frames
from shardwright.publishing.destination import Destination
from shardwright.publishing.frames import Frame, Refused
from shardwright.publishing.versions import Message, Versions
from shardwright.transport.process import start_thread

STALLED_S = 60.0
"""A receiver that takes no byte of a message for so long is let go."""
_GREETING_S = 5.0
_ALIVE_S = 1.0
_LOOK_S = 0.25
_MOST = 256  # receivers of a rank, strangers who have said nothing among them


class Server(Destination):
    """See ``Destination``: listens at ``listener``. changed: the publisher's lock, notified of requests.

    layout: what receivers are told of the publisher; rank 0 tells of all ranks.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, layout: Mapping[str, Any], changed: threading.Condition
    ) -> None:
        self._listener, self._secret, self._changed = listener, secret, changed
        self._layout = json.dumps(layout).encode()
        self._versions = Versions()
        self._have: dict[socket.socket, int] = {}
        self._wants_full = self._is_ending = False
        self._thread = start_thread("shardwright-publish-listen", self._listen)

    def is_due(self, number: int) -> bool:
        """See ``Destination``: where anybody is connected."""
        return number > self._versions.number and bool(self._have)

    def take(self, number: int, pieces: Sequence[torch.Tensor]) -> None:
        """See ``Destination``: code what has changed."""
        last = self._versions.number
        with self._changed:
            # Or somebody is about to get the whole of it, and goes on from there.
            wanted = last > 0 and (last in self._have.values() or self._versions.full is not None)
        self._versions.take(number, pieces, wanted)

    def has_more(self) -> bool:
        """See ``Destination``."""
        return self._wants_full and self._versions.number > 0

    def do_more(self) -> None:
        """See ``Destination``: make the message of a whole version."""
        self._wants_full = False
        self._versions.make_full()

    @property
    def nbytes(self) -> int:
        """See ``Destination``."""
        return self._versions.nbytes

    def close(self, timeout: float) -> None:
        """See ``Destination``."""
        deadline = clock.monotonic() + timeout
        with self._changed:
            while any(have < self._versions.number for have in self._have.values()):
                if clock.monotonic() > deadline:
                    break
                clock.wait(self._changed, _LOOK_S)
            self._is_ending = True
            self._changed.notify_all()
        self._thread.join()
        while self._have and clock.monotonic() < deadline + 2 * _LOOK_S:
            clock.sleep(0.01)

    # ---- threads

    def _listen(self) -> None:
        yield_to_training()
        with self._listener:
            while not self._is_ending:
                if not frames.is_readable(self._listener, _LOOK_S):
                    continue
                try:
                    sock, peer = self._listener.accept()
                except OSError:
                    continue
                if threading.active_count() > _MOST:
                    sock.close()
                    continue
                start_thread("shardwright-publish-to", self._serve, sock, "{}:{}".format(*peer[:2]))

    def _serve(self, sock: socket.socket, peer: str) -> None:
        with sock:
            try:
                sock.settimeout(_GREETING_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                frames.admit(sock, self._secret)
                sock.settimeout(STALLED_S)
                frames.send(sock, Frame(frames.LAYOUT), self._layout)
                with self._changed:
                    self._have[sock] = 0
                    self._changed.notify_all()
                while self._answer(sock, peer):
                    pass
            except Refused as error:
                warn(f"the publisher sends nothing to {peer}: {error}")
            except TimeoutError:
                warn(f"the receiver at {peer} took nothing for {STALLED_S:g} s, and was let go")
            except OSError as error:
                if self._have.get(sock):
                    warn(f"the receiver at {peer} has gone ({error.strerror or error}); training goes on")
            finally:
                with self._changed:
                    self._have.pop(sock, None)
                    self._changed.notify_all()

    def _answer(self, sock: socket.socket, peer: str) -> bool:
        """Answer one request; False where there is no further one."""
        while not frames.is_readable(sock, _LOOK_S):
            if self._is_ending:
                frames.send(sock, Frame(frames.END))
                return False
        asked = frames.receive(sock)
        if asked.kind == frames.END:
            return False
        with self._changed:
            self._have[sock] = asked.version
            self._changed.notify_all()
        answer = self._found(sock, asked, peer)
        if isinstance(answer, Message):
            newest = max(self._versions.number, answer.version)
            frames.send(sock, Frame(frames.VERSION, answer.version, answer.base, newest))
            for piece in answer.pieces:
                frames.send(sock, Frame(frames.PIECE, answer.version, answer.base), piece)
            with self._changed:
                self._have[sock] = answer.version
                if self._versions.full is answer:
                    self._versions.full = None  # whoever needs one next has it made
                self._changed.notify_all()
        else:
            frames.send(sock, Frame(answer))
        return answer != frames.END

    def _found(self, sock: socket.socket, asked: Frame, peer: str) -> Message | bytes:
        """What a request gets, when that is there; the receiver hears meanwhile that this rank is alive."""
        began = said = clock.monotonic()
        while True:
            with self._changed:
                is_new = self._versions.number > asked.version
                if is_new and (message := self._versions.next_for(asked.version, asked.base)) is not None:
                    break
                if is_new and not self._wants_full:
                    self._wants_full = True
                    self._changed.notify_all()
                if not is_new and self._is_ending:
                    return frames.END
                if not is_new and clock.monotonic() >= began + asked.newest / 1000:
                    return frames.NOTHING
                clock.wait(self._changed, _LOOK_S)
            if clock.monotonic() > said + _ALIVE_S:
                said = clock.monotonic()
                frames.send(sock, Frame(frames.ALIVE))
        if asked.version and not message.base:
            warn(
                f"the receiver at {peer} has version {asked.version}, and what has changed since isn't kept "
                f"any more: it gets the whole of version {message.version}"
            )
        return message
