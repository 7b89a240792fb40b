"""Acceptance: which drafted tokens are kept, and the token the target adds. One call, the rules in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distributions.candidates import draw
from mtad.distributions.filters import FILTERS, Filters
from mtad.distributions.table import Distributions, Table, draw_from, draw_one, log_likelihood, positions
from mtad.draft.live import Live
from mtad.draft.tree import TokenTree
from mtad.methods import Rule
from mtad.noise.host import Noise
from mtad.ops import index
from mtad.rows import Layout, Rows, choose_rows
from mtad.rules.beams import beams
from mtad.rules.by_row import Decided, by_row
from mtad.rules.chain import bild, block, ensemble, fly, relaxed, threshold, token_wise, whole
from mtad.rules.joint import joint, joint_sample, modal, typical
from mtad.rules.multi_path import greedy_multi_path
from mtad.rules.recursive_rejection import recursive_rejection
from mtad.rules.scored import Scored, Verdict, has_children, log_likelihoods
from mtad.rules.traversal import traversal

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


T = TypeVar("T", Decided, Verdict)

SCALAR: frozenset[Rule] = frozenset({"joint", "joint_sample", "threshold", "bild", "whole"})
"""Rules that look at nothing but the drafted tokens: of a table, only the nodes that have children matter to them."""


def accept(
    tree: TokenTree | None,
    adjusted: Tensor,
    logits: Tensor,
    q: Sequence[Distributions],
    noise: Noise,
    rows: Rows,
    rules: Sequence[Rule],
    above: Sequence[tuple[Distributions, ...]] = (),
    live: Live | None = None,
    tables: Sequence[bool] = (False,),
    filters: Filters = FILTERS,
) -> Accepted:
    """Decide a block.

    Args:
        tree: the scored tree, `draft_len` levels of `score_width` nodes; None when nothing was drafted.
        adjusted: the target's logits after root and nodes that the rules and the bonus token go by, float
            [R, 1 + N, V]: under the request's constraints, where it has any.
        logits: the target's own logits, which the log-probabilities are reported from; may be the same tensor.
        q: distributions that slot 0 of each level was drawn from, [R, draft_len, K], of each of `tables`; needed by the
            rules of chains.
        noise: the block's noise; `accept`, `nodes` and `bonus` are used.
        rules: acceptance rules of the rows that draft.
        above, live: see `mtad.rules.scored.Scored`; `above` level by level, of each of `tables`.
        tables: which distributions rows have: False for lists, True for tables (`Shape.tables`).
        filters: make them.
    """

    def judged(after: Distributions, number: int, judge: Callable[[Scored, Rows, Sequence[Rule]], T]) -> T:
        assert tree is not None, "something was drafted"
        behind, own = tuple(level[number] for level in above), q[number] if q else None
        log_p = log_likelihoods(after, tree)
        return judge(Scored(tree, log_p, after, own, behind, noise, logits.shape[2], live), rows, rules)

    def by_lists(number: int) -> Decided:
        after = filters.lists(adjusted, rows)
        verdict = _undrafted(after) if tree is None else judged(after, number, _judge_list)
        node, length, ids, weights, own = verdict
        assert ids is not None, "a list has weights"
        assert weights is not None, "a list has weights"
        return Decided(node, length, draw(ids, weights, noise.bonus), own)

    def by_tables(number: int) -> tuple[Decided, Table]:
        on_host = adjusted.device.type == "cpu"  # where only the positions that are looked at are filtered
        wanted = has_children(tree) if on_host and tree is not None and SCALAR.issuperset(rules) else None
        after = filters.tables(adjusted, rows, wanted)
        if tree is None:
            none = torch.full_like(rows.rule, -1)
            found = Decided(none, none + 1, none, None)
        else:
            found = judged(after, number, partial(by_row, _judge_table) if on_host and wanted is None else _judge_table)
        missing, at = found.bonus < 0, (found.node + 1)[:, None]
        bonus = draw_one(after, at, noise.bonus, rows.greedy)
        if wanted is not None and (new := missing & rows.tabulated & ~wanted.gather(1, at).squeeze(1)).any():
            leaves = filters.tables(positions(adjusted, at), rows, new[:, None])
            bonus = torch.where(new, draw_one(leaves, torch.zeros_like(at), noise.bonus, rows.greedy), bonus)
        return found._replace(bonus=torch.where(missing, bonus, found.bonus)), after

    if False in tables:
        verdict = by_lists(0)
    if True in tables:
        found, after = by_tables(len(tables) - 1)
        verdict = choose_rows(rows.tabulated, found, verdict) if False in tables else found
    if tree is None:
        path = tokens = verdict.node[:, None][:, :0]
        last = torch.ones_like(rows.draft_len, dtype=torch.bool)
    else:
        path = tree.path(verdict.node.clamp(min=0))
        tokens = tree.tokens.gather(1, path)
        last = index(tree.levels + 1, logits.device) == verdict.length[:, None]
    tokens = torch.where(last, verdict.bonus[:, None], pad(tokens, (0, 1)))
    # emitted token i follows the root (i = 0) or the node of emitted token i - 1
    branches = tree is not None and tree.width > 1
    at = pad(path + 1, (1, 0)) if branches else index(tokens.shape[1], tokens.device).expand_as(tokens)
    likelihoods = []
    if False in tables:
        own = logits.gather(1, at[:, :, None].expand(-1, -1, logits.shape[2])) if branches else logits
        likelihoods.append(own.float().log_softmax(-1).gather(2, tokens[:, :, None]).squeeze(2))
    if True in tables:
        emitted = rows.tabulated[:, None] & (index(tokens.shape[1], tokens.device) <= verdict.length[:, None])
        likelihoods.append(log_likelihood(logits, at, tokens, emitted, after if adjusted is logits else None))
    log_probs: Tensor = choose_rows(rows.tabulated, likelihoods[-1], likelihoods[0])
    return Accepted(tokens, log_probs, verdict.length, path, live=verdict.live)


def _judge_list(scored: Scored, rows: Rows, rules: Sequence[Rule]) -> Verdict:
    return _judge(scored, rows, rules, lambda verdict: verdict)


def _judge_table(scored: Scored, rows: Rows, rules: Sequence[Rule]) -> Decided:
    """`_judge` of tables, whose weights are too many to be put together: each rule's own are drawn from.

    A bonus token of -1 is still to be drawn from the distribution after the node.
    """

    def settled(verdict: Verdict) -> Decided:
        node, length, ids, weights, live = verdict
        if ids is None or weights is None:
            return Decided(node, length, torch.full_like(node, -1), live)
        bonus = ids.gather(1, draw_from(weights, scored.noise.bonus, rows.greedy)).squeeze(1)
        return Decided(node, length, bonus, live)

    return _judge(scored, rows, rules, settled)


def _judge(scored: Scored, rows: Rows, rules: Sequence[Rule], made: Callable[[Verdict], T]) -> T:
    """What is `made` of the verdict of each row's own rule; only rules that some row uses are computed.

    A row that drafts nothing has none, whatever a rule would make of its empty tree.
    """
    verdict = made(RULES[rules[0]](scored, rows))
    for number, rule in enumerate(rules[1:], 1):
        verdict = choose_rows(rows.rule == number, made(RULES[rule](scored, rows)), verdict)
    chosen: T = choose_rows(rows.rule < 0, made(_undrafted(scored.after))._replace(live=verdict.live), verdict)
    return chosen


def _undrafted(after: Distributions) -> Verdict:
    """What rows that draft nothing get: a token of the target's own."""
    length = torch.zeros_like(after.ids[:, 0, 0])
    if isinstance(after, Table):
        return Verdict(length - 1, length, None, None)
    return Verdict(length - 1, length, after.ids[:, 0], after.log_prob[:, 0].exp())


def moves(accepted: Accepted, tree: TokenTree, origin: Tensor, committed: Tensor, rows: Rows) -> Moves:
    """The cache columns of a block's accepted tokens in both models.

    Args:
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
