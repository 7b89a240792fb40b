"""The lossless rule for a branching draft, from its leaves to its root.

The children of a node were drawn one after the other from q. Where one is rejected, p becomes what it leaves, and q
loses it: children are drawn without replacement. What is left of q is kept as it is, not renormalised, and added
up anew: an auxiliary may be so sure of a token that 1 - q is nothing but rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.compiled import compiled
from mtad.distribution import after
from mtad.rules.scored import draft_after, place_of


class Left(NamedTuple):
    """What is left of p and q after a node.

    Attributes:
        p_ids, p: int32 and float64 [K]; p adds up to 1.
        q_ids, q: of the auxiliary, weights relative to the largest.
    """

    p_ids: npt.NDArray[np.int32]
    p: npt.NDArray[np.float64]
    q_ids: npt.NDArray[np.int32]
    q: npt.NDArray[np.float64]


@compiled
def traversal(row, scored, bonus):
    """Traversal verification (arXiv 2505.12398): from the leaves to the root.

    A node whose parent has the weight w has the weight min(w p / q, 1); the root has 1. Nodes are tried in the order in
    which they were drawn, each after all below it, and a node is kept with a probability of its weight. If it is not,
    its parent's p becomes max(w p - q, 0) and its weight s / (s + 1 - w), s being the sum of that. The bonus token
    comes from what is left of p behind the node that is kept. On a chain this is block verification.
    """
    deepest = max(scored.depths.max(), 0) if len(scored.depths) else 0
    path, tried = np.full(deepest + 1, -1), np.full(deepest + 1, -1)
    weights = np.ones(deepest + 1)
    lefts = [left_after(scored, -1)]
    depth = 0
    while True:
        node, child = path[depth], next_child(scored, path[depth], tried[depth])
        if child >= 0 and weights[depth] > 0.0:
            left, token = lefts[depth], scored.tokens[child]
            p, q = share_of(left.p_ids, left.p, token), share_of(left.q_ids, left.q, token)
            tried[depth] = child
            depth += 1
            path[depth], tried[depth] = child, child
            weights[depth] = min(weights[depth - 1] * p / q, 1.0) if q > 0.0 else 1.0
            lefts.append(left_after(scored, child))
        elif node < 0 or (weights[depth] > 0.0 and scored.accept[node] < weights[depth]):
            left = lefts[depth]
            count = bonus.count[0] = len(left.p)
            bonus.ids[:count], bonus.weights[:count] = left.p_ids, left.p
            return node
        else:
            lefts.pop()
            depth -= 1
            w = weights[depth]
            mass = reject(lefts[depth], scored.tokens[node], w)
            weights[depth] = 1.0 if path[depth] < 0 else mass / (mass + 1.0 - w) if mass > 0.0 else 0.0


@compiled
def next_child(scored, node, behind):
    """The next drafted child of `node` behind node `behind`; -1 for none."""
    for child in range(max(node, behind) + 1, len(scored.tokens)):
        if scored.parents[child] == node and scored.drafted[child]:
            return child
    return -1


@compiled
def left_after(scored, node):
    """All of p and q after a node; nothing where the node has no children, and nothing is rejected."""
    if next_child(scored, node, node) < 0:
        none = np.empty(0, np.int32)
        return Left(none, np.empty(0), none, np.empty(0))
    (p_ids, log_p), (q_ids, log_q) = after(scored.p, node), draft_after(scored, node)
    p, q = np.empty(len(log_p)), np.empty(len(log_q))
    most = log_q.max()
    for at in range(len(p)):
        p[at] = math.exp(log_p[at])
    for at in range(len(q)):
        q[at] = math.exp(np.float64(log_q[at]) - most)  # which a looked-up draft has down to 1e-260
    return Left(p_ids, p, q_ids, q)


@compiled
def share_of(ids, weights, token):
    """The share of a token in weights over ids; 0 where it is not among them."""
    at = np.searchsorted(ids, token)
    return weights[at] / weights.sum() if at < len(ids) and ids[at] == token else 0.0


@compiled
def reject(left, token, weight):
    """Leave max(weight p - q, 0) of p, renormalised, and what q has without the token; returns the former's mass.

    Of a mass of 0, which is nothing but rounding, p stays as it is.
    """
    total, mass, there = left.q.sum(), 0.0, 0
    rest = np.zeros(len(left.p))
    for at in range(len(left.p)):
        there = place_of(left.q_ids, there, left.p_ids[at])
        own = left.q[there] / total if there < len(left.q_ids) and left.q_ids[there] == left.p_ids[at] else 0.0
        rest[at] = max(weight * left.p[at] - own, 0.0)
        mass += rest[at]
    if mass > 0.0:
        left.p[:] = rest / mass
    left.q[np.searchsorted(left.q_ids, token)] = 0.0
    return mass
