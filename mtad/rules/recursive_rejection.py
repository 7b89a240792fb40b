"""Multi-round verification of a branching draft: lossless."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtad.distributions.candidates import Candidates
from mtad.distributions.table import Distributions, Table
from mtad.ops import log_total, total
from mtad.rows import Rows
from mtad.rules.scored import Scored, Verdict


def recursive_rejection(scored: Scored, rows: Rows) -> Verdict:
    """Multi-round speculative sampling (SpecInfer, arXiv 2305.09781, algorithm 2).

    A node's children were drawn one after the other from q. The first is accepted with probability min(1, p/q); if it
    is rejected p becomes the residual max(p - q, 0), q loses it where children are drawn without replacement, both are
    renormalised, and the next child is tried. The bonus token comes from what is left of p behind the last accepted
    node. The output is distributed as the target's own samples.

    Of lists, the rounds of all nodes run side by side, and then the accepted path is followed from the root; of tables,
    only the nodes of the path have rounds, one level after the other.
    """
    tree, after = scored.tree, scored.after
    count, levels = tree.tokens.shape[0], tree.levels
    node = torch.full((count,), -1, dtype=torch.int64, device=scored.log_p.device)
    length = torch.zeros_like(node)
    if isinstance(after, Candidates):
        chosen, p = _rounds(after, auxiliary_after(scored), rows.child_at, scored, rows)
        for _ in range(levels):
            child = chosen.gather(1, node[:, None] + 1).squeeze(1)
            # a node without children has chosen none, so the path stays where it is
            node, length = torch.where(child >= 0, child, node), length + (child >= 0)
        at = (node + 1)[:, None, None].expand(-1, 1, p.shape[2])
        return Verdict(node, length, after.ids.gather(1, at).squeeze(1), p.gather(1, at).squeeze(1))
    going = torch.ones_like(node, dtype=torch.bool)
    weights = torch.zeros_like(after.logits[:, 0], dtype=torch.float32)
    for above in scored.above:
        at, slot = (node + 1)[:, None], node.clamp(min=0)[:, None] % tree.width
        children = rows.child_at.gather(1, at[:, :, None].expand(-1, -1, rows.child_at.shape[2]))
        chosen, p = _rounds(after.pick(at), above.pick(slot), children, scored, rows)
        p, child = p.squeeze(1), chosen.squeeze(1)
        weights = torch.where(going[:, None], p, weights)
        going = going & (child >= 0)
        node, length = torch.where(going, child, node), length + going
    whole = after.pick((node + 1)[:, None]).log_prob.squeeze(1).exp()
    return Verdict(node, length, after.ids[:, 0], torch.where(going[:, None], whole, weights))


def _rounds(
    after: Distributions, auxiliary: Distributions, child_at: Tensor, scored: Scored, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Try the children `child_at` [R, M, C] of M nodes.

    What is left of q is added up anew in every round, over the auxiliary's own candidates and from their logarithms: an
    auxiliary may be so sure of a token that 1 - q is nothing but rounding.

    Args:
        after, auxiliary: the distributions after the nodes, [R, M, K].

    Returns:
        the child that each node has chosen, int64 [R, M], -1 for none; and what is left of p, [R, M, K].
    """
    tree, p_ids, p, q_ids, left = scored.tree, after.ids, after.log_prob.exp(), auxiliary.ids, auxiliary.log_prob
    table = isinstance(after, Table)
    log_q = left if table else Candidates(q_ids, left).among(p_ids, scored.vocab)
    chosen = torch.full(p.shape[:2], -1, dtype=torch.int64, device=p.device)
    for children in child_at.unbind(2):
        node = children.clamp(min=0)
        token = tree.tokens.gather(1, node)
        tried = (children >= 0) & tree.drafted.gather(1, node) & (chosen < 0)
        rest = log_total(left)
        if table:
            own_q, own_p = left.gather(2, token[:, :, None]).squeeze(2), p.gather(2, token[:, :, None]).squeeze(2)
        else:
            in_p, in_q = p_ids == token[:, :, None], q_ids == token[:, :, None]
            own_q, own_p = left.masked_fill(~in_q, -math.inf).amax(-1), (p * in_p).sum(-1)
        drawn = (own_q - rest.squeeze(2)).exp()
        taken = tried & (scored.noise.nodes.gather(1, node) * drawn < own_p)
        chosen = torch.where(taken, children, chosen)
        rejected = (tried & ~taken)[:, :, None]
        residual = (p - (log_q - rest).exp()).clamp(min=0)
        mass = total(residual)
        # no residual but for rounding: a rejection then has probability ~0, and p itself is right
        p = torch.where(rejected & (mass > 0), residual / mass, p)
        lost = rejected & ~rows.replacement[:, :, None]
        if table:
            log_q = left = left.scatter(2, token[:, :, None], own_q[:, :, None].masked_fill(lost, -math.inf))
        else:
            log_q, left = log_q.masked_fill(lost & in_p, -math.inf), left.masked_fill(lost & in_q, -math.inf)
    return chosen, p


def auxiliary_after(scored: Scored) -> Candidates:
    """The auxiliary's distributions after root and nodes, [R, 1 + N, K].

    It never ran the last level's nodes: no token has any probability after those.
    """
    assert len(scored.above) == scored.tree.levels, "the draft keeps the distributions of all its nodes"
    width = scored.tree.width
    # slots beyond the scored ones are other rows'
    ids = [q.ids[:, :width] for q in scored.above]
    log_prob = [q.log_prob[:, :width] for q in scored.above]
    last = torch.zeros_like(ids[0][:, :1]).expand(-1, width, -1)
    nothing = torch.full_like(last, -math.inf, dtype=torch.float32)
    return Candidates(torch.cat([*ids, last], 1), torch.cat([*log_prob, nothing], 1))
