"""From the parameters of requests to the shape of their block and to its rows' tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.methods import FORMS
from mtad.params import DecodingParams
from mtad.rows import LISTED, Layout, Place, Rows, Shape, blocks_of

LEAST = 1e-30
"""The smallest top-p: it keeps the most likely token, whose preceding mass is 0."""

RATIOS = ("joint", "joint_sample", "threshold")
"""Rules that bound a likelihood ratio."""


def top_k_of(params: DecodingParams, vocab_size: int) -> int:
    """Tokens a request's filter keeps at most: greedy is top-k 1, no filter is the vocabulary."""
    if params.temperature == 0 and params.spec.lossless:
        return 1
    return min(params.top_k or vocab_size, vocab_size)


def block_shape(params: Sequence[DecodingParams], vocab_size: int, listed: int = LISTED) -> Shape:
    """The smallest block shape that holds every row; distributions of up to `listed` candidates are lists."""
    width = max(p.draft_width for p in params)
    score_width = max(p.score_width for p in params)
    levels = max(p.drafted for p in params)
    counts = [top_k_of(p, vocab_size) for p in params]
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
        threshold=column([_log(p.threshold) if p.spec.rule in RATIOS else p.threshold for p in params]),
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
