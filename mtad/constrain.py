"""What a request asks of its logits beyond the models' own opinion, at every node of the token tree.

Both models' logits are changed alike, each node's by what its own path implies, before
`mtad.filters.filter_logits` filters them: p and q are then distributions under the same constraints, a
forbidden token has p = q = 0, and the acceptance rules need to know nothing of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.compiled import compiled
from mtad.distribution import F32, NOTHING

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Terms(NamedTuple):
    """What a request asks, and what of its text that needs.

    Attributes:
        biased: int64 [B], tokens with a bias, each once.
        bias: float32 [B], finite or -inf.
        present: int64 [T], the tokens that are in prompt or text, each once; [0] without penalties.
        counts: float32 [V], how often each token is in the text; [0] without penalties.
        penalties: float32 [3], of repetition, presence and frequency.
        ends: int64 [E], tokens that end a text.
        min_left: tokens that the text needs before one of those may follow; <= 0 for none.
    """

    biased: Ints
    bias: Floats
    present: Ints
    counts: Floats
    penalties: Floats
    ends: Ints
    min_left: int


@compiled
def constrain(logits, paths, lengths, terms, allowed):
    """Put a row's logits under its request's constraints, in place.

    In this order: `logit_bias` is added; the repetition penalty divides positive and multiplies negative logits of
    tokens in prompt, text or path; presence and frequency penalties of tokens in text or path are subtracted;
    end-of-sequence tokens that come too early, and forbidden tokens, become -inf.

    Args:
        logits: float32 [S, V], after each of S nodes.
        paths: int64 [S, D], the drafted tokens from the root to each node, itself included; the root has none.
        lengths: int64 [S], how many there are; what stands behind them is not looked at.
        terms: `Terms`.
        allowed: uint8 [S, ceil(V / 8)], tokens that may follow, one bit each, least significant first; [S, 0] where all
            may. A node whose distribution is used must be left with a token, which is for the caller to see to.
    """
    for node in range(len(logits)):
        own, path = logits[node], paths[node, : lengths[node]]
        for at in range(len(terms.biased)):
            own[terms.biased[at]] -= NOTHING - terms.bias[at]  # x - 0 is x to the bit; x + 0 is not, for x = -0
        if len(terms.counts) > 0:
            penalise(own, path, terms)
        if len(path) < terms.min_left:
            for token in terms.ends:
                own[token] = -math.inf
        if allowed.shape[1] > 0:
            forbid(own, allowed[node])


@compiled
def penalise(own, path, terms):
    """Penalties of the tokens in prompt and text, then anew those of the path's tokens, with what the path adds."""
    before = np.empty(len(path), np.float32)
    for at in range(len(path)):
        before[at] = own[path[at]]
    for token in terms.present:
        own[token] = penalised(own[token], terms.counts[token], terms.penalties)
    for at in range(len(path)):
        times = F32((path == path[at]).sum())
        own[path[at]] = penalised(before[at], terms.counts[path[at]] + times, terms.penalties)


@compiled
def penalised(logit, count, penalties):
    """The logit of a token in prompt, text or path, which is in the latter two `count` times."""
    factor = penalties[0]
    logit = logit / factor if logit > 0 else logit * factor
    return logit - (penalties[1] * F32(count > 0) + penalties[2] * count)


@compiled
def forbid(own, allowed):
    """Make the logits of tokens without a bit -inf."""
    for byte in range(len(allowed)):
        if allowed[byte] != 255:
            for token in range(8 * byte, min(8 * byte + 8, len(own))):
                if not allowed[byte] >> (token - 8 * byte) & 1:
                    own[token] = -math.inf
