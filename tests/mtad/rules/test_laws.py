"""Every rule keeps and emits what its paper says, over random drafts: each outcome with its exact probability."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest

from mtad.methods import METHODS
from mtad.params import DecodingParams
from tests.support import rule_laws
from tests.support.law import Distribution, Outcome, Request, Tokens, first_of
from tests.support.one_row import OneRow

VOCAB = 5
SHAPES = [
    *((1.0,), (0.5, 0.5), (0.5, 0.25, 0.25), (0.5, 0.25, 0.125, 0.125), (0.25, 0.25, 0.25, 0.25)),
    *((0.5, 0.25, 0.125, 0.0625, 0.0625), (0.4, 0.3, 0.2, 0.1), (0.7, 0.1, 0.1, 0.1), (0.36, 0.33, 0.31)),
]
"""Powers of two make ties with thresholds that floats compare exactly."""


def request_of(seed: int, params: DecodingParams, eos: Tokens = ()) -> Request:
    """Two models whose distributions are permutations of `SHAPES`, in part the same."""

    @cache
    def both(path: Tokens) -> tuple[Distribution, Distribution]:
        chance = np.random.default_rng([seed, len(path), *path])
        found = []
        for _ in range(2):
            shape = SHAPES[chance.integers(len(SHAPES))]
            found.append(dict(zip(chance.permutation(VOCAB).tolist(), shape, strict=False)))
        if chance.random() < 0.3:
            found[1] = found[0]
        if params.temperature == 0 and params.spec.exact:
            found = [{first_of(own): 1.0} for own in found]
        return found[0], found[1]

    return Request(lambda path: both(path)[0], lambda path: both(path)[1], params, eos)


def kept(found: list[Outcome]) -> dict[Tokens, float]:
    """The probability of each path, those that are possible."""
    masses: dict[Tokens, float] = defaultdict(float)
    for chance, path, _ in found:
        masses[path] += chance
    return {path: mass for path, mass in masses.items() if mass > 1e-9}


def emitted(found: list[Outcome]) -> dict[Tokens, float]:
    """The same of each path with its bonus token."""
    masses: dict[Tokens, float] = defaultdict(float)
    for chance, path, bonus in found:
        for token, value in bonus.items():
            masses[(*path, token)] += chance * value
    return {text: mass for text, mass in masses.items() if mass > 1e-9}


THRESHOLDS = {
    "joint": (0.0, 0.25, 0.5, 1.0, 2.0, 0.3),
    "ensemble": (0.0, 0.3, 0.5, 1.0),
    "relaxed": (0.0, 0.25, 0.125, 1.0),
}


def params_of(method: str, seed: int) -> DecodingParams:
    """Requests that differ in everything the method reads."""
    chance = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[chance.integers(len(values))]

    name = METHODS[method].rule.split(".")[1]
    known = THRESHOLDS.get("joint" if name == "joint_sample" else name)
    return DecodingParams(
        method=method,
        draft_len=pick(1, 2, 3, 4),
        beam_width=pick(1, 2, 3, 4),
        branching=pick((2, 2), (3, 1), (2, 1, 2), (1, 3), (4,)),
        accept_threshold=pick(*known) if known else None,
        divergence=pick(0.0, 0.1, 0.5, 1.0),
        plausible=pick(0.0, 0.3, 0.6, 1.0),
        relaxed_topk=pick(1, 2, 3),
        draft_confidence=pick(0.0, 0.0, 0.25, 0.5),
        temperature=pick(1.0, 1.0, 0.0),
        ignore_eos=pick(False, False, True),
    )


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.form])
def test_a_rule_keeps_and_emits_what_its_paper_says(method: str) -> None:
    """Also of dead slots, ended texts, impossible tokens and ties."""
    accepted = 0.0
    rule = getattr(rule_laws, METHODS[method].rule.split(".")[1])
    for seed in range(600):
        params = params_of(method, seed)
        request = request_of(seed, params, ((), (0,), (1, 3))[seed % 3])
        row = OneRow(request, VOCAB, unfiltered=seed % 2 == 0)
        tree = row.tree(np.random.default_rng(seed).random)
        found, expected = row.judged(tree), list(rule(request, row.draft(tree)))
        if params.temperature == 0:
            expected = [(chance, path, {first_of(bonus): 1.0}) for chance, path, bonus in expected]
        assert kept(found) == pytest.approx(kept(expected), abs=1e-6), (seed, params)
        assert emitted(found) == pytest.approx(emitted(expected), abs=1e-6), (seed, params)
        if METHODS[method].exact:  # whatever number is drawn, also 0
            assert all(request.log_p(path) > -math.inf for _, path, _ in found)
        accepted += sum(chance * len(path) for chance, path, _ in found)
    assert accepted > 30


@pytest.mark.parametrize("method", ["speculative", "block", "ensemble", "traversal"])
def test_a_number_that_equals_the_bound_rejects(method: str) -> None:
    """Numbers come from [0, 1), so a bound of 1 / 2 is met by half of them, and one of 0 by none."""
    for p, kept in (({0: 0.5, 1: 0.5}, ()), ({1: 1.0}, ()), ({0: 0.51, 1: 0.49}, (0,))):
        params = DecodingParams(method=method, draft_len=1, branching=(1,), accept_threshold=1.0)
        row = OneRow(Request({(): p, (0,): p}.__getitem__, lambda path: {0: 1.0}, params), 2)
        assert row.judge(row.tree(lambda width: [0.0] * width), [0.5 if 0 in p else 0.0])[0] == kept


@pytest.mark.parametrize("method", ["speculative", "block", "ensemble", "traversal"])
def test_a_rejection_that_only_rounding_made_leaves_the_targets_distribution(method: str) -> None:
    """Of equal models every token is accepted, whatever is drawn below 1; here 1 is."""
    p = {0: 0.5, 1: 0.5}
    params = DecodingParams(method=method, draft_len=1, branching=(1,), accept_threshold=1.0)
    row = OneRow(Request(lambda path: p, lambda path: p, params), 2)
    path, bonus = row.judge(row.tree(lambda width: [0.0] * width), [1.0])
    assert path == ()
    assert bonus == pytest.approx(p)
