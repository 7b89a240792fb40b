"""Verification of one row's branching draft from tables, on the host, where values may be looked at.

The rules are those of `mtad.rules.recursive_rejection` and `mtad.rules.traversal`. Nodes are tried in their order until
one is kept, and only where a node's child is rejected are the distributions after it computed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mtad.distributions.table import Distributions, Table, part
from mtad.rows import Rows
from mtad.rules.scored import Scored, Verdict

SMALL = 1e-20
"""Less of a distribution than this is scaled up before float32 has no digits left for it."""


def is_one_row(scored: Scored) -> bool:
    """Whether the functions here decide the tree."""
    after = scored.after
    return isinstance(after, Table) and after.logits.device.type == "cpu" and len(after.logits) == 1


class _Tree(NamedTuple):
    """One row's scored tree, in numbers; lists of nodes begin with the first, those of `children` with the root's."""

    scored: Scored
    tokens: list[int]
    children: list[list[int]]
    p: list[float]
    q: list[float]
    noise: list[float]
    replacement: bool

    @classmethod
    def of(cls, scored: Scored, rows: Rows) -> _Tree:
        tree, width = scored.tree, scored.tree.width
        drafted, slots = tree.drafted[0].tolist(), tree.parents.clamp(min=0) % width
        spans = [slice(level * width, (level + 1) * width) for level in range(tree.levels)]
        log_q = [q.below(slots[:, span], tree.tokens[:, span]) for q, span in zip(scored.above, spans, strict=True)]
        return cls(
            scored,
            tree.tokens[0].tolist(),
            [[child for child in own if child >= 0 and drafted[child]] for own in rows.child_at[0].tolist()],
            scored.log_p[0].exp().tolist(),
            torch.cat(log_q, 1)[0].exp().tolist(),
            scored.noise.nodes[0].tolist(),
            bool(rows.replacement),
        )

    def verdict(self, after: _After) -> Verdict:
        """That `after`'s node is the last that is kept."""
        length = after.node // self.scored.tree.width + 1
        found = Verdict(torch.tensor([after.node]), torch.tensor([length]), None, None)
        return found if after.p is None else found._replace(ids=self.scored.after.ids[:, 0], weights=after.p[None])


class _After:
    """What is left of p and q after one node: all at first, less where its children were rejected.

    Attributes:
        node: -1 for the root.
        p: float32 [V], what is left of the target's; None while that is all.
    """

    def __init__(self, tree: _Tree, node: int) -> None:
        self._tree, self.node = tree, node
        self.p: Tensor | None = None
        self._rest = 1.0
        self._lost: list[int] = []

    def chances(self, child: int) -> tuple[float, float]:
        """A child's probabilities under what is left of p and of q."""
        if self.p is None:
            return self._tree.p[child], self._tree.q[child]
        token = self._tree.tokens[child]
        return float(self.p[token]), float(self._q[token]) / self._rest

    def reject(self, child: int, weight: float = 1.0) -> float:
        """Leave max(weight p - q, 0) of p, renormalised, and what q has without the child: the mass of the former.

        No residual but for rounding, of mass 0, leaves p as it is.
        """
        if self.p is None:
            self.p = _only(self._tree.scored.after, self.node + 1).exp_()
            self._weigh()
        residual = (self.p * weight).sub_(self._q, alpha=1 / self._rest).relu_()
        mass = float(residual.sum())
        if mass > SMALL:
            self.p = residual.div_(mass)
        if not self._tree.replacement:
            self._lost.append(self._tree.tokens[child])
            self._q[self._lost[-1]] = 0.0
            self._rest = float(self._q.sum())
            if self._rest < SMALL:
                self._weigh()
        return mass if mass > SMALL else 0.0

    def _weigh(self) -> None:
        """Add up what is left of q anew, from logarithms: of a sure auxiliary, 1 - q is nothing but rounding."""
        level, slot = divmod(self.node, self._tree.scored.tree.width)
        log_q = _only(self._tree.scored.above[level + 1], slot if level >= 0 else 0)
        log_q[self._lost] = -math.inf
        self._q = log_q.sub_(log_q.max().clamp(min=torch.finfo(log_q.dtype).min)).exp_()
        self._rest = max(float(self._q.sum()), SMALL)


def recursive_rejection(scored: Scored, rows: Rows) -> Verdict:
    """Of one row, see `is_one_row`."""
    tree = _Tree.of(scored, rows)
    after = _After(tree, -1)
    while (child := _accepted(tree, after)) is not None:
        after = _After(tree, child)
    return tree.verdict(after)


def _accepted(tree: _Tree, after: _After) -> int | None:
    for child in tree.children[after.node + 1]:
        p, q = after.chances(child)
        if tree.noise[child] * q < p:
            return child
        after.reject(child)
    return None


def traversal(scored: Scored, rows: Rows) -> Verdict:
    """Of one row, see `is_one_row`."""
    tree = _Tree.of(scored, rows)
    return tree.verdict(_kept(tree, -1, 1.0) or _After(tree, -1))


def _kept(tree: _Tree, node: int, weight: float) -> _After | None:
    """What is left after the first node that is kept, of a node of this weight and those below it."""
    after = _After(tree, node)
    for child in tree.children[node + 1]:
        if weight == 0:
            return None
        p, q = after.chances(child)
        if kept := _kept(tree, child, min(weight * p / max(q, 1e-300), 1.0)):
            return kept
        mass = after.reject(child, weight)
        weight = 1.0 if node < 0 else mass / (mass + 1 - weight) if mass > 0 else 0.0
    return after if node < 0 or tree.noise[node] < weight else None


def _only(of: Distributions, at: int) -> Tensor:
    """The logarithm of one of a row's distributions, float32 [V]."""
    return part(of, lambda x: x[:, at : at + 1]).log_prob[0, 0]
