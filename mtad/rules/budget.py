"""Lossless rules against a target that is moved towards the draft, by no more than a budget in total variation."""

from __future__ import annotations

import math

import numpy as np

from mtad.compiled import compiled
from mtad.distribution import NEVER, after
from mtad.rules.block import block
from mtad.rules.branches import next_child, traversal
from mtad.rules.scored import draft_after, place_of


@compiled
def budget(row, scored, bonus):
    """`block` against p~ (see `move`): its output is distributed as p~ says, however bad the auxiliary is.

    So each token's law is at most `divergence` (1 - max p) in total variation from the target's own.
    """
    move_all(row, scored, bonus)
    return block(row, scored, bonus)


@compiled
def budget_tree(row, scored, bonus):
    """`traversal` against p~ (see `move`)."""
    move_all(row, scored, bonus)
    return traversal(row, scored, bonus)


@compiled
def move_all(row, scored, bonus):
    """Move p after each node that has drafted children, and write down how far."""
    for node in range(-1, len(scored.tokens)):
        if next_child(scored, node, node) >= 0:
            (ids, log_p), (q_ids, log_q) = after(scored.p, node), draft_after(scored, node)
            bonus.spent[node + 1] = move(ids, log_p, q_ids, log_q, row.divergence, row.plausible)


@compiled
def move(ids, log_p, q_ids, log_q, divergence, plausible):
    """Make p~ of p, in place, and return their total variation.

    What p~ has more than p goes to tokens that are plausible, p(x) >= `plausible` max p, and of which q has more, in
    proportion to q(x) - p(x); it is taken from the tokens of which q has less, in proportion to p(x) - q(x). It is
    `divergence` (1 - max p), so less where the target is sure, but no more than makes p~ = q on the former.
    """
    most = math.exp(np.float64(log_p.max()))
    gains, losses, there, more = 0.0, 0.0, 0, np.empty(len(ids))
    for at in range(len(ids)):
        there = place_of(q_ids, there, ids[at])
        q = math.exp(np.float64(log_q[there])) if there < len(q_ids) and q_ids[there] == ids[at] else 0.0
        own = math.exp(np.float64(log_p[at]))
        more[at] = q - own
        if more[at] < 0.0:
            losses -= more[at]
        elif own >= plausible * most and own > 0.0:
            gains += more[at]
    spent = min(divergence * (1.0 - most), gains)
    if not spent > 0.0:
        return 0.0
    for at in range(len(ids)):
        own = math.exp(np.float64(log_p[at]))
        if more[at] < 0.0 or (own >= plausible * most and own > 0.0):
            own += more[at] * spent / (losses if more[at] < 0.0 else gains)
            log_p[at] = math.log(own) if own > 0.0 else NEVER
    return spent
