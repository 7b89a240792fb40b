"""What the step table gets wrong is told apart from how fast the machine is."""

from __future__ import annotations

import math
import random

import pytest

from runtime.speculation.cost_error import MOST, CostError


def test_a_machine_that_slows_down_makes_no_kind_of_block_look_dearer_than_another() -> None:
    error, coin = CostError(1), random.Random(0)
    for speed in (0.0, 0.5):
        for _ in range(40):
            for kind, own in (("small", 0.1), ("large", -0.1)):
                error.observe(kind, [0.5], [speed + own + coin.gauss(0, 0.05)])
        assert error.of("small", [0.5]) - error.of("large", [0.5]) == pytest.approx(0.2, abs=0.05)
    assert error.of("small", [0.5]) == pytest.approx(0.6, abs=0.05)


def test_what_a_part_costs_is_expected_of_kinds_that_were_never_run() -> None:
    error = CostError(1)
    for _ in range(50):
        error.observe("none", [0.0], [0.0])
        error.observe("half", [0.5], [0.2])
    assert error.of("whole", [1.0]) - error.of("none", [0.0]) > 0.1
    assert error.speed == pytest.approx(1.0, abs=0.05)


def test_what_changes_after_hours_is_learnt_as_quickly_as_at_the_start() -> None:
    error = CostError(1)
    for number in range(20_000):
        error.observe(number % 2, [0.5 * (number % 2)], [0.0])
    for number in range(1000):
        error.observe(number % 2, [0.5 * (number % 2)], [0.3 * (number % 2)])
    assert error.of(1, [0.5]) - error.of(0, [0.0]) == pytest.approx(0.3, abs=0.1)


def test_few_kinds_are_remembered_those_that_were_run_last() -> None:
    error = CostError(1)
    for kind in range(10 * MOST):
        for _ in range(3):
            error.observe("again", [0.0], [0.3])
            error.observe(kind, [0.0], [-0.3])
    assert len(error._mean) == 2 + MOST
    assert error.of("again", [0.0]) > error.of("never", [0.0])
    assert error.of(0, [0.0]) == error.of("never", [0.0])


def test_one_block_that_took_ten_times_as_long_counts_as_three_standard_deviations() -> None:
    lucky, unlucky = CostError(1), CostError(1)
    for error, last in ((lucky, 0.0), (unlucky, math.log(10))):
        for _ in range(100):
            error.observe("any", [0.2], [0.0])
        error.observe("any", [0.2], [last])
    assert unlucky.of("any", [0.2]) - lucky.of("any", [0.2]) < 0.1
