"""Lossless rules emit exactly the target's law, over all drafts of the draft's law and all acceptance numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mtad.params import DecodingParams
from tests.support.law import Distribution, Request, Tokens
from tests.support.one_row import OneRow
from tests.support.rule_laws import moved

VOCAB = 3
SHAPES: tuple[Sequence[float], ...] = (
    (0.5, 0.3, 0.2),
    (1.0, 0.0, 0.0),
    (0.6, 0.4, 0.0),
    (0.1, 0.1, 0.8),
    (1 / 3, 1 / 3, 1 / 3),
    (0.0, 0.01, 0.99),
)


def request_of(pair: str, params: DecodingParams, eos: Tokens = ()) -> Request:
    """Two models that depend on the whole text, of one kind."""

    @cache
    def both(path: Tokens) -> tuple[Distribution, Distribution]:
        chance = np.random.default_rng([VOCAB, len(path), *path, len(pair)])
        found = []
        for _ in range(2):
            shape = SHAPES[chance.integers(len(SHAPES))]
            if pair != "zeros":
                shape = chance.dirichlet(np.ones(VOCAB)).tolist()
            found.append({token: value for token, value in enumerate(chance.permutation(shape).tolist()) if value > 0})
        if pair == "equal":
            found[1] = found[0]
        if pair == "certain":  # as looked-up drafts are
            found[1] = {int(chance.integers(VOCAB)): 1.0}
        if pair == "disjoint":
            first = int(chance.integers(VOCAB))
            found = [{first: 1.0}, {token: 1 / (VOCAB - 1) for token in range(VOCAB) if token != first}]
        return found[0], found[1]

    return Request(lambda path: both(path)[0], lambda path: both(path)[1], params, eos)


def distance(request: Request) -> float:
    """The largest difference of a text's probability from the target's."""
    found, expected = OneRow(request, VOCAB).emitted(), dict[Tokens, float]()
    for chance, text in request.texts((), request.params.drafted + 1):
        expected[text] = chance
    return max(abs(found.get(text, 0.0) - expected.get(text, 0.0)) for text in {**found, **expected})


LOSSLESS = [
    *(DecodingParams(method=method, draft_len=length) for method in ("speculative", "block") for length in (1, 2, 3)),
    *(
        DecodingParams(method=name, draft_len=4, draft_confidence=0.4, branching=(2, 1))
        for name in ("speculative", "block", "traversal")
    ),
    *(
        DecodingParams(method="traversal", branching=branching)
        for branching in ((2,), (3,), (4,), (2, 2), (1, 2), (2, 1), (1, 1, 2))  # up to more than there are tokens
    ),
    DecodingParams(draft_len=3, draft="lookup"),
]
PAIRS = ("random", "zeros", "equal", "disjoint", "certain")


def name_of(params: DecodingParams) -> str:
    """The name of a case."""
    kind = params.branching if params.spec.form == "branches" else params.draft_len
    return f"{params.method}-{kind}{params.draft or ''}"


@pytest.mark.parametrize("params", LOSSLESS, ids=name_of)
def test_a_lossless_rule_emits_the_targets_law(params: DecodingParams) -> None:
    for pair, eos in zip((*PAIRS, "random"), ((1,), (), (1,), (), (1,), ()), strict=True):
        assert distance(request_of(pair, params, eos)) < 1e-6, (pair, eos)


def test_a_rule_that_is_not_lossless_is_seen_to_differ() -> None:
    assert distance(request_of("random", DecodingParams(method="mtad", draft_len=2, beam_width=1))) > 0.01


@pytest.mark.parametrize("branching", [None, (2, 1), (1, 2)])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_budget_moves_the_first_tokens_law_as_far_as_it_says(pair: str, branching: tuple[int, ...] | None) -> None:
    for divergence, plausible in ((0.0, 0.0), (0.2, 0.0), (0.6, 0.5), (1.0, 0.0)):
        method = "budget" if branching is None else "budget_tree"
        params = DecodingParams(method=method, draft_len=2, divergence=divergence, plausible=plausible)
        request = request_of(pair, replace(params, branching=branching or (1, 1)))
        p, expected = request.p(()), moved(request, ())
        assert emitted_first(request) == pytest.approx(expected, abs=1e-6)
        far = sum(abs(expected[token] - p[token]) for token in p) / 2
        assert far <= divergence * (1 - max(p.values())) + 1e-9
        assert far > 0.01 or divergence < 1 or pair != "random"


@pytest.mark.parametrize("method", ["speculative", "block", "traversal"])
def test_a_very_sure_auxiliary_leaves_the_target_its_law(method: str) -> None:
    """An auxiliary that is sure by 18 nats has, in float32, nothing left besides its likeliest token."""
    logits = np.array([18.0, 0.5, 0.0])
    q = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    p = {0: 0.236, 1: 0.382, 2: 0.382}
    params = DecodingParams(method=method, draft_len=2, branching=(3, 1), top_p=1.0)
    request = Request(lambda _: p, lambda _: dict(enumerate(q.astype(np.float32).tolist())), params)
    assert emitted_first(request) == pytest.approx(p, abs=1e-5)
    params = replace(params, branching=(2, 2))
    assert emitted_first(replace(request, params=params)) == pytest.approx(p, abs=1e-5)


def emitted_first(request: Request) -> Distribution:
    """The law of the first token of a block."""
    masses: dict[int, float] = defaultdict(float)
    for text, mass in OneRow(request, VOCAB).emitted().items():
        masses[text[0]] += mass
    return dict(masses)
