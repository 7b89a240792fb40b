"""Acceptance: which drafted tokens are kept, and the token the target adds. One call, the rules in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distribution import Candidates, draw, process
from mtad.noise import Noise
from mtad.params import Rule
from mtad.rows import Layout, Rows, index
from mtad.tree import TokenTree


class Verdict(NamedTuple):
    """What a rule decides.

    Attributes:
        node: int64 [R], the deepest accepted node of the scored tree; -1, the root, where nothing was accepted.
        length: int64 [R], accepted tokens, 0 .. draft_len.
        ids: int64 [R, K], the target's candidates after `node` (after the root where nothing was accepted).
        weights: float32 [R, K], what the bonus token is drawn from, over `ids`.
    """

    node: Tensor
    length: Tensor
    ids: Tensor
    weights: Tensor


class Moves(NamedTuple):
    """Which cache columns to keep: columns `source` belong at columns `to`; [R, draft_len] each, int64.

    Attributes:
        auxiliary, target: columns of the accepted nodes; beyond the accepted ones, where they already are.
        to: right behind the committed tokens.
    """

    auxiliary: Tensor
    target: Tensor
    to: Tensor


class Accepted(NamedTuple):
    """The outcome of one block.

    Attributes:
        tokens: int64 [R, draft_len + 1]: the accepted tokens, then the bonus token at index `length`.
        log_probs: float32 [R, draft_len + 1]: the target's log-probability of each, unprocessed (temperature 1, no
            filter).
        length: int64 [R], accepted tokens; `length + 1` entries of the other two count, the rest is undefined.
        path: int64 [R, draft_len], scored-tree node of each accepted token; beyond `length`, any valid node.
        moves: the cache columns to keep; None where nothing was drafted, or nobody asked (`mtad.block.decide` does).
    """

    tokens: Tensor
    log_probs: Tensor
    length: Tensor
    path: Tensor
    moves: Moves | None = None


def joint(tree: TokenTree, log_p: Tensor, after: Candidates, rows: Rows) -> Verdict:
    """Joint acceptance (arXiv 2407.09722): the deepest node whose joint likelihood ratio passes the threshold.

    A node at depth d passes iff `log p(path) - log q(first d tokens of the best final beam) > log tau`; on a chain that
    is MTAD's criterion p(x_1..x_d) / q(x_1..x_d) > tau. A prefix that fails does not stop a longer one from passing.
    Among passing nodes of the greatest depth the one of largest joint target likelihood wins. The threshold of a depth
    beyond the end of the best beam is that of its whole path.

    Args:
        tree: the scored tree.
        log_p: float32 [R, N], log p(token | parent), filtered; -inf where the target's filter forbids the token;
            anything for a slot that is not drafted (no drafted slot has such an ancestor).
        after: the target's distributions after root and nodes, [R, 1 + N, K].
        rows: parameters; `log_threshold` is used.
    """
    count, width = log_p.shape[0], tree.width
    bound = tree.log_q.gather(1, tree.path(tree.best_final())) if width > 1 else tree.log_q
    joint_p = tree.along(log_p)
    if width == 1:
        passes = tree.drafted & (joint_p - bound > rows.log_threshold)
        length = (passes * (index(tree.levels, log_p.device) + 1)).amax(-1)
        node = length - 1
    else:
        joint_p = joint_p.view(count, tree.levels, width)
        passes = tree.drafted.view_as(joint_p) & (joint_p - bound[:, :, None] > rows.log_threshold[:, :, None])
        length = (passes.any(-1) * (index(tree.levels, log_p.device) + 1)).amax(-1)
        level = (length - 1).clamp(min=0)
        slot = joint_p.masked_fill(~passes, -math.inf).argmax(-1).gather(1, level[:, None]).squeeze(1)
        node = ((length - 1) * width + slot).clamp(min=-1)
    bonus = _after(after, node)
    return Verdict(node, length, bonus.ids, bonus.log_prob.exp())


def lossless(tree: TokenTree, log_p: Tensor, after: Candidates, q: Candidates, uniform: Tensor, vocab: int) -> Verdict:
    """Token-wise speculative sampling of the chain in slot 0 (arXiv 2211.17192, algorithm 1).

    Token d is accepted with probability min(1, p/q); at the first rejection the bonus token comes from the residual
    max(p - q, 0), after full acceptance from p. The output is distributed as the target's own samples.

    Args:
        tree: the scored tree; only slot 0 of each level is looked at.
        log_p: as in `joint`.
        after: as in `joint`.
        q: the auxiliary's distributions that the chain's tokens were drawn from, [R, draft_len, K].
        uniform: [R, draft_len], uniform [0, 1).
        vocab: V.
    """
    chain = slice(None, None, tree.width)
    tokens, drafted = tree.tokens[:, chain], tree.drafted[:, chain]
    ratio = (log_p[:, chain] - q.at(tokens)).exp()
    accepted = drafted & (uniform < ratio)
    length = ((~accepted).long().cumsum(-1) == 0).sum(-1)  # until the first that is not
    node = ((length - 1) * tree.width).clamp(min=-1)
    p = _after(after, node)
    # q at the first rejected position, spread over the vocabulary to be read at the target's candidates
    at = length.clamp(max=tree.levels - 1)[:, None]
    here = at[:, :, None].expand(-1, 1, q.ids.shape[2])
    dense = torch.zeros(at.shape[0], vocab, device=at.device)
    dense.scatter_(1, q.ids.gather(1, here).squeeze(1), q.log_prob.gather(1, here).squeeze(1).exp())
    residual = (p.log_prob.exp() - dense.gather(1, p.ids)).clamp(min=0)
    rejected = (length < tree.levels) & drafted.gather(1, at).squeeze(1)
    # p == q up to rounding leaves no residual; a rejection then has probability ~0 and p itself is right
    rejected = rejected & (residual.sum(-1) > 0)
    return Verdict(node, length, p.ids, torch.where(rejected[:, None], residual, p.log_prob.exp()))


def accept(
    tree: TokenTree | None,
    adjusted: Tensor,
    logits: Tensor,
    q: Candidates | None,
    noise: Noise,
    rows: Rows,
    rules: Sequence[Rule],
) -> Accepted:
    """Decide a block.

    Args:
        tree: the scored tree, `draft_len` levels of `score_width` nodes; None when nothing was drafted.
        adjusted: the target's logits after root and nodes that the rules and the bonus token go by, float
            [R, 1 + N, V]: under the request's constraints, where it has any.
        logits: the target's own logits, which the log-probabilities are reported from; may be the same tensor.
        q: distributions that slot 0 of each level was drawn from, [R, draft_len, K]; needed by the rule `lossless`.
        noise: the block's noise; `accept` and `bonus` are used.
        rows: parameters of the rows.
        rules: acceptance rules of the rows that draft.
    """
    vocab = logits.shape[2]
    after = process(adjusted, rows)
    if tree is None:
        length = torch.zeros_like(rows.lossless, dtype=torch.int64)
        verdict = Verdict(length, length, after.ids[:, 0], after.log_prob[:, 0].exp())
        path = tokens = length[:, None][:, :0]
        last = torch.ones_like(rows.draft_len, dtype=torch.bool)
    else:
        log_p = _after_parents(after, tree).at(tree.tokens)
        verdict = _judge(tree, log_p, after, q, noise, rows, rules, vocab)
        path = tree.path(verdict.node.clamp(min=0))
        tokens = tree.tokens.gather(1, path)
        last = index(tree.levels + 1, logits.device) == verdict.length[:, None]
    bonus = draw(verdict.ids, verdict.weights, noise.bonus)
    tokens = torch.where(last, bonus[:, None], pad(tokens, (0, 1)))
    # emitted token i follows the root (i = 0) or the node of emitted token i - 1
    if tree is not None and tree.width > 1:
        logits = logits.gather(1, pad(path + 1, (1, 0))[:, :, None].expand(-1, -1, vocab))
    log_probs = logits.float().log_softmax(-1).gather(2, tokens[:, :, None]).squeeze(2)
    return Accepted(tokens, log_probs, verdict.length, path)


def _after_parents(after: Candidates, tree: TokenTree) -> Candidates:
    """The target's distribution after each node's parent: [R, N, K]."""
    if tree.width == 1:
        return Candidates(after.ids[:, :-1], after.log_prob[:, :-1])
    spread = (tree.parents + 1)[:, :, None].expand(-1, -1, after.ids.shape[2])  # row 0 is the root
    return Candidates(after.ids.gather(1, spread), after.log_prob.gather(1, spread))


def _judge(
    tree: TokenTree,
    log_p: Tensor,
    after: Candidates,
    q: Candidates | None,
    noise: Noise,
    rows: Rows,
    rules: Sequence[Rule],
    vocab: int,
) -> Verdict:
    """The verdict of each row's own rule; only rules that some row uses are computed."""
    verdicts = []
    if "lossless" in rules:
        assert q is not None, "the rule `lossless` needs the draft's distributions"
        verdicts.append(lossless(tree, log_p, after, q, noise.accept, vocab))
    if "joint" in rules:
        verdicts.append(joint(tree, log_p, after, rows))
    if len(verdicts) == 1:
        return verdicts[0]
    pairs = zip(*verdicts, strict=True)
    return Verdict(*(torch.where(rows.lossless.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in pairs))


def moves(accepted: Accepted, tree: TokenTree, origin: Tensor, committed: Tensor, rows: Rows) -> Moves:
    """The cache columns of a block's accepted tokens in both models.

    Args:
        accepted: the block's outcome.
        tree: the scored tree; a chain is written where it belongs.
        origin: int64 [R, N], for each node of the scored tree the node of the draft that it is.
        committed: int64 [R].
        rows: parameters; the layouts are used.
    """
    path = accepted.path
    levels = index(path.shape[1], path.device)
    kept = levels < accepted.length[:, None]

    def columns(layout: Layout, nodes: Tensor) -> Tensor:
        return torch.where(kept, layout.column.gather(1, nodes), levels) + committed[:, None]

    to = committed[:, None] + levels
    auxiliary = columns(rows.draft_layout, origin.gather(1, path))
    return Moves(auxiliary, to if tree.width == 1 else columns(rows.score_layout, path), to)


def _after(after: Candidates, node: Tensor) -> Candidates:
    """The target's distribution after `node`, -1 for the root: [R, K]."""
    at = (node + 1)[:, None, None].expand(-1, 1, after.ids.shape[2])
    return Candidates(after.ids.gather(1, at).squeeze(1), after.log_prob.gather(1, at).squeeze(1))
