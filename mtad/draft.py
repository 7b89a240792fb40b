"""Drafting: one level of beam sampling in log space, without replacement. A sampled chain is one beam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.distribution import Candidates
from mtad.rows import Rows, Shape
from mtad.tree import TokenTree


class Level(NamedTuple):
    """One level of a draft, B beams a row.

    Attributes:
        tokens: int64 [R, B]; any valid id where nothing was drafted.
        parents: int64 [R, B], slot of the level above.
        log_q: float32 [R, B], joint log-likelihood of the path; -inf for a dead slot.
        drafted: bool [R, B], the slot holds a new token (it is neither dead nor an ended beam carried down).
        growing: bool [R, B], the path takes more tokens; neither dead nor ended.
        ancestors: bool [R, B, N], the path in the whole tree's node indices, the slot itself included.
    """

    tokens: Tensor
    parents: Tensor
    log_q: Tensor
    drafted: Tensor
    growing: Tensor
    ancestors: Tensor


def root(rows: Rows, shape: Shape) -> Level:
    """The level above the first: one beam, the root, of joint likelihood 1."""
    none = torch.zeros_like(rows.last_level[0])
    zero = none.long()
    ancestors = none[:, :, None].expand(-1, 1, shape.draft_len * shape.width)
    return Level(zero, zero, zero.float(), none, ~rows.last_level[0], ancestors)


def expand(above: Level, candidates: Candidates, noise: Tensor, rows: Rows, depth: int, width: int) -> Level:
    """Draw the next level: W (beam, token) pairs without replacement, with probability q(path) each.

    Gumbel top-k over beam x token (equal to drawing pairs one by one from the renormalised joint, arXiv 2407.09722
    section 4, without replacement). Pairs of distinct beams are distinct paths, so no prefix is drafted twice. An
    ended beam competes as a single candidate, itself, with the weight it has.

    Args:
        above: the previous level, B beams.
        candidates: the auxiliary's distributions after each of them, [R, B, K].
        noise: Gumbel noise [R, W, K], of which the first B beams' is used; 0 gives deterministic beam search.
        rows: parameters of the rows; a row whose own width or support is smaller than W has dead slots.
        depth: 1 for the first drafted token.
        width: W, slots of the level.
    """
    count, beams, k = candidates.ids.shape
    nodes, device = above.ancestors.shape[2], noise.device
    conditional = torch.where(above.growing[:, :, None], candidates.log_prob, _itself(k, device))
    joint = conditional + above.log_q[:, :, None]
    found = min(width, beams * k)
    choice = (joint + (noise if beams == width else noise[:, :beams])).flatten(1).topk(found, dim=-1).indices
    log_q = joint.flatten(1).gather(1, choice)
    if found < width:
        choice = pad(choice, (0, width - found))
        log_q = pad(log_q, (0, width - found), value=-math.inf)
    if rows.slot_bias is not None:
        log_q = log_q + rows.slot_bias
    if beams > 1:
        parents = choice // k
        grew = above.growing.gather(1, parents)
        ancestors = above.ancestors.gather(1, parents[:, :, None].expand(count, width, nodes))
    else:
        parents, grew, ancestors = torch.zeros_like(choice), above.growing, above.ancestors
    drafted = (log_q > -math.inf) & grew
    tokens = candidates.ids.flatten(1).gather(1, choice)
    stops = (tokens[:, :, None] == rows.eos).any(-1) | rows.last_level[depth]
    return Level(tokens, parents, log_q, drafted, drafted > stops, ancestors | _own(depth, width, nodes, device))


@lru_cache(maxsize=256)
def _itself(k: int, device: torch.device) -> Tensor:
    """Conditional log-probability of an ended beam's only candidate, itself: [K] = 0, -inf, -inf, .."""
    return torch.full((k,), -math.inf, device=device).index_fill_(0, torch.zeros(1, dtype=torch.long, device=device), 0)


@lru_cache(maxsize=256)
def _own(depth: int, width: int, nodes: int, device: torch.device) -> Tensor:
    """The node that each slot of a level is: bool [W, N]."""
    return torch.eye(nodes, dtype=torch.bool, device=device)[(depth - 1) * width : depth * width]


def assemble(levels: Sequence[Level]) -> TokenTree:
    """The tree of a finished draft, N = levels x width nodes."""
    width = levels[0].tokens.shape[1]
    parents = torch.cat([level.parents for level in levels], 1)
    return TokenTree(
        tokens=torch.cat([level.tokens for level in levels], 1),
        parents=parents + _level_above(len(levels), width, parents.device),
        log_q=torch.cat([level.log_q for level in levels], 1),
        drafted=torch.cat([level.drafted for level in levels], 1),
        ancestors=torch.cat([level.ancestors for level in levels], 1),
        width=width,
    )


@lru_cache(maxsize=256)
def _level_above(levels: int, width: int, device: torch.device) -> Tensor:
    """First node of the level above each node: [N]; -1, the root, for the first level (whose parent slot is 0)."""
    first = torch.arange(-1, levels - 1, device=device) * width
    return first.clamp(min=-1).repeat_interleave(width)
