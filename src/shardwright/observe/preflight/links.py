"""What ranks find out about the links between them, over plain TCP: whom each reaches, how long a word takes,
how their clocks differ, and how many bytes a second come through.

Nothing here waits without a limit: a rank that isn't there is one that wasn't reached. Without
``SHARDWRIGHT_SECRET`` who reads the job's store can call, too: it would be measured, and told the time.
"""

import selectors
import socket
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock, Thread

from shardwright import clock
from shardwright.observe.preflight.findings import Flow, RankCall
from shardwright.transport.cpu.handshake import Caller, Lobby, Place, call
from shardwright.transport.secret import VARIABLE, given

PING, FLOW = 0, 1  # kinds of connections
MOST_PEERS = 64
"""Ranks that each rank calls; of more, these are spread over all distances."""
MOST_ROUNDS = 12
_PINGS = 8
_PATIENCE_S = 1.5
_GAP_S = 0.03
_LOOK_S = 0.5  # until it is seen that the listener is closed
_FLOW_S = (0.06, 0.3)
_CHUNK = bytes(256 << 10)
_SENT_AHEAD_NBYTES = 512 << 10  # a slow link isn't to deliver for seconds what was sent in milliseconds
_STAMP = struct.Struct("<d")


def spread(count: int, most: int) -> list[int]:
    """The numbers 1 to ``count``, or ``most`` of them, from the first to the last in equal steps."""
    if count <= most:
        return list(range(1, count + 1))
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


def rounds(hosts: Mapping[int, str]) -> list[dict[int, int]]:
    """Who sends to whom, source -> target, in rounds of which each has at most one flow out of a rank and one
    into it. hosts: the host of each rank.

    First rounds between hosts: each rank sends to the one in its place on another host, as the axis of a mesh
    over hosts does, all at the same time. Then rounds in the hosts.
    """
    members: dict[str, list[int]] = {}
    for rank in sorted(hosts):
        members.setdefault(hosts[rank], []).append(rank)
    groups = list(members.values())
    between = [
        {
            rank: groups[(index + shift) % len(groups)][place]
            for index, group in enumerate(groups)
            for place, rank in enumerate(group)
            if place < len(groups[(index + shift) % len(groups)])
        }
        for shift in spread(len(groups) - 1, MOST_ROUNDS)
    ]
    largest = max(map(len, groups))
    inside = [
        {
            rank: group[(place + shift) % len(group)]
            for group in groups
            for place, rank in enumerate(group)
            if shift < len(group)
        }
        for shift in spread(largest - 1, MOST_ROUNDS)
    ]
    return [each for each in between + inside if each]


class Responder:
    """Answers the calls of other ranks: sends back what time it is, and counts what flows in.

    sock, place: as ``handshake.listen`` gives them. flow_s: how long a flow lasts, set before the first one.
    """

    def __init__(self, sock: socket.socket, place: Place) -> None:
        self.place = place
        self.flow_s = _FLOW_S[0]
        self._flows: dict[int, float] = {}
        self._lock = Lock()
        self._sock = sock
        Thread(target=self._run, daemon=True).start()

    @property
    def flows(self) -> tuple[Flow, ...]:
        """What came in so far."""
        with self._lock:
            return tuple(Flow(source, rate) for source, rate in sorted(self._flows.items()))

    def close(self) -> None:
        """Answer no more."""
        self._sock.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            lobby = Lobby(self._sock, selector, self._known)
            while self._sock.fileno() >= 0:
                for key, _ in selector.select(_LOOK_S):
                    if key.data is lobby:
                        lobby.take()
                    else:
                        lobby.hear(key.data)
            lobby.close()

    def _known(self, caller: Caller) -> None:
        if caller.knows(given(), self.place) and caller.answer():
            Thread(target=self._serve, args=(caller,), daemon=True).start()
        else:
            caller.socket.close()

    def _serve(self, caller: Caller) -> None:
        with caller.socket as sock:
            sock.settimeout(_PATIENCE_S)
            try:
                if caller.kind == FLOW:
                    self._count(caller)
                else:
                    while sock.recv(_STAMP.size, socket.MSG_WAITALL):
                        sock.sendall(_STAMP.pack(clock.time()))
            except OSError:
                return

    def _count(self, caller: Caller) -> None:
        """Bytes/s after the first quarter of the time, in which buffers fill."""
        room = memoryview(bytearray(len(_CHUNK)))
        sock, first, settled, total, late = caller.socket, 0.0, 0.0, 0, 0
        now = clock.perf_counter()
        try:
            while got := sock.recv_into(room):
                now = clock.perf_counter()
                if not first:
                    first, settled = now, now + self.flow_s / 4
                total += got
                late += got if now > settled else 0
                if now > first + self.flow_s:
                    break
                sock.settimeout(max(first + self.flow_s - now, 0.001))
        except TimeoutError:
            now = first + self.flow_s
        if first:
            seconds = now - settled
            rate = late / seconds if late and seconds > self.flow_s / 4 else total / max(now - first, 1e-3)
            with self._lock:
                self._flows[caller.rank] = rate


def call_all(own: int, places: Mapping[int, Place], deadline: float) -> list[RankCall]:
    """Call other ranks of ``places``, all at the same time, then ask one after another for the time.

    Returns what came of each by ``deadline`` (``clock.monotonic``).
    """
    ranks = sorted(places)
    at = ranks.index(own)
    peers = [ranks[(at + shift) % len(ranks)] for shift in spread(len(ranks) - 1, MOST_PEERS)]
    made: list[RankCall] = []
    if not peers:
        return made
    pool = ThreadPoolExecutor(min(len(peers), 16))
    patience = min(_PATIENCE_S, max(deadline - clock.monotonic(), 0.1))
    flights = {peer: pool.submit(call, places[peer], given(), own, PING, patience) for peer in sorted(peers)}
    done, _ = wait(flights.values(), max(deadline - clock.monotonic(), 0.0))
    pool.shutdown(wait=False, cancel_futures=True)
    for peer, flight in flights.items():
        error = flight.exception() if flight in done else TimeoutError()
        if error is not None:
            made.append(RankCall(peer, 0.0, 0.0, _why(error)))
            continue
        with flight.result() as sock:
            try:
                sock.settimeout(_PATIENCE_S)
                made.append(_asked(peer, sock))
            except OSError as failed:
                made.append(RankCall(peer, 0.0, 0.0, _why(failed)))
    return made


def _asked(peer: int, sock: socket.socket) -> RankCall:
    """The shortest of some round trips, which knows the other's clock best."""
    best = RankCall(peer, float("inf"), 0.0)
    for _ in range(_PINGS):
        sent, start = clock.time(), clock.perf_counter()
        sock.sendall(_STAMP.pack(sent))
        said = sock.recv(_STAMP.size, socket.MSG_WAITALL)
        if len(said) < _STAMP.size:
            raise ConnectionResetError(f"it hung up: is {VARIABLE} the same on both?")
        latency_s = (clock.perf_counter() - start) / 2
        if latency_s < best.latency_s:
            best = RankCall(peer, latency_s, _STAMP.unpack(said)[0] - sent - latency_s)
    return best


def _why(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused: nobody listens there, or a firewall says so"
    if isinstance(error, TimeoutError):
        return f"no answer within {_PATIENCE_S:g} s"
    return str(error)


def send_all(
    own: int, places: Mapping[int, Place], every: Sequence[Mapping[int, int]], flow_s: float
) -> None:
    """Send what this rank sends in each round; returns when the last one is over. Ranks begin together."""
    start = clock.monotonic()
    for number, pairs in enumerate(every):
        clock.sleep(max(start + number * (flow_s + _GAP_S) - clock.monotonic(), 0.0))
        if own in pairs:
            _send(own, places[pairs[own]], flow_s)
    clock.sleep(max(start + len(every) * (flow_s + _GAP_S) + _GAP_S - clock.monotonic(), 0.0))


def flow_seconds(num_rounds: int, seconds: float) -> float:
    """How long a flow of each round may last, so that all rounds take ``seconds`` at most."""
    least, most = _FLOW_S
    return min(most, max(least, seconds / max(num_rounds, 1) - _GAP_S))


def _send(own: int, place: Place, flow_s: float) -> None:
    try:
        with call(place, given(), own, FLOW, flow_s) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_AHEAD_NBYTES)
            end = clock.monotonic() + flow_s
            while (left := end - clock.monotonic()) > 0:
                sock.settimeout(left)
                sock.send(_CHUNK)
    except OSError:
        return  # whoever reads the counts sees that nothing came
