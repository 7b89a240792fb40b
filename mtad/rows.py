"""What rows with different decoding parameters share: the shape of their block, and their parameters as tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtad.methods import Form, Rule

LISTED = 128
"""Candidates up to which a distribution is a sorted list of them (`Candidates`); one with more is a table of the
vocabulary (`mtad.distributions.table.Table`)."""

BLOCK = 256
"""Tokens of a block of such a table."""


class Shape(NamedTuple):
    """The static shape of one block: the largest row decides, smaller rows are padded with dead nodes.

    Attributes:
        draft_len: D, levels of the tree.
        width: W, nodes of a drafted level.
        score_width: nodes of a level that may be scored.
        scored: nodes that the target scores, padded to the row with most of them.
        candidates: K, most likely tokens listed per position, by the row that lists most; at least W, so that the root
            alone has a candidate for every slot.
        selects: whether some row is scored along one path only, out of several.
        rules: acceptance rules of the rows that draft.
        mixed: whether some row's scored tree has fewer nodes than the batch's, so that they do not lie in order.
        forms: of the rows' drafts.
        children: C, most children a node of a branching draft has; 0 where no row's draft branches.
        live: whether some row's beams stay alive from block to block.
        listed: candidates up to which a row's distribution is a list.
        tables: which distributions there are: False for lists, True for tables.
        blocks: of a table; 0 without any.
    """

    draft_len: int
    width: int
    score_width: int
    scored: int
    candidates: int
    selects: bool
    rules: tuple[Rule, ...]
    mixed: bool
    forms: tuple[Form, ...]
    children: int
    live: bool
    listed: int
    tables: tuple[bool, ...]
    blocks: int

    @property
    def keeps_logits(self) -> bool:
        """Whether tables of the drafter's logits are looked at behind its next step; those of mere beams are not."""
        return True in self.tables and (self.live or self.forms != ("beams",))


class Layout(NamedTuple):
    """In which cache column, behind the committed ones, each node of a padded tree lies.

    A row with fewer nodes than the batch's tree keeps its own together, in the columns they would have without the rest
    of the batch: attention then adds them up in the same order, to the bit.

    Attributes:
        node_at: int64 [R, M], node of each of the M columns that are stored.
        column: int64 [R, N], column of each node; beyond M for nodes that are not stored.
        held: int64 [R, M + 2], `node_at` + 1 between a 0 and an N + 1: what the columns from the last committed one to
            the first beyond the tree hold.
    """

    node_at: Tensor
    column: Tensor
    held: Tensor


class Rows(NamedTuple):
    """Parameters per row, laid out for one `Shape`.

    Attributes:
        inverse_temperature: float32 [R, 1, 1].
        rank_bias: float32 [R, 1, K], 0 for the `top_k` most likely tokens, -inf below.
        top_k: int64 [R, 1, 1], V for all; tables go by it.
        tabulated: bool [R], the row's distributions are tables.
        greedy: bool [R, 1], temperature 0.
        top_p: float32 [R, 1, 1]; 2 where top-p is off, so that rounding of the mass cannot drop a token.
        min_p: float32 [R, 1, 1], relative to the most likely token.
        threshold: float32 [R, 1], what the row's rule bounds (`DecodingParams.accept_threshold`); of `joint` and
            the other `RATIOS` its logarithm, -inf for 0.
        rule_count: int64 [R, 1], what the row's rule counts: `relaxed_topk` or `fly_window_size`.
        log_confidence: float32 [R, 1], log-likelihood below which a path is not continued; -inf for never.
        log_fallback: float32 [R, 1], `bild`: log-probability below which the target decides; -inf for never.
        itself: float32 [K], conditional log-probability of an ended beam's only candidate, itself: 0, -inf, -inf, ..
        level_at: int64 [D, R], column of each level's first node behind the committed ones, in the draft's cache.
        draft_layout, score_layout: columns of the draft's and the scored tree's nodes; where every row is as wide as
            the batch, node n is in column n.
        level_bias: float32 [D, R, W], 0 for the slots of the row's own nodes, -inf for the others.
        branch_at: int64 [D, R, W], of a branching draft: the slot's place among what its level is drawn from, its
            parent x K + which of the parent's children it is.
        form: int64 [R, 1], of the row's draft, an index of `mtad.methods.FORMS`.
        child_at: int64 [R, 1 + N, C], scored node of each child of root and nodes, of a branching draft; -1 for none.
        slots: int64 [score_width], 0, 1, ..
        draft_len: int64 [R, 1], most tokens that a path of the row's draft has.
        tree: bool [R], the target scores all of this row's draft rather than one path.
        drawn: bool [R], the path that is kept is a drawn one, of one path the first, rather than the likeliest.
        rule: int64 [R], the row's rule, as its index in the shape's; -1 where nothing is drafted, so that none applies.
        beam_of: int64 [W K], the beam of each (beam, candidate) pair.
        ends: bool [V], tokens that end a text.
        stops_at_eos: bool [R, 1], whether they end this row's.
        replacement: bool [R, 1], a branching draft's children are drawn with replacement.
    """

    inverse_temperature: Tensor
    rank_bias: Tensor
    top_k: Tensor
    tabulated: Tensor
    greedy: Tensor
    top_p: Tensor
    min_p: Tensor
    threshold: Tensor
    rule_count: Tensor
    log_confidence: Tensor
    log_fallback: Tensor
    itself: Tensor
    level_at: Tensor
    draft_layout: Layout
    score_layout: Layout
    level_bias: Tensor
    branch_at: Tensor
    form: Tensor
    child_at: Tensor
    slots: Tensor
    draft_len: Tensor
    tree: Tensor
    drawn: Tensor
    rule: Tensor
    beam_of: Tensor
    ends: Tensor
    stops_at_eos: Tensor
    replacement: Tensor


def blocks_of(vocab_size: int) -> int:
    """Blocks of a table of the vocabulary."""
    return -(-vocab_size // BLOCK)


class Place(NamedTuple):
    """One level of a draft, as constants of its graph.

    Attributes:
        here: bool [D], the level among all levels.
        slots: int64 [W, 1], 0, 1, ..
        held: int64 [W, 1], what `mtad.draft.tree.tree_columns` calls each slot's node: its index + 1.
        ahead: int64 [1, W], how far behind the first committed column its tokens' positions are: depth - 1.
        behind: int64 [R], how many columns after the committed ones its first node is.
        ends: bool [R, 1], whether a path that reaches this level is as long as the row drafts.
        bias: float32 [R, W], of `Rows.level_bias`.
        branch_at: int64 [R, W], of `Rows.branch_at`.
    """

    here: Tensor
    slots: Tensor
    held: Tensor
    ahead: Tensor
    behind: Tensor
    ends: Tensor
    bias: Tensor
    branch_at: Tensor


def choose_rows(own: Tensor, these: Any, others: Any) -> Any:
    """Of two nested tuples of tensors, the rows [R] of the first, and the other rows of the second.

    What only one of them has is its own.
    """
    if these is None or others is None:
        return others if these is None else these
    if isinstance(these, Tensor):
        return torch.where(own.view(-1, *[1] * (these.dim() - 1)), these, others)
    if type(these) is tuple:
        return tuple(choose_rows(own, a, b) for a, b in zip(these, others, strict=True))
    return type(these)(*(choose_rows(own, a, b) for a, b in zip(these, others, strict=True)))
