"""Drafts that are looked up: what is found in a text, and what the rules make of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mtad.lookup import look_up
from mtad.methods import METHODS
from mtad.params import DecodingParams
from mtad.rows import stack_rows
from tests.support.law import Request, Tokens
from tests.support.one_row import OneRow, mtad, path_of
from tests.support.rule_laws import moved

SHAPES = (0.5, 0.3, 0.2), (1.0, 0.0, 0.0), (0.6, 0.4, 0.0), (0.1, 0.1, 0.8), (0.0, 0.01, 0.99), (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 9, 1, 2, 8, 1, 2], [[8, 1, 2], [9, 1, 2]]),  # of equally long ones the last first
        ([5, 1, 2, 9, 7, 1, 2, 8, 5, 1, 2], [[9, 7, 1]]),  # a longer one rather than a later one
        ([1, 2, 7, 8, 9, 3, 1, 2, 7, 8, 9, 4, 1, 2], [[7, 8, 9]]),  # the same continuation counts once
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], [[1, 2, 3]]),  # it may overlap the end
        ([4, 7, 7, 7], [[7, 7, 7]]),  # and the draft goes on where the text stops
        ([1, 2, 3, 9, 3], []),  # one token is too little
        ([1, 2], []),
    ],
)
def test_what_followed_the_longest_suffix_is_found(text: list[int], drafts: list[list[int]]) -> None:
    for most in (1, 2, 4):
        found = np.full((most, 3), -1)
        count = look_up(np.array([*text, 1, 2, 3]), len(text), found)
        assert found[:count].tolist() == drafts[:most]


def test_what_is_found_goes_on_as_the_text_did_at_the_longest_suffixes() -> None:
    chance = np.random.default_rng(0)
    for _ in range(300):
        text = chance.integers(0, 3, chance.integers(2, 40)).tolist()
        longest = dict[int, int]()  # of the places that follow the same tokens as the end
        for end in range(2, len(text)):
            lengths = [n for n in range(2, 17) if n <= end and text[end - n : end] == text[-n:]]
            longest |= {end: max(lengths)} if lengths else {}
        places = [end for end, n in longest.items() if n == max(longest.values())]
        whole = [[*text[end:], *text[end:] * 6][:6] for end in reversed(places)]
        found = np.zeros((3, 6), np.int64)
        count = look_up(np.array(text), len(text), found)
        assert found[:count].tolist() == list(map(list, dict.fromkeys(map(tuple, whole))))[:3]


class LookedUp(OneRow):
    """A row whose draft is looked up: continuations in ascending order, and what q then is."""

    def __init__(self, p: Any, params: DecodingParams, found: Sequence[Tokens], eos: Tokens = ()) -> None:
        super().__init__(Request(p, self.q_after, params, eos), 3)
        trees, drafts = mtad.batch.Trees.empty(self.starts), np.full((1, params.draft_width, params.drafted), -1)
        trees.drafted[:], trees.tokens[:], drafts[0, : len(found)] = True, 7, found  # 7 is what the block before left
        self.q = mtad.distribution.Distributions(*(each[None] for each in self.empty(1 + len(trees.tokens[0]))))
        rows = stack_rows([params], 3)
        self.deepest = mtad.lookup.draft_looked_up(rows, np.array([True]), drafts, trees, self.q, self.is_end)
        self.made = mtad.batch.tree_of(trees, 0)

    def tree(self, uniforms: Any) -> Any:
        """Nothing is drawn."""
        return self.made

    def q_after(self, path: Tokens) -> dict[int, float]:
        """What rules read after a path."""
        node = next(node for node in range(-1, len(self.made.tokens)) if path_of(self.made, node) == path)
        count = self.q.counts[0, node + 1]
        return dict(zip(self.q.ids[0, node + 1, :count], np.exp(self.q.log_p[0, node + 1, :count]), strict=True))


@pytest.mark.parametrize("eos", [(), (1,)])
@pytest.mark.parametrize("method", ["block", "traversal"])
def test_a_lossless_rule_emits_the_targets_law_whatever_was_looked_up(method: str, eos: Tokens) -> None:
    chance, params = (
        np.random.default_rng(2),
        DecodingParams(method=method, draft="lookup", draft_len=3, branching=(3,)),
    )
    for _ in range(20):
        paths = [path for length in range(4) for path in itertools.product(range(3), repeat=length)]
        p = {path: dict(enumerate(chance.choice(SHAPES).tolist())) for path in paths}
        found = sorted(map(tuple, chance.integers(0, 3, (chance.integers(1, params.draft_width + 1), 3)).tolist()))
        row = LookedUp(p.__getitem__, params, found, eos)
        cut = [next((one[: at + 1] for at in range(3) if one[at] in eos), one) for one in found]
        expected = {one[:length] for one in cut for length in range(1, len(one) + 1)}
        made = [path_of(row.made, node) for node in range(len(row.made.tokens))]
        assert sorted(made) == sorted(expected), "a node is missing, or there twice"
        assert row.deepest == max(map(len, made))
        emitted, law = row.emitted(), {text: mass for mass, text in row.request.texts((), 4)}
        assert max(abs(emitted.get(text, 0.0) - law.get(text, 0.0)) for text in {**emitted, **law}) < 1e-6


@pytest.mark.parametrize("method", ["budget", "budget_tree"])
def test_a_budget_moves_the_first_tokens_law_towards_what_was_looked_up_as_far_as_it_may(method: str) -> None:
    p = {0: 0.5, 1: 0.3, 2: 0.2}
    params = DecodingParams(method=method, draft="lookup", draft_len=2, branching=(3,), divergence=0.4, plausible=0.0)
    row = LookedUp(lambda path: p, params, [(1, 0), (2, 2)][: params.draft_width])
    first = [sum(mass for text, mass in row.emitted().items() if text[0] == token) for token in p]
    assert first == pytest.approx(list(moved(row.request, ()).values()), abs=1e-6)
    assert first[1] == pytest.approx(0.3 + 0.4 * (1 - 0.5), abs=1e-6)


@pytest.mark.parametrize("method", ["mtad", "mmtad", "mmtad_sample"])
def test_tau_bounds_the_joint_probability_of_what_was_looked_up(method: str) -> None:
    p = {0: 0.6, 1: 0.4, 2: 0.0}
    for tau, kept in ((0.59, 1), (0.61, 0), (0.35, 2), (0.21, 3), (0.0, 3)):
        params = DecodingParams(method=method, draft="lookup", draft_len=3, accept_threshold=tau)
        row = LookedUp(lambda path: p, params, [(0, 0, 0)])
        assert all(path == (0,) * kept for _, path, _ in row.judged(row.made)), tau
    if METHODS[method].tree:
        params = DecodingParams(method=method, draft="lookup", draft_len=3, accept_threshold=0.05, temperature=0.0)
        row = LookedUp(lambda path: p, params, [(0, 1, 1), (1, 0, 0), (1, 1, 1)])
        assert {path for _, path, _ in row.judged(row.made)} == {(1, 0, 0)}
