"""Collectives over lines of our own: the bytes and sums of Gloo's messages, and errors that name ranks."""

import os
import re
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import SchedulePolicy, fully_shard, set_transport
from shardwright.comm import meeting
from shardwright.comm.base import Piece
from shardwright.comm.gloo import GlooComm
from shardwright.comm.mesh import resolve
from shardwright.comm.shm import ShmComm
from shardwright.comm.sockets import SocketComm
from shardwright.comm.wire import Wire
from shardwright.errors import CommError
from shardwright.plan.layout import ParamLayout
from tests.ranks.models import batches, build, loss_of, shard_decoder
from tests.ranks.pool import run_ranks
from tests.ranks.scripts import run_scripts

SHAPES = ((7, 3), (1,), (64, 700), (13,), (0, 4), (500, 501))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float32, torch.bfloat16)


def comm_over(transport):
    set_transport(transport)
    return resolve(None).comm


def collectives(rank, world, transport):
    """An all-gather, a reduce-scatter and a gather of uneven pieces of several dtypes; what came of them."""
    comm = comm_over(transport)
    layouts = [ParamLayout(shape, world) for shape in SHAPES]
    gathered, reduced = [], []
    for layout, dtype in zip(layouts, DTYPES, strict=True):
        torch.manual_seed(layout.numel)
        whole = torch.randn(layout.padded_numel).to(dtype)
        region = torch.zeros_like(whole)
        region[slice(*layout.span(rank))] = whole[slice(*layout.span(rank))]
        gathered.append((Piece(region, layout.spans), whole))
        torch.manual_seed(1000 * rank + layout.numel)
        reduced.append(Piece(torch.randn(layout.numel).to(dtype), layout.spans))
    in_flight = comm.all_gather([piece for piece, _ in gathered], "gather")
    sums = comm.reduce_scatter(reduced, [torch.float32] * 2 + [torch.float64] + [torch.float32] * 3, "reduce")
    in_flight.wait()
    for (piece, whole), layout in zip(gathered, layouts, strict=True):
        assert torch.equal(piece.flat[: layout.numel], whole[: layout.numel])
    shard = torch.arange(rank + 1, dtype=torch.float32)
    spans = [(r * (r + 1) // 2, (r + 1) * (r + 2) // 2) for r in range(world)]
    collected = comm.gather(shard, spans, world - 1)
    return type(comm).__name__, [total.tolist() for total in sums.wait()], collected, comm.sent_nbytes


@pytest.mark.parametrize("world", [2, 3, 8])
def test_sums_and_bytes_sent_are_those_of_gloo_for_uneven_shards_of_several_dtypes(world):
    ours, theirs = (run_ranks(world, collectives, transport) for transport in ("sockets", "gloo"))
    assert {result[0] for result in ours} == {SocketComm.__name__}
    assert {result[0] for result in theirs} == {GlooComm.__name__}
    for (_, sums, collected, _), (_, same, _, _) in zip(ours, theirs, strict=True):
        assert sums == same  # bit for bit
        assert collected is None or collected.tolist() == [e for r in range(world) for e in range(r + 1)]
    # Gloo packs small pieces, aligned; here every byte is one of the pieces.
    assert all(mine[3] <= gloo[3] for mine, gloo in zip(ours, theirs, strict=True))


def reduce_embedding(rank, world, transport):
    """A dense gradient whose rows are mostly zeros, other rows on each rank, among full ones."""
    comm = comm_over(transport)
    layout = ParamLayout((4099, 129), world)
    torch.manual_seed(rank)
    sparse, full = torch.zeros(layout.shape), torch.randn(layout.shape)
    used = torch.randint(layout.shape[0], (300,))
    sparse[used] = torch.randn(300, layout.shape[1])
    sparse[used[:50]] = -0.0
    pieces = [Piece(gradient.flatten(), layout.spans) for gradient in (full, sparse, full, 0 * sparse.abs())]
    totals = comm.reduce_scatter(pieces, [torch.float32] * 4, "reduce").wait()
    bits = [total.view(torch.int32).tolist() for total in totals]
    return bits, comm.sent_nbytes, sum(layout.padded_numel * 4 * (world - 1) / world for _ in range(4))


@pytest.mark.parametrize("world", [2, 3])
def test_zeros_of_a_dense_gradient_are_not_sent_and_sums_are_the_same_bit_for_bit(world):
    ours, theirs = (run_ranks(world, reduce_embedding, transport) for transport in ("sockets", "gloo"))
    for (bits, sent, whole), (same, everything, _) in zip(ours, theirs, strict=True):
        assert bits == same
        assert everything == pytest.approx(whole, rel=0.01)
        assert whole / 2 < sent < 0.6 * whole  # two of the four, and 300 of 4099 rows or some more


def one_rank_cannot(rank, world):
    if rank == 1:
        meeting._hosts = lambda: ["203.0.113.7"]  # an address of no machine, so none of this one
    return type(comm_over("sockets")).__name__


def test_all_ranks_take_gloo_where_one_has_no_address():
    assert set(run_ranks(3, one_rank_cannot)) == {GlooComm.__name__}


def stranger_first(rank, world):
    listen = meeting._listen
    strangers = []

    def listen_and_be_called(world):
        listener, own = listen(world)
        stranger = meeting.socket.create_connection(own.address)
        stranger.sendall(meeting._HELLO.pack(b"?" * 16, 1 - rank, 0))
        strangers.append(stranger)
        return listener, own

    meeting._listen = listen_and_be_called
    name, sums, *_ = collectives(rank, world, "sockets")
    return name, sums


def test_who_does_not_know_the_secret_gets_no_line():
    expected = [(name, sums) for name, sums, *_ in run_ranks(2, collectives, "sockets")]
    assert run_ranks(2, stranger_first) == expected


def other_order(rank, world):
    set_transport("sockets")
    model = nn.ModuleList(fully_shard(nn.Linear(4, 4)) for _ in range(2))
    root = fully_shard(nn.Sequential(*model))
    root.set_schedule_policy(SchedulePolicy(agreement="off"))  # else they are told before that
    start = time.monotonic()
    with pytest.raises(CommError, match="different collectives") as error:
        for layer in (0, 1) if rank == 0 else (1, 0):
            root[layer](torch.ones(1, 4))
    assert time.monotonic() - start < 5
    return str(error.value)


def test_ranks_in_different_collectives_are_told_so_at_once():
    for rank, message in enumerate(run_ranks(2, other_order)):
        # The transport's words or the watch's, whichever is first.
        for each in (rank, 1 - rank):
            assert re.search(rf"rank {each} (is )?(in|launched) 'all-gather {each}'", message), message


def killed(rank, world):
    set_transport("sockets")
    model = shard_decoder(build(), fully_shard)
    loss_of(model, batches(0, world)[rank]).backward()
    if rank == 1:
        if os.fork() == 0:  # a worker that outlives it must not keep its lines open
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CommError, match=r"rank 1.*\(rank 0 was in 'all-gather|^lost: rank 1"):
        loss_of(model, batches(1, world)[rank])
    assert time.monotonic() - start < 5


def test_a_killed_rank_is_named_within_seconds_though_its_worker_lives():
    with pytest.raises(AssertionError) as error:
        run_ranks(2, killed)
    assert "rank 1 of 2" in str(error.value)
    assert "rank 0 of 2" not in str(error.value)


kept = []


def kept_to_the_end(rank, world):
    comm = comm_over("sockets")
    layout = ParamLayout((8,), world)
    comm.all_gather([Piece(torch.ones(layout.numel), layout.spans)], "gather").wait()
    kept.append(comm)
    close = Wire.close

    def late(wire):
        time.sleep(0.5)
        close(wire)

    Wire.close = late


def test_the_thread_that_moves_messages_ends_before_python_does():
    """Stopped anywhere, it could take what it is the last owner of down with the process (seen: SIGABRT)."""
    for outcome in run_scripts(2, kept_to_the_end):
        assert (outcome.code, outcome.error) == (0, "")
        assert "shardwright-wire" not in outcome.threads


def faults_of_rounds(rank, world, transport):
    comm = comm_over(transport)
    layout = ParamLayout((4 << 20,), world)
    region, gradient = (torch.ones(layout.numel) for _ in range(2))

    def faults():
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            comm.all_gather([Piece(region, layout.spans)], "gather").wait()
            dist.barrier()  # a peer that is late with reading has the next operation take another place, once
            total = comm.reduce_scatter([Piece(gradient, layout.spans)], [torch.float32], "reduce").wait()
            assert total[0][-1] == world
            dist.barrier()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

    faults()
    return type(comm).__name__, faults()


@pytest.mark.parametrize(
    ("transport", "name"), [("sockets", SocketComm.__name__), ("auto", ShmComm.__name__)]
)
def test_a_steady_state_touches_no_fresh_pages(transport, name):
    for used, faults in run_ranks(2, faults_of_rounds, transport):
        assert used == name
        assert faults < 200  # 8 MiB per round are 2048 pages, 8192 in all
