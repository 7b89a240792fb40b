"""A block of mmtad_sample is the target's own sample, given that it is one of the paths that the draft offers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from mtad.params import DecodingParams
from tests.mtad.rules.test_lossless import p_value
from tests.support import cases as support
from tests.support import reference
from tests.support.cases import Case, run_block
from tests.support.mock_models import mock_pair
from tests.support.noise import draw_noise
from tests.support.reference.request import Tokens
from tests.support.reference.rules import passing

VOCAB, EOS = 5, (0,)
BASE = DecodingParams(method="mmtad_sample", draft_len=3, beam_width=4, top_k=0, top_p=1.0, accept_threshold=0.1)


def kept_paths(case: Case, uniforms: torch.Tensor) -> Counter[Tokens]:
    """What is kept of one draft, for each number that the path may be drawn with."""

    def noise(*arguments: object) -> object:
        drawn = draw_noise(*arguments)  # type: ignore[arg-type]
        drawn.accept[:, 0] = uniforms
        return drawn

    with patch.object(support, "draw_noise", noise):
        run = run_block([case] * len(uniforms), VOCAB, EOS)
    return Counter(run.emitted(row)[:-1] for row in range(len(uniforms)))


def complete_paths(request: reference.Request, path: Tokens = ()) -> list[Tokens]:
    """All texts of as many tokens as are drafted, and those that end before."""
    if len(path) == request.params.draft_len or request.ends(path):
        return [path]
    return [found for token in request.p(path) for found in complete_paths(request, (*path, token))]


@pytest.mark.parametrize("seed", range(6))
def test_of_one_draft_a_path_is_kept_with_the_targets_probability_given_the_set(seed: int) -> None:
    """Every draw enumerated; 1 - p(S) and -log p(S) are then what lies between the block and the target."""
    case, count = Case(mock_pair(seed, VOCAB, 1.5, 0.7), BASE, (), (seed, 0)), 2_000
    request, uniforms = case.request(EOS), (torch.arange(count) + 0.5) / count
    drafted = reference.draft(request, run_block([case], VOCAB, EOS).random(0))
    offered = {path: math.exp(request.log_p(path)) for path in passing(request, drafted)}
    mass = sum(offered.values())
    found = kept_paths(case, uniforms)
    assert found.keys() <= offered.keys()
    for path, p in offered.items():
        assert found[path] / count == pytest.approx(p / mass, abs=2 / count)
    joint = {path: math.exp(request.log_p(path)) for path in complete_paths(request)}
    assert sum(joint.values()) == pytest.approx(1)
    if offered.keys() <= joint.keys():
        block = {path: offered.get(path, 0.0) / mass for path in joint}
        variation = sum(abs(block[path] - p) for path, p in joint.items()) / 2
        entropy = sum(b * math.log(b / joint[path]) for path, b in block.items() if b)
        assert (variation, entropy) == pytest.approx((1 - mass, -math.log(mass)))


def test_over_all_drafts_it_is_the_mixture_of_these() -> None:
    """Of two tokens drawn without replacement, each pair enumerated: closer to the target than what is not covered."""
    params = replace(BASE, draft_len=1, beam_width=2, accept_threshold=0.0)
    pair, count = mock_pair(2, VOCAB, 1.0, 1.0), 4_000
    request = Case(pair, params, (), (0, 0)).request()
    p, q = request.p(), request.q()
    expected, uncovered = dict.fromkeys(p, 0.0), 0.0
    for one, other in itertools.permutations(p, 2):
        chance, mass = q[one] * q[other] / (1 - q[one]), p[one] + p[other]
        uncovered += chance * (1 - mass)
        for token in (one, other):
            expected[token] += chance * p[token] / mass
    variation = sum(abs(expected[token] - p[token]) for token in p) / 2
    assert 0.02 < variation <= uncovered
    run = run_block([Case(pair, params, (), (seed, 0)) for seed in range(count)], VOCAB)
    seen = Counter(run.emitted(row)[0] for row in range(count))
    assert chisquare([seen[token] for token in p], [count * expected[token] for token in p]).pvalue > 1e-3
    own = [count * value for value in p.values()]
    assert chisquare([seen[token] for token in p], own).pvalue < 1e-6


def test_a_draft_that_holds_every_path_makes_it_lossless() -> None:
    assert p_value(replace(BASE, draft_len=2, beam_width=16, accept_threshold=0.0)) > 1e-3


def test_at_temperature_0_the_likeliest_path_is_kept() -> None:
    params = replace(BASE, temperature=0.0)
    cases = [Case(mock_pair(seed, VOCAB, 1.5, 0.7), params, (), (seed, 0)) for seed in range(100)]
    likeliest = [replace(case, params=replace(params, method="mmtad")) for case in cases]
    one, other = run_block(cases, VOCAB, EOS), run_block(likeliest, VOCAB, EOS)
    assert all(np.array_equal(one.emitted(row), other.emitted(row)) for row in range(len(cases)))
