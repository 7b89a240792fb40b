"""What a rule is given, and where it writes the distribution of the bonus token."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.batch import Bools, Ints
from mtad.compiled import compiled
from mtad.distribution import Distributions, after, log_prob


class Scored(NamedTuple):
    """The nodes of one row's draft that the target has scored, M of them, parents before children.

    A chain, or the best path of several, has node n below node n - 1.

    Attributes:
        tokens: int64 [M].
        parents: int64 [M], -1 for the root.
        depths: int64 [M], from 1.
        drafted: bool [M]; only these can be kept.
        ends: bool [M], the node's token ends the text.
        bounds: float64 [D + 1], joint log-likelihood under the draft of its best path up to each depth; where that path
            is shorter, of all of it.
        origins: int64 [M], the draft's node that each is.
        p: `Distributions` of the target after root and nodes.
        q: those of the auxiliary after the root and the draft's nodes, for rules that read them.
        accept: float64 [M], a uniform number for each node.
    """

    tokens: Ints
    parents: Ints
    depths: Ints
    drafted: Bools
    ends: Bools
    bounds: npt.NDArray[np.float64]
    origins: Ints
    p: Distributions
    q: Distributions
    accept: npt.NDArray[np.float64]


class Bonus(NamedTuple):
    """What the bonus token is drawn from, where that is not all of the target's distribution after the kept node.

    Attributes:
        ids: int32 [K], ascending.
        weights: float32 [K], of any scale.
        count: int64 [1], how many of them count; 0 for the target's distribution itself.
        spent: float64 [1 + M], how far the rule moved p after the root and the nodes, in total variation.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    count: Ints  # type: ignore[assignment]
    spent: npt.NDArray[np.float64]


@compiled
def log_p_of(scored, node):
    """Log p(token | parent) of a node under the target's filtered distribution."""
    ids, log_p = after(scored.p, scored.parents[node])
    return log_prob(ids, log_p, scored.tokens[node])


@compiled
def log_q_of(scored, node):
    """Log q(token | parent) of a node under the auxiliary's filtered distribution."""
    ids, log_q = draft_after(scored, scored.parents[node])
    return log_prob(ids, log_q, scored.tokens[node])


@compiled
def draft_after(scored, node):
    """The auxiliary's distribution after a node: ids, log-probabilities."""
    return after(scored.q, scored.origins[node] if node >= 0 else -1)


@compiled
def joint_log_p(scored):
    """Joint log-likelihood of every node's path under the target's filtered distributions: float64 [M]."""
    joint = np.full(len(scored.tokens), -math.inf)
    for node in range(len(joint)):
        if scored.drafted[node]:
            parent = scored.parents[node]
            above = joint[parent] if parent >= 0 else 0.0
            joint[node] = above + log_p_of(scored, node) if above > -math.inf else -math.inf
    return joint


@compiled
def keep_residual(scored, node, weight, bonus):
    """Keep `node`; the bonus token comes from max(weight p - q, 0) after it.

    Where that is nothing, a rejection had probability 0 but for rounding, and p itself is right.
    """
    mass = residual(scored, node, weight, bonus)
    bonus.count[0] = len(after(scored.p, node)[0]) if mass > 0.0 else 0
    return node


@compiled
def residual(scored, node, weight, bonus):
    """Write max(weight p - q, 0) after a node to the weights of `bonus`; returns its sum over all tokens."""
    ids, log_p = after(scored.p, node)
    q_ids, log_q = draft_after(scored, node)
    mass, there = 0.0, 0
    for at in range(len(ids)):
        there = place_of(q_ids, there, ids[at])
        own = math.exp(log_q[there]) if there < len(q_ids) and q_ids[there] == ids[at] else 0.0
        bonus.ids[at] = ids[at]
        bonus.weights[at] = max(weight * math.exp(log_p[at]) - own, 0.0)
        mass += bonus.weights[at]
    return mass


@compiled
def place_of(q_ids, there, token):
    """The first place from `there` on whose id is at least `token`."""
    while there < len(q_ids) and q_ids[there] < token:
        there += 1
    return there
