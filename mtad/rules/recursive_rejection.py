"""Multi-round verification of a branching draft: lossless."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtad.distributions.candidates import Candidates
from mtad.distributions.table import Distributions, Table
from mtad.ops import log_total, total
from mtad.rows import Rows
from mtad.rules import one_row
from mtad.rules.one_row import is_one_row
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
    if is_one_row(scored):
        return one_row.recursive_rejection(scored, rows)
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
    """Try the children `child_at` [R, M, C] of M nodes, until one is accepted.

    Args:
        after, auxiliary: the distributions after the nodes, [R, M, K].

    Returns:
        the child that each node has chosen, int64 [R, M], -1 for none; and what is left of p, [R, M, K].
    """
    rounds = Rounds(after, auxiliary, scored, rows)
    chosen = torch.full(child_at.shape[:2], -1, dtype=torch.int64, device=child_at.device)
    for children in child_at.unbind(2):
        rounds.turn(children)
        tried = rounds.tried & (chosen < 0)
        taken = tried & (scored.noise.nodes.gather(1, rounds.node) * rounds.drawn < rounds.own_p)
        chosen = torch.where(taken, children, chosen)
        rounds.reject(tried & ~taken)
    return chosen, rounds.p


class Rounds:
    """What is left of p and q after M nodes, while their children are tried one after the other.

    What is left of q is added up anew in every round, over the auxiliary's own candidates and from their logarithms: an
    auxiliary may be so sure of a token that 1 - q is nothing but rounding.

    Args:
        after, auxiliary: the distributions after the nodes, [R, M, K].

    Attributes:
        p: float32 [R, M, K], what is left of the target's.
        node: int64 [R, M], each node's child whose turn it is; any without one.
        tried: bool [R, M], whether there is one.
        own_p, drawn: float32 [R, M], its probability under what is left of p and of q.
    """

    def __init__(self, after: Distributions, auxiliary: Distributions, scored: Scored, rows: Rows) -> None:
        self._tree, self._replacement, self._table = scored.tree, rows.replacement, isinstance(after, Table)
        self._p_ids, self.p = after.ids, after.log_prob.exp()
        self._q_ids, self._left = auxiliary.ids, auxiliary.log_prob
        listed = None if self._table else Candidates(self._q_ids, self._left)
        self._log_q = self._left if listed is None else listed.among(self._p_ids, scored.vocab)

    def turn(self, children: Tensor) -> None:
        """It is the turn of these children, int64 [R, M], -1 for none."""
        self.node = children.clamp(min=0)
        self.tried = (children >= 0) & self._tree.drafted.gather(1, self.node)
        self._token = self._tree.tokens.gather(1, self.node)[:, :, None]
        self._rest = log_total(self._left)
        if self._table:
            own_q, own_p = self._left.gather(2, self._token), self.p.gather(2, self._token)
        else:
            own_q = self._left.masked_fill(self._q_ids != self._token, -math.inf).amax(-1, keepdim=True)
            own_p = (self.p * (self._p_ids == self._token)).sum(-1, keepdim=True)
        self._own_q, self.own_p, self.drawn = own_q, own_p.squeeze(2), (own_q - self._rest).exp().squeeze(2)

    def reject(self, rejected: Tensor, weight: Tensor | None = None) -> Tensor:
        """Where `rejected` [R, M], leave max(weight p - q, 0) of p, and what q has without the child.

        Returns:
            float32 [R, M], the residual's mass before it is renormalised. Where it is 0, there is no residual but for
            rounding: a rejection then has probability ~0, and p itself is right.
        """
        weighted = self.p if weight is None else weight[:, :, None] * self.p
        residual = (weighted - (self._log_q - self._rest).exp()).clamp(min=0)
        mass = total(residual)
        self.p = torch.where(rejected[:, :, None] & (mass > 0), residual / mass, self.p)
        lost = (rejected & ~self._replacement)[:, :, None]
        if self._table:
            left = self._left.scatter(2, self._token, self._own_q.masked_fill(lost, -math.inf))
            self._log_q = self._left = left
        else:
            self._log_q = self._log_q.masked_fill(lost & (self._p_ids == self._token), -math.inf)
            self._left = self._left.masked_fill(lost & (self._q_ids == self._token), -math.inf)
        return mass.squeeze(2)


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
