"""Verification of a branching draft from its leaves to its root: lossless."""

from __future__ import annotations

from operator import itemgetter

import torch

from mtad.distributions.table import part
from mtad.rows import Rows
from mtad.rules import one_row
from mtad.rules.one_row import is_one_row
from mtad.rules.recursive_rejection import Rounds
from mtad.rules.scored import Scored, Verdict, after_node


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
    if is_one_row(scored):
        return one_row.traversal(scored, rows)
    tree, device = scored.tree, scored.log_p.device
    (count, levels), width = (tree.tokens.shape[0], tree.levels), tree.width
    weight = torch.ones(count, 1, device=device)
    weights, rests = [], []
    for level, above in enumerate(scored.above):
        here = slice(1 + (level - 1) * width, 1 + level * width) if level else slice(1)
        # slots beyond the scored ones are other rows'
        after, auxiliary = part(scored.after, itemgetter((slice(None), here))), part(above, lambda x: x[:, :width])
        rounds = Rounds(after, auxiliary, scored, rows)
        below = torch.zeros(count, width + 1, device=device)
        for children in rows.child_at[:, here].unbind(2):
            rounds.turn(children)
            entered = torch.where(rounds.tried, (weight * rounds.own_p / rounds.drawn).clamp(max=1.0), 0.0)
            below = below.scatter(1, torch.where(rounds.tried, rounds.node - level * width, width), entered)
            mass = rounds.reject(rounds.tried, weight)
            # no residual but for rounding: the root stays, and any other node has lost all its weight
            left = torch.where(mass > 0, mass / (mass + (1 - weight)), weight if level == 0 else 0.0)
            weight = torch.where(rounds.tried, left, weight)
        weights.append(weight)
        rests.append(rounds.p)
        weight = below[:, :width]
    weights.append(weight)
    kept = tree.drafted & (scored.noise.nodes[:, : levels * width] < torch.cat(weights[1:], 1))
    leads = (tree.ancestors & kept[:, :, None]).any(1)
    node = torch.full((count,), -1, dtype=torch.int64, device=device)
    length = torch.zeros_like(node)
    for _ in range(levels):
        children = rows.child_at.gather(1, (node + 1)[:, None, None].expand(-1, 1, rows.child_at.shape[2])).squeeze(1)
        goes_on = (children >= 0) & leads.gather(1, children.clamp(min=0))
        first = children.gather(1, goes_on.long().argmax(-1, keepdim=True)).squeeze(1)
        node, length = torch.where(goes_on.any(-1), first, node), length + goes_on.any(-1)
    left = torch.cat(rests, 1)
    at = (node + 1).clamp(max=left.shape[1] - 1)[:, None, None].expand(-1, 1, left.shape[2])
    last = after_node(scored.after, node)  # nothing was drafted behind the nodes of the last level
    p = torch.where((length < levels)[:, None], left.gather(1, at).squeeze(1), last.log_prob.exp())
    return Verdict(node, length, last.ids, p)
