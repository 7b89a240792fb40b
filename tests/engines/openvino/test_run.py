"""Steps are run in few numbers of tokens, by blanks that nobody sees."""

from __future__ import annotations

import numpy as np
import pytest

from engines.openvino.columns import Columns
from engines.openvino.graph import PAGE
from engines.openvino.run import Run, size


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
def test_blanks_are_a_row_of_their_own(tokens: int, tree: bool) -> None:
    given, count = run_of(tokens, tree).feeds, 40 + tokens
    assert given["tokens"].shape == given["positions"].shape == (1, size(count))
    assert [given[name].dtype for name in ("block_indices", "past_lens", "subsequence_begins")] == [np.int32] * 3
    blanks = size(count) - count
    assert len(given["past_lens"]) == 1 + bool(blanks)
    if not blanks:
        return
    assert given["past_lens"][-1] == 0
    assert given["subsequence_begins"][-2:].tolist() == [count, count + blanks]
    page = 2 * 2048 // PAGE  # behind those of the rows
    assert (given["block_indices"][-1], given["block_indices_begins"][-1]) == (page, len(given["block_indices"]))
    if len(given["qq_bias"]):
        begin, end = given["qq_bias_begins"][-2:]
        assert (end - begin, end) == (blanks**2, len(given["qq_bias"]))
