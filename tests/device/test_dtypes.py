"""What NCCL is given: dtypes that it lacks as bytes, in one call with all others, and as pairs of reals to be
summed; reductions on a communicator of their own where that was asked."""

import torch

from shardwright.schedule.layout import equal_spans
from shardwright.transport.base import Segment
from shardwright.transport.process import LaunchLog
from shardwright.transport.process_group import ProcessGroupComm
from shardwright.transport.streams import Streams
from tests.device.kernels import Kernels
from tests.device.ranks import Communicator
from tests.device.sim import Stream, World, resizing

LACKING = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e8m0fnu)


class Counted(Communicator):
    """Counts its launches."""

    num = 0

    def _launch(self, read, write):
        self.num += 1
        return super()._launch(read, write)


def on_two_ranks(run):
    """What ``run(comm, group, rank)`` gives on each of two simulated devices, as tensors of the host."""
    world = World(2, 0)

    def rank_of(rank):
        device = world.devices[rank]
        streams = Streams(lambda: Stream(device), lambda: device.current[-1])
        group = Counted(device, [0, 1], "all")
        log = LaunchLog([0, 1])
        comm = ProcessGroupComm(group, group, log, streams, None, lambda _: Counted(device, [0, 1], "own"))
        with resizing(world), Kernels(device):
            found = run(comm, group, rank)
            device.synchronize()
            return [device.read(each) for each in found]

    return world.run(rank_of)


def test_any_dtype_is_gathered_in_one_call_with_all_others():
    dtypes = (*LACKING, torch.float32, torch.bfloat16, torch.bool)

    def gather(comm, group, rank):
        flats = [torch.full((8,), rank + 1, dtype=torch.int64).to(dtype) for dtype in dtypes]
        comm.all_gather([Segment(flat, equal_spans(4, 2)) for flat in flats], "gather").wait()
        assert group.num == 1
        return [flat.view(torch.uint8) for flat in flats]

    for found in on_two_ranks(gather):
        for dtype, flat in zip(dtypes, found, strict=True):
            wanted = torch.tensor([1, 1, 1, 1, 2, 2, 2, 2]).to(dtype)
            assert flat.equal(wanted.view(torch.uint8)), dtype


def test_complex_gradients_are_summed():
    def reduce(comm, group, rank):
        grads = [
            torch.full((8,), rank + 1, dtype=dtype) * (2 - 1j)
            for dtype in (torch.complex64, torch.complex128)
        ]
        dtypes = [grad.dtype for grad in grads]
        segments = [Segment(grad, equal_spans(4, 2)) for grad in grads]
        sums = comm.reduce_scatter(segments, dtypes, "reduce").wait()
        again = comm.all_reduce([sums[0] * 1], "all-reduce").wait()
        return [each.view(each.dtype.to_real()) for each in (*sums, *again)]

    for first, second, twice in on_two_ranks(reduce):
        assert first.tolist() == second.tolist() == [6, -3] * 4
        assert twice.tolist() == [12, -6] * 4


def test_reductions_have_a_communicator_of_their_own_where_that_is_asked():
    def both(comm, group, rank):
        summed = []
        for asked in (True, True, False):
            comm.separate_reductions(asked)
            flat = torch.ones(8)
            gather = comm.all_gather([Segment(flat, equal_spans(4, 2))], "gather")
            summed += comm.reduce_scatter([Segment(flat, equal_spans(4, 2))], [torch.float32], "sum").wait()
            gather.wait()
        assert (group.num, comm.log.operations) == (4, 4)  # three gathers, and a sum
        return summed

    for found in on_two_ranks(both):
        assert [total.tolist() for total in found] == [[2.0] * 4] * 3
