"""Acceptance: which drafted tokens are kept, and the token the target adds. One call, the rules in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.beams import beams
from mtad.chain import bild, block, ensemble, fly, relaxed, threshold, token_wise, whole
from mtad.distribution import Candidates, draw, process
from mtad.joint import joint, joint_sample, modal, typical
from mtad.live import Live
from mtad.multi_path import greedy_multi_path
from mtad.noise import Noise
from mtad.ops import index
from mtad.params import Rule
from mtad.recursive_rejection import recursive_rejection
from mtad.rows import Layout, Rows, choose_rows
from mtad.scored import Scored, Verdict, after_parents
from mtad.traversal import traversal
from mtad.tree import TokenTree

RULES: dict[Rule, Callable[[Scored, Rows], Verdict]] = {
    "token_wise": token_wise,
    "block": block,
    "greedy_multi_path": greedy_multi_path,
    "traversal": traversal,
    "recursive_rejection": recursive_rejection,
    "joint": joint,
    "joint_sample": joint_sample,
    "modal": modal,
    "typical": typical,
    "threshold": threshold,
    "ensemble": ensemble,
    "relaxed": relaxed,
    "fly": fly,
    "bild": bild,
    "beams": beams,
    "whole": whole,
}


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
        length: int64 [R], accepted tokens; `length + 1` entries of the other two count, the rest is undefined. -1
            where live beams have no token in common.
        path: int64 [R, draft_len], scored-tree node of each accepted token; beyond `length`, any valid node.
        moves: the cache columns to keep; None where nothing was drafted, or nobody asked (`mtad.block.decide` does).
        live: beams that the next block goes on with, of rows whose method keeps some; None where none does.
    """

    tokens: Tensor
    log_probs: Tensor
    length: Tensor
    path: Tensor
    moves: Moves | None = None
    live: Live | None = None


def accept(
    tree: TokenTree | None,
    adjusted: Tensor,
    logits: Tensor,
    q: Candidates | None,
    noise: Noise,
    rows: Rows,
    rules: Sequence[Rule],
    above: tuple[Candidates, ...] = (),
    live: Live | None = None,
) -> Accepted:
    """Decide a block.

    Args:
        tree: the scored tree, `draft_len` levels of `score_width` nodes; None when nothing was drafted.
        adjusted: the target's logits after root and nodes that the rules and the bonus token go by, float
            [R, 1 + N, V]: under the request's constraints, where it has any.
        logits: the target's own logits, which the log-probabilities are reported from; may be the same tensor.
        q: distributions that slot 0 of each level was drawn from, [R, draft_len, K]; needed by the rules of chains.
        noise: the block's noise; `accept`, `nodes` and `bonus` are used.
        rules: acceptance rules of the rows that draft.
        above, live: see `mtad.scored.Scored`.
    """
    vocab = logits.shape[2]
    after = process(adjusted, rows)
    if tree is None:
        verdict = _undrafted(after)
        path = tokens = verdict.node[:, None][:, :0]
        last = torch.ones_like(rows.draft_len, dtype=torch.bool)
    else:
        log_p = after_parents(after, tree).at(tree.tokens)
        verdict = _judge(Scored(tree, log_p, after, q, above, noise, vocab, live), rows, rules)
        path = tree.path(verdict.node.clamp(min=0))
        tokens = tree.tokens.gather(1, path)
        last = index(tree.levels + 1, logits.device) == verdict.length[:, None]
    bonus = draw(verdict.ids, verdict.weights, noise.bonus)
    tokens = torch.where(last, bonus[:, None], pad(tokens, (0, 1)))
    # emitted token i follows the root (i = 0) or the node of emitted token i - 1
    if tree is not None and tree.width > 1:
        logits = logits.gather(1, pad(path + 1, (1, 0))[:, :, None].expand(-1, -1, vocab))
    log_probs = logits.float().log_softmax(-1).gather(2, tokens[:, :, None]).squeeze(2)
    return Accepted(tokens, log_probs, verdict.length, path, live=verdict.live)


def _judge(scored: Scored, rows: Rows, rules: Sequence[Rule]) -> Verdict:
    """The verdict of each row's own rule; only rules that some row uses are computed.

    A row that drafts nothing has none, whatever a rule would make of its empty tree.
    """
    verdict = RULES[rules[0]](scored, rows)
    for number, rule in enumerate(rules[1:], 1):
        verdict = choose_rows(rows.rule == number, RULES[rule](scored, rows), verdict)
    chosen: Verdict = choose_rows(rows.rule < 0, _undrafted(scored.after)._replace(live=verdict.live), verdict)
    return chosen


def _undrafted(after: Candidates) -> Verdict:
    """What rows that draft nothing get: a token of the target's own."""
    length = torch.zeros_like(after.ids[:, 0, 0])
    return Verdict(length - 1, length, after.ids[:, 0], after.log_prob[:, 0].exp())


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
