"""What sharding costs the host of one rank, counted: this process plays rank 0 (``bench/rankzero.py``)."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from bench.counting import KernelCount, count_calls
from bench.host import Case, Cost, cost, interval
from shardwright.transport.host_memory import VARIABLE

MOST_FRAMES, MOST_CALLS, MOST_KERNELS, MOST_RECORDS = 8, 600, 8, 24
HERE = __file__.rpartition("/")[0]


@pytest.fixture(autouse=True)
def no_budget(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@cache
def counted(world: int, width: int = 512, dim: int = 0) -> Cost:
    """A step of four groups, with the defaults."""
    return cost("shardwright", Case(world, width, layers=3, dim=dim))


def called(found: Cost) -> str:
    """How often each function of the package was called, for a failure to tell."""
    calls = found.seen.calls.most_common()
    return "\n".join(f"{number} {code.co_filename}:{code.co_qualname}" for code, number in calls)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_few_frames_lie_between_a_hook_and_a_collective(kind):
    way = counted(8).seen.ways[kind]
    assert 0 < len(way.frames) <= MOST_FRAMES, way.frames


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_the_drawn_way_of_a_byte_is_the_stack_of_a_real_step(kind):
    page = Path(HERE).parents[1] / "docs" / "design" / "way-of-a-byte.md"
    drawn = re.search(rf"<!-- frames: {kind} -->\n```text\n(.*?)\n```", page.read_text(), re.DOTALL)
    found = counted(8).seen.ways[kind].frames
    frames = [f"{file.rpartition('/shardwright/')[2]} {name}" for file, name in found]
    assert drawn and drawn[1].splitlines() == frames, "\n".join([f"{page.name} should draw:", *frames])


@pytest.mark.parametrize("world", [1, 8, 64, 512])
def test_a_group_costs_few_python_calls_a_step(world):
    assert 0 < counted(world).calls <= MOST_CALLS, called(counted(world))


def test_it_does_so_with_a_budget_of_memory_too(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1TiB")
    assert counted(8).calls < cost("shardwright", Case(8, 512, layers=3)).calls <= MOST_CALLS


def test_the_played_device_times_its_collectives_by_three_calls_for_each():
    found = counted(8)
    calls = found.seen.calls.items()
    of_times = sum(number for code, number in calls if code.co_filename.endswith("/device_times.py"))
    collectives = found.counted.collectives.total()
    assert 3 * collectives <= of_times <= 3 * collectives + 2  # and a look at what has passed, now and then


def test_python_calls_do_not_grow_with_the_world():
    def calls(world):  # of two counts: now and then a step meets something else that was due
        return min(counted(world).calls, counted.__wrapped__(world).calls)

    assert calls(8) == calls(64) == calls(512)


@pytest.mark.parametrize("world", [8, 64, 512])
def test_ranks_exchange_control_words_at_most_four_times_a_step(world):
    assert 0 < counted(world).exchanges <= 4


def test_a_group_writes_few_records_a_step():
    found = counted(8)
    assert 0 < found.records / found.num_groups <= MOST_RECORDS


@pytest.mark.parametrize(
    ("world", "width", "dim", "most"),
    [
        pytest.param(8, 512, 0, MOST_KERNELS, id="even rows"),
        pytest.param(8, 127, 0, MOST_KERNELS, id="uneven rows"),
        pytest.param(512, 127, 0, MOST_KERNELS, id="ranks without rows"),
        pytest.param(8, 128, -1, MOST_KERNELS + 1, id="the last dim"),
        pytest.param(8, 127, -1, MOST_KERNELS + 4, id="an uneven last dim"),
        pytest.param(512, 127, -1, MOST_KERNELS + 4, id="ranks without columns"),
    ],
)
def test_a_group_launches_few_kernels_a_step(world, width, dim, most):
    found = counted(world, width, dim)
    assert 0 < found.kernels <= most, found.counted.kernels


# ---- the counting itself


ROWS, SAME = ([torch.ones(3, 4), torch.ones(2)] for _ in range(2))
NARROW = [row.bfloat16() for row in ROWS]


@pytest.mark.parametrize(
    ("launch", "num_kernels"),
    [
        (lambda: torch._foreach_add_(ROWS, SAME), 1),
        (lambda: torch._foreach_mul_(ROWS, 2.0), 1),
        (lambda: torch._foreach_copy_(NARROW, ROWS), 1),
        (lambda: torch._foreach_copy_(ROWS, [NARROW[0], SAME[1]]), 2),
        (lambda: torch._foreach_copy_(ROWS, [torch.empty(4, 3).t(), SAME[1]]), 2),
        (lambda: torch._foreach_add_(ROWS, NARROW), 2),
    ],
)
def test_a_foreach_call_is_one_kernel_only_where_cuda_has_one_for_its_lists(launch, num_kernels):
    with KernelCount(HERE) as counted:
        launch()
    assert list(counted.kernels.values()) == [num_kernels]


def test_views_memory_and_what_has_no_element_launch_no_kernel():
    whole = torch.zeros(4, 4)
    with KernelCount(HERE) as counted:
        whole.view(16)[2:5].detach().chunk(3)
        torch.empty(5).new_empty(3)
        whole[:0].copy_(whole[:0])
    assert not counted.kernels


def test_frames_and_calls_are_those_between_a_hook_and_a_collective():
    def collective():
        pass

    def inner():
        collective()

    module = torch.nn.Identity()
    module.register_forward_pre_hook(lambda *_: inner())
    seen = count_calls(lambda: module(1), HERE, {"all-gather": collective.__code__})
    assert [function for _, function in seen.ways["all-gather"].frames] == ["<lambda>", "inner"]
    assert seen.calls[inner.__code__] == seen.calls[collective.__code__] == 1


def test_the_interval_of_a_median_is_that_of_order_statistics():
    assert interval([float(each) for each in range(15)]) == (3.0, 11.0)
    assert interval([1.0, 2.0, 3.0]) == (1.0, 3.0)
