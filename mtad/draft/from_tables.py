"""Drafting from tables: what the samplers of `mtad.draft.levels` do, without noise for each token.

Gumbel noise on the mass of a block is the largest of the noisy tokens of the block, and the W largest noisy tokens lie
in the W blocks with the largest. So each block has a number, and only the tokens of W blocks have numbers of their own,
conditioned on what their largest is known to be (arXiv 1903.06059, section 4.1).

With the example of `mtad.distributions.table` and one beam to draw: block 0 has log(0.625) plus its number, say
-0.47 + 0.2 = -0.27, and block 1 has -0.98 + 1.1 = 0.12. Block 1 is the larger, so the token comes from it, and the
largest noisy token of block 1 is known to be 0.12; token 5 is the only one there. Block 0 needs no numbers for its
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, relu

from mtad.distributions.table import Table, descend
from mtad.methods import FORMS, Form
from mtad.noise.host import LevelNoise
from mtad.ops import index
from mtad.rows import BLOCK, Place, Rows

Drawn = tuple[Tensor, Tensor, Tensor]
"""Of each slot: its parent's slot and its token, int64 [R, W], and the path's log-likelihood, float32 [R, W]."""


class Beams:
    """B beams, by the distributions after them; an ended one has a single continuation, itself, as its token 0.

    Args:
        table: [R, B].
        growing: bool [R, B].
        weight: float32 [R, B], joint log-likelihood; -inf for a dead beam.

    Attributes:
        blocks: float32 [R, B, blocks], log-likelihood of the continuations in each block, given the beam.
    """

    def __init__(self, table: Table, growing: Tensor, weight: Tensor) -> None:
        self._table, self._growing, self.weight = table, growing, weight
        itself = torch.zeros_like(table.blocks[0, 0]).masked_fill(
            index(table.blocks.shape[2], weight.device) > 0, -math.inf
        )
        self.blocks = torch.where(growing[:, :, None], table.blocks, itself)

    def entries(self, beam: Tensor, block: Tensor) -> Tensor:
        """Log-likelihood of the tokens of a beam's block, given the beam: [R, M, BLOCK] of [R, M]."""
        first = block[:, :, None] * BLOCK + index(BLOCK, block.device) == 0
        itself = torch.zeros_like(first, dtype=torch.float32).masked_fill(~first, -math.inf)
        return torch.where(self._growing.gather(1, beam)[:, :, None], self._table.entries(beam, block), itself)


def draw_level(
    growing: Tensor, weight: Tensor, table: Table, noise: LevelNoise, rows: Rows, place: Place, forms: Sequence[Form]
) -> Drawn:
    """The next level's slots; each form's sampler runs if some row is of it."""
    beams = Beams(table, growing, weight)
    found = SAMPLERS[forms[0]](beams, noise, rows, place)
    for form in forms[1:]:
        own = rows.form == FORMS.index(form)
        other = SAMPLERS[form](beams, noise, rows, place)
        parent, token, log_q = (torch.where(own, a, b) for a, b in zip(other, found, strict=True))
        found = parent, token, log_q
    return found


def sample_chain(beams: Beams, noise: LevelNoise, rows: Rows, place: Place) -> Drawn:
    """One token by inversion, of the block and then of the token."""
    block, rest = descend(beams.blocks[:, 0].exp(), noise.uniform, rows.greedy)
    parent = torch.zeros_like(block)
    entries = beams.entries(parent, block).squeeze(1)
    entry, _ = descend(entries.exp(), rest, rows.greedy)
    log_q = entries.gather(1, entry) + beams.weight[:, :1]
    width = place.bias.shape
    return parent.expand(width), (block * BLOCK + entry).expand(width), log_q.expand(width)


def sample_beams(beams: Beams, noise: LevelNoise, rows: Rows, place: Place) -> Drawn:
    """W (beam, token) pairs without replacement, with probability q(path) each."""
    (_, count, blocks), width = beams.blocks.shape, place.bias.shape[1]
    keys = (beams.blocks + beams.weight[:, :, None] + noise.table[:, :count, :blocks]).flatten(1)
    top = keys.topk(min(width, count * blocks))
    beam, block = top.indices // blocks, top.indices % blocks
    entries = beams.entries(beam, block) + beams.weight.gather(1, beam)[:, :, None]
    noisy = _under(top.values, entries + noise.table[:, : beam.shape[1], blocks:], rows)
    choice, short = _largest(noisy.flatten(1), width)
    at = choice // BLOCK
    log_q = entries.flatten(1).gather(1, choice).masked_fill(short, -math.inf)
    return beam.gather(1, at), block.gather(1, at) * BLOCK + choice % BLOCK, log_q


def sample_branches(beams: Beams, noise: LevelNoise, rows: Rows, place: Place) -> Drawn:
    """Each beam's children from its own distribution, in order, without or with replacement."""
    (count, width, blocks), most = beams.blocks.shape, rows.child_at.shape[2]
    listed = rows.itself.shape[0]
    parent, child = place.branch_at // listed, place.branch_at % listed
    # without replacement: a beam's n-th block takes the numbers of its n-th child
    top = (beams.blocks + noise.table[:, :width, :blocks]).topk(min(most, blocks))
    each = top.indices.shape[2]
    beam = index(width, parent.device)[:, None].expand(count, width, each).flatten(1)
    pairs = index(width, parent.device, listed)[:, None] + index(each, parent.device)
    slot = (place.branch_at[:, None] == pairs.flatten()[:, None]).byte().argmax(-1)
    own = noise.table[:, :, blocks:].gather(1, slot[:, :, None].expand(-1, -1, BLOCK))
    entries = beams.entries(beam, top.indices.flatten(1))
    noisy = _under(top.values.flatten(1), entries + own, rows).view(count, width, -1)
    order, short = _largest(noisy, most)
    at = parent * most + child.clamp(max=most - 1)
    entry, short = order.flatten(1).gather(1, at), short[child.clamp(max=most - 1)]
    block = top.indices.flatten(1).gather(1, parent * each + entry // BLOCK)
    log_q = (
        entries.view(count, width, -1).flatten(1).gather(1, parent * each * BLOCK + entry).masked_fill(short, -math.inf)
    )
    # with replacement: every child has numbers of its own
    spread = beams.blocks.gather(1, parent[:, :, None].expand(-1, -1, blocks))
    other = (spread + noise.table[:, :, :blocks]).argmax(-1)
    others = beams.entries(parent, other)
    found = (others + noise.table[:, :, blocks:]).argmax(-1, keepdim=True)
    token = torch.where(rows.replacement, other * BLOCK + found.squeeze(2), block * BLOCK + entry % BLOCK)
    log_q = torch.where(rows.replacement, others.gather(2, found).squeeze(2), log_q)
    return parent, token, log_q + beams.weight.gather(1, parent)


Sampler = Callable[[Beams, LevelNoise, Rows, Place], Drawn]
SAMPLERS: dict[Form, Sampler] = {"chain": sample_chain, "beams": sample_beams, "branches": sample_branches}


def _under(largest: Tensor, noisy: Tensor, rows: Rows) -> Tensor:
    """Noisy log-likelihoods [R, M, BLOCK] as they are where their largest is `largest` [R, M].

    At temperature 0 there is no noise, and the largest is what it is.
    """
    largest, most = largest[:, :, None], noisy.amax(-1, keepdim=True)
    below = largest - noisy + (-(noisy - most).exp()).log1p()
    known = largest - relu(below) - (-below.abs()).exp().log1p()
    possible = (noisy > -math.inf) & (largest > -math.inf)
    return torch.where(rows.greedy[:, :, None], noisy, known).masked_fill(~possible, -math.inf)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where the `count` largest of the last axis are, and bool [count], which there are not."""
    short = max(0, count - values.shape[-1])
    found = values.topk(count - short).indices
    return pad(found, (0, short)), index(count, values.device) >= count - short
