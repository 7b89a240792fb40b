"""Verification of a branching draft from its leaves to its root: lossless."""

from __future__ import annotations

import math

import torch

from mtad.distributions.candidates import Candidates
from mtad.ops import log_total, total
from mtad.rows import Rows
from mtad.rules.recursive_rejection import auxiliary_after
from mtad.rules.scored import Scored, Verdict


def traversal(scored: Scored, rows: Rows) -> Verdict:
    """Traversal verification (arXiv 2505.12398).

    A node whose parent has the weight w has the weight min(w p / q, 1); the root has 1. Nodes are tried in the order in
    which they were drawn, each after all below it, and a node is kept with a probability of its weight. If it is not,
    its parent's p becomes max(w p - q, 0), its weight s / (s + 1 - w), s being the sum of that, and q loses the node
    where children are drawn without replacement. The bonus token comes from what is left of p behind the node that is
    kept. The output is distributed as the target's own samples; on a chain this is block verification.

    The first node that is kept ends the search, so all that were tried before it were not kept, and each node's state
    when it is tried is known beforehand. It is computed level by level; then the first one is looked for.
    """
    tree, device = scored.tree, scored.log_p.device
    (count, levels), width = (tree.tokens.shape[0], tree.levels), tree.width
    ids = scored.after.ids
    q_ids, q = auxiliary_after(scored)
    among = Candidates(q_ids, q).among(ids, scored.vocab)
    weight = torch.ones(count, 1, device=device)
    weights, rests = [], []
    for level in range(levels + 1):
        here = slice(1 + (level - 1) * width, 1 + level * width) if level else slice(1)
        p, left, log_q = scored.after.log_prob[:, here].exp(), q[:, here], among[:, here]
        below = torch.zeros(count, width + 1, device=device)
        for children in rows.child_at[:, here].unbind(2) if level < levels else ():
            node = children.clamp(min=0)
            tried, token = (children >= 0) & tree.drafted.gather(1, node), tree.tokens.gather(1, node)
            in_p, in_q = ids[:, here] == token[:, :, None], q_ids[:, here] == token[:, :, None]
            rest = log_total(left)
            drawn = (left.masked_fill(~in_q, -math.inf).amax(-1) - rest.squeeze(2)).exp()
            entered = torch.where(tried, (weight * (p * in_p).sum(-1) / drawn).clamp(max=1.0), 0.0)
            below = below.scatter(1, torch.where(tried, node - level * width, width), entered)
            residual = (weight[:, :, None] * p - (log_q - rest).exp()).clamp(min=0)
            mass = total(residual)
            some = tried & (mass.squeeze(2) > 0)
            p = torch.where(some[:, :, None], residual / mass, p)
            # no residual but for rounding: the root stays, and any other node has lost all its weight
            updated = (mass / (mass + (1 - weight[:, :, None]))).squeeze(2)
            weight = torch.where(some, updated, weight if level == 0 else weight.masked_fill(tried, 0.0))
            lost = (tried & ~rows.replacement)[:, :, None]
            log_q, left = log_q.masked_fill(lost & in_p, -math.inf), left.masked_fill(lost & in_q, -math.inf)
        weights.append(weight)
        rests.append(p)
        weight = below[:, :width]
    kept = tree.drafted & (scored.noise.nodes[:, : levels * width] < torch.cat(weights[1:], 1))
    leads = (tree.ancestors & kept[:, :, None]).any(1)
    node = torch.full((count,), -1, dtype=torch.int64, device=device)
    length = torch.zeros_like(node)
    for _ in range(levels):
        children = rows.child_at.gather(1, (node + 1)[:, None, None].expand(-1, 1, rows.child_at.shape[2])).squeeze(1)
        goes_on = (children >= 0) & leads.gather(1, children.clamp(min=0))
        first = children.gather(1, goes_on.long().argmax(-1, keepdim=True)).squeeze(1)
        node, length = torch.where(goes_on.any(-1), first, node), length + goes_on.any(-1)
    at = (node + 1)[:, None, None].expand(-1, 1, ids.shape[2])
    return Verdict(node, length, ids.gather(1, at).squeeze(1), torch.cat(rests, 1).gather(1, at).squeeze(1))
