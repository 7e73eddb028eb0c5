"""A receiver's side of ``tcp://``: a connection to each rank, and one version of all of them."""

import contextlib
import socket
from collections.abc import Iterator, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from shardwright import clock
from shardwright.checkpoint.format import Box, TensorEntry
from shardwright.checkpoint.shardfile import TORCH_DTYPE
from shardwright.errors import CommError
from shardwright.files import json_object
from shardwright.publishing import frames
from shardwright.publishing.frames import Frame, Refused
from shardwright.publishing.shards import Layout
from shardwright.publishing.versions import Copies, Message
from shardwright.transport.cpu.coder import Damaged
from shardwright.transport.cpu.handshake import connect

SILENT_S = 10.0
"""A rank that says nothing for so long while it is asked has gone."""
_RETRY_S = 0.1


class Ended(Exception):
    """The publisher was closed, and nothing newer comes."""


class Rank:
    """The connection to one rank. Raises: CommError, from whichever method, naming it."""

    def __init__(self, number: int, host: str, port: int, secret: bytes, patience_s: float) -> None:
        self.number, self.where = number, f"rank {number} at {host}:{port}"
        deadline = clock.monotonic() + patience_s
        while True:
            try:
                self._sock = connect((host, port), max(0.1, deadline - clock.monotonic()))
                break
            except OSError as error:
                if clock.monotonic() > deadline:
                    raise CommError(
                        f"{self.where} of the publisher can't be reached in {patience_s:g} s "
                        f"({error.strerror or error}); see whether the trainer runs, and whether this host "
                        "reaches that address"
                    ) from error
                clock.sleep(_RETRY_S)
        try:
            self._sock.settimeout(SILENT_S)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            frames.enter(self._sock, secret)
            frame = frames.receive(self._sock)
            self.layout: dict[str, Any] = json_object(self._body(frame))
        except (OSError, ValueError, Refused) as error:
            self._sock.close()
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> CommError:
        what: Any = error
        if isinstance(error, TimeoutError):
            what = f"it has said nothing for {SILENT_S:g} s, as its host or process stands still"
        return CommError(f"{self.where} of the publisher: {what}; call receive() again where it runs")

    def _body(self, frame: Frame) -> bytes:
        body = bytes(frames.read(self._sock, frame.nbytes))
        if frames.crc32(body) != frame.crc:
            raise Refused(f"{frame.nbytes} bytes are damaged on their way, by their CRC-32")
        return body

    def ask(self, have: int, until: int, wait_s: float, names: list[str]) -> tuple[Message | None, int]:
        """What comes after a version, and the newest one there. None: nothing in that time. Raises: Ended."""
        try:
            if not frames.is_readable(self._sock, 0):  # else it has told that it ends
                frames.send(self._sock, Frame(frames.GET, have, until, int(1000 * wait_s)))
            while (frame := frames.receive(self._sock)).kind == frames.ALIVE:
                pass
            if frame.kind == frames.END:
                raise Ended
            if frame.kind == frames.NOTHING:
                return None, have
            pieces = []
            for name in names:
                try:
                    pieces.append(self._body(frames.receive(self._sock)))
                except Refused as error:
                    raise Refused(f"{name} of version {frame.version}: {error}") from error
            return Message(frame.version, frame.base, pieces), frame.newest
        except (OSError, Refused) as error:
            self._sock.close()
            raise self._lost(error) from error

    def close(self) -> None:
        """Tell it that this receiver ends."""
        with contextlib.suppress(OSError):
            frames.send(self._sock, Frame(frames.END))
        self._sock.close()


class Client:
    """The newest version of all ranks that this receiver has. Raises: CommError."""

    def __init__(self, host: str, port: int, secret: bytes, patience_s: float) -> None:
        self.version = 0
        first = Rank(0, host, port, secret, patience_s)
        self._ranks = [first]
        try:
            told = first.layout
            if "places" not in told:
                raise CommError(f"{first.where} isn't the publisher's rank 0; connect to the address of `to`")
            try:
                self._layout = Layout.heard(told)
            except (KeyError, TypeError, ValueError) as error:
                raise CommError(f"{first.where} is no publisher of this release ({error})") from error
            for number, (at, its) in enumerate(told["places"][1:], 1):
                self._ranks.append(Rank(number, at, its, secret, SILENT_S))
            for rank in self._ranks:
                if rank.layout["token"] != told["token"]:
                    raise CommError(f"{rank.where} is of another publisher; start the receiver anew")
        except BaseException:
            self.close()
            raise
        entries = self._layout.entries
        self._names = [[f"{name} at {list(box.offset)}" for name, box in held] for held in self._layout.held]
        self._copies = [
            Copies([(label, entries[n], box.shape) for label, (n, box) in zip(labels, held, strict=True)])
            for labels, held in zip(self._names, self._layout.held, strict=True)
        ]
        self._pool = ThreadPoolExecutor(len(self._ranks), "shardwright-receive")

    def advance(self, wait_s: float) -> bool:
        """Go to the newest version; False where none has come in that time. Raises: Ended, CommError."""
        pending: list[list[Message]] = [[] for _ in self._ranks]
        until, waits = 0, wait_s
        while True:
            behind = [i for i in range(len(pending)) if not until or self._at(pending[i], i) < until]
            if not behind:
                break
            found = [self._pool.submit(self._collect, i, pending[i], until, waits) for i in behind]
            futures.wait(found)  # also where one has failed: no two ask one rank at once
            came = [each.result() for each in found]
            if not any(came):
                if not until:
                    return False
                raise CommError(
                    f"{self._ranks[behind[0]].where} has no version {until}, which other ranks have sent, "
                    f"for {waits:g} s; see whether all ranks call send(), and call again"
                )
            until, waits = max(self._at(each, i) for i, each in enumerate(pending)), SILENT_S
        self.version = 0  # until all have followed
        try:
            for copies, messages in zip(self._copies, pending, strict=True):
                for message in messages:
                    copies.apply(message)
        except Damaged as error:
            for copies in self._copies:
                copies.number = 0
            raise CommError(f"{error}; nothing of it is used, the next version comes whole") from error
        self.version = until
        return True

    def _at(self, pending: list[Message], i: int) -> int:
        return pending[-1].version if pending else self._copies[i].number

    def _collect(self, i: int, pending: list[Message], until: int, wait_s: float) -> bool:
        """Ask one rank for all that brings it to ``until``, or to its newest version; whether any came."""
        came = False
        while True:
            message, newest = self._ranks[i].ask(self._at(pending, i), until, wait_s, self._names[i])
            if message is None:
                return came
            came = True
            if not message.base:
                pending.clear()
            pending.append(message)
            if message.version >= (until or newest):
                return True

    def entries(self) -> Mapping[str, TensorEntry]:
        """What a version has."""
        return self._layout.entries

    def tensors(self) -> Iterator[tuple[str, TensorEntry, torch.Tensor]]:
        """Each tensor of the version, in memory of its own."""
        found: dict[str, list[tuple[Box, Any]]] = {name: [] for name in self._layout.entries}
        for held, copies in zip(self._layout.held, self._copies, strict=True):
            for (name, box), words in zip(held, copies.words(), strict=True):
                found[name].append((box, words))
        for name, entry in self._layout.entries.items():
            whole = torch.empty(entry.shape, dtype=TORCH_DTYPE[entry.dtype])
            for box, words in found[name]:
                part = torch.from_numpy(words).view(whole.dtype).view(box.shape)
                whole[box.slices_in(Box.whole(entry.shape))] = part
            yield name, entry, whole

    def close(self) -> None:
        """End all connections."""
        for rank in self._ranks:
            rank.close()
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=False)
