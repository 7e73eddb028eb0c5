"""TCP connections between ranks of several hosts, and the messages of collectives on them.

    caller       Connection.send(parts) / .receive(places)  ->  EventLoop.go()  ...  Transfer.wait_received()
    event loop   Connection.move(events): sendmsg / recvmsg_into, from and into the tensors' own memory

A message (``transport/cpu/message.py``) is all that one collective has for one peer, gathered and scattered
by the kernel, so that nothing is packed. A coded one is queued before it is there, so that messages keep
their order, and decoded by a thread of its own.
"""

import contextlib
import itertools
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright import clock
from shardwright.transport.cpu import handshake
from shardwright.transport.cpu.coder import Damaged
from shardwright.transport.cpu.message import (
    CODED,
    FAILURE,
    HEAD_NBYTES,
    NOT_SUMMED,
    WHOLE,
    failure_message,
    read_head,
    resembles,
    text_of,
)
from shardwright.transport.cpu.pages import take_bytes
from shardwright.transport.cpu.transfer import LOOK_S, CollectiveFailure, Endpoint, Transfer
from shardwright.transport.cpu.views import RUN, crc32_of, skip, view_of, views_of
from shardwright.transport.differences import Kept

TEXT_NBYTES = 4096  # at most, of such a message


@dataclass
class Incoming:
    """A message that is expected, or that arrives before it is.

    views: the places that are still to be filled. memory: what lies behind them, where the event loop
    took it.
    runs: the table that is to be filled first, where the message has one.
    kept, code, places: of a coded message what is kept of each part, its memory, and where it is decoded to.
    transfer: who waits for it; None until the own rank comes to that collective.
    text: word of a failure from that collective on, which nobody waits for.
    crc, sent_nbytes: what its head says of all that follows. found_crc: of what has followed so far.
    took_s: seconds from its head to its end; while it arrives, less the time of its end.
    """

    number: int
    nbytes: int
    key: str
    views: deque[memoryview]
    memory: torch.Tensor | None = None
    runs: bytearray | None = None
    kept: Sequence[Kept | None] = ()
    code: torch.Tensor | None = None
    places: deque[memoryview] = field(default_factory=deque)
    transfer: Transfer | None = None
    text: bytearray | None = None
    crc: int = NOT_SUMMED
    sent_nbytes: int = 0
    found_crc: int = 0
    took_s: float = 0.0

    @property
    def arriving(self) -> bool:
        """Whether some of it is still to come, or came with other bits."""
        return bool(self.views) or self.runs is not None or self.code is not None or self.is_damaged

    @property
    def is_damaged(self) -> bool:
        """Whether what has come isn't what was sent; also while it comes."""
        return self.crc not in (NOT_SUMMED, self.found_crc)

    def take_text(self, number: int) -> None:
        """Become word of a failure from the collective ``number`` on."""
        self.number, self.text = number, bytearray(self.nbytes)
        self.views.append(memoryview(self.text))

    def take_code(self, nbytes: int) -> None:
        """Become a coded message: its places are filled once the code is there."""
        self.places, self.code = self.views, take_bytes(nbytes)
        self.views = views_of([self.code])

    @property
    def name(self) -> tuple[int, int, str]:
        """What must be the same on both ends."""
        return self.number, self.nbytes, self.key


@dataclass
class Outgoing:
    """A message that is sent. transfer: who waits until it is sent, None for word of a failure. ready: False
    while it is coded."""

    views: deque[memoryview]
    transfer: Transfer | None
    ready: bool = True


# Gloo's thread wakes for every 64 KiB that arrive. Of 96 MiB each way at 1 Gbit/s, in messages of 2 MiB
# between 2 ranks, that was 1700 times and 68 ms of CPU per rank; sockets that wake their reader for half a
# MiB did it 400 times and in 45 ms (measured). The cores are busy with compute, so that counts.
_MARK_NBYTES = 512 << 10
_VIEWS = 256  # parts per system call; the kernel takes up to 1024


class Connection:
    """A TCP connection to one peer, for one kind of collective: messages arrive in the order of sending.

    peer: its rank. takes_memory: what arrives lies in memory that the event loop takes (a gradient to be
        summed), so that it needn't wait for the own rank; else it waits in the kernel for a place.
    trouble: what ended it, "" while it works. socket: None until the peer has been reached, or has called;
        what is to be sent waits so long.
    turn: held by the thread that moves something, but for one that has claimed it and reads. watched: for
        what the event loop watches its socket.
    """

    def __init__(self, endpoint: Endpoint, peer: int, takes_memory: bool) -> None:
        self.endpoint = endpoint
        self.peer = peer
        self.takes_memory = takes_memory
        self.trouble = ""
        self.turn = threading.Lock()
        self.watched = 0
        self.socket: socket.socket | None = None
        self._out: deque[Outgoing] = deque()
        self._expected: deque[Incoming] = deque()  # named by the own rank, head not yet arrived
        self._early: deque[Incoming] = deque()  # arrived, or arriving, before the own rank named them
        self._current: Incoming | None = None
        self._head = bytearray(HEAD_NBYTES)
        self._head_views = deque([memoryview(self._head)])
        self._mark = 1

    def attach(self, sock: socket.socket) -> None:
        """From here on it is open. Any thread; ``EventLoop.go`` follows."""
        sock.setblocking(False)
        with self.endpoint.changed:
            self.socket = sock
            # It was told on the connections that were open then; who connects later has to hear of it, too.
            if self.endpoint.failure is not None:
                self.tell(self.endpoint.failure)

    @property
    def is_open(self) -> bool:
        """Whether there is a peer at its other end."""
        return self.socket is not None

    def tell(self, failure: CollectiveFailure) -> None:
        """See ``Link.tell``."""
        text = failure.why.encode()[:TEXT_NBYTES]
        with self.endpoint.changed:
            self._out.append(Outgoing(deque(failure_message(failure.number, text)), None))

    # ---- called by the rank's own thread

    def send(self, transfer: Transfer, parts: Sequence[memoryview]) -> int:
        """Queue a message (see ``message_of``); ``EventLoop.go`` follows. Its memory may change after
        ``transfer.wait_sent``. Returns the bytes that will be sent, without the head."""
        with self.endpoint.changed:
            transfer.sending.add(self)
            self._out.append(Outgoing(deque(parts), transfer))
        return sum(map(len, parts)) - HEAD_NBYTES

    def send_later(self, transfer: Transfer) -> Callable[[Sequence[memoryview]], None]:
        """Queue a message that is still being coded. Give it to what is returned, from any thread; its memory
        may change as that of ``send``; ``EventLoop.go`` follows."""
        outgoing = Outgoing(deque(), transfer, ready=False)
        with self.endpoint.changed:
            transfer.sending.add(self)
            self._out.append(outgoing)

        def fill(parts: Sequence[memoryview]) -> None:
            outgoing.views.extend(parts)
            outgoing.ready = True

        return fill

    def say(self, message: bytes) -> bool:
        """Send a small message at once. False where some is left, which needs ``EventLoop.go``."""
        sent = 0
        with self.turn:
            if self.socket is not None and not self._out:
                with contextlib.suppress(OSError):  # ``move`` meets it again
                    sent = self.socket.send(message)
            if sent < len(message):
                with self.endpoint.changed:
                    self._out.append(Outgoing(deque([memoryview(message)[sent:]]), None))
                return False
        return True

    def hear(self, message: bytes, waiting: Any) -> bytes | None:
        """By who has claimed it: the next message, once it is there, where it is as ``message`` but for the
        words in it. None, and nothing was taken, where it isn't, or doesn't come soon: ``receive`` it."""
        sock, head = self.socket, b"" if self._head_views else bytes(self._head)
        if (
            sock is None
            or self._current is not None
            or len(self._head_views and self._head_views[0]) % HEAD_NBYTES
        ):
            return None
        nbytes = len(message) - len(head)
        for sleeps in (True, False):
            with contextlib.suppress(OSError):
                seen = head + sock.recv(nbytes, socket.MSG_PEEK)
                if not resembles(seen, message):
                    return None
                sock.recv(nbytes)
                self._head_views = deque([memoryview(self._head)])
                return seen[HEAD_NBYTES:]
            if sleeps:
                waiting.only(self.peer, self.endpoint.rank)
                handshake.sleep_until_read(sock, LOOK_S)
        return None

    def receive(
        self, transfer: Transfer, nbytes: int, places: deque[memoryview], kept: Sequence[Kept | None] = ()
    ) -> None:
        """Say what is expected, and where (unless the connection takes memory); ``EventLoop.go`` follows.
        kept: of each part, where it may say what has changed."""
        key = text_of(transfer.launch.key).decode(errors="replace")
        expected = Incoming(transfer.launch.number, nbytes, key, places, kept=kept)
        with self.endpoint.changed:
            transfer.sources += 1
            if not self._early:
                expected.transfer = transfer
                transfer.receiving.add(self)
                self._expected.append(expected)
                return
            early = self._early.popleft()
            if early.name != expected.name:
                transfer.receiving.add(self)
                self.trouble = _mismatch(self, expected, early)
            elif early.arriving:
                early.transfer = transfer
                transfer.receiving.add(self)
            else:
                assert early.memory is not None
                transfer.take(self, early.memory, early.took_s)

    # ---- called by the event loop's thread, or in its place

    @property
    def events(self) -> int:
        """What its socket is to be watched for."""
        if self.socket is None:
            return 0
        if self.trouble:
            # A peer that is in another collective learns it from what is sent there; and from nothing else.
            return selectors.EVENT_WRITE if self._may_write else 0
        # A message without a place stays in the kernel, where TCP slows its sender down. It isn't watched
        # for: a selector would report it again and again.
        has_place = self._current is not None or self._expected or self.takes_memory
        held = self in self.endpoint.claimed or (not self._head_views and not has_place)
        return (0 if held else selectors.EVENT_READ) | (selectors.EVENT_WRITE if self._may_write else 0)

    @property
    def _may_write(self) -> bool:
        return bool(self._out) and self._out[0].ready

    def move(self, events: int) -> None:
        """Receive, then send, without waiting: a peer that takes nothing any more may have said why."""
        try:
            if events & selectors.EVENT_READ:
                self._read()
            if events & selectors.EVENT_WRITE:
                self._write()
        except OSError as error:
            self._break(
                f"the connection to {self.endpoint.name(self.peer)} broke: {error}; its own error says why"
            )

    def _write(self) -> None:
        assert self.socket is not None
        while self._may_write:
            first = self._out[0]
            while first.views:
                views = list(itertools.islice(first.views, _VIEWS))
                try:
                    sent = self.socket.sendmsg(views)
                except BlockingIOError:
                    return
                skip(first.views, sent)
                # The kernel's buffer is full, and the next call would only say so.
                if sent < sum(map(len, views)):
                    return
            with self.endpoint.changed:
                self._out.popleft()
                if first.transfer is not None:
                    first.transfer.sending.discard(self)
                self.endpoint.changed.notify_all()

    def _read(self) -> None:
        while True:
            if self._current is None and not (self._fill(self._head_views) and self._open()):
                return
            assert self._current is not None
            if not self._fill(self._current.views):
                return
            if not (self._finish() if self._current.runs is None else self._place_runs()):
                return

    def _fill(self, views: deque[memoryview]) -> bool:
        """Receive into ``views``; whether they are full now."""
        assert self.socket is not None
        while views:
            some = list(itertools.islice(views, _VIEWS))
            nbytes = sum(map(len, some))
            try:
                got = self.socket.recvmsg_into(some)[0]
            except BlockingIOError:
                self._wake_for(nbytes)
                return False
            if not got:
                self._break(
                    f"{self.endpoint.name(self.peer)} has ended, or left the mesh; its own error says why"
                )
                return False
            current = self._current
            if current is not None and current.crc != NOT_SUMMED:
                current.found_crc = crc32_of(views, got, current.found_crc)
            skip(views, got)
            if got < nbytes:  # asking again would bring the few packets that came meanwhile
                self._wake_for(nbytes - got)
                return False
        return True

    def _wake_for(self, nbytes: int) -> None:
        """Sleep until so much has arrived, or the mark."""
        assert self.socket is not None
        nbytes = min(_MARK_NBYTES, nbytes)  # beyond what is still to come, the last bytes would wait for ever
        if nbytes != self._mark:
            self._mark = nbytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _open(self) -> bool:
        """Find the place of the message whose head is there; False where there is none yet."""
        head = read_head(self._head)
        if head is None:
            self._damaged("the head of a message")
            return False
        number, nbytes, num_runs, sent_nbytes, crc, key = head
        arrived = Incoming(number, nbytes, key.rstrip(b"\0").decode(errors="replace"), deque())
        if number == FAILURE:
            if not 0 < nbytes <= TEXT_NBYTES:
                self.fail(f"{self.endpoint.name(self.peer)} sent {nbytes} bytes as word of a failure")
                return False
            arrived.take_text(num_runs)
            arrived.crc = crc
            self._current = arrived
            return True
        with self.endpoint.changed:
            if self._expected:
                self._current = self._expected.popleft()
                if self._current.name != arrived.name:  # seen before any byte is put in a wrong place
                    self.fail(_mismatch(self, self._current, arrived))
                    return False
            elif self.takes_memory:
                self._current = arrived
                self._early.append(arrived)
            else:
                return False
            self._current.took_s = -clock.perf_counter()
            self._current.crc, self._current.sent_nbytes = crc, sent_nbytes
            if self.takes_memory:
                self._current.memory = take_bytes(nbytes)
                self._current.views = views_of([self._current.memory])
            if num_runs == CODED:
                self._current.take_code(sent_nbytes)
            elif num_runs != WHOLE:
                assert self._current.memory is not None, "runs on a connection that takes no memory"
                # What the pool gives still has the values of earlier messages, and only runs are received
                # into it.
                self._current.memory.zero_()
                self._current.runs = bytearray(num_runs * RUN.size)
                self._current.views = deque([memoryview(self._current.runs)] if num_runs else [])
        return True

    def _place_runs(self) -> bool:
        """The current message's table is there: its parts go where it says. False where that is nowhere."""
        current = self._current
        assert current is not None and current.runs is not None and current.memory is not None
        whole = view_of(current.memory)
        runs = list(RUN.iter_unpack(current.runs))
        with self.endpoint.changed:
            current.views = deque(whole[start:stop] for start, stop in runs)
            current.runs = None
            in_bounds = all(0 <= start < stop <= len(whole) for start, stop in runs)
            # A table with too few bytes would leave who waits for the rest waiting for ever.
            if not in_bounds or sum(map(len, current.views)) != current.sent_nbytes:
                self._damaged(f"the table of runs of {current.key!r}")
                return False
        return True

    def _finish(self) -> bool:
        """The current message has arrived to its end; whether it is what was sent."""
        arrived, self._current = self._current, None
        assert arrived is not None
        arrived.took_s += clock.perf_counter()
        if arrived.is_damaged:
            self._damaged(f"{arrived.nbytes} bytes of {arrived.key!r} (number {arrived.number} of this mesh)")
            return False
        if arrived.code is None:
            self._complete(arrived)
        else:
            # Not in the event loop, whose other messages would wait in the kernel until this one is decoded.
            self.endpoint.decoder.do(lambda: self._decode(arrived))
        self._head_views.append(memoryview(self._head))
        return True

    def _damaged(self, what: str) -> None:
        """Something has arrived otherwise than it was sent, by its CRC-32."""
        name = self.endpoint.name
        self.fail(
            f"{what} from {name(self.peer)} arrived at {name(self.endpoint.rank)} with other bits than were "
            "sent (their CRC-32 differs): the memory of one of the two hosts, or the network between them, "
            "is damaged. Nothing of it was used: go on from the newest checkpoint, on other hosts where it "
            "happens again"
        )

    def _decode(self, arrived: Incoming) -> None:
        """Fill the places of a coded message. Runs on the decoder's thread."""
        assert arrived.code is not None
        try:
            self.endpoint.decoder.coder.decode(view_of(arrived.code), arrived.places, arrived.kept, self.peer)
        except Damaged as damage:
            peer = self.endpoint.name(self.peer)
            self.fail(f"the message of {peer} in {arrived.key!r} can't be used: {damage}")
            return
        with self.endpoint.changed:
            arrived.code = None
            self._complete(arrived)

    def _complete(self, arrived: Incoming) -> None:
        with self.endpoint.changed:
            if arrived.text is not None:
                self.endpoint.spread(CollectiveFailure(arrived.number, arrived.text.decode(errors="replace")))
            elif arrived.transfer is not None:
                arrived.transfer.take(self, arrived.memory, arrived.took_s)
                self.endpoint.changed.notify_all()

    def _break(self, trouble: str) -> None:
        """The peer has ended: nothing can be received any more, and nothing sent."""
        self.endpoint.log.ended.add(self.peer)
        with self.endpoint.changed:
            self._out.clear()
        self.fail(trouble)

    def fail(self, trouble: str) -> None:
        """Whoever waits on it raises ``trouble``. Any thread."""
        with self.endpoint.changed:
            self.trouble = self.trouble or trouble
            self.endpoint.changed.notify_all()


def _mismatch(connection: Connection, expected: Incoming, arrived: Incoming) -> str:
    own, peer = connection.endpoint.name(connection.endpoint.rank), connection.endpoint.name(connection.peer)
    return (
        f"ranks are in different collectives: {own} is in {expected.key!r} (number {expected.number} of this "
        f"mesh, {expected.nbytes} bytes from {peer}), {peer} is in {arrived.key!r} (number {arrived.number}, "
        f"{arrived.nbytes} bytes). Every rank must run the same modules in the same order"
    )
