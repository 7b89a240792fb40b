"""A level of speculative beam sampling: how many beams it has, and which pairs, drawn from the draft if possible."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.ops import index, log_total


class Drafted(NamedTuple):
    """What the draft has of a level, W' drafted pairs; logarithms, float64.

    Attributes:
        log_q: the draft's joint likelihood of each of the target's pairs, [R, W K]; of live beams, up to a constant.
        left: that of each of the auxiliary's own pairs, all that q adds up to: [R, W K].
        each: that of each drafted pair, in the order they were drawn; -inf for one whose beam is not alive: [R, W'].
        hits: bool [R, W K, W'], which of the target's pairs each is; none if its filter forbids the token.
        own_hits: the same of the auxiliary's pairs.
        share: [R], probability that a drafted pair's beam was going to be alive.
    """

    log_q: Tensor
    left: Tensor
    each: Tensor
    hits: Tensor
    own_hits: Tensor
    share: Tensor

    @classmethod
    def nothing(cls, p: Tensor) -> Drafted:
        none = p.new_zeros(*p.shape, 0, dtype=torch.bool)
        return cls(p, p, p[:, :0], none, none, p[:, 0])


def level_width(p: Tensor, drafted: Drafted, threshold: Tensor, most: Tensor) -> Tensor:
    """Beams of a level, [R]: the most that are accepted, out of `most` drafted pairs, with probability `threshold`.

    Counted as if pairs were drawn with replacement: the residuals, and so the rates of acceptance after 0, 1, ..
    rejections in a row, then depend on p and q alone.
    """
    draws = drafted.each.shape[1]
    q = (drafted.log_q - log_total(drafted.left)).exp().nan_to_num(0.0)
    rates, rest = [], p
    for _ in range(draws):
        rates.append(torch.minimum(rest, q).sum(-1))
        rest = _normalised((rest - q).clamp(min=0))
    rate = torch.stack([*rates, torch.zeros_like(rates[0])], -1)[:, None]
    # probability of a number of acceptances so far, and of rejections since the last
    state = torch.zeros(len(p), draws + 1, draws + 1, dtype=p.dtype, device=p.device)
    state[:, 0, 0] = 1
    share = drafted.share[:, None, None]
    for draw in range(draws):
        after = pad((state * (1 - rate))[:, :, :-1], (1, 0))
        after[:, :, 0] += pad((state * rate).sum(-1)[:, :-1], (1, 0))
        state = torch.where((draw < most)[:, None, None], share * after + (1 - share) * state, state)
    at_least = state.sum(-1).flip(-1).cumsum(-1).flip(-1)
    return torch.minimum((at_least[:, 1:] >= threshold).sum(-1).clamp(min=1), most)


def draw_pairs(
    p: Tensor, drafted: Drafted, accept: Tensor, draw: Tensor, wanted: Tensor, drawn: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a level's pairs, from the draft as long as it lasts.

    Args:
        p: the target's joint probability of each pair [R, W K].
        accept, draw: uniform [0, 1) [R, W] each.
        wanted: pairs to draw, [R].
        drawn: rows that draw; the others take the likeliest, [R].

    Returns:
        pairs in the order they were drawn, int64 [R, W], -1 where there are no more; and whether some are not from the
        draft, bool [R].
    """
    (count, width), log_q, left, rest, current = draw.shape, drafted.log_q, drafted.left, p, p
    got = torch.zeros_like(wanted)
    picks, short = torch.full((count, width), -1, device=p.device), torch.zeros_like(drawn)
    slots = index(width, p.device)
    for slot in range(drafted.each.shape[1]):
        each, hit = drafted.each[:, slot, None], drafted.hits[:, :, slot]
        remaining = log_total(left)
        tried = drawn & (each.squeeze(1) > -math.inf) & (got < wanted)
        ratio = accept[:, slot] * (each - remaining).squeeze(1).exp()
        taken = tried & (ratio < (current * hit).sum(-1))
        residual = _normalised((current - (log_q - remaining).exp()).clamp(min=0))
        # no residual but for rounding: a rejection then has probability ~0, and what is left of p is right
        lost = (tried & ~taken)[:, None] & (residual.sum(-1, keepdim=True) > 0)
        rest = torch.where(taken[:, None] & hit, 0.0, rest)
        current = torch.where(taken[:, None], _normalised(rest), torch.where(lost, residual, current))
        log_q = log_q.masked_fill(tried[:, None] & hit, -math.inf)
        left = left.masked_fill(tried[:, None] & drafted.own_hits[:, :, slot], -math.inf)
        picks = torch.where(taken[:, None] & (slots == got[:, None]), hit.byte().argmax(-1, keepdim=True), picks)
        got = got + taken
    for slot in range(width):
        mass = current.cumsum(-1)
        inverse = (mass <= draw[:, slot, None] * mass[:, -1:]).sum(-1).clamp(max=p.shape[1] - 1)
        pick = torch.where(drawn, inverse, current.argmax(-1))[:, None]
        more = (got < wanted) & (mass[:, -1] > 0)
        rest = torch.where(more[:, None], rest.scatter(1, pick, 0.0), rest)
        current = torch.where(more[:, None], _normalised(rest), current)
        picks = torch.where(more[:, None] & (slots == got[:, None]), pick, picks)
        got, short = got + more, short | more
    return picks, short


def nodes_of(picks: Tensor, hits: Tensor, first: int) -> Tensor:
    """The node of each pair, [R, W]; -1 for one that was not drafted. `first` is the level's first node."""
    if not hits.shape[2]:
        return torch.full_like(picks, -1)
    found = hits.gather(1, picks.clamp(min=0)[:, :, None].expand(-1, -1, hits.shape[2]))
    return torch.where(found.any(-1) & (picks >= 0), found.byte().argmax(-1) + first, -1)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
