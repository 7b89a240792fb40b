"""Drafting: one level of beam sampling in log space, without replacement. A sampled chain is one beam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distribution import Candidates
from mtad.ops import flat, index, missing, take_slots
from mtad.rows import Place, Rows, Shape
from mtad.tree import TokenTree


class Level(NamedTuple):
    """One level of a draft, B beams per row.

    Attributes:
        tokens: int64 [R, B]; any valid id where nothing was drafted.
        parents: int64 [R, B], slot of the level above.
        log_q: float32 [R, B], joint log-likelihood of the path; -inf for a dead slot.
        drafted: bool [R, B], the slot holds a new token (it is neither dead nor an ended beam carried down).
        growing: bool [R, B], the path takes more tokens; neither dead nor ended.
        paths: int64 [R, B, D], the slot of each level on the way here, this one's included; 0 below it.
    """

    tokens: Tensor
    parents: Tensor
    log_q: Tensor
    drafted: Tensor
    growing: Tensor
    paths: Tensor


def root(rows: Rows, shape: Shape) -> Level:
    """The level above the first: one beam, the root, of joint likelihood 1."""
    zero = torch.zeros_like(rows.draft_len)
    paths = zero[:, :, None].expand(-1, 1, shape.draft_len)
    return Level(zero, zero, zero.float(), zero.bool(), rows.draft_len > 0, paths)


def expand(
    above: Level, candidates: Candidates, noise: Tensor, rows: Rows, place: Place, branches: bool = False
) -> Level:
    """Draw the next level: W (beam, token) pairs without replacement, with probability q(path) each.

    Gumbel top-k over beam x token (equal to drawing pairs one by one from the renormalised joint, arXiv 2407.09722
    section 4, without replacement). Pairs of distinct beams are distinct paths, so no prefix is drafted twice. An
    ended beam competes as a single candidate, itself, with the weight it has.

    The rows whose draft branches draw each beam's children from its own distribution instead, in order, without or
    with replacement (arXiv 2305.09781).

    Args:
        above: the previous level, B beams.
        candidates: the auxiliary's distributions after each of them, [R, B, K].
        noise: Gumbel noise [R, W, K], of which the first B beams' is used; 0 gives deterministic beam search.
        rows: parameters of the rows; a row whose own width or support is smaller than W has dead slots.
    """
    (_, beams, k), width = candidates.ids.shape, noise.shape[1]
    conditional = torch.where(above.growing[:, :, None], candidates.log_prob, rows.itself)
    each = conditional + above.log_q[:, :, None]
    joint = flat(each)
    # a vocabulary smaller than the width leaves slots without any candidate
    short = missing(width, beams * k)
    scores = joint + flat(noise if beams == width else noise[:, :beams])
    choice = scores.topk(width - short, dim=-1).indices
    if short:
        choice = pad(choice, (0, short))
    if branches:
        order = (each + noise[:, :beams]).topk(k, dim=-1).indices
        own = flat(order + index(beams, choice.device, k)[:, None]).gather(1, place.branch_at)
        # with replacement each child has noise of its own
        parents = place.branch_at // k
        drawn = (each.gather(1, parents[:, :, None].expand(-1, -1, k)) + noise).argmax(-1) + parents * k
        choice = torch.where(rows.branches, torch.where(rows.replacement, drawn, own), choice)
    log_q = joint.gather(1, choice) + place.bias
    if short:
        beyond = index(width, choice.device) >= width - short
        log_q = log_q.masked_fill(beyond & ~rows.branches, -math.inf)
    if beams > 1:
        parents = rows.beam_of[choice]
        grew = above.growing.gather(1, parents)
    else:
        parents, grew = torch.zeros_like(choice), above.growing
    paths = torch.where(place.here, place.slots, along(above.paths, parents))
    drafted = (log_q > -math.inf) & grew
    tokens = flat(candidates.ids).gather(1, choice)
    stops = (rows.ends[tokens] & rows.heeds) | place.ends
    growing = drafted & ~stops & (log_q >= rows.log_confidence)
    return Level(tokens, parents, log_q, drafted, growing, paths)


def along(values: Tensor, parents: Tensor) -> Tensor:
    """Each slot's parent's entry: [R, B, X] by slots of the level above, to [R, W, X]; `parents` int64 [R, W].

    Of a single slot above, the root, the entry is returned as it is, [R, 1, X].
    """
    if values.shape[1] == 1:
        return values
    return take_slots(values, parents)


def stack(levels: Sequence[Level]) -> Level:
    """The levels of a draft as one, level first: [D, R, W], paths [D, R, W, D]."""
    return Level(*(torch.stack(column) for column in zip(*levels, strict=True)))


def assemble(levels: Level) -> TokenTree:
    """The tree of a finished draft, N = levels x width nodes, from its stacked levels."""
    count, _, width = levels.tokens.shape
    above = index(count, levels.tokens.device, width)[:, None, None] - width  # first node of the level above
    parents = (levels.parents + above).clamp(min=-1)  # slot 0 above the first level is the root

    def by_row(values: Tensor) -> Tensor:
        return values.transpose(0, 1).flatten(1, 2)

    return TokenTree(*map(by_row, (levels.tokens, parents, levels.log_q, levels.drafted, levels.paths)))
