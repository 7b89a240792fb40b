"""The best path of a draft, which methods that score a single path keep."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from mtad.params import DecodingParams
from tests.support.law import Request
from tests.support.one_row import OneRow, mtad


def best_written(tree: Any, levels: int) -> tuple[list[int], int]:
    """The likeliest path of the last level that has a drafted token, and that level's depth."""
    edges = tree.starts[: levels + 1].tolist()
    own = [list(range(*edge)) for edge in itertools.pairwise(edges)]
    own = own[: 1 + max((at for at, level in enumerate(own) if tree.drafted[level].any()), default=-1)]
    alive = [node for node in own[-1] if tree.log_q[node] > -math.inf] if own else []
    path: list[int] = []
    node = max(alive, key=lambda node: tree.log_q[node], default=-1)
    while node >= 0:
        path, node = ([node, *path] if tree.drafted[node] else path), int(tree.parents[node])
    return path, len(own)


def test_the_best_path_is_the_likeliest_of_the_last_level_with_a_drafted_token() -> None:
    """Ended texts compete there, of equal ones the first wins, and levels without a drafted token do not count."""
    lengths = set()
    for seed in range(300):
        chance = np.random.default_rng(seed)
        params = DecodingParams(method="mmtad", draft_len=3, beam_width=3)
        starts = OneRow(Request(lambda _: {}, lambda _: {}, params), 3).starts
        tree = mtad.batch.tree_of(mtad.batch.Trees.empty(starts), 0)
        for node in range(9):
            tree.parents[node] = above = -1 if node < 3 else node // 3 * 3 - 3 + int(chance.integers(3))
            alive = (above < 0 or tree.log_q[above] > -math.inf) and chance.random() < 0.7
            tree.drafted[node] = alive and chance.random() < 0.6
            tree.log_q[node] = -float(chance.integers(1, 4)) if alive else -math.inf
        for levels in range(4):
            nodes = np.full(levels, -1)
            count, depth = mtad.draft.best_path(tree, levels, nodes)
            assert (nodes[:count].tolist(), depth) == best_written(tree, levels)
            lengths.add((count, depth))
    assert {(0, 0), (1, 1), (1, 2), (2, 3), (3, 3)} <= lengths
