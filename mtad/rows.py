"""Decoding parameters of the rows of one batch, as tensors: rows with different parameters share one computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.params import FORMS, DecodingParams, Form, Rule

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
        form: int64 [R, 1], of the row's draft, an index of `mtad.params.FORMS`.
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


def top_k_of(params: DecodingParams, vocab_size: int) -> int:
    """Tokens a request's filter keeps at most: greedy is top-k 1, no filter is the vocabulary."""
    if params.temperature == 0 and params.spec.lossless:
        return 1
    return min(params.top_k or vocab_size, vocab_size)


def blocks_of(vocab_size: int) -> int:
    """Blocks of a table of the vocabulary."""
    return -(-vocab_size // BLOCK)


def block_shape(params: Sequence[DecodingParams], vocab_size: int, listed: int | None = None) -> Shape:
    """The smallest block shape that holds every row.

    Args:
        listed: candidates up to which a distribution is a list; by default `LISTED`.
    """
    width = max(p.draft_width for p in params)
    score_width = max(p.score_width for p in params)
    levels = max(p.drafted for p in params)
    counts = [top_k_of(p, vocab_size) for p in params]
    listed = LISTED if listed is None else listed
    branching = [p.children for p in params if p.spec.form == "branches"]
    return Shape(
        draft_len=levels,
        width=width,
        score_width=score_width,
        scored=max(sum(_scored(p)) for p in params),
        candidates=min(vocab_size, max(width, 1, *(count for count in counts if count <= listed))),
        selects=width > 1 and not all(p.spec.tree for p in params),
        rules=tuple(sorted({p.spec.rule for p in params if p.drafted})),
        mixed=bool(branching) or any(p.score_width not in (0, score_width) for p in params),
        forms=tuple(form for form in FORMS if any(p.spec.form == form for p in params if p.drafted)),
        children=max((c for row in branching for c in row), default=0),
        live=any(p.spec.live for p in params),
        listed=listed,
        tables=tuple(sorted({count > listed for count in counts})),
        blocks=blocks_of(vocab_size) if max(counts) > listed else 0,
    )


def _scored(params: DecodingParams) -> tuple[int, ...]:
    """Nodes of each level that the target scores."""
    return params.widths if params.spec.tree else (1,) * params.drafted


def stack_rows(
    params: Sequence[DecodingParams],
    shape: Shape,
    vocab_size: int,
    eos: Sequence[int],
    device: torch.device | str = "cpu",
) -> Rows:
    """Rows for a batch of requests.

    Temperature 0 has no code of its own: lossless methods become top-k 1, the others keep temperature 1 and are given
    noise 0 (`mtad.noise.host`), which turns beam sampling into beam search and the bonus draw into an argmax.

    Args:
        shape: at least as large as each request's own.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    def first(counts: list[int], size: int) -> Tensor:
        """Bias [R, size]: 0 for the first `counts[r]` entries, -inf for the others."""
        beyond = torch.arange(size, device=device) >= torch.tensor(counts, device=device)[:, None]
        return torch.zeros(len(counts), size, device=device).masked_fill(beyond, -math.inf)

    def layout(widths: Tensor, width: int, stored: int) -> Layout:
        node = torch.arange(levels * width, device=device)
        level, slot = node // max(width, 1), node % max(width, 1)
        mine = slot < widths[:, level]
        order = torch.where(mine, node, len(node) + node).argsort(-1)
        node_at = order[:, :stored].contiguous()
        held = pad(pad(node_at + 1, (1, 0)), (0, 1), value=len(node) + 1)
        return Layout(node_at, order.argsort(-1), held)

    levels, ends = shape.draft_len, frozenset(eos)

    def by_level(values: list[tuple[int, ...]]) -> Tensor:
        """[R, D], 0 for levels that a row has not."""
        padded = [row + (0,) * (levels - len(row)) for row in values]
        return torch.tensor(padded, dtype=torch.int64, device=device).view(len(params), levels)

    counts = [top_k_of(p, vocab_size) for p in params]
    own = by_level([p.widths for p in params])
    # a row that drafts nothing is laid out as the batch is: it has no nodes to keep together
    drafted = by_level([p.widths or (shape.width,) * levels for p in params])
    scored = by_level([_scored(p) or (shape.score_width,) * levels for p in params])
    bias = torch.zeros(levels, len(params), shape.width, device=device)
    # beams that end are carried down to the batch's last level; branches are not
    kept = by_level([p.widths if p.spec.form == "branches" else p.widths[-1:] * levels for p in params])
    beyond = torch.arange(shape.width, device=device) >= kept.T[:, :, None]
    children = by_level([p.children for p in params])
    without = torch.tensor([not p.replaces for p in params], device=device)[:, None]
    rank = torch.arange(shape.width, device=device) % children.T[:, :, None].clamp(min=1)
    beyond |= without & (rank >= shape.candidates) & (children.T[:, :, None] > 0)
    branch_at, child_at = _branches(children, own, shape)
    bild = [p.spec.rule == "bild" for p in params]
    confidence = [0.0 if b else p.confidence for b, p in zip(bild, params, strict=True)]
    return Rows(
        inverse_temperature=column([1 / (p.temperature or 1.0) for p in params])[:, :, None],
        rank_bias=first(counts, shape.candidates)[:, None],
        top_k=torch.tensor(counts, device=device)[:, None, None],
        tabulated=torch.tensor([count > shape.listed for count in counts], device=device),
        greedy=torch.tensor([[p.temperature == 0] for p in params], device=device),
        top_p=column([max(p.top_p, LEAST) if p.top_p < 1 else 2.0 for p in params])[:, :, None],
        min_p=column([p.min_p for p in params])[:, :, None],
        threshold=column([_threshold(p) for p in params]),
        rule_count=torch.tensor(
            [[p.fly_window_size if p.spec.rule == "fly" else p.relaxed_topk] for p in params], device=device
        ),
        log_confidence=column(list(map(_log, confidence))),
        log_fallback=column([_log(p.confidence) if b else -math.inf for b, p in zip(bild, params, strict=True)]),
        itself=first([1], shape.candidates)[0],
        level_at=(drafted.cumsum(1) - drafted).T.contiguous(),
        draft_layout=layout(drafted, shape.width, levels * shape.width),
        score_layout=layout(scored, shape.score_width, shape.scored),
        level_bias=bias.masked_fill(beyond, -math.inf),
        branch_at=branch_at,
        form=torch.tensor([[FORMS.index(p.spec.form)] for p in params], device=device),
        replacement=torch.tensor([[p.replaces] for p in params], device=device),
        child_at=child_at,
        slots=torch.arange(shape.score_width, device=device),
        draft_len=torch.tensor([[p.drafted] for p in params], device=device),
        tree=torch.tensor([p.spec.tree for p in params], device=device),
        drawn=torch.tensor([p.spec.drawn and p.temperature > 0 for p in params], device=device),
        rule=torch.tensor([shape.rules.index(p.spec.rule) if p.drafted else -1 for p in params], device=device),
        beam_of=torch.arange(shape.width * shape.candidates, device=device) // shape.candidates,
        ends=torch.tensor([token in ends for token in range(vocab_size)], device=device),
        stops_at_eos=torch.tensor([[not p.ignore_eos] for p in params], device=device),
    )


LEAST = 1e-30
"""The smallest top-p: it keeps the most likely token, whose preceding mass is 0."""

RATIOS = ("joint", "joint_sample", "threshold")
"""Rules that bound a likelihood ratio."""


def _threshold(params: DecodingParams) -> float:
    """As `Rows` has it."""
    return _log(params.threshold) if params.spec.rule in RATIOS else params.threshold


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _branches(children: Tensor, own: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """`Rows.branch_at` and `Rows.child_at`, from the children [R, D] and the nodes [R, D] of each row's levels."""
    (count, levels), width, device = own.shape, shape.score_width, own.device
    if not shape.children:
        none = torch.zeros(levels, count, shape.width, dtype=torch.int64, device=device)
        return none, none.new_zeros(count, 0, 0)
    drafted, slots = torch.arange(shape.width, device=device), torch.arange(width, device=device)
    each = children.T[:, :, None].clamp(min=1)
    mine = (drafted < own.T[:, :, None]) & (children.T[:, :, None] > 0)
    # a small vocabulary has no candidate for some children; with replacement each child may be any candidate
    at = torch.where(mine, drafted // each * shape.candidates + (drafted % each).clamp(max=shape.candidates - 1), 0)
    child, found = torch.arange(shape.children, device=device), []
    for level in range(levels):
        parents = slots[: 1 if level == 0 else width]
        slot = parents[:, None] * children[:, level, None, None] + child
        alive = (child < children[:, level, None, None]) & (slot < own[:, level, None, None])
        found.append(torch.where(alive, slot + level * width, -1))
    found.append(torch.full((count, width, shape.children), -1, device=device))
    return at, torch.cat(found, 1)


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


def places(rows: Rows, shape: Shape) -> tuple[Place, ...]:
    """The levels of a draft, first to last."""
    levels, width, device = shape.draft_len, shape.width, rows.rule.device
    slots = torch.arange(width, device=device)[:, None]
    return tuple(
        Place(
            here=torch.arange(levels, device=device) == level,
            slots=slots,
            held=slots + (level * width + 1),
            ahead=torch.full((1, width), level, device=device),
            behind=rows.level_at[level],
            ends=rows.draft_len <= level + 1,
            bias=rows.level_bias[level],
            branch_at=rows.branch_at[level],
        )
        for level in range(levels)
    )


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
