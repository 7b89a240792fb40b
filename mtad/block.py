"""The host's part of a block, for all rows: what runs between the steps of the two models.

    for each level: draft_levels, level_inputs, the auxiliary's step; then select_nodes, target_inputs, the target's
    step, decide

Every row is computed alone, so what it gets does not depend on the rest of the batch.
"""

from __future__ import annotations

import importlib
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import literal_unroll

from mtad.compiled import compiled
from mtad.distribution import Distributions, after, filter_after, log_likelihood, pick
from mtad.draft import Tree, best_path, draft_level
from mtad.rows import RULES
from mtad.rules.scored import Bonus, Scored

FUNCTIONS = tuple(
    getattr(importlib.import_module(f"mtad.rules.{module}"), name)
    for module, name in (rule.split(".") for rule in RULES)
)
"""The functions of `RULES`."""

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Trees(NamedTuple):
    """The drafts of R rows, as `Tree` has them: [R, N], and `starts` [R, D + 1]; nodes that a row lacks are empty."""

    tokens: Ints
    parents: Ints
    log_q: Reals
    drafted: Bools
    growing: Bools
    ended: Bools
    starts: Ints

    @classmethod
    def empty(cls, starts: Ints) -> Trees:
        """Drafts without a drafted token."""
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
    log_q: Reals
    drafted: Bools
    ends: Bools
    bounds: Reals
    origins: Ints
    counts: Ints
    longest: Ints

    @classmethod
    def empty(cls, rows: int, nodes: int, draft_len: int) -> ScoredTrees:
        """Memory for so many nodes per row."""
        whole, flags = np.zeros((4, rows, nodes), np.int64), np.zeros((2, rows, nodes), np.bool_)
        bounds, log_q = np.zeros((rows, draft_len + 1)), np.full((rows, nodes), -math.inf)
        counts, longest = np.zeros((2, rows), np.int64)
        return cls(whole[0], whole[1], whole[2], log_q, flags[0], flags[1], bounds, whole[3], counts, longest)


class Decisions(NamedTuple):
    """The outcome of a block of R rows.

    Attributes:
        tokens: int64 [R, D + 1], the accepted tokens and then the bonus token.
        log_probs: float64 [R, D + 1], the target's log-probability of each, at temperature 1 without a filter.
        lengths: int64 [R], accepted tokens; `lengths + 1` entries of the other two count.
        paths: int64 [R, D], the scored node of each accepted token.
        finite: bool [R], whether all logits that were looked at are distributions.
    """

    tokens: Ints
    log_probs: Reals
    lengths: Ints
    paths: Ints
    finite: Bools

    @classmethod
    def empty(cls, rows: int, draft_len: int) -> Decisions:
        tokens, paths = np.zeros((rows, draft_len + 1), np.int64), np.zeros((rows, draft_len), np.int64)
        log_probs, lengths = np.zeros((rows, draft_len + 1)), np.zeros(rows, np.int64)
        return cls(tokens, log_probs, lengths, paths, np.ones(rows, np.bool_))


@compiled
def draft_levels(first, last, rows, level, trees, logits, q, uniforms, is_end, finite):
    """Draw a level of the drafts of rows `first` to `last`.

    Args:
        rows: records, `mtad.rows.ROW` [R].
        trees: `Trees`, written to.
        logits: float32 [R, B, V], the auxiliary's after the beams of the level above.
        q: `Distributions` [R, 1 + N], where those of rows whose rule reads them are kept.
        uniforms: float32 [R, D, W].
        finite: bool [R], made False where logits are no distribution.
    """
    vocab = logits.shape[2]
    kept = 1
    for r in range(first, last):
        kept = max(kept, min(rows[r].top_k, vocab))
    ids, log_p = np.empty((logits.shape[1], kept), np.int32), np.empty((logits.shape[1], kept), np.float32)
    counts = np.empty(logits.shape[1], np.int64)
    for r in range(first, last):
        row = rows[r]
        if level >= row.draft_len:
            continue
        tree = tree_of(trees, r)
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


@compiled
def tree_of(trees, r):
    """The draft of a row."""
    count = trees.starts[r, trees.starts.shape[1] - 1]
    return Tree(
        trees.tokens[r, :count],
        trees.parents[r, :count],
        trees.log_q[r, :count],
        trees.drafted[r, :count],
        trees.growing[r, :count],
        trees.ended[r, :count],
        trees.starts[r],
    )


@compiled
def any_growing(trees, level):
    """Whether the path of some row goes on behind a level."""
    for r in range(len(trees.starts)):
        for node in range(trees.starts[r, level], trees.starts[r, level + 1]):
            if trees.growing[r, node]:
                return True
    return False


@compiled
def first_inputs(rows, last_two, committed, tokens, positions, write_at, mask):
    """Write a draft's first step: the last two committed tokens; see `level_inputs`.

    After a fully accepted block the last drafted token has never been run, and a fixed step of two tokens costs less
    than two kinds of step. A row that drafts nothing runs them behind its committed columns, where they change nothing.
    A sequence of one token has it twice, in columns 0 and 1.
    """
    for r in range(len(committed)):
        start = committed[r] - 2 if rows[r].draft_len > 0 else committed[r]
        write_at[r] = max(start, 0)
        for at in range(2):
            tokens[r, at], positions[r, at] = last_two[r, at], max(start + at, 0)
            mask[r, 0, at, : write_at[r] + at + 1] = True
            mask[r, 0, at, write_at[r] + at + 1 :] = False


@compiled
def level_inputs(level, trees, committed, tokens, positions, write_at, mask):
    """Write the auxiliary's step over a level: see `engines.base.Step`.

    Args:
        committed: int64 [R].
        tokens, positions: int64 [R, W].
        write_at: int64 [R].
        mask: bool [R, 1, W, L].
    """
    for r in range(len(committed)):
        first, stop, end = trees.starts[r, level], trees.starts[r, level + 1], committed[r]
        write_at[r] = end + first
        for slot in range(tokens.shape[1]):
            tokens[r, slot], positions[r, slot] = 0, end + level
            mask[r, 0, slot, :end] = True
            mask[r, 0, slot, end:] = False
            if first + slot < stop:
                tokens[r, slot] = trees.tokens[r, first + slot]
                see_path(trees.parents[r], first + slot, mask[r, 0, slot, end:])


@compiled
def see_path(parents, node, columns):
    """Let a node see itself and its ancestors; columns begin behind the committed ones."""
    while node >= 0:
        columns[node] = True
        node = parents[node]


@compiled
def select_nodes(rows, levels, trees, is_end, scored):
    """The nodes that the target scores: the whole draft of some rows, the best path of the others.

    Args:
        levels: how many levels were drafted; fewer than asked for, if all paths have stopped.
        scored: `ScoredTrees`, empty; written to.
    """
    for r in range(len(rows)):
        row, tree = rows[r], tree_of(trees, r)
        own = min(levels, row.draft_len)
        path = np.empty(own, np.int64)
        length, scored.longest[r] = best_path(tree, own, path)
        for depth in range(1, scored.bounds.shape[1]):
            scored.bounds[r, depth] = tree.log_q[path[min(depth, length) - 1]] if length else 0.0
        count = tree.starts[own] if row.tree else own
        scored.counts[r] = count
        level = 0
        for at in range(count):
            node = at if row.tree else path[at] if at < length else -1
            while row.tree and node >= tree.starts[level + 1]:
                level += 1
            scored.origins[r, at] = node
            scored.depths[r, at] = level + 1 if row.tree else at + 1
            scored.parents[r, at] = tree.parents[node] if row.tree else at - 1
            if node >= 0:
                scored.tokens[r, at], scored.log_q[r, at] = tree.tokens[node], tree.log_q[node]
                scored.drafted[r, at] = tree.drafted[node]
                scored.ends[r, at] = row.stops_at_eos and is_end[tree.tokens[node]]


@compiled
def target_inputs(scored, roots, committed, tokens, positions, write_at, mask):
    """Write the target's step over the root and the scored nodes: see `engines.base.Step`.

    The logits after node n are at 1 + n.

    Args:
        roots, committed: int64 [R], the last committed token, and how many there are.
        tokens, positions: int64 [R, 1 + M].
        write_at: int64 [R].
        mask: bool [R, 1, 1 + M, L].
    """
    for r in range(len(committed)):
        end = committed[r]
        write_at[r] = end - 1
        mask[r, 0, :, :end] = True
        mask[r, 0, :, end:] = False
        tokens[r, 0], positions[r, 0] = roots[r], end - 1
        for node in range(tokens.shape[1] - 1):
            known = node < scored.counts[r]
            tokens[r, 1 + node] = scored.tokens[r, node] if known else 0
            positions[r, 1 + node] = end - 1 + (scored.depths[r, node] if known else 1)
            if known:
                see_path(scored.parents[r], node, mask[r, 0, 1 + node, end:])


@compiled
def decide(first, last, rows, trees, scored, adjusted, logits, q, accept, bonus_noise, decisions):
    """Accept drafts and add the target's own token, for rows `first` to `last`.

    Args:
        scored: `ScoredTrees`.
        adjusted: float32 [R, 1 + M, V], the target's logits under the rows' constraints: the rules go by them.
        logits: float32 [R, 1 + M, V], its own, which log-probabilities are reported from.
        q: `Distributions` [R, 1 + N] of the auxiliary.
        accept: float32 [R, D, W]; bonus_noise: float32 [R].
        decisions: `Decisions`, written to.
    """
    places, vocab, kept = logits.shape[1], logits.shape[2], 1
    for r in range(first, last):
        kept = max(kept, min(rows[r].top_k, vocab))
    ids, log_p = np.empty((places, kept), np.int32), np.empty((places, kept), np.float32)
    counts, numbers = np.empty(places, np.int64), np.zeros(max(places, 1), np.float32)
    bonus = Bonus(np.empty(kept, np.int32), np.empty(kept, np.float32), np.zeros(1, np.int64), np.zeros(1))
    for r in range(first, last):
        row, count = rows[r], scored.counts[r]
        counts[:] = -1
        for at in range(count):
            origin, level = scored.origins[r, at], scored.depths[r, at] - 1
            slot = origin - trees.starts[r, level] if row.tree else 0
            numbers[at] = accept[r, level, slot]
        own = Scored(
            scored.tokens[r, :count],
            scored.parents[r, :count],
            scored.depths[r, :count],
            scored.log_q[r, :count],
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
            bonus.count[0], bonus.nats[0] = 0, math.inf
            node = judge(row, own, bonus)
            decisions.finite[r] = filter_after(own.p, node, row)
            token = draw_bonus(row, own.p, node, bonus, bonus_noise[r])
            emit(decisions, r, own, node, token, logits[r])


@compiled
def draw_bonus(row, p, node, bonus, uniform):
    """The target's own token after the kept node."""
    if bonus.count[0] == 0:
        ids, log_p = after(p, node)
        least = log_p.max() - bonus.nats[0] - 1e-6
        bonus.count[0] = len(ids)
        for at in range(len(ids)):
            bonus.ids[at] = ids[at]
            bonus.weights[at] = math.exp(log_p[at]) if log_p[at] >= least else 0.0
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
def emit(decisions, r, scored, node, bonus, logits):
    """Write down a row's tokens, and their log-probabilities."""
    length, at = 0, node
    while at >= 0:
        length += 1
        at = scored.parents[at]
    decisions.lengths[r], at = length, node
    for depth in range(length - 1, -1, -1):
        decisions.tokens[r, depth], decisions.paths[r, depth] = scored.tokens[at], at
        at = scored.parents[at]
    decisions.tokens[r, length] = bonus
    for depth in range(length + 1):
        before = decisions.paths[r, depth - 1] if depth else -1
        log_prob = log_likelihood(logits[before + 1], decisions.tokens[r, depth])
        decisions.log_probs[r, depth] = log_prob
        if not math.isfinite(log_prob):
            decisions.finite[r] = False


@compiled
def kept_columns(committed, scored, decisions, target, auxiliary, to):
    """Which cache columns the accepted tokens lie in, of both models, and where they belong.

    Args:
        target, auxiliary, to: int64 [R, D], written to; beyond the accepted tokens, columns that stay where they are.
    """
    for r in range(len(committed)):
        for at in range(to.shape[1]):
            to[r, at] = target[r, at] = auxiliary[r, at] = committed[r] + at
            if at < decisions.lengths[r]:
                node = decisions.paths[r, at]
                target[r, at], auxiliary[r, at] = committed[r] + node, committed[r] + scored.origins[r, node]


@compiled
def node_paths(parents, drafted_tokens, drafted, nodes, tokens, valid):
    """Write the drafted tokens from the root to each of some nodes [R, S], -1 for the root, itself included.

    Args:
        parents, drafted_tokens, drafted: of `Trees` or `ScoredTrees`.
        tokens, valid: int64 and bool [R, S, D], the valid ones first.
    """
    for r in range(nodes.shape[0]):
        for s in range(nodes.shape[1]):
            length, node = 0, nodes[r, s]
            while node >= 0:
                length += drafted[r, node]
                node = parents[r, node]
            at, node = length, nodes[r, s]
            valid[r, s, :length] = True
            while node >= 0:
                if drafted[r, node]:
                    at -= 1
                    tokens[r, s, at] = drafted_tokens[r, node]
                node = parents[r, node]


ENTRIES = (
    *("first_inputs", "draft_levels", "any_growing", "level_inputs", "select_nodes", "target_inputs", "decide"),
    *("kept_columns", "node_paths"),
)
"""What is called from Python."""
