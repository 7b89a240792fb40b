"""A tree that the target has scored: what acceptance rules judge, and what they answer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distributions.candidates import Candidates
from mtad.distributions.table import Distributions, Table, part
from mtad.draft.live import Live
from mtad.draft.tree import TokenTree
from mtad.noise.host import Noise
from mtad.ops import index


class Verdict(NamedTuple):
    """What a rule decides.

    Attributes:
        node: int64 [R], the deepest accepted node of the scored tree; -1, the root, where nothing was accepted.
        length: int64 [R], accepted tokens, 0 .. draft_len; -1 where the block decides no token, the bonus included.
        ids: int64 [R, K], what the bonus token is drawn from; the target's candidates after `node`, where it is drawn.
        weights: float32 [R, K], over `ids`, of any scale. Both None: from the table after `node`.
        live: beams that the next block goes on with; None for rules that end each block with one text.
    """

    node: Tensor
    length: Tensor
    ids: Tensor | None
    weights: Tensor | None
    live: Live | None = None


class Scored(NamedTuple):
    """A scored tree.

    Attributes:
        log_p: float32 [R, N], log p(token | parent), filtered; -inf where the target's filter forbids the token;
            anything for a slot that is not drafted (no drafted slot has such an ancestor).
        after: the target's distributions after root and nodes, [R, 1 + N, K].
        q: distributions that slot 0 of each level was drawn from, [R, draft_len, K]; tables where `after` is one.
        above: of a branching draft, and of one with live beams, the auxiliary's distributions after each node of the
            level above, level by level: draft_len times [R, B, K].
        noise: the block's; `accept` and `nodes` are used.
        vocab: V.
        live: beams that the tree begins with; None where no row has any.
    """

    tree: TokenTree
    log_p: Tensor
    after: Distributions
    q: Distributions | None
    above: tuple[Distributions, ...]
    noise: Noise
    vocab: int
    live: Live | None = None

    def of_parents(self, values: Tensor) -> Tensor:
        """Of numbers after root and nodes, [R, 1 + N], each node's parent's: [R, N]."""
        return values[:, :-1] if self.tree.width == 1 else values.gather(1, self.tree.parents + 1)


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
    after: Distributions
    q: Distributions
    nodes: Tensor

    @classmethod
    def of(cls, scored: Scored) -> Chain:
        """Slot 0 of each level of a scored tree; a draft of one path has no other nodes."""
        tree, after, q = scored.tree, scored.after, scored.q
        assert q is not None, "rules for chains need the draft's distributions"
        slots = slice(None, None, tree.width)
        tokens = tree.tokens[:, slots]
        if tree.width > 1:
            after = part(after, lambda x: torch.cat([x[:, :1], x[:, 1:][:, slots]], 1))
        nodes = index(tree.levels, tokens.device, tree.width).expand_as(tokens)
        return cls(tokens, tree.drafted[:, slots], scored.log_p[:, slots], q.at(tokens), after, q, nodes)

    def node(self, length: Tensor) -> Tensor:
        """The tree's node of the last of `length` [R] tokens; -1, the root, for none."""
        return pad(self.nodes, (1, 0), value=-1).gather(1, length[:, None]).squeeze(1)


def log_likelihoods(after: Distributions, tree: TokenTree) -> Tensor:
    """Log p(token | parent) of each node, [R, N], of the target's distributions after root and nodes."""
    if tree.width == 1:
        return part(after, lambda x: x[:, :-1]).at(tree.tokens)
    return after.below(tree.parents + 1, tree.tokens)


def has_children(tree: TokenTree) -> Tensor:
    """Whether something was drafted behind root and each node, bool [R, 1 + N]."""
    none = torch.zeros_like(tree.drafted[:, :1]).expand(-1, 1 + tree.drafted.shape[1])
    return none.long().scatter_add(1, tree.parents + 1, tree.drafted.long()) > 0


def plain(after: Distributions, node: Tensor, length: Tensor) -> Verdict:
    """The verdict that keeps `node` [R], -1 for the root; the bonus is the target's own."""
    if isinstance(after, Table):
        return Verdict(node, length, None, None)
    bonus = after_node(after, node)
    return Verdict(node, length, bonus.ids, bonus.log_prob.exp())


def after_node(after: Distributions, node: Tensor) -> Candidates:
    """The target's distribution after `node`, -1 for the root: [R, K]."""
    found = after.pick((node + 1)[:, None])
    return Candidates(found.ids.squeeze(1), found.log_prob.squeeze(1))
