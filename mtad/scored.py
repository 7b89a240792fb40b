"""A tree that the target has scored: what acceptance rules judge, and what they answer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distribution import Candidates
from mtad.live import Live
from mtad.noise import Noise
from mtad.ops import index
from mtad.tree import TokenTree


class Verdict(NamedTuple):
    """What a rule decides.

    Attributes:
        node: int64 [R], the deepest accepted node of the scored tree; -1, the root, where nothing was accepted.
        length: int64 [R], accepted tokens, 0 .. draft_len; -1 where the block decides no token, the bonus included.
        ids: int64 [R, K], what the bonus token is drawn from; the target's candidates after `node`, where it is drawn.
        weights: float32 [R, K], over `ids`, of any scale.
        live: beams that the next block goes on with; None for rules that end each block with one text.
    """

    node: Tensor
    length: Tensor
    ids: Tensor
    weights: Tensor
    live: Live | None = None


class Scored(NamedTuple):
    """A scored tree.

    Attributes:
        tree: the tree.
        log_p: float32 [R, N], log p(token | parent), filtered; -inf where the target's filter forbids the token;
            anything for a slot that is not drafted (no drafted slot has such an ancestor).
        after: the target's distributions after root and nodes, [R, 1 + N, K].
        q: distributions that slot 0 of each level was drawn from, [R, draft_len, K].
        above: of a branching draft, and of one with live beams, the auxiliary's distributions after each node of the
            level above, level by level: draft_len times [R, B, K].
        noise: the block's; `accept` and `nodes` are used.
        vocab: V.
        live: beams that the tree begins with; None where no row has any.
    """

    tree: TokenTree
    log_p: Tensor
    after: Candidates
    q: Candidates | None
    above: tuple[Candidates, ...]
    noise: Noise
    vocab: int
    live: Live | None = None

    @property
    def parents(self) -> Candidates:
        """The target's distribution after each node's parent, [R, N, K]."""
        return after_parents(self.after, self.tree)


class Chain(NamedTuple):
    """One path of a scored tree, and what its tokens were drawn from.

    Attributes:
        tokens: int64 [R, D].
        drafted: bool [R, D].
        log_p, log_q: float32 [R, D], of each token after those before it, under either model's filtered distribution.
        after: the target's distributions after root and nodes, [R, 1 + D, K].
        q: distributions that the tokens were drawn from, [R, D, K], in no particular order.
        nodes: int64 [R, D], the tree's node of each token.
    """

    tokens: Tensor
    drafted: Tensor
    log_p: Tensor
    log_q: Tensor
    after: Candidates
    q: Candidates
    nodes: Tensor

    @classmethod
    def of(cls, scored: Scored) -> Chain:
        """Slot 0 of each level of a scored tree; a draft of one path has no other nodes."""
        tree, after, q = scored.tree, scored.after, scored.q
        assert q is not None, "rules for chains need the draft's distributions"
        slots = slice(None, None, tree.width)
        tokens = tree.tokens[:, slots]
        if tree.width > 1:
            after = Candidates(*(torch.cat([x[:, :1], x[:, 1:][:, slots]], 1) for x in after))
        nodes = index(tree.levels, tokens.device, tree.width).expand_as(tokens)
        return cls(tokens, tree.drafted[:, slots], scored.log_p[:, slots], q.at(tokens), after, q, nodes)

    def node(self, length: Tensor) -> Tensor:
        """The tree's node of the last of `length` [R] tokens; -1, the root, for none."""
        return pad(self.nodes, (1, 0), value=-1).gather(1, length[:, None]).squeeze(1)


def after_parents(after: Candidates, tree: TokenTree) -> Candidates:
    """The target's distribution after each node's parent: [R, N, K]."""
    if tree.width == 1:
        return Candidates(after.ids[:, :-1], after.log_prob[:, :-1])
    spread = (tree.parents + 1)[:, :, None].expand(-1, -1, after.ids.shape[2])  # row 0 is the root
    return Candidates(after.ids.gather(1, spread), after.log_prob.gather(1, spread))


def after_node(after: Candidates, node: Tensor) -> Candidates:
    """The target's distribution after `node`, -1 for the root: [R, K]."""
    at = (node + 1)[:, None, None].expand(-1, 1, after.ids.shape[2])
    return Candidates(after.ids.gather(1, at).squeeze(1), after.log_prob.gather(1, at).squeeze(1))
