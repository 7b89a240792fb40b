"""What blocks take: kinds are compared by blocks that ran close together, and the machine slows all down alike."""

from __future__ import annotations

import random

import pytest

from runtime.speculation.block_times import BlockTimes
from tests.runtime.speculation.test_planner import LENGTHS


def test_drafts_that_were_not_run_for_long_do_not_seem_to_become_slower() -> None:
    times, jitter = BlockTimes(), random.Random(0)
    for length in [4] * 8 + [0] * 5000:
        disturbed = jitter.lognormvariate(0, 0.1) * (1.5 if jitter.random() < 0.1 else 1)
        times.add(1, length, 1e-3 * (1 + length / 2) * disturbed)
    drafted, plain = times.expected(1, [4, 0])
    assert drafted / plain == pytest.approx(3, rel=0.2)


def test_a_machine_that_slows_down_while_one_length_runs_does_so_for_all() -> None:
    times = BlockTimes()
    for length, slowness in [(4, 1)] * 9 + [(0, 1)] * 9 + [(0, 3)] * 40 + [(4, 3)] * 4:
        times.add(8, length, slowness * (3.0 if length else 1.0))
    assert times.expected(8, [4, 0]) == pytest.approx([9, 3])


def test_a_length_first_measured_just_after_a_disturbance_does_not_seem_fast_for_good() -> None:
    times = BlockTimes()
    disturbed = [(4, 1)] * 40 + [(4, 3)] * 20 + [(1, 1)] * 8
    for length, slowness in disturbed + ([(4, 1)] * 4 + [(1, 1)] * 8) * 2:
        times.add(1, length, slowness * (2.0 if length == 4 else 1.0))
    short, long = times.expected(1, [1, 4])
    assert long / short == pytest.approx(2, rel=0.05)


def test_where_one_length_was_measured_blocks_take_what_they_do_with_about_so_many_rows() -> None:
    times = BlockTimes()
    for rows, length, seconds in ((1, 0, 1.0), (1, 4, 1.1), (8, 0, 1.0), (8, 4, 3.0), (6, 0, 0.9)):
        for _ in range(9):
            times.add(rows, length, seconds)
    assert times.expected(6, LENGTHS) == times.expected(8, LENGTHS)
    assert times.expected(2, LENGTHS) == times.expected(1, LENGTHS)
