"""Beams that stay alive from one block to the next: paths of which the text will be one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.draft.levels import Level, by_parent
from mtad.rows import Place, Rows, choose_rows

Beams = list[tuple[tuple[int, ...], float]]
"""A row's: the tokens of each behind the committed text, and the joint log-likelihood under the target; the one drawn
first comes first. Beams shorter than the longest have ended."""


class Live(NamedTuple):
    """The live beams of R rows, for drafts of D levels and W slots.

    Attributes:
        tokens: int64 [R, D, W], behind the committed ones; beam w is slot w.
        lengths: int64 [R, W], tokens of each; 0 for a slot without a beam.
        weights: float32 [R, W], joint log-likelihood under the target's filtered distribution, up to a constant of the
            row; -inf for a slot without a beam.
    """

    tokens: Tensor
    lengths: Tensor
    weights: Tensor

    @classmethod
    def of(cls, rows: Sequence[Beams], levels: int, width: int) -> Live:
        """Beams of each row, laid out as tensors."""
        tokens = torch.zeros(len(rows), levels, width, dtype=torch.int64)
        lengths = torch.zeros(len(rows), width, dtype=torch.int64)
        weights = torch.full((len(rows), width), -math.inf)
        for row, beams in enumerate(rows):
            for slot, (path, weight) in enumerate(beams):
                tokens[row, : len(path), slot] = torch.tensor(path, dtype=torch.int64)
                lengths[row, slot], weights[row, slot] = len(path), weight
        return cls(tokens, lengths, weights)

    def beams(self) -> list[Beams]:
        """Beams of each row, as `of` takes them."""
        table = zip(self.tokens.mT.tolist(), self.lengths.tolist(), self.weights.tolist(), strict=True)
        return [
            [(tuple(path[:length]), weight) for path, length, weight in zip(*row, strict=True) if length]
            for row in table
        ]


def replay(level: Level, above: Level, live: Live, depth: int, place: Place, rows: Rows) -> Level:
    """A level of the draft, with the tokens that live beams already have at this depth in place of new ones.

    Their weight is the target's, which the draft then goes on from.
    """
    has = live.lengths >= depth
    tokens = torch.where(has, live.tokens[:, depth - 1], 0)
    slots = place.slots.squeeze(1).expand_as(tokens)
    parents = slots if above.tokens.shape[1] > 1 else torch.zeros_like(slots)
    ends = ~has | (rows.ends[tokens] & rows.stops_at_eos)
    own = Level(
        tokens=tokens,
        parents=parents,
        log_q=live.weights,
        drafted=has,
        growing=~ends & ~place.ends,
        ended=ends & (live.weights > -math.inf),
        paths=torch.where(place.here, place.slots, by_parent(above.paths, parents)),
    )
    chosen: Level = choose_rows(live.lengths.amax(1) >= depth, own, level)
    return chosen


def behind(path: Tensor, count: Tensor, levels: int) -> Tensor:
    """Tokens of paths [R, W, X] behind the first `count` [R]: [R, levels, W]; 0 beyond the end."""
    at = count[:, None] + torch.arange(levels, device=path.device)
    found = pad(path, (0, 1)).gather(2, at.clamp(max=path.shape[2])[:, None].expand(-1, path.shape[1], -1))
    return found.clamp(min=0).mT
