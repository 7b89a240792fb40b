"""Multi-round verification of a branching draft: lossless."""

from __future__ import annotations

import math

import torch

from mtad.distribution import Candidates
from mtad.ops import log_total, total
from mtad.rows import Rows
from mtad.scored import Scored, Verdict


def recursive_rejection(scored: Scored, rows: Rows) -> Verdict:
    """Multi-round speculative sampling (SpecInfer, arXiv 2305.09781, algorithm 2).

    A node's children were drawn one after the other from q. The first is accepted with probability min(1, p/q); if it
    is rejected p becomes the residual max(p - q, 0), q loses it where children are drawn without replacement, both are
    renormalised, and the next child is tried. The bonus token comes from what is left of p behind the last accepted
    node. The output is distributed as the target's own samples.

    The rounds of all nodes run side by side; then the accepted path is followed from the root. What is left of q is
    added up anew in every round, over the auxiliary's own candidates and from their logarithms: an auxiliary may be so
    sure of a token that 1 - q is nothing but rounding.
    """
    tree, device = scored.tree, scored.log_p.device
    count, levels = tree.tokens.shape[0], tree.levels
    p_ids, p = scored.after.ids, scored.after.log_prob.exp()
    q_ids, left = auxiliary_after(scored)
    log_q = Candidates(q_ids, left).among(p_ids, scored.vocab)
    chosen = torch.full(p.shape[:2], -1, dtype=torch.int64, device=device)
    for children in rows.child_at.unbind(2):
        node = children.clamp(min=0)
        token = tree.tokens.gather(1, node)
        tried = (children >= 0) & tree.drafted.gather(1, node) & (chosen < 0)
        in_p, in_q = p_ids == token[:, :, None], q_ids == token[:, :, None]
        rest = log_total(left)
        drawn = (left.masked_fill(~in_q, -math.inf).amax(-1) - rest.squeeze(2)).exp()
        taken = tried & (scored.noise.nodes.gather(1, node) * drawn < (p * in_p).sum(-1))
        chosen = torch.where(taken, children, chosen)
        rejected = (tried & ~taken)[:, :, None]
        residual = (p - (log_q - rest).exp()).clamp(min=0)
        mass = total(residual)
        # no residual but for rounding: a rejection then has probability ~0, and p itself is right
        p = torch.where(rejected & (mass > 0), residual / mass, p)
        lost = rejected & ~rows.replacement[:, :, None]
        log_q, left = log_q.masked_fill(lost & in_p, -math.inf), left.masked_fill(lost & in_q, -math.inf)
    node = torch.full((count,), -1, dtype=torch.int64, device=device)
    length = torch.zeros_like(node)
    for _ in range(levels):
        child = chosen.gather(1, node[:, None] + 1).squeeze(1)
        node, length = torch.where(child >= 0, child, node), length + (child >= 0)
        # a node without children has chosen none, so the path stays where it is
    at = (node + 1)[:, None, None].expand(-1, 1, p.shape[2])
    return Verdict(node, length, p_ids.gather(1, at).squeeze(1), p.gather(1, at).squeeze(1))


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
