"""Rules for the paths of a tree, by their joint likelihood or token by token. A chain is a tree of width one."""

from __future__ import annotations

import math

import numpy as np

from mtad.compiled import compiled
from mtad.distribution import draw
from mtad.rules.scored import joint_log_p


@compiled
def joint(row, scored, bonus):
    """MTAD and MMTAD (arXiv 2407.09722): the deepest path whose joint likelihood ratio exceeds the threshold.

    A node at depth d passes iff log p(path) - log q(first d tokens of the draft's best path) > log tau; on a chain that
    is MTAD's criterion p(x_1..x_d) / q(x_1..x_d) > tau. A prefix that fails does not stop a longer one from passing.
    Among the passing nodes of the greatest depth, and texts that ended above them, the target's likeliest wins.
    """
    joint_p = joint_log_p(scored)
    return likeliest(scored, ratio_test(row, scored, joint_p), joint_p)


@compiled
def joint_sample(row, scored, bonus):
    """MMTAD's paths, but one of the deepest that pass, S, is drawn: with probability p(path) / p(S).

    So a draft's block is the target's own sample, given that it is one of S: in total variation it is 1 - p(S) away
    from the target's joint distribution. At temperature 0 the likeliest path is kept.
    """
    joint_p = joint_log_p(scored)
    deep = deepest(scored, ratio_test(row, scored, joint_p))
    best = likeliest(scored, deep, joint_p)
    if best < 0 or row.greedy:
        return best
    weights = np.zeros(len(deep), np.float32)
    for node in range(len(deep)):
        if deep[node]:
            weights[node] = math.exp(joint_p[node] - joint_p[best])
    return draw(weights, scored.accept[0])


@compiled
def ratio_test(row, scored, joint_p):
    """Whether each node passes as `joint` says: bool [M]; `row.threshold` is the logarithm of tau."""
    passes = np.zeros(len(joint_p), np.bool_)
    for node in range(len(joint_p)):
        if scored.drafted[node] and joint_p[node] > -math.inf:
            passes[node] = joint_p[node] - scored.bounds[scored.depths[node]] > row.threshold
    return passes


@compiled
def deepest(scored, passes):
    """Of the nodes that pass, those of the greatest depth: bool [M].

    A text that has ended counts at every depth below its own, as it would if it went on with tokens of probability 1.
    If it did not, a longer path would win against any end, and texts would hardly ever end.
    """
    depth, deep = 0, np.zeros(len(passes), np.bool_)
    for node in range(len(passes)):
        if passes[node]:
            depth = max(depth, scored.depths[node])
    for node in range(len(passes)):
        deep[node] = passes[node] and (scored.depths[node] == depth or scored.ends[node])
    return deep


@compiled
def likeliest(scored, passes, score):
    """The deepest node that passes, of several the one of the largest score; -1 for none."""
    best, deep = -1, deepest(scored, passes)
    for node in range(len(deep)):
        if deep[node] and (best < 0 or score[node] > score[best]):
            best = node
    return best
