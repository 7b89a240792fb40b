"""Drafting draws without replacement, as one by one from what is left; width 1 is sampling."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from scipy.stats import chisquare

from mtad.distributions.candidates import Candidates
from mtad.draft.levels import Level, expand, root
from mtad.noise.host import LevelNoise
from mtad.params import DecodingParams
from mtad.rows import Rows
from mtad.stacking import block_shape, places, stack_rows
from tests.support.noise import draw_noise

DRAWS = 10_000
FIRST = [0.7, 0.3]
NONE = LevelNoise(torch.zeros(DRAWS), torch.zeros(DRAWS, 2, 3), torch.zeros(DRAWS, 2, 0))
NEXT = [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]


def candidates(table: list[list[float]]) -> Candidates:
    """The same distributions in every row, by most likely tokens 0, 1, 2."""
    probabilities = torch.tensor(table).expand(DRAWS, -1, -1)
    return Candidates(torch.arange(3).expand(probabilities.shape), probabilities.log())


@cache
def second_level(eos: tuple[int, ...] = ()) -> tuple[Level, Level, Rows]:
    """Level 1, always tokens 0 and 1 of weights `FIRST`, and level 2 drawn from them with many requests' noise."""
    params = [DecodingParams(method="mmtad", draft_len=2, beam_width=2, top_k=0, top_p=1.0)] * DRAWS
    shape = block_shape(params, 3)
    rows = stack_rows(params, shape, 3, eos)
    noise = draw_noise(params, [(seed, 0) for seed in range(DRAWS)], shape, 3)
    first, second = places(rows, shape)
    above = expand(root(rows, shape), candidates([[*FIRST, 0.0]]), NONE, rows, first, shape.forms)
    return above, expand(above, candidates(NEXT), noise.levels[1], rows, second, shape.forms), rows


def p_value(draws: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    seen = Counter(draws)
    assert seen.keys() <= expected.keys()
    weights = list(expected.values())
    assert sum(weights) == pytest.approx(1)
    return float(chisquare([seen[key] for key in expected], [len(draws) * w / sum(weights) for w in weights]).pvalue)


def ordered_pairs(weights: dict[int, float]) -> dict[tuple[int, ...], float]:
    """Probability of each ordered pair, drawn one after the other from the renormalised rest."""
    return {
        (one, other): weights[one] * weights[other] / (1 - weights[one])
        for one, other in itertools.permutations(weights, 2)
    }


@pytest.mark.parametrize("eos", [(), (1,)])
def test_pairs_are_drawn_one_by_one_from_the_renormalised_rest(eos: tuple[int, ...]) -> None:
    """A pair is (beam, token), here 3 beam + token; the beam that ended is one candidate, itself."""
    _, level, _ = second_level(eos)
    joint = {3 * beam + token: FIRST[beam] * NEXT[beam][token] for beam in range(2) for token in range(3)}
    if eos:
        joint = {pair: weight for pair, weight in joint.items() if pair < 3} | {3: FIRST[1]}
    drawn = (3 * level.parents + level.tokens).tolist()
    assert p_value([(pair[0],) for pair in drawn], {(pair,): w for pair, w in joint.items()}) > 1e-3
    assert p_value([tuple(pair) for pair in drawn], ordered_pairs(joint)) > 1e-3
    if eos:
        ended = level.parents == 1
        assert torch.equal(level.drafted, ~ended)
        assert torch.allclose(level.log_q[ended], torch.tensor(math.log(FIRST[1])))


def test_the_wrong_weights_would_be_noticed() -> None:
    _, level, _ = second_level()
    drawn = [(pair[0],) for pair in (3 * level.parents + level.tokens).tolist()]
    assert p_value(drawn, {(pair,): 1 / 6 for pair in range(6)}) < 1e-6


def test_width_1_draws_from_the_distribution_itself() -> None:
    base = DecodingParams(method="mtad", draft_len=1, beam_width=1, top_k=0, top_p=1.0)
    for p in (base, replace(base, method="speculative")):
        params = [p] * DRAWS
        shape = block_shape(params, 3)
        rows = stack_rows(params, shape, 3, ())
        noise = draw_noise(params, [(7, block) for block in range(DRAWS)], shape, 3)
        place = places(rows, shape)[0]
        level = expand(root(rows, shape), candidates(NEXT[:1]), noise.levels[0], rows, place, shape.forms)
        drawn = [tuple(tokens) for tokens in level.tokens.tolist()]
        assert p_value(drawn, {(token,): weight for token, weight in enumerate(NEXT[0])}) > 1e-3


def test_without_noise_the_draft_is_beam_search() -> None:
    above, _, rows = second_level()
    shape = block_shape([DecodingParams(method="mmtad", draft_len=2, beam_width=2, top_k=0, top_p=1.0)], 3)
    level = expand(above, candidates(NEXT), NONE, rows, places(rows, shape)[1], shape.forms)
    assert level.parents[0].tolist() == [0, 0]
    assert level.tokens[0].tolist() == [0, 1]
    assert level.log_q[0].exp().tolist() == pytest.approx([0.35, 0.21])
