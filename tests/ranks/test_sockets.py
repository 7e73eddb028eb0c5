"""Collectives over our own TCP connections: sums in rank order, no byte too many, errors that name ranks."""

import os
import re
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import SchedulePolicy, fully_shard, set_transport, stats
from shardwright.errors import CommError
from shardwright.schedule.layout import ParamLayout
from shardwright.transport import mesh
from shardwright.transport.base import Segment
from shardwright.transport.cpu import handshake, peers
from shardwright.transport.cpu.event_loop import EventLoop
from shardwright.transport.cpu.shm import ShmComm
from shardwright.transport.cpu.sockets import SocketComm
from shardwright.transport.mesh import resolve
from shardwright.transport.process import process_state
from shardwright.transport.process_group import ProcessGroupComm
from tests.ranks.models import batches, build, fresh_mesh, loss_of, shard_decoder
from tests.ranks.pool import on_ranks, run_ranks, run_ranks_but
from tests.ranks.scripts import run_scripts

SHAPES = ((7, 3), (1,), (64, 700), (13,), (0, 4), (500, 501))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float32, torch.bfloat16)
SUMMED_IN = [torch.float32] * 2 + [torch.float64] + [torch.float32] * 3


def comm_over(transport):
    set_transport(transport)
    return resolve(None).comm


def gradient(rank, layout, dtype):
    torch.manual_seed(1000 * rank + layout.numel)
    return torch.randn(layout.numel).to(dtype)


def sum_of(parts, dtype):
    """Rank by rank, in ``dtype``."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def collectives(rank, world, transport):
    """An all-gather, a reduce-scatter and a gather of uneven segments of several dtypes; their results."""
    comm = comm_over(transport)
    layouts = [ParamLayout(shape, world) for shape in SHAPES]
    gathered, reduced = [], []
    for layout, dtype in zip(layouts, DTYPES, strict=True):
        torch.manual_seed(layout.numel)
        whole = torch.randn(layout.padded_numel).to(dtype)
        region = torch.zeros_like(whole)
        region[slice(*layout.span(rank))] = whole[slice(*layout.span(rank))]
        gathered.append((Segment(region, layout.spans), whole))
        reduced.append(Segment(gradient(rank, layout, dtype), layout.spans))
    in_flight = comm.all_gather([segment for segment, _ in gathered], "gather")
    sums = comm.reduce_scatter(reduced, SUMMED_IN, "reduce")
    in_flight.wait()
    for (segment, whole), layout in zip(gathered, layouts, strict=True):
        assert torch.equal(segment.flat[: layout.numel], whole[: layout.numel])
    shard = torch.arange(rank + 1, dtype=torch.float32)
    spans = [(r * (r + 1) // 2, (r + 1) * (r + 2) // 2) for r in range(world)]
    collected = comm.gather(shard, spans, world - 1)
    return type(comm).__name__, [total.tolist() for total in sums.wait()], collected, comm.sent_nbytes


@pytest.mark.parametrize("world", [2, 3, 8])
def test_sums_are_in_rank_order_and_every_byte_is_one_of_the_pieces_for_uneven_shards(world):
    layouts = [ParamLayout(shape, world) for shape in SHAPES]
    whole = [
        sum_of([gradient(rank, layout, dtype) for rank in range(world)], summed_in)
        for layout, dtype, summed_in in zip(layouts, DTYPES, SUMMED_IN, strict=True)
    ]
    for rank, (name, sums, collected, sent) in enumerate(run_ranks(world, collectives, "sockets")):
        assert name == SocketComm.__name__
        parts = [total[slice(*layout.span(rank))] for total, layout in zip(whole, layouts, strict=True)]
        assert sums == [part.tolist() for part in parts]  # bit for bit
        assert collected is None or collected.tolist() == [e for r in range(world) for e in range(r + 1)]
        own = [part.numel() * dtype.itemsize for part, dtype in zip(parts, DTYPES, strict=True)]
        every = [layout.numel * dtype.itemsize for layout, dtype in zip(layouts, DTYPES, strict=True)]
        shard = 0 if rank == world - 1 else 4 * (rank + 1)
        assert sent == (world - 1) * sum(own) + sum(every) - sum(own) + shard


def of_embedding(rank, layout):
    """Gradients whose rows are mostly zeros, other rows on each rank, among full ones."""
    torch.manual_seed(rank)
    sparse, full = torch.zeros(layout.shape), torch.randn(layout.shape)
    used = torch.randperm(layout.shape[0])[:300]  # each once: of two writes to a row any may be the last
    sparse[used] = torch.randn(300, layout.shape[1])
    sparse[used[:50]] = -0.0
    return [each.flatten() for each in (full, sparse, full, 0 * sparse.abs())]


def reduce_embedding(rank, world):
    comm = comm_over("sockets")
    layout = ParamLayout((4099, 129), world)
    segments = [Segment(each, layout.spans) for each in of_embedding(rank, layout)]
    totals = comm.reduce_scatter(segments, [torch.float32] * 4, "reduce").wait()
    bits = [total.view(torch.int32).tolist() for total in totals]
    return bits, comm.sent_nbytes


@pytest.mark.parametrize("world", [2, 3])
def test_zeros_of_a_dense_gradient_are_not_sent_and_sums_are_the_same_bit_for_bit(world):
    layout = ParamLayout((4099, 129), world)
    of_ranks = [of_embedding(rank, layout) for rank in range(world)]
    sums = [sum_of(parts, torch.float32).view(torch.int32) for parts in zip(*of_ranks, strict=True)]
    whole = 4 * layout.padded_numel * 4 * (world - 1) / world
    for rank, (bits, sent) in enumerate(run_ranks(world, reduce_embedding)):
        assert bits == [total[slice(*layout.span(rank))].tolist() for total in sums]
        assert whole / 2 < sent < 0.6 * whole  # two of the four, and 300 of 4099 rows or some more


def one_rank_cannot(rank, world):
    if rank == 1:
        handshake.own_hosts = lambda: ["203.0.113.7"]  # an address of no machine, so none of this one
    return type(comm_over("sockets")).__name__


def test_all_ranks_take_torchs_collectives_where_one_has_no_address():
    assert set(run_ranks(3, one_rank_cannot)) == {ProcessGroupComm.__name__}


@on_ranks(2)
def test_torchs_collectives_gather_dtypes_that_gloo_does_not_know(rank, world):
    comm = comm_over("collectives")
    layout = ParamLayout((5, 3), world)
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.bool, torch.bfloat16):
        region, own = torch.zeros(layout.padded_numel).to(dtype), slice(*layout.span(rank))
        region[own] = torch.ones_like(region[own])
        comm.all_gather([Segment(region, layout.spans)], "gather").wait()
        assert region[: layout.numel].float().tolist() == [1.0] * layout.numel, dtype


def trains_without_sockets(rank, world):
    process_state.told.clear()  # another test of this process may have been told
    warned = []
    mesh.logger.warning = lambda text, *args: warned.append(text % args)
    assert one_rank_cannot(rank, world) == ProcessGroupComm.__name__
    alone, data = build(), batches(0, world)
    (sum(loss_of(alone, each) for each in data) / world).backward()
    for axis in (None, fresh_mesh(world)):
        model = shard_decoder(build(), fully_shard, mesh=axis)
        before = stats(model)
        loss_of(model, data[rank]).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        after = stats(model)
        assert after.sent_nbytes > before.sent_nbytes
        assert after.exposed_s > before.exposed_s  # over Gloo the host waits, and says so
    return warned


def test_ranks_without_sockets_train_with_torchs_collectives_and_are_warned_once():
    warnings, none = run_ranks(2, trains_without_sockets)
    assert none == []
    (warning,) = warnings
    assert "over torch's collectives on Gloo: no sockets of our own (rank 1: " in warning
    assert "another order" in warning
    assert "twice the bytes" in warning


def stranger_first(rank, world):
    listen = handshake.listen
    strangers = []

    def listen_and_be_called():
        listener, own = listen()
        stranger = handshake.connect((own.host, own.port))
        read = own.key(b"", 1 - rank, 0)  # by all that the job's store has
        stranger.sendall(handshake._HELLO.pack(read, 1 - rank, 0))
        strangers.append(stranger)
        return listener, own

    peers.listen = listen_and_be_called
    name, sums, *_ = collectives(rank, world, "sockets")
    return name, sums


@pytest.mark.slow
def test_who_does_not_know_the_secret_gets_no_line():
    expected = [(name, sums) for name, sums, *_ in run_ranks(2, collectives, "sockets")]
    assert run_ranks(2, stranger_first) == expected


def with_secrets(rank, world, *given):
    os.environ["SHARDWRIGHT_SECRET"] = given[rank]
    try:
        return collectives(rank, world, "sockets")[0]
    except CommError as error:
        return str(error)


def test_ranks_that_the_launcher_gave_a_secret_talk_and_others_are_told_which_has_another():
    assert run_ranks(2, with_secrets, "a" * 32, "a" * 32) == ["SocketComm"] * 2
    found = run_ranks(2, with_secrets, "a" * 32, "b" * 32)
    assert ["SHARDWRIGHT_SECRET of rank 1 isn't that of rank 0" in said for said in found] == [True, True]


def called_by_many(rank, world):
    """As this rank calls another, and before it has said who it is, a hundred strangers call there too."""
    connect, strangers = handshake.connect, []

    def connect_among_many(place, *limits):
        sock = connect(place, *limits)
        if len(strangers) < 200:
            strangers.extend(connect(place) for _ in range(100))
            time.sleep(0.2)
        return sock

    handshake.connect = connect_among_many
    name, sums, *_ = collectives(rank, world, "sockets")
    assert len(strangers) == (200 if rank else 0)
    return name, sums


def test_strangers_that_call_in_crowds_change_nothing():
    expected = [(name, sums) for name, sums, *_ in run_ranks(2, collectives, "sockets")]
    assert run_ranks(2, called_by_many) == expected


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
        if os.fork() == 0:  # a worker that outlives it must not keep its connections open
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CommError, match=r"rank 1.*\(rank 0 was in 'all-gather|^lost: rank 1"):
        loss_of(model, batches(1, world)[rank])
    assert time.monotonic() - start < 5


def test_a_killed_rank_is_named_within_seconds_though_its_worker_lives():
    run_ranks_but(1, 2, killed)


kept = []


def kept_to_the_end(rank, world):
    comm = comm_over("sockets")
    layout = ParamLayout((8,), world)
    comm.all_gather([Segment(torch.ones(layout.numel), layout.spans)], "gather").wait()
    kept.append(comm)
    close = EventLoop.close

    def late(loop):
        time.sleep(0.5)
        close(loop)

    EventLoop.close = late


def test_the_thread_that_moves_messages_ends_before_python_does():
    """Stopped anywhere, it could take what it is the last owner of down with the process (seen: SIGABRT)."""
    for outcome in run_scripts(2, kept_to_the_end):
        assert (outcome.code, outcome.error) == (0, "")
        assert "shardwright-event-loop" not in outcome.threads


def faults_of_rounds(rank, world, transport):
    comm = comm_over(transport)
    layout = ParamLayout((4 << 20,), world)
    region, gradient = (torch.ones(layout.numel) for _ in range(2))

    def faults():
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            comm.all_gather([Segment(region, layout.spans)], "gather").wait()
            dist.barrier()  # a peer that is late with reading has the next operation take another place, once
            total = comm.reduce_scatter([Segment(gradient, layout.spans)], [torch.float32], "reduce").wait()
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


def passed_on(comm, rank):
    comm.exchange([rank] * 100, "words")


def gathered(comm, rank):
    comm.gather(torch.full((50,), float(rank), dtype=torch.float64), ((0, 50), (50, 100)), dst=0)


def comes_after_the_timeout(rank, world, collective):
    comm = comm_over("sockets")
    if rank == 0:
        comm._loop.endpoint.timeout_s = 0.2
        with pytest.raises(CommError, match="did not come"):
            collective(comm, rank)
        # Whatever was freed is taken again.
        own = [bytearray(nbytes * b"\xa5") for nbytes in range(600, 1100) for _ in range(4)]
    dist.barrier()
    if rank == 1:
        comm._loop.endpoint.timeout_s = 1.0
        collective(comm, rank)
    dist.barrier()
    if rank == 0:
        time.sleep(0.3)  # what arrived is read
        return [len(each) for each in own if each.strip(b"\xa5")]
    return []


@pytest.mark.parametrize("collective", [passed_on, gathered])
def test_what_arrives_after_the_timeout_is_written_into_nobodys_memory(collective):
    assert run_ranks(2, comes_after_the_timeout, collective) == [[], []]


def ctrl_c(*_):
    raise KeyboardInterrupt


@on_ranks(2)
def test_a_gather_that_was_interrupted_as_it_was_issued_writes_into_nobodys_memory(rank, world):
    """Ctrl-C while an all-gather is being issued: its group gives up, and frees the memory."""
    comm = comm_over("sockets")
    layout = ParamLayout((100,), world)
    flat = torch.zeros(layout.padded_numel, dtype=torch.float64)
    if rank == 0:
        comm._send = ctrl_c
        with pytest.raises(KeyboardInterrupt):
            comm.all_gather([Segment(flat, layout.spans)], "gather")
        flat.untyped_storage().resize_(0)
        own = [bytearray(nbytes * b"\xa5") for nbytes in range(600, 1100) for _ in range(4)]
    dist.barrier()
    if rank == 1:
        with pytest.raises(CommError, match=r"rank 0 was interrupted .* as it began 'gather'"):
            comm.all_gather([Segment(flat, layout.spans)], "gather").wait()
    dist.barrier()
    assert rank == 1 or not any(each.strip(b"\xa5") for each in own)
