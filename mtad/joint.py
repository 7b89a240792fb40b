"""Acceptance rules for the paths of a tree, by their joint likelihood or token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtad.ops import index
from mtad.rows import Rows
from mtad.scored import Scored, Verdict, after_node


def joint(scored: Scored, rows: Rows) -> Verdict:
    """MTAD and MMTAD (arXiv 2407.09722): the deepest node whose joint likelihood ratio passes the threshold.

    A node at depth d passes iff `log p(path) - log q(first d tokens of the best final beam) > log tau`; on a chain that
    is MTAD's criterion p(x_1..x_d) / q(x_1..x_d) > tau. A prefix that fails does not stop a longer one from passing.
    Among passing nodes of the greatest depth the one of largest joint target likelihood wins. The threshold of a depth
    beyond the end of the best beam is that of its whole path.
    """
    tree = scored.tree
    joint_p = tree.along(scored.log_p)
    if tree.width == 1:
        return _deepest(scored, joint_p - tree.log_q > rows.threshold, joint_p)
    bound = tree.log_q.gather(1, tree.path(tree.best_final()))
    by_level = joint_p.view(-1, tree.levels, tree.width)
    passes = by_level - bound[:, :, None] > rows.threshold[:, :, None]
    return _deepest(scored, passes.flatten(1), joint_p)


def modal(scored: Scored, rows: Rows) -> Verdict:
    """Joint distance to the target's own mode: the deepest node whose path stays within the threshold of it.

    The distance of a path is the sum over its tokens of log p(most likely token) - log p(token), both after the same
    prefix. It never falls along a path, and the bonus token is drawn from p among those that what is left of the
    threshold allows; so a whole block x_1..x_k, its bonus token included, satisfies, under the target alone,

        log p(x_1..x_k) >= sum_i max_t log p(t | x_1..x_{i-1}) - accept_threshold

    however bad the auxiliary is. Threshold 0 is greedy decoding.
    """
    after, tree = scored.after, scored.tree
    distance = tree.along(scored.parents.log_prob[..., 0] - scored.log_p)
    verdict = _deepest(scored, distance <= rows.threshold, -distance)
    at = verdict.node[:, None]
    spent = torch.where(at >= 0, distance.gather(1, at.clamp(min=0)), 0.0)
    log_prob = after_node(after, verdict.node).log_prob
    allowed = log_prob[:, :1] - log_prob <= (rows.threshold - spent).clamp(min=0)
    return verdict._replace(weights=torch.where(allowed, verdict.weights, 0.0))


def typical(scored: Scored, rows: Rows) -> Verdict:
    """Typical acceptance (arXiv 2401.10774, section 2.3.1): tokens likelier than min(epsilon, delta exp(-entropy)).

    A node passes iff every token of its path does. The entropy is that of the distribution a token is judged by, the
    target's, filtered; `accept_threshold` is epsilon, and delta its square root, as there.
    """
    p = scored.parents.log_prob
    entropy = -(p.exp() * p.clamp(min=-1e4)).sum(-1)
    epsilon = rows.threshold.log()
    fails = scored.log_p <= torch.minimum(epsilon, 0.5 * epsilon - entropy)
    return _deepest(scored, scored.tree.along(fails.float()) == 0, scored.tree.along(scored.log_p))


def _deepest(scored: Scored, passes: Tensor, score: Tensor) -> Verdict:
    """The deepest drafted node that passes, of several the one of largest score; the bonus is the target's."""
    tree = scored.tree
    passes = passes & tree.drafted
    depth = index(tree.levels, passes.device) + 1
    if tree.width == 1:
        length = (passes * depth).amax(-1)
        node = length - 1
    else:
        by_level = passes.view(-1, tree.levels, tree.width)
        length = (by_level.any(-1) * depth).amax(-1)
        level = (length - 1).clamp(min=0)[:, None]
        best = score.masked_fill(~passes, -math.inf).view_as(by_level).argmax(-1)
        node = ((length - 1) * tree.width + best.gather(1, level).squeeze(1)).clamp(min=-1)
    bonus = after_node(scored.after, node)
    return Verdict(node, length, bonus.ids, bonus.log_prob.exp())
