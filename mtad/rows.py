"""Decoding parameters of the rows of one batch, as tensors: rows with different parameters share one computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.params import DecodingParams, Rule


class Shape(NamedTuple):
    """The static shape of one block: the largest row decides, smaller rows are padded with dead nodes.

    Attributes:
        draft_len: D, levels of the tree.
        width: W, beams the auxiliary drafts a level.
        score_width: nodes a level that the target scores.
        candidates: K, most likely tokens looked at per position; V where any row has no top-k, else at least W, so that
            the root alone has a candidate for every slot.
        selects: whether some row is scored along its best beam only, out of several.
        rules: acceptance rules of the rows that draft.
        mixed: whether some row's scored tree is narrower than the batch's, so that its nodes do not lie in order.
    """

    draft_len: int
    width: int
    score_width: int
    candidates: int
    selects: bool
    rules: tuple[Rule, ...]
    mixed: bool


class Layout(NamedTuple):
    """In which cache column, behind the committed ones, each node of a padded tree lies.

    A row narrower than the batch's tree keeps its own nodes together, in the columns they would have without the rest
    of the batch: attention then adds them up in the same order, to the bit.

    Attributes:
        node_at: int64 [R, N], node of each column.
        column: int64 [R, N], column of each node.
        held: int64 [R, N + 2], `node_at` + 1 between a 0 and an N + 1: what the columns from the last committed one to
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
        top_p: float32 [R, 1, 1]; 2 where top-p is off, so that rounding of the mass cannot drop a token.
        log_threshold: float32 [R, 1], log tau; -inf for tau = 0.
        itself: float32 [K], conditional log-probability of an ended beam's only candidate, itself: 0, -inf, -inf, ..
        width: int64 [R], beams the row's draft is stored with: its own, or W where it drafts nothing.
        draft_layout, score_layout: columns of the draft's and the scored tree's nodes; where every row is as wide as
            the batch, node n is in column n.
        slot_bias: float32 [R, W], 0 for the slots of the row's own beams, -inf for the others.
        slots: int64 [score_width], 0, 1, ..
        draft_len: int64 [R, 1], tokens a path of the row's draft has at most.
        tree: bool [R], the target scores all beams of this row rather than the best one.
        lossless: bool [R], the row is accepted by the `lossless` rule, else by `joint`.
        beam_of: int64 [W K], the beam of each (beam, candidate) pair.
        ends: bool [V], tokens that end a text.
        heeds: bool [R, 1], whether they end this row's.
    """

    inverse_temperature: Tensor
    rank_bias: Tensor
    top_p: Tensor
    log_threshold: Tensor
    itself: Tensor
    width: Tensor
    draft_layout: Layout
    score_layout: Layout
    slot_bias: Tensor
    slots: Tensor
    draft_len: Tensor
    tree: Tensor
    lossless: Tensor
    beam_of: Tensor
    ends: Tensor
    heeds: Tensor


def top_k_of(params: DecodingParams, vocab_size: int) -> int:
    """Tokens a request's filter keeps at most: greedy is top-k 1, no filter is the vocabulary."""
    if params.temperature == 0 and params.spec.lossless:
        return 1
    return min(params.top_k or vocab_size, vocab_size)


def block_shape(params: Sequence[DecodingParams], vocab_size: int) -> Shape:
    """The smallest block shape that holds every row."""
    width = max(p.draft_width for p in params)
    score_width = max(p.score_width for p in params)
    return Shape(
        draft_len=max(p.drafted for p in params),
        width=width,
        score_width=score_width,
        candidates=min(vocab_size, max(width, *(top_k_of(p, vocab_size) for p in params))),
        selects=width > 1 and not all(p.spec.tree for p in params),
        rules=tuple(sorted({p.spec.rule for p in params if p.drafted})),
        mixed=any(p.score_width not in (0, score_width) for p in params),
    )


def stack_rows(
    params: Sequence[DecodingParams],
    shape: Shape,
    vocab_size: int,
    eos: Sequence[int],
    device: torch.device | str = "cpu",
) -> Rows:
    """Rows for a batch of requests.

    Temperature 0 has no code of its own: lossless methods become top-k 1, the others keep temperature 1 and are given
    noise 0 (`mtad.noise`), which turns beam sampling into beam search and the bonus draw into an argmax.

    Args:
        params: parameters of the R requests.
        shape: at least as large as each request's own.
        vocab_size: V.
        eos: tokens that end a text.
        device: of the result.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    def first(counts: list[int], size: int) -> Tensor:
        """Bias [R, size]: 0 for the first `counts[r]` entries, -inf for the others."""
        beyond = torch.arange(size, device=device) >= torch.tensor(counts, device=device)[:, None]
        return torch.zeros(len(counts), size, device=device).masked_fill(beyond, -math.inf)

    def layout(beams: list[int], width: int) -> Layout:
        node = torch.arange(shape.draft_len * width, device=device)
        level, slot = node // max(width, 1), node % max(width, 1)
        mine = torch.tensor(beams, device=device)[:, None]
        node_at = torch.where(slot < mine, level * mine + slot, len(node) + node).argsort(-1)
        held = pad(pad(node_at + 1, (1, 0)), (0, 1), value=len(node) + 1)
        return Layout(node_at, node_at.argsort(-1), held)

    ends = frozenset(eos)
    own = [p.draft_width for p in params]
    widths = [w or shape.width for w in own]
    return Rows(
        inverse_temperature=column([1 / (p.temperature or 1.0) for p in params])[:, :, None],
        rank_bias=first([top_k_of(p, vocab_size) for p in params], shape.candidates)[:, None],
        top_p=column([p.top_p if p.top_p < 1 else 2.0 for p in params])[:, :, None],
        log_threshold=column([math.log(p.accept_threshold) if p.accept_threshold > 0 else -math.inf for p in params]),
        itself=first([1], shape.candidates)[0],
        width=torch.tensor(widths, device=device),
        draft_layout=layout(widths, shape.width),
        score_layout=layout([p.score_width or shape.score_width for p in params], shape.score_width),
        slot_bias=first(own, shape.width),
        slots=torch.arange(shape.score_width, device=device),
        draft_len=torch.tensor([[p.drafted] for p in params], device=device),
        tree=torch.tensor([p.spec.tree for p in params], device=device),
        lossless=torch.tensor([p.spec.rule == "lossless" for p in params], device=device),
        beam_of=torch.arange(shape.width * shape.candidates, device=device) // shape.candidates,
        ends=torch.tensor([token in ends for token in range(vocab_size)], device=device),
        heeds=torch.tensor([[not p.ignore_eos] for p in params], device=device),
    )


class Place(NamedTuple):
    """One level of a draft, as constants of its graph.

    Attributes:
        here: bool [D], the level among all levels.
        slots: int64 [W, 1], 0, 1, ..
        held: int64 [W, 1], what `mtad.tree.tree_columns` calls each slot's node: its index + 1.
        ahead: int64 [1, W], how far behind the first committed column its tokens' positions are: depth - 1.
        behind: int64 [R], how many columns after the committed ones its first node is.
        ends: bool [R, 1], whether a path that reaches this level is as long as the row drafts.
    """

    here: Tensor
    slots: Tensor
    held: Tensor
    ahead: Tensor
    behind: Tensor
    ends: Tensor


def places(rows: Rows, shape: Shape) -> tuple[Place, ...]:
    """The levels of a draft, first to last."""
    levels, width, device = shape.draft_len, shape.width, rows.width.device
    slots = torch.arange(width, device=device)[:, None]
    return tuple(
        Place(
            here=torch.arange(levels, device=device) == level,
            slots=slots,
            held=slots + (level * width + 1),
            ahead=torch.full((1, width), level, device=device),
            behind=rows.width * level,
            ends=rows.draft_len <= level + 1,
        )
        for level in range(levels)
    )


def flat(values: Tensor) -> Tensor:
    """[R, A, B] as [R, A B]; exported, without the arithmetic of shapes."""
    if not torch.compiler.is_exporting():
        return values.flatten(1)
    shape = (values.shape[0], values.shape[1] * values.shape[2])
    return torch.onnx.ops.symbolic("Reshape", (values, torch.tensor([0, -1])), dtype=values.dtype, shape=shape)


def index(size: int, device: torch.device, step: int = 1) -> Tensor:
    """0, step, 2 step, ..: int64 [size]; a constant, made once. A graph that is traced makes its own."""
    if torch.compiler.is_exporting():
        return torch.arange(size, device=device) * step
    return _index(size, device, step)


@lru_cache(maxsize=1024)
def _index(size: int, device: torch.device, step: int) -> Tensor:
    return torch.arange(size, device=device) * step
