"""Owners of whole matrices: how even they are, and how far from the best."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule.balance import Load, Matrices, newton_schulz_flops, owners


def of(out: int, into: int, count: int = 1) -> Matrices:
    return Matrices(count, 4 * out * into, newton_schulz_flops((out, into)))


def llama(d: int, kv: int, hidden: int) -> list[Matrices]:
    return [of(d, d), of(kv, d), of(kv, d), of(d, d), of(hidden, d), of(hidden, d), of(d, hidden)]


def experts(d: int, heads: int, kv: int, hidden: int, count: int) -> list[Matrices]:
    attention = [of(heads, d), of(kv, d), of(kv, d), of(d, heads)]
    return [*attention, of(2 * hidden, d, count), of(d, hidden, count)]


BLOCKS = {
    "fused": [of(2304, 768), of(768, 768), of(3072, 768), of(768, 3072)],
    "llama 8B": llama(4096, 1024, 14336),
    "llama 1B": llama(2048, 512, 8192),
    "llama 7B": llama(4096, 4096, 11008),
    **{f"wide, {n} experts": experts(4096, 4096, 1024, 14336, n) for n in (6, 8, 12)},
    **{f"fine, {n} experts": experts(2048, 4096, 512, 768, n) for n in (6, 8, 12)},
}


def unevenness(loads: list[Load]) -> tuple[float, float]:
    """The busiest rank's bytes and FLOPs, of the mean."""
    kinds = [load.nbytes for load in loads], [load.flops for load in loads]
    return max(kinds[0]) * len(loads) / sum(kinds[0]), max(kinds[1]) * len(loads) / sum(kinds[1])


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_twelve_blocks_are_even_on_eight_ranks_in_one_call_and_nearly_block_by_block(block):
    at_once, one_by_one = [Load() for _ in range(8)], [Load() for _ in range(8)]
    owners(block * 12, at_once)
    for _ in range(12):
        owners(block, one_by_one)
    assert max(unevenness(at_once)) < 1.05
    nbytes, flops = unevenness(one_by_one)
    assert nbytes < 1.07 and flops < 1.10


COSTS = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def largest(costs: list[Matrices], ranks: tuple[int, ...], world: int) -> float:
    """The larger of the busiest rank's shares in all bytes and all FLOPs."""
    totals = sum(c.nbytes for c in costs), sum(c.flops for c in costs)
    loads = [[0, 0] for _ in range(world)]
    for cost, rank in zip(costs, ranks, strict=True):
        loads[rank][0] += cost.nbytes
        loads[rank][1] += cost.flops
    return max(load[kind] / totals[kind] for load in loads for kind in (0, 1))


def best(costs: list[Matrices], world: int) -> float:
    return min(largest(costs, ranks, world) for ranks in product(range(world), repeat=len(costs)))


def ranks_of(found: list[list[int]]) -> tuple[int, ...]:
    return tuple(counts.index(1) for counts in found)


@settings(max_examples=60, deadline=None)
@given(COSTS, st.integers(2, 3))
def test_where_flops_follow_bytes_the_busiest_rank_is_within_four_thirds_of_the_best(numbers, world):
    costs = [Matrices(1, number, 3 * number) for number in numbers]
    found = largest(costs, ranks_of(owners(costs, [Load() for _ in range(world)])), world)
    assert found <= (4 / 3 - 1 / (3 * world)) * best(costs, world) + 1e-12


@settings(max_examples=60, deadline=None)
@given(COSTS, st.integers(2, 3))
def test_where_they_come_one_by_one_it_is_within_twice_the_best(numbers, world):
    costs, loads = [Matrices(1, number, 3 * number) for number in numbers], [Load() for _ in range(world)]
    ranks = ranks_of([owners([cost], loads)[0] for cost in costs])
    assert largest(costs, ranks, world) <= (2 - 1 / world) * best(costs, world) + 1e-12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=6), st.integers(2, 3))
def test_of_two_costs_that_have_nothing_to_do_with_each_other_it_is_within_three_times(pairs, world):
    costs = [Matrices(1, 1 + nbytes, flops) for nbytes, flops in pairs]
    found = largest(costs, ranks_of(owners(costs, [Load() for _ in range(world)])), world)
    assert found <= 3 * best(costs, world) + 1e-12


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.integers(1, 9),
)
def test_every_matrix_has_one_owner_and_the_loads_are_what_ranks_own(costs, world):
    weights, loads = [Matrices(*cost) for cost in costs], [Load() for _ in range(world)]
    found = owners(weights, loads)
    assert [sum(counts) for counts in found] == [weight.count for weight in weights]
    assert all(min(counts) >= weight.count // world for counts, weight in zip(found, weights, strict=True))
    for rank, load in enumerate(loads):
        owned = [(counts[rank], weight) for counts, weight in zip(found, weights, strict=True)]
        assert load.nbytes == sum(number * weight.nbytes for number, weight in owned)
        assert load.flops == sum(number * weight.flops for number, weight in owned)
    assert owners(weights, [Load() for _ in range(world)]) == found


def test_what_a_rank_lacks_counts_more_than_the_order_of_ranks():
    loads = [Load(9, 9), Load(9, 0), Load(0, 9), Load(4, 4)]
    assert owners([Matrices(1, 1, 1), Matrices(1, 4, 4)], loads) == [[0, 0, 0, 1], [0, 0, 0, 1]]
    assert owners([Matrices(5, 1, 1)], [Load(8, 8), Load()]) == [[2, 3]]
