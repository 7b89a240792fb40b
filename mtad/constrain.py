"""What a request asks of its logits beyond the models' own opinion, at every node of the token tree.

Both models' logits are changed alike, each node's by what its own path implies, before
`mtad.filters.filter_logits` filters them: p and q are then distributions under the same constraints, a
forbidden token has p = q = 0, and the acceptance rules need to know nothing of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Paths(NamedTuple):
    """The drafted tokens from the root to each of S nodes, the node itself included; the root has none.

    Attributes:
        tokens: int64 [R, S, D]; any valid id where `valid` is False.
        valid: bool [R, S, D], a drafted token of the path is there; their order is the path's.
    """

    tokens: Tensor
    valid: Tensor


class Penalties(NamedTuple):
    """Penalties of committed tokens.

    Attributes:
        repetition, presence, frequency: float32 [R]; 1, 0 and 0 are off.
        counts: float32 [R, V], how often each token is in the text.
        seen: bool [R, V], whether it is in prompt or text.
        tokens: int64 [R, T], every token that is in prompt or text, others allowed, repetitions too: T pads.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    counts: Tensor
    seen: Tensor
    tokens: Tensor


class Terms(NamedTuple):
    """What the rows of a batch ask; a field is None where no row asks for it.

    Attributes:
        bias: float32 [R, V], finite or -inf, 0 for none.
        penalties: of each row; off for rows that ask for none.
        end: int64 [E], tokens that end a text.
        min_left: int64 [R], tokens the text needs before one of `end` may follow; <= 0 for none.
    """

    bias: Tensor | None
    penalties: Penalties | None
    end: Tensor
    min_left: Tensor | None


def constrain(logits: Tensor, paths: Paths, terms: Terms, barrier: Tensor | None = None) -> Tensor:
    """Put logits under a request's constraints, in place.

    In this order: `logit_bias` is added; the repetition penalty divides positive and multiplies negative logits of
    tokens in prompt, text or path; presence and frequency penalties of tokens in text or path are subtracted;
    end-of-sequence tokens that come too early, and forbidden tokens, become -inf.

    A row's result does not depend, to the bit, on the other rows, and a row that asks for nothing is unchanged.

    Args:
        logits: float32 [R, S, V], after each of S nodes, changed in place.
        barrier: float32 [R, S, V] of `barrier`, inf for forbidden tokens, 0 for others; None where no row forbids any.
            A node whose distribution is used must be left with a token, which is for the caller to see to.

    Returns:
        `logits`.
    """
    if terms.bias is not None:
        logits.sub_((0.0 - terms.bias)[:, None])  # x - 0 is x to the bit; x + 0 is not, for x = -0
    if terms.penalties is not None:
        _penalise(logits, paths, terms.penalties)
    if terms.min_left is not None:
        early = paths.valid.sum(-1) < terms.min_left[:, None]
        ends = logits[:, :, terms.end].masked_fill(early[:, :, None], -math.inf)
        logits.index_copy_(2, terms.end, ends)
    if barrier is not None:
        logits.sub_(barrier)  # many times faster than masked_fill_
    return logits


def _penalise(logits: Tensor, paths: Paths, p: Penalties) -> None:
    """Penalties of the tokens in prompt and text, then anew those of the path's tokens, with what the path adds.

    In place. A token named twice is written the same value twice, and one named without need its own: neither the order
    of the writes nor padding changes anything.
    """
    tokens, valid = paths
    committed = p.tokens[:, None].expand(-1, logits.shape[1], -1)
    # what the path's tokens are before any penalty
    before = logits.gather(2, tokens)
    logits.scatter_(2, committed, _penalised(logits.gather(2, committed), p, p.tokens[:, None], None))
    if tokens.shape[2]:
        times = ((tokens[:, :, :, None] == tokens[:, :, None, :]) & valid[:, :, None, :]).sum(-1)
        logits.scatter_(2, tokens, _penalised(before, p, tokens, times))


def _penalised(logits: Tensor, p: Penalties, tokens: Tensor, times: Tensor | None) -> Tensor:
    """Logits of `tokens` that the path holds `times` times."""
    counts = p.counts.gather(1, tokens.flatten(1)).view_as(tokens)
    seen = p.seen.gather(1, tokens.flatten(1)).view_as(tokens)
    if times is not None:
        counts, seen = counts + times, seen | (times > 0)
    factor = torch.where(seen, p.repetition[:, None, None], 1.0)
    minus = p.presence[:, None, None] * (counts > 0) + p.frequency[:, None, None] * counts
    return torch.where(logits > 0, logits / factor, logits * factor) - minus


_BARRIERS = torch.full((256, 8), math.inf).masked_fill((torch.arange(256)[:, None] >> torch.arange(8) & 1).bool(), 0.0)
"""The barrier of each byte: float32 [256, 8]."""


def barrier(bits: Tensor, size: int) -> Tensor:
    """What is subtracted from logits to forbid tokens: 0 where a token's bit is set, inf where it is not.

    Args:
        bits: uint8 [..., ceil(size / 8)], least significant first.
        size: V.

    Returns:
        float32 [..., V].
    """
    return _BARRIERS.index_select(0, bits.flatten().int()).view(*bits.shape[:-1], -1)[..., :size]
