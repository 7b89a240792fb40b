"""Corrections of the table: real errors are learnt, luck is not."""

from __future__ import annotations

import math
import random
import statistics

from runtime.speculation.step_costs import BlockShape, StepCosts, StepTable
from runtime.speculation.step_times import BlockTimes

COSTS = StepCosts(StepTable((1,), (1, 9), ((2.0, 4.0),), 64), StepTable((1,), (1, 2), ((0.25, 0.5),), 64))
SHAPES = [BlockShape(levels, width, 1) for levels in range(1, 5) for width in (1, 2, 4)]


def seen(noise: float, blocks: int, seed: int, wrong: dict[BlockShape, float], speed: float = 1.0) -> BlockTimes:
    """What is believed after `blocks` blocks of each shape; `wrong` shapes take longer than the table says."""
    times, chance = BlockTimes(COSTS), random.Random(seed)
    for _ in range(blocks):
        for shape in SHAPES:
            seconds = speed * wrong.get(shape, 1.0) * COSTS.block(1, shape, 64)
            times.observe(1, shape, 0, seconds * math.exp(chance.gauss(0, noise)))
    return times


def errors(times: BlockTimes) -> list[float]:
    """Log of what is expected over what the table says."""
    return [math.log(times.expect(1, shape, 0) / COSTS.block(1, shape, 64)) for shape in SHAPES]


def test_on_a_noisy_machine_no_shape_seems_fast_by_luck() -> None:
    luck = statistics.fmean(statistics.pstdev(errors(seen(0.25, 10, seed, {}))) for seed in range(20))
    assert luck < 0.5 * 0.25 / math.sqrt(10)


def test_on_a_quiet_machine_a_shapes_own_error_is_learnt() -> None:
    slow = SHAPES[5]
    for seed in range(5):
        found = errors(seen(0.01, 15, seed, {slow: 1.2}))
        others = statistics.fmean(error for shape, error in zip(SHAPES, found, strict=True) if shape != slow)
        assert abs(found[5] - others - math.log(1.2)) < 0.03


def test_a_machine_that_is_twice_as_slow_is_so_for_shapes_never_met() -> None:
    times = seen(0.05, 3, 1, {}, speed=2.0)
    new = BlockShape(8, 4, 4)
    assert abs(math.log(times.expect(1, new, 0) / COSTS.block(1, new, 64) / 2)) < 0.1
