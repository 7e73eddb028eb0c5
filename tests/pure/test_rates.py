"""The learning rate of each step, by the schedule of the recipe."""

import math

import pytest

from shardwright.recipe.config import OptimizerConfig
from shardwright.train.loop import Best, learning_rate


def rates(steps, **options):
    config = OptimizerConfig(lr=2.0, warmup_steps=4, final_share=0.1, **options)
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def test_every_schedule_warms_up_and_then_keeps_to_its_form():
    warm = [0.5, 1.0, 1.5, 2.0]
    assert rates(12, schedule="constant") == [*warm, *[2.0] * 8]
    down = [0.2 + 1.8 * left / 5 for left in (4, 3, 2, 1, 0)]
    assert rates(20, schedule="wsd", decay_share=0.25) == pytest.approx([*warm, *[2.0] * 11, *down])
    cosine = rates(12, schedule="cosine")
    assert cosine[:4] == warm and cosine[-1] == pytest.approx(0.2)
    assert cosine[7] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 2)))


def test_decay_never_begins_in_the_warm_up():
    assert rates(8, schedule="wsd", decay_share=1.0) == pytest.approx([0.5, 1, 1.5, 2, 1.55, 1.1, 0.65, 0.2])
    assert rates(3, schedule="wsd") == [0.5, 1.0, 1.5]


def test_the_best_evaluation_is_the_lowest_and_no_number_is_none():
    best = Best()
    for step, loss in enumerate([3.0, 2.0, math.nan, 2.0, 2.5], 1):
        best = best.after(loss, step)
    assert best == Best(2.0, 2, 3)
