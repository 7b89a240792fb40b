"""`speculative` emits the target's own distribution; without randomness, its most likely tokens."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from scipy.stats import chisquare

from mtad.params import DecodingParams
from tests.reference import Case, Ties, Tokens, generate, log_likelihood, mock_pair

VOCAB, LENGTH, TEXTS = 4, 3, 4_000
PAIR = mock_pair(11, VOCAB, peak=1.2, noise=0.8)
FREE = DecodingParams(method="speculative", draft_len=2, top_k=0, top_p=1.0)


def p_value(params: DecodingParams) -> float:
    """Chi-square of the first tokens of many texts against the target's enumerated joint."""
    settings = Case(PAIR, params, (), (0, 0)).settings(())
    texts = itertools.product(range(VOCAB), repeat=LENGTH)
    joint = {text: math.exp(log_likelihood(PAIR.target, (), text, settings, Ties())) for text in texts}
    assert sum(joint.values()) == pytest.approx(1)
    seen = Counter(generate(PAIR, [params] * TEXTS, VOCAB, LENGTH))
    possible = {text for text, probability in joint.items() if probability > 0}
    assert seen.keys() <= possible
    common = [text for text in possible if joint[text] * TEXTS >= 5]
    observed, expected = [seen[text] for text in common], [joint[text] * TEXTS for text in common]
    rest = TEXTS - sum(expected)
    if rest > 5:
        observed, expected = [*observed, TEXTS - sum(observed)], [*expected, rest]
    else:
        expected = [value * sum(observed) / sum(expected) for value in expected]
    return float(chisquare(observed, expected).pvalue)


@pytest.mark.parametrize(
    "params",
    [
        FREE,
        replace(FREE, temperature=0.6, draft_len=1),
        replace(FREE, top_k=3, draft_len=4),
        replace(FREE, top_p=0.8),
        replace(FREE, temperature=1.7, top_k=3, top_p=0.9, draft_len=3),
        replace(FREE, method="sample"),
    ],
    ids=lambda p: f"{p.method}-{p.draft_len}-{p.temperature}-{p.top_k}-{p.top_p}",
)
def test_texts_are_distributed_as_the_targets(params: DecodingParams) -> None:
    assert p_value(params) > 1e-3


def test_a_lossy_rule_would_be_noticed() -> None:
    assert p_value(replace(FREE, method="mtad", beam_width=1, accept_threshold=0.1)) < 1e-6


@pytest.mark.parametrize("method", ["sample", "speculative"])
def test_temperature_0_gives_the_greedy_tokens(method: str) -> None:
    length = 12
    params = [
        DecodingParams(method=method, temperature=0.0, draft_len=gamma, top_k=k) for gamma in (1, 3, 6) for k in (0, 5)
    ]
    for seed in range(20):
        pair = mock_pair(seed, 9, peak=1.0, noise=0.7)
        greedy: Tokens = ()
        while len(greedy) < length:
            greedy += (int(pair.target(greedy).argmax()),)
        assert generate(pair, params, 9, length) == [greedy] * len(params)


@pytest.mark.parametrize("method", ["mtad", "mmtad"])
def test_temperature_0_does_not_depend_on_the_seed(method: str) -> None:
    params = [DecodingParams(method=method, temperature=0.0, draft_len=3, beam_width=3)] * 5
    for seed in range(20):
        assert len(set(generate(mock_pair(seed, 9, peak=1.0, noise=0.7), params, 9, 12))) == 1
