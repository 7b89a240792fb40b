"""Acceptance rules for the paths of a tree, by their joint likelihood or token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtad.distributions.candidates import invert
from mtad.ops import depths, index
from mtad.rows import Rows
from mtad.rules.scored import Scored, Verdict, after_node, plain


def joint(scored: Scored, rows: Rows) -> Verdict:
    """MTAD and MMTAD (arXiv 2407.09722): the deepest path whose joint likelihood ratio passes the threshold.

    A node at depth d passes iff `log p(path) - log q(first d tokens of the best final beam) > log tau`; on a chain that
    is MTAD's criterion p(x_1..x_d) / q(x_1..x_d) > tau. A prefix that fails does not stop a longer one from passing.
    Among passing nodes of the greatest depth the one of largest joint target likelihood wins; a text that ended above
    them is one of these. The threshold of a depth beyond the end of the best beam is that of its whole path.
    """
    passes, joint_p = _ratio_test(scored, rows)
    return _likeliest(scored, rows, passes, joint_p)


def joint_sample(scored: Scored, rows: Rows) -> Verdict:
    """MMTAD's paths, but one of them is drawn: with probability p(path) / p(S), S being the deepest that pass.

    So a draft's block is the target's own sample, given that it is one of S: in total variation it is 1 - p(S) away
    from the target's joint distribution, and -log p(S) nats in relative entropy, and the more of the target's mass the
    draft covers the closer it gets. At temperature 0 the likeliest path is kept.
    """
    passes, joint_p = _ratio_test(scored, rows)
    deepest = _deepest(scored, rows, passes)
    score = joint_p.masked_fill(~deepest, -math.inf)
    weights = (score - score.amax(-1, keepdim=True)).exp().masked_fill(~deepest, 0.0)
    drawn = invert(weights, scored.noise.accept[:, 0]).squeeze(1)
    return _of_node(scored, deepest, torch.where(rows.drawn, drawn, score.argmax(-1)))


def _ratio_test(scored: Scored, rows: Rows) -> tuple[Tensor, Tensor]:
    """Whether each node passes as `joint` says, and the target's joint log-likelihood of its path: [R, N]."""
    tree = scored.tree
    joint_p = tree.path_sum(scored.log_p)
    if tree.width == 1:
        return joint_p - tree.log_q > rows.threshold, joint_p
    bound = tree.log_q.gather(1, tree.path(tree.best()))
    by_level = joint_p.view(-1, tree.levels, tree.width)
    return (by_level - bound[:, :, None] > rows.threshold[:, :, None]).flatten(1), joint_p


def modal(scored: Scored, rows: Rows) -> Verdict:
    """Joint distance to the target's own mode: the deepest node whose path stays within the threshold of it.

    The distance of a path is the sum over its tokens of log p(most likely token) - log p(token), both after the same
    prefix. It never falls along a path, and the bonus token is drawn from p among those that what is left of the
    threshold allows; so a whole block x_1..x_k, its bonus token included, satisfies, under the target alone,

        log p(x_1..x_k) >= sum_i max_t log p(t | x_1..x_{i-1}) - accept_threshold

    however bad the auxiliary is. Threshold 0 is greedy decoding.
    """
    after, tree = scored.after, scored.tree
    distance = tree.path_sum(scored.of_parents(after.most) - scored.log_p)
    verdict = _likeliest(scored, rows, distance <= rows.threshold, -distance)
    at = verdict.node[:, None]
    spent = torch.where(at >= 0, distance.gather(1, at.clamp(min=0)), 0.0)
    bonus = after_node(after, verdict.node)
    allowed = bonus.log_prob.amax(-1, keepdim=True) - bonus.log_prob <= (rows.threshold - spent).clamp(min=0)
    return verdict._replace(ids=bonus.ids, weights=torch.where(allowed, bonus.log_prob.exp(), 0.0))


def typical(scored: Scored, rows: Rows) -> Verdict:
    """Typical acceptance (arXiv 2401.10774, section 2.3.1): tokens likelier than min(epsilon, delta exp(-entropy)).

    A node passes iff every token of its path does. The entropy is that of the distribution a token is judged by, the
    target's, filtered; `accept_threshold` is epsilon, and delta its square root, as there.
    """
    p = scored.after.log_prob
    entropy = scored.of_parents(-(p.exp() * p.clamp(min=-1e4)).sum(-1))
    epsilon = rows.threshold.log()
    fails = scored.log_p <= torch.minimum(epsilon, 0.5 * epsilon - entropy)
    return _likeliest(scored, rows, scored.tree.path_sum(fails.float()) == 0, scored.tree.path_sum(scored.log_p))


def _likeliest(scored: Scored, rows: Rows, passes: Tensor, score: Tensor) -> Verdict:
    """The passing node of the greatest depth, of several the one of largest score."""
    if scored.tree.width == 1:
        depth = index(scored.tree.levels, passes.device) + 1
        length = (passes & scored.tree.drafted).mul(depth).amax(-1)
        return plain(scored.after, length - 1, length)
    deepest = _deepest(scored, rows, passes)
    return _of_node(scored, deepest, score.masked_fill(~deepest, -math.inf).argmax(-1))


def _deepest(scored: Scored, rows: Rows, passes: Tensor) -> Tensor:
    """Of the nodes that pass, those of the greatest depth: bool [R, N].

    A text that has ended counts at every depth below its own, as it would if it went on with tokens of probability 1.
    If it did not, a longer path would win against any end, and texts would hardly ever end.
    """
    tree = scored.tree
    passes = passes & tree.drafted
    depth = depths(tree.levels, tree.width, passes.device)[1:]
    ended = rows.ends[tree.tokens] & rows.stops_at_eos
    return passes & (ended | (depth == (passes * depth).amax(-1, keepdim=True)))


def _of_node(scored: Scored, deepest: Tensor, node: Tensor) -> Verdict:
    """The verdict that keeps `node` [R], or nothing where no node passes."""
    tree, some = scored.tree, deepest.any(-1)
    length = torch.where(some, depths(tree.levels, tree.width, node.device)[node + 1], 0)
    return plain(scored.after, torch.where(some, node, -1), length)
