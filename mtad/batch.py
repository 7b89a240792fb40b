"""The drafts of a batch, what the target scores of them, and what was decided: arrays whose first axis are the rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.compiled import compiled

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float64]


class Trees(NamedTuple):
    """The drafted nodes of R rows, N of each, parents before children; nodes that a row lacks are empty.

    Attributes:
        tokens: int64 [R, N].
        parents: int64 [R, N], -1 for the root, the last committed token.
        log_q: float64 [R, N], joint log-likelihood of the path under the draft; -inf for a dead slot.
        drafted: bool [R, N], the slot holds a new token.
        growing: bool [R, N], the path takes more tokens.
        ended: bool [R, N], the path's text is complete.
        starts: int64 [R, D + 1], the first node of each level, and N.
    """

    tokens: Ints
    parents: Ints
    log_q: Reals
    drafted: Bools
    growing: Bools
    ended: Bools
    starts: Ints

    @classmethod
    def empty(cls, starts: Ints) -> Trees:
        rows, nodes = len(starts), int(starts.max())
        whole, flags = np.zeros((2, rows, nodes), np.int64), np.zeros((3, rows, nodes), np.bool_)
        return cls(whole[0], whole[1], np.full((rows, nodes), -math.inf), flags[0], flags[1], flags[2], starts)


class ScoredTrees(NamedTuple):
    """The nodes that the target scores, of R rows, as `Scored` has them: [R, M], and `bounds` [R, D + 1].

    Attributes:
        counts: int64 [R], how many nodes a row has.
        longest: int64 [R], tokens of the longest path that was drafted.
    """

    tokens: Ints
    parents: Ints
    depths: Ints
    drafted: Bools
    ends: Bools
    bounds: Reals
    origins: Ints
    counts: Ints
    longest: Ints

    @classmethod
    def empty(cls, rows: int, nodes: int, draft_len: int) -> ScoredTrees:
        whole, flags = np.zeros((4, rows, nodes), np.int64), np.zeros((2, rows, nodes), np.bool_)
        bounds = np.zeros((rows, draft_len + 1))
        counts, longest = np.zeros((2, rows), np.int64)
        return cls(whole[0], whole[1], whole[2], flags[0], flags[1], bounds, whole[3], counts, longest)


class Decisions(NamedTuple):
    """The outcome of a block of R rows.

    Attributes:
        tokens: int64 [R, D + 1], the accepted tokens and then the bonus token.
        log_probs: float64 [R, D + 1], the target's log-probability of each, at temperature 1 without a filter.
        lengths: int64 [R], accepted tokens; `lengths + 1` entries of tokens, log_probs and spent count.
        paths: int64 [R, D], the scored node of each accepted token.
        spent: float64 [R, D + 1], how far the law of each token was moved, in total variation.
        finite: bool [R], whether all logits that were looked at are distributions.
    """

    tokens: Ints
    log_probs: Reals
    lengths: Ints
    paths: Ints
    spent: Reals
    finite: Bools

    @classmethod
    def empty(cls, rows: int, draft_len: int) -> Decisions:
        tokens, paths = np.zeros((rows, draft_len + 1), np.int64), np.zeros((rows, draft_len), np.int64)
        log_probs, lengths = np.zeros((rows, draft_len + 1)), np.zeros(rows, np.int64)
        return cls(tokens, log_probs, lengths, paths, np.zeros(tokens.shape), np.ones(rows, np.bool_))


@compiled
def tree_of(trees, r):
    """The draft of a row: `Trees` without the axis R, and without the nodes that the row lacks."""
    count = trees.starts[r, trees.starts.shape[1] - 1]
    return Trees(
        trees.tokens[r, :count],
        trees.parents[r, :count],
        trees.log_q[r, :count],
        trees.drafted[r, :count],
        trees.growing[r, :count],
        trees.ended[r, :count],
        trees.starts[r],
    )
