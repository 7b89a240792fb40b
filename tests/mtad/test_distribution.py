"""Filters, draws and likelihoods against their definitions in float64, which call nothing of `mtad.distribution`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mtad.distribution import draw, exp_into, log_likelihood, pick
from mtad.filters import filter_logits, keep_likeliest
from mtad.params import DecodingParams
from mtad.rows import stack_rows
from tests.support import law

Floats = npt.NDArray[np.float32]
Found = tuple[npt.NDArray[np.int32], Floats]

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 10, "top_p": 0.9},
    {"top_k": 10, "temperature": 0.7},
    {"top_k": 1000, "top_p": 0.95, "min_p": 0.02},
    {"top_k": 2**31 - 1},
    {"top_p": 0.0},
    {"top_p": 0.5, "temperature": 1.3, "min_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.9, "temperature": 0.01},
    {"top_p": 0.999, "temperature": 10.0},
    {"min_p": 0.05},
    {"min_p": 0.3, "temperature": 10.0},
    {"min_p": 1.0},
    {"top_k": 10, "min_p": 0.1},
    {"temperature": 0.01},
    {"temperature": 10.0},
]
NORMAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def filtered(logits: Floats, **asked: Any) -> Found:
    """What `filter_logits` gives for one row's parameters."""
    row = stack_rows([DecodingParams(**{**NORMAL, **asked})], len(logits))[0]
    ids, log_p = np.full(len(logits), -1, np.int32), np.zeros(len(logits), np.float32)
    count = filter_logits(logits, row, ids, log_p)
    return ids[:count], log_p[:count]


def some_logits(size: int, scale: float, masked: bool, seed: int) -> Floats:
    """Random logits; small ones are whole numbers, so that many are equal."""
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal(size) * scale).astype(np.float32)
    if size < 100:
        logits = np.round(logits)
    if masked:
        logits[generator.random(size) < 0.5] = -math.inf
        logits[size // 2] = 0.0
    return logits


def check_filter(logits: Floats, asked: dict[str, Any]) -> None:
    ids, log_p = filtered(logits, **asked)
    expected, log_expected = law.filtered(logits, DecodingParams(**{**NORMAL, **asked}))
    if len(ids) == len(logits):  # without a filter, what is forbidden keeps its entry
        assert (log_p[np.isin(ids, expected, invert=True)] < -700).all()
        ids, log_p = ids[np.isin(ids, expected)], log_p[np.isin(ids, expected)]
    assert ids.tolist() == expected.tolist()
    assert np.allclose(log_p, log_expected, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 8.0, 40.0])
@pytest.mark.parametrize("size", [1, 5, 64, 65, 1025, 4096])
def test_a_filter_keeps_what_its_definition_keeps(size: int, scale: float, masked: bool) -> None:
    for seed, asked in enumerate(FILTERS):
        check_filter(some_logits(size, scale, masked, seed), asked)


@pytest.mark.parametrize("asked", FILTERS[3:10:2], ids=str)
def test_a_filter_of_a_whole_vocabulary_keeps_what_its_definition_keeps(asked: dict[str, Any]) -> None:
    check_filter(some_logits(128256, 3.0, False, 0), asked)


def test_nucleus_at_its_boundary_keeps_the_token_that_reaches_it() -> None:
    logits = np.zeros(8, np.float32)  # each has an eighth, which floats hold exactly
    for eighths in range(1, 9):
        top_p = eighths / 8
        assert len(filtered(logits, top_p=top_p)[0]) == eighths
        if eighths < 8:
            assert len(filtered(logits, top_p=top_p + 1e-6)[0]) == eighths + 1


def test_min_p_at_its_boundary_keeps_the_token() -> None:
    logits = np.array([0.0, -1.0, -1.0, -2.0], np.float32)
    for min_p, kept in ((math.exp(-1.0), 3), (math.exp(-1.0) + 1e-6, 1), (math.exp(-2.0), 4), (1.0, 1)):
        assert len(filtered(logits, min_p=min_p)[0]) == kept


@pytest.mark.parametrize("asked", FILTERS, ids=str)
def test_logits_that_are_no_distribution_give_a_single_nan(asked: dict[str, Any]) -> None:
    for size, bad in itertools.product((1, 5, 65, 130), (math.nan, math.inf, -math.inf)):
        for at in (0, size // 2, size - 1):
            logits = np.zeros(size, np.float32)
            logits[:] = -math.inf if bad == -math.inf else np.linspace(-3, 3, size)
            logits[at] = bad
            ids, log_p = filtered(logits, **asked)
            assert ids.tolist() == [0]
            assert np.isnan(log_p).all()


def test_equal_logits_are_kept_in_the_order_of_their_ids() -> None:
    logits = np.array([2.0, -0.0, 1.0, 0.0, 1.0, -0.0, 0.0, -5.0], np.float32)
    for few in range(1, 9):
        ids = np.arange(8, dtype=np.int32)
        count = keep_likeliest(logits, ids, np.ones(8, np.float32), few)
        assert ids[:count].tolist() == sorted([0, 2, 4, 1, 3, 5, 6, 7][:few])
    assert keep_likeliest(logits, np.arange(8, dtype=np.int32), np.ones(8, np.float32), 100.0) == 8
    assert keep_likeliest(logits, np.arange(8, dtype=np.int32), np.ones(8, np.float32), 0.0) == 1


@pytest.mark.parametrize("shift", [0.0, 1e-30, 300.0, -300.0])
def test_few_are_told_apart_however_close_or_far_their_logits_are(shift: float) -> None:
    generator = np.random.default_rng(0)
    for scale in (1e-30, 1e-6, 0.02, 1.0, 30.0):
        logits = (generator.standard_normal(200) * scale + shift).astype(np.float32)
        logits[7] = 0.0  # between those above and those below
        order = np.lexsort((np.arange(200), -logits))
        for few in (1, 2, 17, 199, 200):
            ids = np.arange(200, dtype=np.int32)
            count = keep_likeliest(logits, ids, np.ones(200, np.float32), few)
            assert ids[:count].tolist() == sorted(order[:few].tolist())


def inverse(weights: Floats, uniform: float) -> int:
    """The first index whose running sum exceeds `uniform` of the total; -1 where nothing has weight."""
    sums = np.cumsum(weights.astype(np.float64))
    above = np.flatnonzero((sums > uniform * sums[-1]) & (weights > 0))
    there = np.flatnonzero(weights > 0)
    return int(above[0]) if len(above) else int(there[-1]) if len(there) else -1


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**60])
def test_a_draw_is_the_inverse_of_the_distribution_function(scale: float) -> None:
    cases = [[1], [0, 1, 0], [1, 2, 5], [0, 0, 3, 0, 1, 4, 0, 0], [8], [0] * 4, [1] * 8, [0, 1, 0, 7, 0]]
    for weights in cases:
        scaled = np.array(weights, np.float32) * np.float32(scale)
        for uniform in np.arange(256) / 256:  # eighths are among them, where one token ends and the next begins
            assert draw(scaled, uniform) == inverse(scaled, uniform)


@pytest.mark.parametrize("size", [63, 64, 1024, 1025, 2048, 2049, 5000])
def test_a_draw_from_many_weights_is_the_inverse_too(size: int) -> None:
    generator = np.random.default_rng(size)
    for zeros in (0.0, 0.5, 0.999):
        weights = generator.integers(1, 5, size).astype(np.float32)  # whole numbers, so that sums are exact
        weights[generator.random(size) < zeros] = 0
        weights[: size // 3], weights[size - size // 4 :] = 0, 0
        for uniform in [0.0, 1 - 2**-24, *generator.random(50), *(np.arange(64) / 64)]:
            assert draw(weights, uniform) == inverse(weights, uniform)
        edges = np.cumsum(weights.astype(np.float64)) / max(weights.sum(dtype=np.float64), 1.0)
        for uniform in edges[edges < 1][:: max(size // 50, 1)]:
            assert draw(weights, float(uniform)) == inverse(weights, float(uniform))


def test_a_draw_that_rounding_lets_none_exceed_takes_the_last_that_has_weight() -> None:
    for size, at in itertools.product((3, 3000), (0, 1)):
        weights = np.zeros(size, np.float32)
        weights[at] = 1.0
        assert draw(weights, 1.0) == at
        assert draw(np.zeros(size, np.float32), 0.5) == -1


def test_nothing_random_picks_the_first_of_the_largest() -> None:
    for weights, best in (([1, 3, 3, 2], 1), ([0, 0, 2], 2), ([0, 0], -1), ([5], 0), ([0, 1e-30, 0], 1)):
        for uniform in (0.0, 0.5, 0.999):
            assert pick(np.array(weights, np.float32), uniform, True) == best
            assert pick(np.array(weights, np.float32), uniform, False) == draw(np.array(weights, np.float32), uniform)


@pytest.mark.parametrize("size", [1, 5, 64, 65, 5000])
def test_log_likelihood_is_that_of_the_softmax(size: int) -> None:
    for scale in (0.0, 1.0, 30.0):
        logits = some_logits(size, scale, size > 5, 1)
        exact = logits.astype(np.float64)
        exact = exact - exact.max() - math.log(np.exp(exact - exact.max()).sum())
        for token in range(0, size, max(size // 20, 1)):
            found = log_likelihood(logits, token)
            assert found == pytest.approx(exact[token], rel=1e-6, abs=1e-6) or (found == exact[token] == -math.inf)
    for bad in (math.nan, math.inf):
        logits[-1] = bad
        assert math.isnan(log_likelihood(logits, 0))
    assert math.isnan(log_likelihood(np.full(size, -math.inf, np.float32), 0))


def test_the_exponential_is_that_of_numpy() -> None:
    values = -np.concatenate([np.linspace(0, 87, 200_003), np.geomspace(1e-30, 1, 999)]).astype(np.float32)
    out = np.empty_like(values)
    exp_into(values, 0.0, 1.0, out)
    assert np.allclose(out, np.exp(values.astype(np.float64)), rtol=1e-6, atol=0)
    assert out[0] == 1.0
    for far in (-87.01, -1e4, -math.inf):
        exp_into(np.full(70, far, np.float32), 0.0, 1.0, out[:70])
        assert (out[:70] == 0).all()
    exp_into(np.array([3.0, 1.0], np.float32), 3.0, 0.5, out[:2])
    assert np.allclose(out[:2], [1.0, math.exp(-1.0)], rtol=1e-6)
