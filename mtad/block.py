"""The host's part of a block, for all rows: what is drafted, scored and decided between the steps of the two models.

    for each level: draft_levels, level_inputs, the auxiliary's step; then select_nodes, target_inputs, the target's
    step, decide

Every row is computed alone, so what it gets does not depend on the rest of the batch.
"""

from __future__ import annotations

import importlib
import math
from functools import partial

import numpy as np
from numba import literal_unroll

from mtad.batch import tree_of
from mtad.compiled import compiled
from mtad.distribution import NEVER, Distributions, after, exp_into, log_likelihood, pick
from mtad.draft import best_path, draft_level, drafted_path
from mtad.filters import filter_after
from mtad.rows import RULES
from mtad.rules.scored import Bonus, Scored

FUNCTIONS = tuple(
    getattr(importlib.import_module(f"mtad.rules.{module}"), name)
    for module, name in (rule.split(".") for rule in RULES)
)
"""The functions of `RULES`."""


@partial(compiled, nogil=True)
def draft_levels(first, last, rows, level, trees, logits, q, uniforms, is_end, finite):
    """Draw a level of the drafts of rows `first` to `last`; returns whether the path of some row goes on behind it.

    Args:
        rows: records, `mtad.rows.ROW` [R].
        trees: `Trees`, written to.
        logits: float32 [R, B, V], the auxiliary's after the beams of the level above.
        q: `Distributions` [R, 1 + N], where those of rows whose rule reads them are kept.
        uniforms: float64 [R, D, W].
        finite: bool [R], made False where logits are no distribution.
    """
    vocab = logits.shape[2]
    kept, growing = 1, False
    for r in range(first, last):
        kept = max(kept, min(rows[r].top_k, vocab))
    ids, log_p = np.empty((logits.shape[1], kept), np.int32), np.empty((logits.shape[1], kept), np.float32)
    counts = np.empty(logits.shape[1], np.int64)
    for r in range(first, last):
        row = rows[r]
        if level >= row.draft_len:
            continue
        tree = tree_of(trees, r)
        if level == 0:  # what the block before left
            tree.drafted[:], tree.growing[:], tree.log_q[:] = False, False, NEVER
        at = 0 if level == 0 else tree.starts[level - 1] + 1
        beams = 1 if level == 0 else tree.starts[level] - tree.starts[level - 1]
        counts[:] = -1
        above = Distributions(logits[r], ids, log_p, counts)
        if row.reads_draft:
            above = Distributions(
                logits[r], q.ids[r, at : at + beams], q.log_p[r, at : at + beams], q.counts[r, at : at + beams]
            )
            above.counts[:] = -1
        if not draft_level(row, level, tree, above, uniforms[r, level], is_end):
            finite[r] = False
        for node in range(tree.starts[level], tree.starts[level + 1]):
            growing = growing or tree.growing[node]
    return growing


@compiled
def select_nodes(rows, levels, trees, is_end, scored):
    """The nodes that the target scores: the whole draft of some rows, the best path of the others.

    Returns how many the row with most of them has.

    Args:
        levels: how many levels were drafted; fewer than asked for, if all paths have stopped.
        scored: `ScoredTrees`, written to.
    """
    most = 0
    for r in range(len(rows)):
        row, tree = rows[r], tree_of(trees, r)
        own = min(levels, row.draft_len)
        path = np.empty(own, np.int64)
        length, scored.longest[r] = best_path(tree, own, path)
        for depth in range(1, scored.bounds.shape[1]):
            scored.bounds[r, depth] = tree.log_q[path[min(depth, length) - 1]] if length else 0.0
        count = tree.starts[own] if row.tree else own
        scored.counts[r], most, level = count, max(most, count), 0
        for at in range(count):
            node = at if row.tree else path[at] if at < length else -1
            while row.tree and node >= tree.starts[level + 1]:
                level += 1
            scored.origins[r, at] = node
            scored.depths[r, at] = level + 1 if row.tree else at + 1
            scored.parents[r, at] = tree.parents[node] if row.tree else at - 1
            token = tree.tokens[node] if node >= 0 else 0
            scored.tokens[r, at] = token
            scored.drafted[r, at] = node >= 0 and tree.drafted[node]
            scored.ends[r, at] = node >= 0 and row.stops_at_eos and is_end[token]
    return most


@partial(compiled, nogil=True)
def decide(first, last, rows, trees, scored, adjusted, logits, q, accept, bonus_noise, decisions):
    """Accept drafts and add the target's own token, for rows `first` to `last`.

    Args:
        scored: `ScoredTrees`.
        adjusted: float32 [R, 1 + M, V], the target's logits under the rows' constraints: the rules go by them.
        logits: float32 [R, 1 + M, V], its own, which log-probabilities are reported from.
        q: `Distributions` [R, 1 + N] of the auxiliary.
        accept: float64 [R, D, W]; bonus_noise: float64 [R].
        decisions: `Decisions`, written to.
    """
    places, vocab, kept = logits.shape[1], logits.shape[2], 1
    for r in range(first, last):
        kept = max(kept, min(rows[r].top_k, vocab))
    ids, log_p = np.empty((places, kept), np.int32), np.empty((places, kept), np.float32)
    counts, numbers = np.empty(places, np.int64), np.zeros(max(places, 1), np.float32)
    bonus = Bonus(np.empty(kept, np.int32), np.empty(kept, np.float32), np.zeros(1, np.int64), np.zeros(places))
    for r in range(first, last):
        row, count = rows[r], scored.counts[r]
        counts[:], decisions.lengths[r] = -1, 0
        for at in range(count):
            origin, level = scored.origins[r, at], scored.depths[r, at] - 1
            slot = origin - trees.starts[r, level] if row.tree else 0
            numbers[at] = accept[r, level, slot]
        own = Scored(
            scored.tokens[r, :count],
            scored.parents[r, :count],
            scored.depths[r, :count],
            scored.drafted[r, :count],
            scored.ends[r, :count],
            scored.bounds[r],
            scored.origins[r, :count],
            Distributions(adjusted[r], ids, log_p, counts),
            Distributions(adjusted[r], q.ids[r], q.log_p[r], q.counts[r]),
            numbers,
        )
        for node in range(count):  # rules look at the distributions that drafted tokens were judged by
            if own.drafted[node] and not filter_after(own.p, own.parents[node], row):
                decisions.finite[r] = False
        if decisions.finite[r]:
            bonus.count[0], bonus.spent[:] = 0, 0.0
            node = judge(row, own, bonus)
            decisions.finite[r] = filter_after(own.p, node, row)
            token = draw_bonus(row, own.p, node, bonus, bonus_noise[r])
            emit(decisions, r, own, node, token, bonus.spent, logits[r])


@compiled
def draw_bonus(row, p, node, bonus, uniform):
    """The target's own token after the kept node."""
    if bonus.count[0] == 0:
        ids, log_p = after(p, node)
        weights = np.empty(len(ids), np.float32)
        exp_into(log_p, 0.0, 1.0, weights)
        bonus.count[0] = len(ids)
        bonus.ids[: len(ids)], bonus.weights[: len(ids)] = ids, weights
    return bonus.ids[pick(bonus.weights[: bonus.count[0]], uniform, row.greedy)]


@compiled
def judge(row, scored, bonus):
    """The node that the row's rule keeps, -1 for none."""
    node, rule = -1, row.rule
    for function in literal_unroll(FUNCTIONS):
        if rule == 0:
            node = function(row, scored, bonus)
        rule -= 1
    return node


@compiled
def emit(decisions, r, scored, node, bonus, spent, logits):
    """Write down a row's tokens, their log-probabilities, and how far their laws were moved."""
    length = drafted_path(scored.parents, scored.drafted, node, decisions.paths[r])
    decisions.lengths[r] = length
    for depth in range(length):
        decisions.tokens[r, depth] = scored.tokens[decisions.paths[r, depth]]
    decisions.tokens[r, length] = bonus
    for depth in range(length + 1):
        before = decisions.paths[r, depth - 1] if depth else -1
        log_prob = log_likelihood(logits[before + 1], decisions.tokens[r, depth])
        decisions.log_probs[r, depth] = log_prob
        decisions.spent[r, depth] = spent[before + 1]
        if not math.isfinite(log_prob):
            decisions.finite[r] = False
