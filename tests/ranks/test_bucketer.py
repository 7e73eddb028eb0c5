"""``ReduceScatterBucketer``: small lists share a collective, large ones go at once, nothing is lost or kept.

Each test says which line of docs/bucketer.md it holds: R1 to R24, what fairscale's promises; D1 to D7, what
it lacks.
"""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from shardwright import ReduceScatterBucketer, set_transport
from shardwright.bucketer import HOST_NBYTES
from shardwright.errors import CommError, InputError, StageError
from shardwright.transport.mesh import comm_of
from tests.ranks.pool import on_ranks, run_ranks

WORLD = 2
ROW_NUMEL = 2**20 // 4 // WORLD  # of a bucket of 1 MiB in float32


def ones(world, numel, dtype=torch.float32):
    return [torch.ones(numel, dtype=dtype) for _ in range(world)]


def gathered(inputs):
    """The sum for this rank by torch's own all-reduce."""
    whole = torch.stack([tensor.detach() for tensor in inputs])
    dist.all_reduce(whole)
    return whole[dist.get_rank()]


class Calls:
    """Counts the collectives that a transport issues; remembers the sizes of one rank's parts."""

    def __init__(self, group=None):
        self.comm = comm_of(group, "cpu")
        self.segments = []
        self._inner = self.comm.reduce_scatter
        self.comm.reduce_scatter = self

    def __call__(self, segments, dtypes, key):
        self.segments.append(segments)
        return self._inner(segments, dtypes, key)

    def __len__(self):
        return len(self.segments)


def sums(rank, world, transport):
    set_transport(transport)
    torch.manual_seed(rank)
    bucketer = ReduceScatterBucketer(1)
    found, expected = [], []
    shapes = [(2, 3), (), (0, 4), (7,), (2**18 // world + 1,), (5, 1)]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for shape in shapes:
            inputs = [
                (torch.randn(shape) * 8).to(dtype).requires_grad_(dtype.is_floating_point)
                for _ in range(world)
            ]
            bucketer.reduce_scatter_async(inputs, dist.group.WORLD, found.append)
            expected.append(gathered(inputs))
    bucketer.flush()
    assert len(found) == len(expected)
    for total in found:
        assert not total.requires_grad
    for dtype in {total.dtype for total in expected}:
        ours = sorted((t for t in found if t.dtype == dtype), key=lambda t: (t.numel(), t.ndim))
        theirs = sorted((t for t in expected if t.dtype == dtype), key=lambda t: (t.numel(), t.ndim))
        for total, other in zip(ours, theirs, strict=True):
            assert total.shape == other.shape
            assert (
                torch.equal(total, other) if world == 2 else torch.allclose(total, other, rtol=0.05, atol=0.2)
            )
    return [total.detach().double() for total in found]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_of_any_shape_and_dtype_are_alike_over_every_transport(world):  # R1 R15 R17 R23 D1 D5
    by_transport = [run_ranks(world, sums, name) for name in ("auto", "sockets", "collectives")]
    if world < 3:  # two terms commute; torch's own collective adds three in an order of its own
        for other in by_transport[1:]:
            for ours, theirs in zip(by_transport[0], other, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@on_ranks(WORLD)
def test_what_goes_at_once_what_waits_and_in_which_order_callbacks_run(world):  # R2 to R10, R16
    calls = Calls()
    said = []
    bucketer = ReduceScatterBucketer(1)

    def add(name, numel):
        return bucketer.reduce_scatter_async(ones(world, numel), None, lambda _: said.append(name))

    add("small", 3)
    assert len(calls) == 0  # in its bucket
    big = add("big", ROW_NUMEL + 1)
    assert len(calls) == 1  # R2: at once, and the bucket stays
    add("exact", ROW_NUMEL - 3)  # R3: fits to the last element
    assert len(calls) == 1
    assert not said  # R5: nothing before flush or wait
    add("next", 1)  # R8: makes room
    assert len(calls) == 2
    other = bucketer.reduce_scatter_async(ones(world, 1, torch.float64), None, lambda _: said.append("other"))
    bucketer.flush()
    assert big.done and other.done
    assert said == ["big", "small", "exact", "next", "other"]  # R6 R7
    assert len(calls) == 4
    bucketer.flush()  # R9
    assert len(calls) == 4
    assert ReduceScatterBucketer(25).shard_numel(torch.float32, 3) == 25 * 2**20 // 12  # R10
    none = ReduceScatterBucketer(0)
    assert none.shard_numel(torch.float32, world) == 0
    for numel in (1, 2, 3, 0):  # R4
        none.reduce_scatter_async(ones(world, numel))
    assert len(calls) == 8
    none.flush()
    assert none.held_nbytes == 0


def memory(rank, world):
    bucketer = ReduceScatterBucketer(1)
    assert bucketer.held_nbytes == 0  # R22
    first = bucketer.reduce_scatter_async(ones(world, ROW_NUMEL))
    assert bucketer.held_nbytes == 2**20  # R11: the cap
    with pytest.raises(StageError, match=r"teardown\(\) with 1 reduce-scatters pending; call flush"):  # R21
        bucketer.teardown()
    bucketer.flush()
    kept = first.wait()
    bucketer.reduce_scatter_async([torch.full((ROW_NUMEL,), 5.0)] * world)
    bucketer.flush()
    assert torch.equal(kept, torch.full((ROW_NUMEL,), float(world)))  # R18, with what that memory now holds
    assert bucketer.held_nbytes == 2**20  # the same memory again
    for _ in range(20):
        bucketer.reduce_scatter_async(ones(world, ROW_NUMEL))
        assert bucketer.held_nbytes <= 3 * 2**20
    bucketer.flush()
    bucketer.teardown()
    assert bucketer.held_nbytes == 0 and bucketer.num_buckets == 0
    assert torch.equal(kept, torch.full((ROW_NUMEL,), float(world)))  # R18, after teardown
    again = bucketer.reduce_scatter_async(ones(world, 2))  # R20
    assert again.wait().tolist() == [world] * 2
    small = bucketer.reduce_scatter_async(ones(world, 3))  # R19: nothing of earlier inputs is read again
    assert small.wait().tolist() == [world] * 3
    given = torch.full((4,), 2.0)
    handle = bucketer.reduce_scatter_async([given] * world)
    given.zero_()  # small inputs belong to the caller again
    assert handle.wait().tolist() == [2.0 * world] * 4
    bucketer.teardown()
    gone = weakref.ref(bucketer)
    gc.disable()
    del bucketer
    assert gone() is None  # D4: nothing keeps it, not even a circle


def test_memory_is_held_from_the_first_use_to_teardown_and_results_outlive_it():  # R11 R18-R22 D4
    run_ranks(1, memory)
    run_ranks(WORLD, memory)


@on_ranks(WORLD)
def test_on_the_host_buckets_travel_before_the_cap_is_reached_and_no_more_than_it_is_under_way(
    rank, world
):  # R3 R11
    calls = Calls()
    cap = 25
    bucketer = ReduceScatterBucketer(cap)
    row = HOST_NBYTES // 4 // world
    whole_row = bucketer.shard_numel(torch.float32, world)
    for _ in range(6):  # three lists fill a bucket of the host
        bucketer.reduce_scatter_async(ones(world, row // 3))
    assert len(calls) == 1  # on its way though the cap isn't reached: the wire isn't idle
    exact = ones(world, whole_row)
    handle = bucketer.reduce_scatter_async(exact)  # R3: small to the last element, in a bucket of its own
    assert len(calls) == 2
    exact[rank].zero_()  # and so the caller's again
    for _ in range(40):
        bucketer.reduce_scatter_async(ones(world, row))
        assert sum(flight.nbytes for flight in bucketer._flights) <= cap * 2**20
    assert handle.wait()[-1].item() == world
    bucketer.flush()
    assert len(calls) == 3 + 40
    assert bucketer.held_nbytes <= cap * 2**20 + 2 * HOST_NBYTES
    bucketer.teardown()


@on_ranks(WORLD)
def test_equal_groups_share_a_bucket_and_other_ranks_or_dtypes_do_not(rank, world):  # R12 D6
    everyone = [dist.new_group(list(range(world))) for _ in range(2)]
    alone = [dist.new_group([r]) for r in range(world)][rank]
    calls = Calls(everyone[0])
    bucketer = ReduceScatterBucketer(1)
    for group in (everyone[0], everyone[1], None):
        bucketer.reduce_scatter_async(ones(world, 4), group)
    assert bucketer.num_buckets == 1  # D6: who is in it counts, not which object
    own = bucketer.reduce_scatter_async([torch.full((2,), rank + 1.0)], alone)
    bucketer.reduce_scatter_async(ones(world, 4, torch.float64), everyone[0])
    assert bucketer.num_buckets == 3  # R12: ranks, dtype
    bucketer.flush()
    assert len(calls) == 2
    assert own.wait().tolist() == [rank + 1.0] * 2
    with pytest.raises(InputError, match="ProcessGroup that has this rank"):
        bucketer.reduce_scatter_async(ones(1, 1), dist.GroupMember.NON_GROUP_MEMBER)


@on_ranks(WORLD)
def test_ragged_and_wrong_inputs_are_refused_on_every_path_with_their_sizes():  # R13 R14 D3
    for cap in (1, 0):  # R13 R14 D3: alike on the path of small and of large inputs
        bucketer = ReduceScatterBucketer(cap)
        with pytest.raises(InputError, match=r"received 3 inputs, expected group.size\(\) \(2\)"):
            bucketer.reduce_scatter_async(ones(3, 2))
        with pytest.raises(InputError, match=r"received 0 inputs"):
            bucketer.reduce_scatter_async([])
        for other in (torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, device="meta")):
            with pytest.raises(
                InputError, match=r"input 1 is \([23],\) .* input 0 is \(2,\) torch.float32 on cpu"
            ):
                bucketer.reduce_scatter_async([torch.ones(2), other])
        with pytest.raises(InputError, match="input 1 is not a dense tensor"):
            bucketer.reduce_scatter_async([torch.ones(2), torch.ones(2).to_sparse()])
        assert bucketer.held_nbytes == 0 and bucketer.num_buckets == 0  # nothing half done
        bucketer.teardown()
    with pytest.raises(InputError, match="number of MiB, got 'much'"):
        ReduceScatterBucketer("much")


def overlapped(rank, world):
    set_transport("sockets")
    bucketer = ReduceScatterBucketer(1)
    bucketer.reduce_scatter_async(ones(world, 1)).wait()  # makes the groups, which is a meeting of its own
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(1.0)
    handle = bucketer.reduce_scatter_async(ones(world, ROW_NUMEL + 1))
    issued_s = time.monotonic() - start
    before = handle.done
    assert handle.wait()[0].item() == world
    return issued_s, before


def test_a_large_input_is_on_its_way_while_the_caller_goes_on():  # D2
    (issued_s, done), _ = run_ranks(WORLD, overlapped)
    assert issued_s < 0.5  # its peer comes after 1 s
    assert not done


@on_ranks(WORLD)
def test_large_inputs_and_part_filled_buckets_are_sent_from_where_they_lie(world):  # D7
    bucketer = ReduceScatterBucketer(0)
    calls = Calls()
    whole = torch.arange(8.0)
    bucketer.reduce_scatter_async(whole.chunk(world)).wait()
    (segment,) = calls.segments[-1]
    assert segment.flat.data_ptr() == whole.data_ptr()
    apart = [torch.ones(4), torch.ones(4)]
    assert bucketer.reduce_scatter_async(apart).wait().tolist() == [2.0] * 4
    assert [segment.flat.data_ptr() for segment in calls.segments[-1]] == [t.data_ptr() for t in apart]
    part = ReduceScatterBucketer(1)
    part.reduce_scatter_async(ones(world, 5))
    part.flush()
    (segment,) = calls.segments[-1]
    assert segment.flat.nbytes == 2**20  # the bucket itself, of which 5 elements a rank are sent
    assert [stop - start for start, stop in segment.spans] == [5, 5]


def bytes_sent(rank, world):
    set_transport("sockets")
    bucketer = ReduceScatterBucketer(1)
    for _ in range(100):
        bucketer.reduce_scatter_async(ones(world, 16 * 1024 // 4))
    bucketer.flush()
    return comm_of(None, "cpu").sent_nbytes


def test_each_rank_sends_every_other_rank_its_part_once():
    for world in (2, 4):
        assert run_ranks(world, bytes_sent) == [100 * 16 * 1024 * (world - 1)] * world


@on_ranks(WORLD)
def test_a_callback_that_raises_or_adds_more_loses_nothing(world):
    bucketer = ReduceScatterBucketer(1)
    said = []

    def fails(_):
        raise KeyError("mine")

    first = bucketer.reduce_scatter_async(ones(world, 1), None, fails)
    bucketer.reduce_scatter_async(ones(world, 1), None, said.append)
    bucketer.reduce_scatter_async(ones(world, 1, torch.float64), None, said.append)
    with pytest.raises(KeyError, match="mine"):
        bucketer.flush()
    assert first.wait().item() == world
    assert len(said) == 1
    bucketer.flush()
    assert len(said) == 2

    def chained(total):
        if total.item() < 8:
            bucketer.reduce_scatter_async([total] * world, None, chained)

    bucketer.reduce_scatter_async(ones(world, 1), None, chained)
    bucketer.flush()  # until nothing is pending
    bucketer.teardown()


@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
@pytest.mark.each_case
@on_ranks(WORLD)
def test_ranks_that_add_different_sizes_or_dtypes_are_told_so_on_every_transport(
    rank, world, transport
):  # R24
    set_transport(transport)
    for cap in (1, 0):
        for inputs in (ones(world, 3 + rank), ones(world, 4, (torch.float32, torch.int32)[rank])):
            bucketer = ReduceScatterBucketer(cap)
            with pytest.raises(
                CommError, match=r"different collectives(.|\n)*reduce-scatter of 1 inputs, \d x"
            ):
                bucketer.reduce_scatter_async(inputs)
                bucketer.flush()
            bucketer.flush()
            bucketer.teardown()
    handle = ReduceScatterBucketer().reduce_scatter_async(ones(world, 3 + rank))
    for told in (CommError, StageError):
        with pytest.raises(told, match="failed earlier" if told is StageError else "different"):
            handle.wait()


@on_ranks(WORLD)
def test_callbacks_run_without_gradients_so_that_they_may_step_a_parameter(world):  # R23
    weight = torch.nn.Parameter(torch.ones(3))
    enabled = []

    def step(total):
        enabled.append(torch.is_grad_enabled())
        weight.sub_(total)  # of a leaf that asks for a gradient

    for cap in (1, 0):
        bucketer = ReduceScatterBucketer(cap)
        bucketer.reduce_scatter_async(ones(world, 3), None, step)
        bucketer.flush()
        bucketer.reduce_scatter_async(ones(world, 3), None, step).wait()
    assert enabled == [False] * 4 and torch.is_grad_enabled()
    assert weight.tolist() == [1.0 - 4 * world] * 3


def subset(rank, world, transport):
    set_transport(transport)
    members = [0, 2]
    group = dist.new_group(members)
    bucketer = ReduceScatterBucketer(1)
    if rank not in members:
        with pytest.raises(InputError, match="ProcessGroup that has this rank"):
            bucketer.reduce_scatter_async(ones(2, 4), group)
        return None
    with pytest.raises(InputError, match=r"received 3 inputs, expected group.size\(\) \(2\)"):
        bucketer.reduce_scatter_async(ones(3, 4), group)
    small = bucketer.reduce_scatter_async([torch.full((4,), 10.0 * rank + part) for part in range(2)], group)
    large = bucketer.reduce_scatter_async(ones(2, 2**18), group)
    bucketer.flush()
    assert large.wait()[0].item() == 2.0
    return small.wait()[0].item()


@pytest.mark.parametrize("transport", ["auto", "sockets", "collectives"])
@pytest.mark.each_case
def test_a_group_of_some_of_the_ranks_sums_over_these(transport):  # R13
    assert run_ranks(3, subset, transport) == [20.0, None, 22.0]


@on_ranks(WORLD)
def test_the_cap_is_25_mib_and_zero_or_less_buckets_nothing(world):  # R4 R10
    assert ReduceScatterBucketer().bucket_cap_mb == 25
    assert ReduceScatterBucketer().shard_numel(torch.float32, world) == 25 * 2**20 // 4 // world
    for cap in (-1, -0.5, 0):
        calls = Calls()
        bucketer = ReduceScatterBucketer(cap)
        assert bucketer.shard_numel(torch.float32, world) == 0
        handles = [bucketer.reduce_scatter_async(ones(world, numel)) for numel in (1, 0, 5)]
        assert len(calls) == 3 and bucketer.held_nbytes == 0
        bucketer.flush()
        assert [handle.wait().tolist() for handle in handles] == [[world], [], [world] * 5]
        bucketer.teardown()
    for cap in (float("nan"), float("inf"), None):
        with pytest.raises(InputError, match="number of MiB"):
            ReduceScatterBucketer(cap)


@on_ranks(WORLD)
def test_making_room_issues_that_bucket_and_no_other(world):  # R8
    calls = Calls()
    bucketer = ReduceScatterBucketer(1)
    kept = bucketer.reduce_scatter_async(ones(world, 4, torch.float64))
    full = bucketer.reduce_scatter_async(ones(world, ROW_NUMEL))
    assert len(calls) == 0
    bucketer.reduce_scatter_async(ones(world, 1))  # no room beside the full one
    assert len(calls) == 1
    (segment,) = calls.segments[0]
    assert segment.flat.dtype is torch.float32 and segment.spans[0] == (0, ROW_NUMEL)
    full.wait()
    assert not kept.done and len(calls) == 1
    with pytest.raises(StageError, match="2 reduce-scatters pending"):
        bucketer.teardown()
    assert kept.wait().tolist() == [world] * 4 and len(calls) == 2
    bucketer.flush()
    assert len(calls) == 3
