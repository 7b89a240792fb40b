"""Next-token distributions, and the one way in which a token is drawn.

A distribution is `ids`, `log_p` and a count: the kept tokens in ascending order, and their log-probabilities, which are
normalised over them. Without a filter the count is V. Both arrays may be longer than the count.

The vocabulary is passed over in loops of independent sums or maxima, which compile to vector instructions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.compiled import compiled

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

SUMS, CHUNK, STRETCH = 64, 64, 1024
"""Independent sums of a loop. Tokens of a chunk, whose maximum says whether they need to be looked at, and
of a stretch, whose sum says whether the token that is drawn lies in it."""

NEVER = -math.inf
F32 = np.float32
LOG2_E, LN2_HIGH, LN2_LOW, HALF, ONE = F32(1.4426950408889634), F32(0.693359375), F32(-2.12194440e-4), F32(0.5), F32(1)
C2, C3, C4, C5, C6 = F32(0.5), F32(1.6666665459e-1), F32(4.1665795894e-2), F32(8.3334519073e-3), F32(1.3981999507e-3)
C7, LEAST_EXPONENT, NOTHING = F32(1.9875691500e-4), F32(-87.0), F32(0)
POSITIVE, INFINITE, SIGN = np.int32(0x7FFFFFFF), np.int32(0x7F800000), np.int32(31)


class Distributions(NamedTuple):
    """Distributions after the root and after nodes: that after node n is at index n + 1.

    Attributes:
        logits: float32 [S, V], what `filter_after` makes them of.
        ids: int32 [S, K].
        log_p: float32 [S, K].
        counts: int64 [S]; -1 where the logits have not been filtered.
    """

    logits: Floats
    ids: Ints
    log_p: Floats
    counts: npt.NDArray[np.int64]


@compiled
def after(of, node):
    """The distribution after a node, -1 for the root: ids int32 [n], log_p float32 [n]."""
    count = of.counts[node + 1]
    return of.ids[node + 1, :count], of.log_p[node + 1, :count]


@compiled
def log_prob(ids, log_p, token):
    """The log-probability of a token; -inf where the filter removed it."""
    at = np.searchsorted(ids, token)
    return np.float64(log_p[at]) if at < len(ids) and ids[at] == token else NEVER


@compiled
def largest(logits, maxima):
    """The largest logit, NaN if there is one; and the largest of each chunk of `CHUNK`, written to `maxima`."""
    whole, found = len(logits) // CHUNK, maxima.view(np.int32)
    bits = logits.view(np.int32)
    chunks, rest = bits[: whole * CHUNK].reshape(whole, CHUNK), bits[whole * CHUNK :]
    best, largest_size = 0, np.int32(0)
    for chunk in range(len(maxima)):
        most, size = largest_bits(chunks[chunk] if chunk < whole else rest)
        found[chunk], largest_size = in_order(most), max(largest_size, size)
        best = chunk if maxima[chunk] > maxima[best] else best
    return maxima[best] if largest_size <= INFINITE else F32(math.nan)


@compiled
def largest_bits(bits):
    """Of some floats, given as their bits, the largest one's `in_order`, and the largest bits without the sign.

    The second are more than `INFINITE` where one is NaN. Integers are compared, because that compiles to vector
    instructions, which comparing floats does not.
    """
    most, most_size = np.int32(-(2**31)), np.int32(0)
    for at in range(len(bits)):
        own, size = in_order(bits[at]), np.int32(bits[at] & POSITIVE)
        most = own if own > most else most
        most_size = size if size > most_size else most_size
    return most, most_size


@compiled
def in_order(bits):
    """Map a float's bits to an integer that sorts as the float does; the map is its own inverse."""
    return np.int32(bits ^ ((bits >> SIGN) & POSITIVE))


@compiled
def log_likelihood(logits, token):
    """The log-probability of a token without any filter, at temperature 1; NaN where the logits are no distribution."""
    top = largest(logits, np.empty((len(logits) + CHUNK - 1) // CHUNK, np.float32))
    if not (top > NEVER and top < math.inf):
        return math.nan
    weights = np.empty(len(logits), np.float32)
    exp_into(logits, top, 1.0, weights)
    return np.float64(logits[token]) - top - math.log(total_of(weights))


@compiled
def exp_into(values, top, scale, out):
    """Write exp((values - top) * scale), for values <= top, to `out`, float32 [n]; 0 below exp(-87).

    Cephes' polynomial in float32, because numba calls the C library's exponential for one number at a time.
    """
    count, top, scale = len(values), F32(top), F32(scale)
    powers = np.empty(count, np.int32)
    for at in range(count):
        x = (values[at] - top) * scale
        tiny = x < LEAST_EXPONENT
        x = LEAST_EXPONENT if tiny else x
        power = np.floor(x * LOG2_E + HALF)
        r = x - power * LN2_HIGH - power * LN2_LOW
        y = ((((C7 * r + C6) * r + C5) * r + C4) * r + C3) * r + C2
        y = y * r * r + r + ONE
        out[at] = NOTHING if tiny else y
        powers[at] = 0 if tiny else np.int32(power)
    bits = out.view(np.int32)
    for at in range(count):
        bits[at] += powers[at] << 23


@compiled
def total_of(weights):
    """The sum of weights, float32 [n], in float64."""
    total, whole = 0.0, len(weights) // SUMS * SUMS
    if whole > 0:
        lanes = np.zeros(SUMS, np.float64)
        for at in range(0, whole, SUMS):
            stretch = weights[at : at + SUMS]  # else AVX-512 would gather: an index might count from the end
            for lane in range(SUMS):
                lanes[lane] += stretch[lane]
        for lane in range(SUMS):
            total += lanes[lane]
    for at in range(whole, len(weights)):
        total += weights[at]
    return total


@compiled
def draw(weights, uniform):
    """The first entry at which the running sum of the weights exceeds `uniform` times their total.

    Args:
        weights: float32 [n], at least 0.
        uniform: from [0, 1).

    Returns:
        its index; the last entry of positive weight where rounding lets none exceed it, -1 where all weights are 0.
    """
    goal, mass, start = uniform * total_of(weights), 0.0, 0
    while start + STRETCH < len(weights):  # what does not reach the goal is passed over as a whole
        stretch = total_of(weights[start : start + STRETCH])
        if mass + stretch > goal:
            break
        mass += stretch
        start += STRETCH
    last = -1
    for at in range(start, len(weights)):
        mass += weights[at]
        if weights[at] > 0.0:
            last = at
            if mass > goal:
                return at
    at = start - 1
    while last < 0 and at >= 0:
        last = at if weights[at] > 0.0 else -1
        at -= 1
    return last


@compiled
def pick(weights, uniform, greedy):
    """An entry that is drawn by its weight; the largest, of equal ones the first, where nothing is random."""
    if not greedy:
        return draw(weights, uniform)
    best = -1
    for at in range(len(weights)):
        if weights[at] > 0.0 and (best < 0 or weights[at] > weights[best]):
            best = at
    return best
