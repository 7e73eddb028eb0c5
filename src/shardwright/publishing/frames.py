"""What travels between a rank and its receivers: who calls, then frames of one kind each.

    rank -> receiver   the protocol, 16 random bytes                    before anything else
    receiver -> rank   16 random bytes, HMAC of both by the secret      it may read
    rank -> receiver   HMAC of both the other way round                 it may send

    GET   version: what the receiver has; base: up to which it asks; newest: milliseconds to wait
    VERSION, then one PIECE after another, each a coded message (``transport/cpu/coder.py``)
    NOTHING newer has come; ALIVE: it is being coded; END: the publisher was closed; LAYOUT: JSON

Nothing is encrypted: who can read the network can read weights, and who can change packets is seen only where
it doesn't know CRC-32. Who doesn't know the secret and only connects gets no weights, and isn't believed.
"""

import hmac
import secrets
import selectors
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.checksum import crc32

_PROTOCOL = b"shardwright-pub1"
_NONCE_NBYTES, _MAC_NBYTES = 16, 32
_HEAD = struct.Struct("<cqqqqI")
_CRC = struct.Struct("<I")
_SLICE = 1 << 20  # a time limit holds for each: a slow link is no stalled receiver
MAX_NBYTES = 1 << 40
GET, VERSION, PIECE, NOTHING, ALIVE, END, LAYOUT = b"g", b"v", b"p", b"0", b"a", b"e", b"l"


class Refused(Exception):
    """Who is at the other end isn't who it should be, with the reason."""


class Frame(NamedTuple):
    """One message. crc: CRC-32 of ``nbytes`` that follow."""

    kind: bytes
    version: int = 0
    base: int = 0
    newest: int = 0
    nbytes: int = 0
    crc: int = 0


def send(sock: socket.socket, frame: Frame, body: bytes | memoryview = b"") -> None:
    """Send a frame and what belongs to it. Raises: OSError, TimeoutError where nothing goes on."""
    frame = frame._replace(nbytes=len(body), crc=crc32(body))
    head = _HEAD.pack(*frame)
    sock.sendall(head + _CRC.pack(crc32(head)))
    for at in range(0, len(body), _SLICE):
        sock.sendall(memoryview(body)[at : at + _SLICE])


def receive(sock: socket.socket) -> Frame:
    """The next frame, without what follows it. Raises: OSError; Refused for a damaged one."""
    head = read(sock, _HEAD.size + _CRC.size)
    frame = Frame(*_HEAD.unpack_from(head))
    if (
        crc32(head[: _HEAD.size]) != _CRC.unpack_from(head, _HEAD.size)[0]
        or not 0 <= frame.nbytes < MAX_NBYTES
    ):
        raise Refused("a frame is damaged on its way, by its CRC-32")
    return frame


def read(sock: socket.socket, nbytes: int) -> bytearray:
    """So many bytes. Raises: OSError, ConnectionResetError where the other end is gone."""
    data = bytearray(nbytes)
    at = 0
    while at < nbytes:
        got = sock.recv_into(memoryview(data)[at : at + _SLICE])
        if not got:
            raise ConnectionResetError("the other end has closed the connection")
        at += got
    return data


def is_readable(sock: socket.socket, wait_s: float) -> bool:
    """Whether something has come, or comes in that time."""
    with selectors.DefaultSelector() as selector:  # `select` refuses descriptors above 1,023
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(wait_s))


def _proof(secret: bytes, who: bytes, nonces: Sequence[bytes]) -> bytes:
    return hmac.digest(secret, b"shardwright publish " + who + b"".join(nonces), "sha256")


def admit(sock: socket.socket, secret: bytes) -> None:
    """On a rank: let a receiver in. Raises: OSError; Refused where it doesn't know the secret."""
    own = secrets.token_bytes(_NONCE_NBYTES)
    sock.sendall(_PROTOCOL + own)
    said = bytes(read(sock, _NONCE_NBYTES + _MAC_NBYTES))
    nonces = own, said[:_NONCE_NBYTES]
    if not hmac.compare_digest(said[_NONCE_NBYTES:], _proof(secret, b"receiver", nonces)):
        raise Refused("it doesn't know the secret")
    sock.sendall(_proof(secret, b"rank", nonces))


def enter(sock: socket.socket, secret: bytes) -> None:
    """On a receiver: be let in. Raises: OSError; Refused where the rank doesn't know the secret."""
    said = bytes(read(sock, len(_PROTOCOL) + _NONCE_NBYTES))
    if said[: len(_PROTOCOL)] != _PROTOCOL:
        raise Refused(f"it says {said[:16]!r}, expected a publisher of this release")
    nonces = said[len(_PROTOCOL) :], secrets.token_bytes(_NONCE_NBYTES)
    sock.sendall(nonces[1] + _proof(secret, b"receiver", nonces))
    try:
        answer = bytes(read(sock, _MAC_NBYTES))
    except ConnectionError as error:
        raise Refused("it hung up: it has another SHARDWRIGHT_SECRET, or none") from error
    if not hmac.compare_digest(answer, _proof(secret, b"rank", nonces)):
        raise Refused("it has another SHARDWRIGHT_SECRET, or none")
