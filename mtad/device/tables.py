"""Filtered distributions and drafts on a device, and how a token is drawn.

A distribution is its logits and a few numbers. An example with 8 tokens in 2 blocks of 4, at temperature 1 with `top_p`
0.8: the probabilities before the filter are 0.4, 0, 0.1, 0.1 | 0, 0.3, 0.1, 0. Most likely first, 0.4 + 0.3 + 0.1 reach
0.8, so tokens 0, 5 and 2 are kept: `lowest` is the logit of token 2, and `last` is 2, because tokens 3 and 6 have the
same logit but larger ids. The masses of the blocks are (0.4 + 0.1) / 0.8 and 0.3 / 0.8.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
"""Tokens of a block, whose mass is known."""


class Given(NamedTuple):
    """What a block of R rows is given: the rows' parameters as `mtad.rows.ROW` has them, and what changes every block.

    Attributes:
        inverse_temperature, top_p, min_p, divergence, plausible: float32 [R].
        top_k, draft_len, width, rule: int64 [R].
        greedy, tree, reads_draft, stops_at_eos: bool [R].
        threshold, log_confidence: float64 [R].
        last_two: int64 [R, 2], the last two committed tokens; the last is the root.
        committed: int64 [R].
        real: bool [R]; other rows are padding, and write behind the capacity.
        draft, accept: float64 [R, D, W]; bonus: float64 [R]. See `mtad.random.Noise`.
    """

    inverse_temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    divergence: Tensor
    plausible: Tensor
    greedy: Tensor
    rule: Tensor
    threshold: Tensor
    draft_len: Tensor
    width: Tensor
    tree: Tensor
    reads_draft: Tensor
    log_confidence: Tensor
    stops_at_eos: Tensor
    last_two: Tensor
    committed: Tensor
    real: Tensor
    draft: Tensor
    accept: Tensor
    bonus: Tensor


Step = tuple[Tensor, Tensor, Tensor, Tensor]
"""Tokens, positions, write_at and mask of a model's step: see `engines.base.Step`."""


class Tree(NamedTuple):
    """The drafts of R rows, D levels of W slots; see `mtad.batch.Trees`.

    Attributes:
        tokens: int64 [R, D, W].
        log_q: float64 [R, D, W]; NaN where the level was to be drawn from what is no distribution.
        drafted, growing, ended: bool [R, D, W].
        ways: int64 [R, D, W, D], the slots of the path to each node, level by level; beyond its own, anything.
    """

    tokens: Tensor
    log_q: Tensor
    drafted: Tensor
    growing: Tensor
    ended: Tensor
    ways: Tensor

    @classmethod
    def empty(cls, rows: int, levels: int, width: int, device: torch.device) -> Tree:
        shape = rows, levels, width
        kinds = torch.int64, torch.float64, torch.bool, torch.bool, torch.bool
        own: list[Tensor] = [torch.empty(shape, dtype=kind, device=device) for kind in kinds]
        return cls._make([*own, torch.zeros((*shape, levels), dtype=torch.int64, device=device)])


class Scored(NamedTuple):
    """The nodes that the target scores, M per row; see `mtad.rules.scored.Scored`.

    Attributes:
        tokens, parents, depths, origins: int64 [R, M]; parents are -1 for the root.
        log_q: float64 [R, M].
        drafted, ends: bool [R, M].
        bounds: float64 [R, M], log-likelihood under the draft of its best path up to the node's depth.
        ancestors: bool [R, M, M], whether a node's path goes through another one; through itself it does.
        longest: int64 [R].
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    origins: Tensor
    log_q: Tensor
    drafted: Tensor
    ends: Tensor
    bounds: Tensor
    ancestors: Tensor
    longest: Tensor


class Results(NamedTuple):
    """The outcome of a block of R rows as `mtad.batch.Decisions` has it, but in float32.

    Attributes:
        longest: int64 [R], tokens of the longest path that was drafted.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    paths: Tensor
    longest: Tensor
    spent: Tensor
    finite: Tensor

    @classmethod
    def empty(cls, rows: int, levels: int, device: torch.device | str) -> Results:

        def like(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty((rows, *sizes), dtype=dtype, device=device)

        numbers = [like(levels + 1, dtype=torch.float32) for _ in range(2)]
        return cls(like(levels + 1), numbers[0], like(), like(levels), like(), numbers[1], like(dtype=torch.bool))


class Tables(NamedTuple):
    """Distributions [R, S]. All tensors but the logits are contiguous.

    Attributes:
        logits: float [R, S, V], the model's, last axis contiguous.
        inverse_temperature: float32 [R].
        numbers: float32 [R, S, 4]: the largest logit; the smallest one that is kept, -inf for all; the logarithm of the
            sum of exp((logit - largest) / temperature) over what is kept, NaN if this is no distribution; that sum at
            temperature 1 over all tokens.
        last: int64 [R, S], of the tokens with the smallest kept logit, the largest id that is kept.
        blocks: float32 [R, S, ceil(V / BLOCK)], the mass of each block; of greedy rows, that of its likeliest token.
    """

    logits: Tensor
    inverse_temperature: Tensor
    numbers: Tensor
    last: Tensor
    blocks: Tensor

    def log_prob(self, at: Tensor, tokens: Tensor) -> Tensor:
        """Log-probability of tokens [R, M] at positions `at` [R, M], float64; -inf where the filter removed them."""
        logits = self.logits[torch.arange(len(at), device=at.device)[:, None], at, tokens].float()
        largest, lowest, log_total, _ = self.numbers.gather(1, at[..., None].expand(-1, -1, 4)).unbind(2)
        kept = (logits > lowest) | ((logits == lowest) & (tokens <= self.last.gather(1, at)))
        values = (logits - largest) * self.inverse_temperature[:, None] - log_total
        return values.masked_fill(~kept, -math.inf).double()


class Found(NamedTuple):
    """What kernels that filter [R, S] distributions write for the next one; see `mtad.device.filter_kernels`.

    Attributes:
        largest, totals, plains: float32 [R, S, chunks], each chunk's largest logit, and its weight, relative to that
            one's, at the temperature and at 1.
        counts, masses: float32 [R, S, chunks, BINS], by bin.
        candidates: int32 [R, S], how many there are.
        keys: int64 [R, S, CANDIDATES], of the first candidates, by id.
        lows, highs: int64 [R, S, chunks], the smallest and the largest key of each chunk's candidates.
    """

    largest: Tensor
    totals: Tensor
    plains: Tensor
    counts: Tensor
    masses: Tensor
    candidates: Tensor
    keys: Tensor
    lows: Tensor
    highs: Tensor


def stacked(tables: list[Tables]) -> Tables:
    """The first distribution of each, [R, len(tables)]; without blocks."""
    logits = torch.stack([table.logits[:, 0] for table in tables], 1)
    numbers = torch.stack([table.numbers[:, 0] for table in tables], 1)
    last = torch.stack([table.last[:, 0] for table in tables], 1)
    return Tables(logits, tables[0].inverse_temperature, numbers, last, tables[0].blocks)


def first_above(weights: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """`mtad.distribution.draw` for rows [R, N] of float64 weights, by a goal [R] in place of a uniform number.

    Returns:
        the entry, int64 [R], and what is left of the goal before it, [R].
    """
    running, some = weights.cumsum(1), weights > 0
    reached = some & (running > goal[:, None])
    last = weights.shape[1] - 1 - some.flip(1).int().argmax(1)
    entry = torch.where(reached.any(1), reached.int().argmax(1), last)[:, None]
    return entry[:, 0], goal - (running - weights).gather(1, entry)[:, 0]


def by_block(weights: Tensor) -> Tensor:
    """Weights [R, V] as [R, blocks, BLOCK], filled up with 0."""
    return pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row by its weight, int64 [R].

    Args:
        weights: float32 [R, V], at least 0, of any scale.
        uniform: float64 [R], from [0, 1).
    """
    blocks = by_block(weights)
    masses = blocks.sum(2, dtype=torch.float64)
    block, rest = first_above(masses, uniform * masses.sum(1))
    entry, _ = first_above(blocks[torch.arange(len(blocks), device=block.device), block].double(), rest)
    return (block * BLOCK + entry).clamp(max=weights.shape[1] - 1)
