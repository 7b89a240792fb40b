"""Figures of requests and running totals: what their definitions say."""

from __future__ import annotations

import json
import math

from runtime.scheduler.statistics import Histogram, Statistics, Totals


def test_a_histogram_counts_each_value_once_below_its_bound() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1, 1e9):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.to_dict()["count"] == 7
    assert histogram.to_dict()["sum"] == math.fsum((0, 1, 1.5, 2, 5, 5.1, 1e9))


def test_a_request_that_never_began_has_no_latency() -> None:
    totals = Totals()
    totals.ended("error", Statistics(prompt_tokens=3))
    assert totals.requests == {"stop": 0, "length": 0, "cancelled": 0, "error": 1}
    assert sum(totals.total.counts) == sum(totals.first_token.counts) == 0
    assert json.loads(json.dumps(totals.to_dict()))["queue"]["count"] == 0
