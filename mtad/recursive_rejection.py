"""Multi-round verification of a branching draft: lossless."""

from __future__ import annotations

import torch
from torch import Tensor

from mtad.distribution import Candidates
from mtad.rows import Rows
from mtad.scored import Scored, Verdict


def recursive_rejection(scored: Scored, rows: Rows) -> Verdict:
    """Multi-round speculative sampling (SpecInfer, arXiv 2305.09781, algorithm 2).

    A node's children were drawn one after the other from q. The first is accepted with probability min(1, p/q); if it
    is rejected p becomes the residual max(p - q, 0), q loses it where children are drawn without replacement, both are
    renormalised, and the next child is tried. The bonus token comes from what is left of p behind the last accepted
    node. The output is distributed as the target's own samples.

    The rounds of all nodes run side by side; then the accepted path is followed from the root.
    """
    tree, device = scored.tree, scored.log_p.device
    count, levels = tree.tokens.shape[0], tree.levels
    p_ids, p = scored.after.ids, scored.after.log_prob.exp()
    q = auxiliary_at(scored, p_ids)
    left = torch.ones(count, 1 + tree.tokens.shape[1], device=device)
    chosen = torch.full_like(left, -1, dtype=torch.int64)
    own_q = _drawn_from(scored)
    for children in rows.child_at.unbind(2):
        node = children.clamp(min=0)
        token = tree.tokens.gather(1, node)
        tried = (children >= 0) & tree.drafted.gather(1, node) & (chosen < 0)
        here = p_ids == token[:, :, None]
        drawn = own_q.gather(1, node)
        taken = tried & (scored.noise.nodes.gather(1, node) * (drawn / left) < (p * here).sum(-1))
        chosen = torch.where(taken, children, chosen)
        rejected = (tried & ~taken)[:, :, None]
        residual = (p - q / left[:, :, None]).clamp(min=0)
        mass = residual.sum(-1, keepdim=True)
        # no residual but for rounding: a rejection then has probability ~0, and p itself is right
        p = torch.where(rejected & (mass > 0), residual / mass, p)
        lost = rejected & ~rows.replacement[:, :, None]
        q = torch.where(lost & here, 0.0, q)
        left = torch.where(lost.squeeze(2), (left - drawn).clamp(min=1e-30), left)
    node = torch.full((count,), -1, dtype=torch.int64, device=device)
    length = torch.zeros_like(node)
    for _ in range(levels):
        child = chosen.gather(1, node[:, None] + 1).squeeze(1)
        node, length = torch.where(child >= 0, child, node), length + (child >= 0)
        # a node without children has chosen none, so the path stays where it is
    at = (node + 1)[:, None, None].expand(-1, 1, p.shape[2])
    return Verdict(node, length, p_ids.gather(1, at).squeeze(1), p.gather(1, at).squeeze(1))


def auxiliary_at(scored: Scored, ids: Tensor) -> Tensor:
    """The auxiliary's probabilities of `ids` [R, 1 + N, K], after root and nodes; 0 after those of the last level."""
    found = []
    for level, q in enumerate(_by_parent(scored)):
        first = 0 if level == 0 else 1 + (level - 1) * scored.tree.width
        dense = torch.zeros(*q.ids.shape[:2], scored.vocab, device=ids.device)
        dense.scatter_(2, q.ids, q.log_prob.exp())
        found.append(dense.gather(2, ids[:, first : first + q.ids.shape[1]]))
    found.append(torch.zeros(ids.shape[0], scored.tree.width, ids.shape[2], device=ids.device))
    return torch.cat(found, 1)


def _drawn_from(scored: Scored) -> Tensor:
    """The auxiliary's probability of each node's token after its parent: [R, N]."""
    tree, found = scored.tree, []
    for level, q in enumerate(_by_parent(scored)):
        at = slice(level * tree.width, (level + 1) * tree.width)
        parent = (tree.parents[:, at] - (level - 1) * tree.width).clamp(min=0)
        parent = parent if level else torch.zeros_like(parent)
        own = parent[:, :, None].expand(-1, -1, q.ids.shape[2])
        found.append(Candidates(q.ids.gather(1, own), q.log_prob.gather(1, own)).at(tree.tokens[:, at]).exp())
    return torch.cat(found, 1)


def _by_parent(scored: Scored) -> list[Candidates]:
    """The auxiliary's distributions after the nodes above each level; slots beyond the scored ones are other rows'."""
    assert len(scored.above) == scored.tree.levels, "the draft keeps the distributions of all its nodes"
    return [Candidates(*(values[:, : scored.tree.width] for values in q)) for q in scored.above]
