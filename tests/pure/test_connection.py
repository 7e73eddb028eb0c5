"""Connections between two ends in one process: whatever arrives early, in pieces or wrongly is dealt with."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from shardwright.errors import CommError
from shardwright.transport.cpu import message as message_file
from shardwright.transport.cpu.connection import Connection
from shardwright.transport.cpu.event_loop import EventLoop
from shardwright.transport.cpu.message import message_of
from shardwright.transport.cpu.transfer import CollectiveFailure, Endpoint, Transfer
from shardwright.transport.cpu.views import views_of
from shardwright.transport.process import Launch, LaunchLog, process_state
from shardwright.transport.recorder import DONE, WAIT


class End:
    """One end: an event loop with a single connection to the other one."""

    def __init__(self, rank, connection, takes_memory, timeout_s=5.0):
        endpoint = Endpoint(rank, timeout_s, LaunchLog((0, 1)))
        self.connection = Connection(endpoint, 1 - rank, takes_memory)
        self.connection.attach(connection)
        self.loop = EventLoop(endpoint, [self.connection])

    def send(self, number, parts, key="key", runs=None):
        transfer = Transfer(self.loop.endpoint, Launch(number, key, "", 0), list(parts))
        self.connection.send(transfer, message_of(transfer.launch, list(views_of(parts)), runs))
        self.loop.go()
        return transfer

    def receive(self, number, places, key="key", nbytes=None):
        transfer = Transfer(self.loop.endpoint, Launch(number, key, "", 0), list(places))
        self.connection.receive(transfer, nbytes or sum(p.nbytes for p in places), views_of(places))
        self.loop.go()
        return transfer


@contextmanager
def both(takes_memory, timeout_s=5.0):
    """Two ends that are connected."""
    ends = [End(rank, end, takes_memory, timeout_s) for rank, end in enumerate(socket.socketpair())]
    yield ends
    for end in ends:
        end.loop.stop()


@pytest.fixture(params=[False, True], ids=["places", "takes memory"])
def ends(request):
    with both(request.param) as ends:
        yield ends


def arrived(transfer, places):
    """What has arrived, wherever the connection put it."""
    transfer.wait_received()
    joined = [transfer.received[peer] for peer in sorted(transfer.received)]
    return torch.cat(joined or [place.view(torch.uint8) for place in places])


def test_both_ends_learn_that_they_are_in_different_collectives(ends):
    """Also the one whose peer has found out, and raised, before it has sent anything itself."""
    first, second = ends
    message = torch.ones(8)
    second.send(1, [message], key="theirs")
    with pytest.raises(CommError, match="different collectives"):
        first.receive(1, [torch.empty(8)], key="ours").wait_received()
    first.send(1, [message], key="ours")
    with pytest.raises(CommError, match="different collectives"):
        second.receive(1, [torch.empty(8)], key="theirs").wait_received()


SIZES = ([1], [5, 100_003], [3] * 700, [4 << 20, 7])


def in_order(expected_first, receive, send):
    """What both give, the receives begun before the sends or after them."""
    if expected_first:
        return receive(), send()
    sends = send()
    time.sleep(0.1)  # what can arrive before it is expected has done so
    return receive(), sends


@pytest.mark.parametrize("expected_first", [True, False])
def test_messages_of_any_size_arrive_in_order_whoever_comes_first(ends, expected_first):
    sender, receiver = ends
    messages = [[torch.randint(256, (n,), dtype=torch.uint8) for n in sizes] for sizes in SIZES]
    places = [[torch.empty(n, dtype=torch.uint8) for n in sizes] for sizes in SIZES]
    receives, sends = in_order(
        expected_first,
        lambda: [receiver.receive(number, into) for number, into in enumerate(places)],
        lambda: [sender.send(number, parts) for number, parts in enumerate(messages)],
    )
    for transfer, into, parts in zip(receives, places, messages, strict=True):
        assert torch.equal(arrived(transfer, into), torch.cat(parts))
    for transfer in sends:
        transfer.wait_sent()


@pytest.fixture
def taking():
    """Two ends of a connection that takes memory."""
    with both(takes_memory=True) as ends:
        yield ends


RUNS = (None, [], [(0, 1)], [(2, 5), (700, 1000), (1001, 4 << 20)], [(0, 1000), (1000, 5 << 20)])


@pytest.mark.parametrize("expected_first", [True, False])
def test_what_lies_between_runs_is_zeros_and_is_not_sent(taking, expected_first):
    sender, receiver = taking
    parts = [torch.randint(1, 256, (n,), dtype=torch.uint8) for n in (1000, 5 << 20)]
    torch.empty(8 << 20, dtype=torch.uint8).fill_(7)  # what the next memory was used for
    place = [torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8)]
    receives, sends = in_order(
        expected_first,
        lambda: [receiver.receive(number, place) for number in range(len(RUNS))],
        lambda: [sender.send(number, parts, runs=runs) for number, runs in enumerate(RUNS)],
    )
    for transfer, runs in zip(receives, RUNS, strict=True):
        whole = torch.cat(parts)
        kept = torch.zeros_like(whole) if runs is not None else whole
        for start, stop in runs or []:
            kept[start:stop] = whole[start:stop]
        assert torch.equal(arrived(transfer, place), kept)
    for transfer in sends:
        transfer.wait_sent()


@pytest.mark.parametrize("run", [(0, 9), (-1, 3), (5, 5), (1 << 40, 1 << 41)])
def test_a_damaged_table_of_runs_is_told_and_nobody_waits_for_ever(taking, run, monkeypatch):
    monkeypatch.setattr(message_file, "cut", lambda parts, runs: parts)
    sender, receiver = taking
    parts = [torch.ones(8, dtype=torch.uint8)]
    sender.send(1, parts, runs=[run])
    with pytest.raises(
        CommError, match="the table of runs of 'key' from rank 0 arrived at rank 1 with other bits"
    ):
        receiver.receive(1, parts).wait_received()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("runs", [None, [(0, 2), (5, 8)]])
def test_whichever_bit_of_a_message_is_flipped_on_the_way_nothing_of_it_is_used(runs, early):
    parts = views_of([torch.arange(8, dtype=torch.uint8)])
    sent = b"".join(message_of(Launch(1, "key", "", 0), list(parts), runs))
    place = torch.zeros(8, dtype=torch.uint8)
    for bit in range(8 * len(sent)):
        peer, own = socket.socketpair()
        end = End(1, own, takes_memory=runs is not None or early)
        damaged = bytearray(sent)
        damaged[bit // 8] ^= 1 << bit % 8
        if early:
            peer.sendall(damaged)
        transfer = end.receive(1, [place])
        if not early:
            peer.sendall(damaged)
        with pytest.raises(CommError, match="from rank 0 arrived at rank 1 with other bits than were sent"):
            transfer.wait_received()
        end.loop.join()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("number", "nbytes", "key"), [(2, 8, "all-gather 1"), (1, 9, "all-gather 1"), (1, 8, "all-gather 2")]
)
def test_another_collective_is_told_from_the_head(ends, early, number, nbytes, key):
    sender, receiver = ends
    place = torch.zeros(8, dtype=torch.uint8)
    if early:
        sender.send(number, [torch.ones(nbytes, dtype=torch.uint8)], key)
        time.sleep(0.05)
    transfer = receiver.receive(1, [place], "all-gather 1")
    if not early:
        sender.send(number, [torch.ones(nbytes, dtype=torch.uint8)], key)
    with pytest.raises(CommError, match="ranks are in different collectives") as error:
        transfer.wait_received()
    assert "rank 1 is in 'all-gather 1' (number 1" in str(error.value)
    assert f"rank 0 is in {key!r} (number {number}, {nbytes} bytes)" in str(error.value)
    assert not place.any()


def test_an_end_that_goes_away_is_named_at_once_and_only_to_who_waits(ends):
    sender, receiver = ends
    sender.send(1, [torch.ones(8, dtype=torch.uint8)]).wait_sent()
    sender.loop.stop()
    place = torch.zeros(8, dtype=torch.uint8)
    assert arrived(receiver.receive(1, [place]), [place]).sum() == 8
    with pytest.raises(CommError, match=r"rank 0 has ended, or left the mesh.*\(rank 1 was in 'next'\)"):
        receiver.receive(2, [place], "next").wait_received()


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_an_end_that_passes_on_a_failure_and_goes_away_is_not_named_for_it(family, sends):
    for _ in range(10):
        ends = [End(rank, end, False) for rank, end in enumerate(pair_of(family))]
        teller, hearer = ends
        if sends:  # more than fits: the write fails, too
            transfer = hearer.send(6, [torch.ones(32 << 20, dtype=torch.uint8)])
        else:
            transfer = hearer.receive(6, [torch.empty(8)])
        teller.loop.endpoint.spread(CollectiveFailure(5, "rank 5 has ended"))
        teller.loop.stop()
        with pytest.raises(CommError, match="rank 5 has ended"):
            transfer.wait_sent() if sends else transfer.wait_received()
        hearer.loop.stop()


def pair_of(family):
    """Two sockets that are connected."""
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        return server.accept()[0], caller


def test_how_long_a_message_took_is_on_record_whether_or_not_it_began_late():
    peer, own = socket.socketpair()
    end = End(1, own, False)
    log = end.loop.endpoint.log
    eight = [memoryview(bytes(8))]
    head = [bytes(message_of(Launch(number, "key", "", 0), eight)[0]) for number in (1, 2)]
    place = torch.empty(8, dtype=torch.uint8)
    late_slow = ((b"", head[0] + bytes(8)), (head[1], bytes(8)))
    for number, parts in enumerate(late_slow, 1):
        transfer = end.receive(number, [place])
        peer.sendall(parts[0])
        later = threading.Timer(0.3, peer.sendall, parts[1:])
        later.start()
        transfer.wait_received()
        later.join()
    end.loop.stop()
    kept = [each for *_, written in process_state.recorder.steps() for each in written if each[1] == log.name]
    (late, late_s), (slow, slow_s) = [each[-2:] for each in kept if each[0] == DONE]
    assert late == slow == (0, 1) and late_s < 0.25 < slow_s
    waits = [each[-2:] for each in kept if each[0] == WAIT]
    assert [link for link, _ in waits] == [(0, 1), (0, 1)] and min(seconds for _, seconds in waits) > 0.25


def test_an_end_that_says_nothing_is_named_after_the_timeout():
    place = torch.zeros(8, dtype=torch.uint8)
    refused = pytest.raises(CommError, match="rank 1 waited 0 s for rank 0 in 'key'; the connection is open")
    with both(takes_memory=False, timeout_s=0.2) as ends, refused:
        ends[1].receive(1, [place]).wait_received()
