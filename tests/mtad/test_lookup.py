"""Drafts that are looked up: what is found in a text, and what the rules make of it."""

from __future__ import annotations

import numpy as np
import pytest

from mtad.batch import Trees
from mtad.distribution import Distributions
from mtad.lookup import draft_looked_up, look_up
from mtad.params import DecodingParams
from mtad.rows import stack_rows
from tests.support.law import Request, Tokens
from tests.support.one_row import OneRow


@pytest.mark.parametrize(
    ("text", "suffix", "draft"),
    [
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, [8, 1, 2]),  # of equally long ones the last
        ([5, 1, 2, 9, 7, 1, 2, 8, 5, 1, 2], 3, [9, 7, 1]),  # a longer one rather than a later one
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 6, [1, 2, 3]),  # it may overlap the end
        ([4, 7, 7, 7], 2, [7, 7, 7]),  # and the draft goes on where the text stops
        ([1, 2, 3, 9, 3], 0, []),  # one token is too little
        ([1, 2], 0, []),
    ],
)
def test_what_followed_the_longest_suffix_is_found(text: list[int], suffix: int, draft: list[int]) -> None:
    found = np.full(3, -1)
    assert look_up(np.array([*text, 1, 2, 3]), len(text), found) == suffix
    assert found.tolist() == (draft or [-1] * 3)


def test_what_is_found_goes_on_as_the_text_did_at_the_longest_suffix() -> None:
    chance = np.random.default_rng(0)
    for _ in range(300):
        text = chance.integers(0, 3, chance.integers(2, 40))
        ends = range(2, len(text))
        same = [
            [n for n in range(1, 17) if n <= end and np.array_equal(text[end - n : end], text[-n:])] for end in ends
        ]
        common = [max(each, default=0) for each in same]
        draft = np.zeros(6, np.int64)
        longest = look_up(text, len(text), draft)
        assert longest == (max(common) if max(common, default=0) > 1 else 0)
        if longest:
            place = max(end for end, n in zip(ends, common, strict=True) if n == longest)
            whole = [*text, *draft]
            assert draft.tolist() == whole[place : place + 6]


def test_looked_up_tokens_are_the_chain_that_a_certain_model_would_draft() -> None:
    params = [DecodingParams(method="block", draft="lookup", draft_len=3), DecodingParams(method="mtad", draft_len=3)]
    tokens: Tokens = (2, 0, 1)
    starts = np.array([np.cumsum([0, *own.widths]) for own in params])
    for end, count in (((), 3), ((0,), 2)):
        request = Request(lambda path: {}, lambda path: {tokens[len(path)]: 1.0}, params[0], end)
        expected = OneRow(request, 3).tree(lambda width: [0.5] * width)
        trees = Trees.empty(starts)
        trees.drafted[:], trees.tokens[:] = True, 7  # what the block before left
        ids, log_q = np.zeros((2, 13, 1), np.int32), np.zeros((2, 13, 1), np.float32)
        q = Distributions(np.empty((0, 0), np.float32), ids, log_q, np.full((2, 13), -1))
        is_end = np.isin(np.arange(3), end)
        rows = stack_rows(params, 3)
        assert draft_looked_up(rows, np.array([tokens, tokens]), np.array([3, -1]), trees, q, is_end) == count
        for name in ("tokens", "parents", "log_q", "drafted"):
            assert getattr(trees, name)[0, :count].tolist() == getattr(expected, name)[:count].tolist()
        assert trees.drafted[0, :3].sum() == expected.drafted.sum() == count
        assert (q.ids[0, :count, 0].tolist(), q.counts[0, : count + 1].tolist()) == (
            [*tokens[:count]],
            [1] * count + [-1],
        )
        assert trees.drafted[1].all(), "a row whose draft is drawn was touched"


@pytest.mark.parametrize("method", ["mtad", "mmtad", "mmtad_sample"])
def test_tau_bounds_the_joint_probability_of_what_was_looked_up(method: str) -> None:
    p = {0: 0.6, 1: 0.4}
    for tau, kept in ((0.59, 1), (0.61, 0), (0.35, 2), (0.21, 3), (0.0, 3)):
        params = DecodingParams(method=method, draft="lookup", draft_len=3, accept_threshold=tau)
        row = OneRow(Request(lambda path: p, lambda path: {0: 1.0}, params), 2)
        tree = row.tree(lambda width: [0.5] * width)
        assert len(tree.tokens) == 3, "a looked-up draft is a chain"
        assert all(path == (0,) * kept for _, path, _ in row.judged(tree)), tau
