"""Drafting: the next level of a draft, by one of three samplers, which a row's form chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distributions.candidates import Candidates, invert
from mtad.distributions.table import Table
from mtad.draft.from_tables import draw_level
from mtad.draft.tree import TokenTree
from mtad.methods import FORMS, Form
from mtad.noise.host import LevelNoise
from mtad.ops import flat, index, missing, take_slots
from mtad.rows import Place, Rows, Shape


class Level(NamedTuple):
    """One level of a draft, B beams per row.

    Attributes:
        tokens: int64 [R, B]; any valid id where nothing was drafted.
        parents: int64 [R, B], slot of the level above.
        log_q: float32 [R, B], joint log-likelihood of the path; -inf for a dead slot.
        drafted: bool [R, B], the slot holds a new token (it is neither dead nor an ended beam carried down).
        growing: bool [R, B], the path takes more tokens.
        ended: bool [R, B], the path's text is complete. It is carried down. A path that neither grows nor has ended,
            because it is unlikely or as long as the row drafts, is dead from the next level on.
        paths: int64 [R, B, D], the slot of each level on the way here, this one's included; 0 below it.
    """

    tokens: Tensor
    parents: Tensor
    log_q: Tensor
    drafted: Tensor
    growing: Tensor
    ended: Tensor
    paths: Tensor


def root(rows: Rows, shape: Shape) -> Level:
    """The level above the first: one beam, the root, of joint likelihood 1."""
    zero = torch.zeros_like(rows.draft_len)
    paths = zero[:, :, None].expand(-1, 1, shape.draft_len)
    return Level(zero, zero, zero.float(), zero.bool(), rows.draft_len > 0, zero.bool(), paths)


def expand(
    above: Level, candidates: Candidates | Table, noise: LevelNoise, rows: Rows, place: Place, forms: Sequence[Form]
) -> Level:
    """Draw the next level, W slots.

    An ended beam has a single candidate, itself, and keeps the weight it has. A path that only stopped has none: were
    it carried down with its weight, it could beat the continuation of a likelier beginning.

    Args:
        above: the previous level, B beams.
        candidates: the auxiliary's distributions after each of them, [R, B, K].
        noise: of this level; 0 draws what is most likely.
        rows: parameters of the rows; a row whose own width or support is smaller than W has dead slots.
        forms: of the rows that draft. Only their samplers run.
    """
    weight = above.log_q.masked_fill(~(above.growing | above.ended), -math.inf)
    if isinstance(candidates, Table):
        parents, tokens, log_q = draw_level(above.growing, weight, candidates, noise, rows, place, forms)
        return _level(above, parents, tokens.clamp(max=len(rows.ends) - 1), log_q + place.bias, rows, place)
    beams, k = candidates.ids.shape[1:]
    conditional = torch.where(above.growing[:, :, None], candidates.log_prob, rows.itself)
    joint = conditional + weight[:, :, None]
    choice = SAMPLERS[forms[0]](conditional, joint, noise, rows, place)
    for form in forms[1:]:
        own = rows.form == FORMS.index(form)
        choice = torch.where(own, SAMPLERS[form](conditional, joint, noise, rows, place), choice)
    log_q = flat(joint).gather(1, choice) + place.bias
    if short := missing(place.bias.shape[1], beams * k):
        # a vocabulary smaller than the width leaves slots without any candidate, except that branches have their own
        beyond = index(place.bias.shape[1], choice.device) >= place.bias.shape[1] - short
        log_q = log_q.masked_fill(beyond & (rows.form != FORMS.index("branches")), -math.inf)
    parents = rows.beam_of[choice] if beams > 1 else torch.zeros_like(choice)
    return _level(above, parents, flat(candidates.ids).gather(1, choice), log_q, rows, place)


def _level(above: Level, parents: Tensor, tokens: Tensor, log_q: Tensor, rows: Rows, place: Place) -> Level:
    """The level of these slots."""
    grew = above.growing.gather(1, parents) if above.growing.shape[1] > 1 else above.growing
    paths = torch.where(place.here, place.slots, by_parent(above.paths, parents))
    alive = log_q > -math.inf
    drafted = alive & grew
    ends = rows.ends[tokens] & rows.stops_at_eos
    growing = drafted & ~ends & ~place.ends & (log_q >= rows.log_confidence)
    return Level(tokens, parents, log_q, drafted, growing, alive & (ends | ~grew), paths)


def sample_chain(conditional: Tensor, joint: Tensor, noise: LevelNoise, rows: Rows, place: Place) -> Tensor:
    """One token by inversion: it takes one number, where Gumbel noise takes one per candidate."""
    return invert(conditional[:, 0].exp(), noise.uniform).expand_as(place.bias)


def sample_beams(conditional: Tensor, joint: Tensor, noise: LevelNoise, rows: Rows, place: Place) -> Tensor:
    """W (beam, token) pairs without replacement, with probability q(path) each.

    Gumbel top-k over beam x token (equal to drawing pairs one by one from the renormalised joint, arXiv 2407.09722
    section 4, without replacement). Pairs of distinct beams are distinct paths, so no prefix is drafted twice.
    """
    beams, width = joint.shape[1], place.bias.shape[1]
    gumbel = noise.gumbel if beams == width else noise.gumbel[:, :beams]
    short = missing(width, beams * joint.shape[2])
    choice = (flat(joint) + flat(gumbel)).topk(width - short, dim=-1).indices
    return pad(choice, (0, short)) if short else choice


def sample_branches(conditional: Tensor, joint: Tensor, noise: LevelNoise, rows: Rows, place: Place) -> Tensor:
    """Each beam's children from its own distribution, in order, without or with replacement (arXiv 2305.09781)."""
    beams, k = joint.shape[1:]
    order = (joint + noise.gumbel[:, :beams]).topk(k, dim=-1).indices
    own = flat(order + index(beams, order.device, k)[:, None]).gather(1, place.branch_at)
    # with replacement each child has noise of its own
    parents = place.branch_at // k
    drawn = (joint.gather(1, parents[:, :, None].expand(-1, -1, k)) + noise.gumbel).argmax(-1) + parents * k
    return torch.where(rows.replacement, drawn, own)


Sampler = Callable[[Tensor, Tensor, LevelNoise, Rows, Place], Tensor]
SAMPLERS: dict[Form, Sampler] = {"chain": sample_chain, "beams": sample_beams, "branches": sample_branches}
"""From log-likelihoods of B beams' candidates given the beam, and of the whole paths, both float32 [R, B, K], to the
pair that each of W slots takes, beam x K + candidate: int64 [R, W]."""


def by_parent(values: Tensor, parents: Tensor) -> Tensor:
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
