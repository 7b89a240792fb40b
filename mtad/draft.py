"""Drafts: how one row's next level is drawn, and which of its nodes the target scores.

A draft has `draft_len` levels. A slot of a level is a *drafted* token; a beam whose text has *ended* higher up, which
is carried down so that it keeps its weight; or *dead*: the support is smaller than the width, or the path has stopped.
Node `starts[level] + slot` is stored `starts[level] + slot` columns behind the committed tokens.
"""

from __future__ import annotations

import math

import numpy as np

from mtad.compiled import compiled
from mtad.distribution import NEVER, after, exp_into, pick, total_of
from mtad.filters import filter_after
from mtad.rows import BEAMS, BRANCHES


@compiled
def draft_level(row, level, tree, q, uniforms, is_end):
    """Draw the next level of a row's draft, by its form, from the distributions after the beams of the level above.

    * A chain has one token per level (arXiv 2211.17192).
    * Beams: `width` paths of all beams' continuations without replacement, with probability q(path) each (arXiv
      2407.09722, section 4): each is drawn by inverse CDF, from what those before have left.
    * Branches: every node has children of its own, drawn without replacement (arXiv 2305.09781).

    At temperature 0 the likeliest are taken in place of drawn ones.

    Args:
        tree: one row's of `mtad.batch.Trees`, written to; it lacks the axis R here and below.
        q: `Distributions` of the auxiliary after the B beams of the level above: index b is beam b.
        uniforms: float64 [width], one for each slot.
        is_end: bool [V], tokens that end a text.

    Returns:
        whether the logits it looked at are distributions.
    """
    first, stop = tree.starts[level], tree.starts[level + 1]
    above, beams = (-1, 1) if level == 0 else (tree.starts[level - 1], first - tree.starts[level - 1])
    for beam in range(beams):
        if grows(tree, above + beam) and not filter_after(q, beam - 1, row):
            tree.parents[first:stop], tree.log_q[first:stop] = above, NEVER
            return False
    if row.form == BRANCHES:
        children = (stop - first) // beams
        for beam in range(beams):
            own = uniforms[beam * children : (beam + 1) * children]
            draw_slots(row, tree, q, above, beam, beam + 1, first + beam * children, own)
    else:
        draw_slots(row, tree, q, above, 0, beams, first, uniforms[: stop - first])
    for node in range(first, stop):
        settle(row, level, tree, node, is_end)
    return True


@compiled
def draw_slots(row, tree, q, above, low, high, first, uniforms):
    """Draw a continuation of beams `low` to `high` for each uniform number: its parent, token and log-likelihood.

    Args:
        above: the node of beam 0; -1, the root, for the first level.
        first: the first node that is written.
    """
    best, size = NEVER, 1
    for beam in range(low, high):
        best = max(best, weight_of(row, tree, above + beam))
        if grows(tree, above + beam):
            size = max(size, len(after(q, beam - 1)[0]))
    shares, masses = np.zeros(high - low, np.float64), np.zeros(high - low, np.float64)
    weights = np.zeros((high - low, size), np.float32)
    for beam in range(low, high):
        log_w = weight_of(row, tree, above + beam)
        if log_w > NEVER:
            own, shares[beam - low] = weights[beam - low], math.exp(log_w - best)
            own[0] = 1.0  # an ended text has a single continuation, itself
            if grows(tree, above + beam):
                log_q = after(q, beam - 1)[1]
                exp_into(log_q, 0.0, 1.0, own[: len(log_q)])
            masses[beam - low] = shares[beam - low] * total_of(own)
    for slot in range(len(uniforms)):
        node = first + slot
        tree.parents[node], tree.tokens[node], tree.log_q[node] = above + low, 0, NEVER
        beam, entry = choose(weights, shares, masses, uniforms[slot], row.greedy)
        if beam < 0:
            continue
        parent = above + low + beam
        tree.parents[node], tree.log_q[node] = parent, weight_of(row, tree, parent)
        if grows(tree, parent):
            ids, log_q = after(q, low + beam - 1)
            tree.tokens[node] = ids[entry]
            tree.log_q[node] += log_q[entry]
        else:
            tree.tokens[node] = tree.tokens[parent]
        if slot + 1 < len(uniforms):
            weights[beam, entry] = 0.0
            masses[beam] = shares[beam] * total_of(weights[beam])


@compiled
def choose(weights, shares, masses, uniform, greedy):
    """A beam, and one of its entries; -1 and -1 where nothing is left.

    Args:
        weights: float32 [B, K], of the entries of each beam, given the beam.
        shares, masses: [B], of the beams, and of what is left of each.
    """
    total = 0.0
    for beam in range(len(masses)):
        total += masses[beam]
    if greedy:
        best, at = -1, -1
        for beam in range(len(masses)):
            entry = pick(weights[beam], 0.0, True) if shares[beam] > 0.0 else -1
            if entry >= 0 and (best < 0 or shares[beam] * weights[beam, entry] > shares[best] * weights[best, at]):
                best, at = beam, entry
        return best, at
    goal, last = uniform * total, -1
    for beam in range(len(masses)):
        if masses[beam] > 0.0:
            last = beam
            if goal < masses[beam]:
                break
            goal -= masses[beam]
    if last < 0:
        return -1, -1
    return last, pick(weights[last], min(goal / masses[last], 1.0 - 2.0**-53), False)


@compiled
def grows(tree, node):
    """Whether the path to a node takes more tokens."""
    return node < 0 or tree.growing[node]


@compiled
def weight_of(row, tree, node):
    """The log-likelihood with which a beam competes; -inf for one that is not continued."""
    if node < 0:
        return 0.0
    carried = tree.ended[node] and row.form == BEAMS
    return tree.log_q[node] if tree.growing[node] or carried else NEVER


@compiled
def settle(row, level, tree, node, is_end):
    """Say what a slot is that was just drawn: drafted or carried down, and whether its path goes on."""
    parent, alive = tree.parents[node], tree.log_q[node] > NEVER
    grew = grows(tree, parent)
    tree.drafted[node] = alive and grew
    ends = row.stops_at_eos and is_end[tree.tokens[node]]
    tree.ended[node] = alive and (ends or not grew)
    likely = tree.log_q[node] >= row.log_confidence
    tree.growing[node] = tree.drafted[node] and not ends and likely and level + 1 < row.draft_len


@compiled
def best_path(tree, levels, nodes):
    """Write the nodes of the draft's best path to `nodes`, root first.

    That is the likeliest of the last level in which something was drafted; a text that has ended competes there.

    Returns:
        how many nodes it has, and how many levels the draft has.
    """
    last = -1
    for level in range(levels):
        for node in range(tree.starts[level], tree.starts[level + 1]):
            if tree.drafted[node]:
                last = level
    best = -1
    for node in range(tree.starts[max(last, 0)], tree.starts[last + 1]):
        if tree.log_q[node] > NEVER and (best < 0 or tree.log_q[node] > tree.log_q[best]):
            best = node
    return drafted_path(tree.parents, tree.drafted, best, nodes), last + 1


@compiled
def drafted_path(parents, drafted, node, nodes):
    """Write the drafted nodes from the root to a node, itself included, to `nodes`; returns how many there are."""
    count, at = 0, node
    while at >= 0:
        count += drafted[at]
        at = parents[at]
    at = count
    while node >= 0:
        if drafted[node]:
            at -= 1
            nodes[at] = node
        node = parents[node]
    return count
