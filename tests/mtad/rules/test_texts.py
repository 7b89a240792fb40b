"""Texts by compiled blocks of the host: lossless ones are distributed as the target's, and greedy ones are its own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtad.methods import METHODS
from mtad.params import DecodingParams
from tests.support.chi_square import p_value
from tests.support.law import Distribution, Request, Tokens, filtered
from tests.support.mock_models import Model, Pair, generate, mock_pair, sure_pair

BASE = DecodingParams(draft_len=2, top_k=0, top_p=1.0)
LOSSLESS: tuple[dict[str, Any], ...] = (
    {"method": "speculative"},
    {"method": "block"},
    {"method": "block", "draft_confidence": 0.4},
    *({"method": "traversal", "branching": branching} for branching in ((2, 1), (1, 2), (3,))),
)


def request_of(pair: Pair, params: DecodingParams, eos: Tokens = ()) -> Request:
    """A request of two models."""

    def after(model: Model, path: Tokens) -> Distribution:
        ids, log_p = filtered(model(path), params)
        return dict(zip(ids.tolist(), np.exp(log_p).tolist(), strict=True))

    return Request(lambda path: after(pair.target, path), lambda path: after(pair.auxiliary, path), params, eos)


FILTERS: tuple[dict[str, Any], ...] = (
    *({}, {"top_k": 3, "temperature": 1.7}),
    *({"top_p": 0.9, "temperature": 0.6}, {"min_p": 0.2}),
)
DRAWN = [
    replace(BASE, **asked, **filters)
    for asked, filters in zip([{"method": "sample"}, *LOSSLESS], itertools.cycle(FILTERS), strict=False)
]


@pytest.mark.slow
@pytest.mark.parametrize("params", DRAWN, ids=lambda p: f"{p.method}-{p.branching}-{p.temperature}")
@pytest.mark.parametrize("gap", [0, 30])
def test_texts_are_distributed_as_the_targets(params: DecodingParams, gap: int) -> None:
    """Also where the auxiliary is surer than float32 or float64 can express as 1 - q."""
    pair = sure_pair(23, 4, gap) if gap else mock_pair(11, 4, peak=1.2, noise=0.8)
    law = {text: value for value, text in request_of(pair, params).texts((), 3)}
    assert p_value(generate(pair, [params] * 3000, 4, 3), law) > 1e-4


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.lossless])
def test_temperature_0_gives_the_greedy_tokens(method: str) -> None:
    params = [
        DecodingParams(method=method, temperature=0.0, draft_len=gamma, top_k=k) for gamma in (1, 3, 6) for k in (0, 5)
    ]
    for seed in range(5):
        pair = mock_pair(seed, 9, peak=1.0, noise=0.7)
        greedy: Tokens = ()
        while len(greedy) < 12:
            greedy += (int(pair.target(greedy).argmax()),)
        assert generate(pair, params, 9, 12) == [greedy] * len(params)


@pytest.mark.parametrize("method", METHODS)
def test_temperature_0_does_not_depend_on_the_seed(method: str) -> None:
    params = [DecodingParams(method=method, temperature=0.0, draft_len=3, beam_width=3)] * 4
    for seed in range(3):
        assert len(set(generate(mock_pair(seed, 9, peak=1.0, noise=0.7), params, 9, 12))) == 1
