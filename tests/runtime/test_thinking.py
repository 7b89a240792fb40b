"""Thoughts: the rule switches at the tags, the answer is the target's own, limits and texts are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM
from runtime.scheduler.request import Request
from runtime.scheduler.thoughts import Thoughts, known_tags
from tests.runtime.test_schedules import Mock, make_mock
from tests.support.chi_square import p_value
from tests.support.mock_engine import VOCAB

OPEN, CLOSE = [1, 2], [3]
"""A tag of two tokens, and one of a single token."""


def run(mock: Mock, params: Sequence[DecodingParams], prompt: Sequence[int] = (5, *OPEN)) -> list[Request]:
    requests = [Request(number, list(prompt), p, p.seed or 0) for number, p in enumerate(params)]
    for request in requests:
        inside = list(prompt[-len(OPEN) :]) == OPEN
        request.thoughts = Thoughts(OPEN, CLOSE, inside, request.params.thinking_token_budget)
        mock.loop.scheduler.submit(request)
    while not mock.loop.idle:
        for request in mock.loop.step():
            assert not request.error, request.error
        mock.loop.check_integrity()
    return requests


def ranks(requests: Sequence[Request]) -> tuple[list[int], np.ndarray]:
    """How likely the first two tokens behind each thought were, as ranks, and how often each rank is expected."""
    drawn, law = list[int](), np.zeros(VOCAB)
    for request in requests:
        start = request.thoughts.switches[0][1] if request.thoughts and request.thoughts.switches else len(request.tokens)
        for token, top in zip(request.tokens[start : start + 2], request.top_log_probs[start:], strict=False):
            drawn.append([other for other, _ in top].index(token))
            law += np.exp([value for _, value in top])
    return drawn, law / law.sum()


LOSSY: tuple[dict[str, Any], ...] = (
    {"thinking_method": "mtad", "thinking_threshold": 0.0},
    {"thinking_method": "ensemble", "thinking_threshold": 0.0},
    {"thinking_method": "modal"},
    {"thinking_method": "budget", "thinking_divergence": 1.0},
)
BASE = DecodingParams(method="block", draft_len=3, max_tokens=60, top_logprobs=VOCAB, ignore_eos=True)


def texts(asked: dict[str, Any], count: int = 1200) -> list[Request]:
    mock = make_mock(rows=16, max_waiting=2 * count)
    return run(mock, [replace(DecodingParams.from_dict(asked, BASE), seed=seed) for seed in range(count)])


@pytest.mark.slow
@pytest.mark.parametrize("asked", LOSSY, ids=lambda asked: asked["thinking_method"])
def test_behind_a_thought_tokens_are_the_targets_own_whatever_the_thoughts_rule(asked: dict[str, Any]) -> None:
    drawn, law = ranks(texts(asked))
    assert p_value(drawn, dict(enumerate(law))) > 1e-4


@pytest.mark.slow
def test_without_the_switch_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Thoughts.read
    monkeypatch.setattr(Thoughts, "read", lambda self, text, tokens, cut: read(self, text, tokens, False))
    drawn, law = ranks(texts(LOSSY[1]))
    assert p_value(drawn, dict(enumerate(law))) < 1e-6
