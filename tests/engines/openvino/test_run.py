"""Steps are run in few numbers of tokens, by blanks that nobody sees."""

from __future__ import annotations

import numpy as np
import pytest

from engines.openvino.columns import Columns
from engines.openvino.graph import PAGE
from engines.openvino.run import Run, padded, size


def run_of(tokens: int, tree: bool) -> Run:
    """A step of one row with `tokens` new tokens behind 40 columns; those of a tree see themselves alone."""
    columns = Columns(2, 2048)
    at = np.arange(40 + tokens)
    columns.defer(at[:40], at[:40], 0, 0)
    mask = at[None, None, :] <= at[None, 40:, None]
    if tree:
        mask &= (at < 40) | (at == at[40:, None])
    return columns.plan(at[None, 40:], at[None, 40:], np.array([40]), mask, np.array([0]), 0)


def test_numbers_of_tokens_are_few_and_blanks_fit_a_page() -> None:
    sizes = {size(tokens) for tokens in range(1, 1025)}
    assert len(sizes) <= 16 + 4 * 8 + 32
    for tokens in range(1, 1025):
        assert tokens <= size(tokens) < tokens + PAGE
        assert size(tokens) <= max(16, 1.125 * tokens)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 20, 60])
def test_blanks_are_a_row_of_their_own_and_change_nothing_else(tokens: int, tree: bool) -> None:
    run = run_of(tokens, tree)
    count, rows, page = run.tokens.shape[1], len(run.past), 999
    found = padded(run, page)
    assert found.tokens.shape == found.positions.shape == (1, size(count))
    for name in ("tokens", "positions"):
        assert np.array_equal(getattr(found, name)[:, :count], getattr(run, name))
    for name in ("past", "begins", "pages", "page_begins", "masks", "mask_begins"):
        before, after = getattr(run, name), getattr(found, name)
        assert np.array_equal(after[: len(before)], before)
        assert after.dtype == before.dtype
    for name in ("rows", "own", "keep", "copies"):
        assert getattr(found, name) is getattr(run, name)
    blanks = size(count) - count
    if not blanks:
        assert found is run
        return
    assert (len(found.past), found.past[-1], found.begins[-1]) == (rows + 1, 0, count + blanks)
    assert (found.pages[-1], found.page_begins[-1]) == (page, len(found.pages))
    if len(run.masks):
        assert found.mask_begins[-1] == len(found.masks) == len(run.masks) + blanks**2
