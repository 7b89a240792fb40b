"""Drafting: one level of beam sampling in log space, without replacement. A sampled chain is one beam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtad.distribution import Candidates
from mtad.rows import Rows
from mtad.tree import TokenTree


class Level(NamedTuple):
    """One level of a draft, B beams a row.

    Attributes:
        tokens: int64 [R, B], 0 where nothing was drafted.
        parents: int64 [R, B], slot of the level above.
        log_q: float32 [R, B], joint log-likelihood of the path; -inf for a dead slot.
        drafted: bool [R, B], the slot holds a new token (it is neither dead nor an ended beam carried down).
        ended: bool [R, B], the path takes no more tokens.
        ancestors: bool [R, B, N], the path in the whole tree's node indices, the slot itself included.
    """

    tokens: Tensor
    parents: Tensor
    log_q: Tensor
    drafted: Tensor
    ended: Tensor
    ancestors: Tensor


def root(rows: Rows, nodes: int) -> Level:
    """The level above the first: one beam, the root, of joint likelihood 1; `nodes` is the size N of the whole tree."""
    zeros = torch.zeros_like(rows.draft_len)[:, None]
    none = zeros.bool()
    return Level(zeros, zeros, zeros.float(), none, rows.draft_len[:, None] < 1, none[:, :, None].expand(-1, 1, nodes))


def expand(above: Level, candidates: Candidates, noise: Tensor, rows: Rows, depth: int, width: int) -> Level:
    """Draw the next level: `width` (beam, token) pairs without replacement, with probability q(path) each.

    Gumbel top-k over beam x token (equal to drawing pairs one by one from the renormalised joint, arXiv 2407.09722
    section 4, without replacement). Pairs of distinct beams are distinct paths, so no prefix is drafted twice. An
    ended beam competes as a single candidate, itself, with the weight it has.

    Args:
        above: the previous level, B' beams.
        candidates: the auxiliary's distributions after each of them, [R, B', K].
        noise: Gumbel noise [R, B', K]; 0 gives deterministic beam search.
        rows: parameters of the rows.
        depth: 1 for the first drafted token.
        width: slots of the new level; a row whose own width or support is smaller has dead slots.
    """
    beams, k = candidates.ids.shape[1:]
    joint = above.log_q[:, :, None] + candidates.log_prob
    itself = torch.arange(k, device=joint.device) == 0
    stay = torch.where(itself, above.log_q[:, :, None], -math.inf)
    joint = torch.where(above.ended[:, :, None], stay, joint).flatten(1)
    found = min(width, beams * k)
    _, index = (joint + noise.flatten(1)).topk(found, dim=-1)
    if found < width:
        index = torch.nn.functional.pad(index, (0, width - found))
    slot = torch.arange(width, device=joint.device)
    log_q = joint.gather(1, index)
    log_q = torch.where((slot < rows.beam_width[:, None]) & (slot < found), log_q, -math.inf)
    parents = index // k
    had_ended = above.ended.gather(1, parents)
    drafted = (log_q > -math.inf) & ~had_ended
    tokens = torch.where(drafted, candidates.ids.flatten(1).gather(1, index), 0)
    stops = (tokens[:, :, None] == rows.eos[:, None, :]).any(-1) | (rows.draft_len[:, None] <= depth)
    nodes = above.ancestors.shape[2]
    own = torch.arange(nodes, device=joint.device) == (slot + (depth - 1) * width)[:, None]
    ancestors = above.ancestors.gather(1, parents[:, :, None].expand(-1, -1, nodes)) | own
    return Level(tokens, parents, log_q, drafted, ~drafted | stops, ancestors)


def assemble(levels: Sequence[Level]) -> TokenTree:
    """The tree of a finished draft, N = levels x width nodes."""
    width = levels[0].tokens.shape[1]
    parents = [torch.full_like(levels[0].parents, -1)]
    parents += [level.parents + above * width for above, level in enumerate(levels[1:])]
    return TokenTree(
        tokens=torch.cat([level.tokens for level in levels], 1),
        parents=torch.cat(parents, 1),
        log_q=torch.cat([level.log_q for level in levels], 1),
        drafted=torch.cat([level.drafted for level in levels], 1),
        ancestors=torch.cat([level.ancestors for level in levels], 1),
        width=width,
    )
