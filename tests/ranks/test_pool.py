"""What the tests on ranks may rely on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import run_ranks


def rank_and_sum(rank: int, world: int, offset: int) -> tuple[int, float]:
    total = torch.full((3,), float(rank + offset))
    dist.all_reduce(total)
    return rank, total[0].item()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_in_rank_order(world):
    expected = float(sum(rank + 10 for rank in range(world)))
    assert run_ranks(world, rank_and_sum, 10) == [(rank, expected) for rank in range(world)]


def environment(rank: int, world: int) -> tuple[int, float, int]:
    return torch.get_num_threads(), torch.rand(()).item(), os.getpid()


def test_each_call_has_new_single_threaded_seeded_ranks():
    first, second = run_ranks(2, environment), run_ranks(2, environment)
    assert [row[:2] for row in first + second] == [first[0][:2]] * 4
    assert first[0][0] == 1
    assert len({row[2] for row in first + second}) == 4


def return_tensor(rank: int, world: int, given: torch.Tensor) -> torch.Tensor:
    return given + rank


def test_tensors_travel_both_ways():
    assert torch.equal(run_ranks(2, return_tensor, torch.arange(5))[1], torch.arange(1, 6))


def late_rank_is_served(rank: int, world: int) -> float:
    value = torch.ones(1 << 16)
    if rank == 0:
        dist.send(value, 1)
    else:
        time.sleep(0.3)
        dist.recv(value, 0)
    return value.sum().item()


def test_a_rank_that_is_done_waits_for_the_others():
    assert run_ranks(2, late_rank_is_served) == [65536.0, 65536.0]


def one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise RuntimeError("boom on purpose")
    dist.barrier()


def test_the_rank_that_failed_first_is_on_top_and_the_others_follow():
    begin = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(3, one_raises)
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 failed first")
    assert message.index("boom on purpose") < message.index("rank 0 of 3 failed")
    assert "in one_raises" in message
    assert "rank 2 of 3 failed" in message
    assert time.monotonic() - begin < 10


def wait_forever(rank: int, world: int) -> None:
    while rank == 0:
        time.sleep(0.05)


def test_a_hang_is_reported_with_its_stack_and_the_next_call_works():
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 0 of 2 failed first: still running after 2 s") as caught:
        run_ranks(2, wait_forever, limit_s=2)
    assert "in wait_forever" in str(caught.value)
    assert time.monotonic() - begin < 6
    assert run_ranks(2, rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]


def missing_partner(rank: int, world: int) -> None:
    if rank == 0:
        dist.recv(torch.empty(1), 1)


def test_a_collective_without_its_partner_ends_with_the_group_timeout():
    with pytest.raises(AssertionError, match="rank 0 of 2 failed first") as caught:
        run_ranks(2, missing_partner, timeout_s=1, limit_s=10)
    assert "still running" not in str(caught.value)


def die(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)


def test_a_rank_that_dies_is_reported_with_its_exit_code():
    with pytest.raises(
        AssertionError, match=r"rank 1 of 2 failed first: died without a report \(exit code 7\)"
    ):
        run_ranks(2, die)


def unpicklable(rank: int, world: int) -> object:
    return lambda: rank


def test_a_result_that_can_not_be_sent_is_a_failure():
    with pytest.raises(AssertionError, match="failed first"):
        run_ranks(1, unpicklable)


def test_a_world_out_of_range_is_refused():
    with pytest.raises(ValueError, match="world is 0"):
        run_ranks(0, rank_and_sum, 0)
