"""Next-token distributions: the filter, and the one way in which a token is drawn.

A distribution is `ids`, `log_p` and a count: the kept tokens in ascending order, and their log-probabilities, which are
normalised over them. Without a filter the count is V. Both arrays may be longer than the count.

An example with 5 tokens, temperature 1 and `top_p` 0.8. The probabilities 0.1, 0.4, 0.1, 0.3, 0.1 are taken most likely
first, equal ones by id: 0.4 + 0.3 + 0.1 reach 0.8, so ids are 0, 1, 3 with probabilities 0.125, 0.5 and 0.375.

The vocabulary is passed over in loops of independent sums or maxima, which compile to vector instructions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.compiled import compiled, compiled_without_nan

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
SIXTEENTHS, MOST_DIGIT = F32(16.0), F32(255.0)


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
def filter_after(of, node, row):
    """Make the distribution after a node, unless that is done; returns whether the logits are a distribution."""
    at = node + 1
    if of.counts[at] < 0:
        of.counts[at] = filter_logits(of.logits[at], row, of.ids[at], of.log_p[at])
    return not math.isnan(of.log_p[at, 0])


@compiled
def log_prob(ids, log_p, token):
    """The log-probability of a token; -inf where the filter removed it."""
    at = np.searchsorted(ids, token)
    return float(log_p[at]) if at < len(ids) and ids[at] == token else NEVER


@compiled
def filter_logits(logits, row, ids, log_p):
    """Apply a row's temperature, then top-k, then top-p, then min-p, and renormalise.

    Order and meaning are those of the paper's code and of Hugging Face's warpers: top-p counts the mass that top-k
    left, and keeps the token that crosses it; min-p is relative to the most likely token. Of equal logits the smaller
    id counts as likelier.

    Args:
        logits: float32 [V].
        ids, log_p: where the distribution is written; at least `min(top_k, V)` entries.

    Returns:
        the count. Logits that are no distribution (a NaN, +inf, or nothing but -inf) give one entry, a NaN.
    """
    size, scale = len(logits), 1.0 / row.temperature
    maxima = np.empty((size + CHUNK - 1) // CHUNK, np.float32)
    top = largest(logits, maxima)
    if not (top > NEVER and top < math.inf):
        ids[0], log_p[0] = 0, math.nan
        return 1
    if row.top_k >= size and row.top_p >= 1.0 and row.min_p <= 0.0:
        return keep_all(logits, top, scale, ids, log_p)
    if row.top_k < size:
        count = keep_top_k(logits, maxima, row.top_k, ids)
    elif row.top_p < 1.0:
        count = keep_nucleus(logits, maxima, top, scale, row.top_p, ids)
    else:
        count = keep_above(logits, maxima, top + (math.log(row.min_p) - 1e-6) / scale, ids)
    if row.top_k < size and row.top_p < 1.0:
        weights, total = np.empty(count, np.float32), 0.0
        for at in range(count):
            weights[at] = math.exp((logits[ids[at]] - top) * scale)
            total += weights[at]
        count = keep_likeliest(logits, ids, weights, row.top_p * total)
    kept, total = 0, 0.0
    for at in range(count):
        weight = math.exp((logits[ids[at]] - top) * scale)
        if weight >= row.min_p and weight > 0.0:
            ids[kept] = ids[at]
            kept += 1
            total += weight
    shift = math.log(total)
    for at in range(kept):
        log_p[at] = (logits[ids[at]] - top) * scale - shift
    return kept


@compiled
def largest(logits, maxima):
    """The largest logit, NaN if there is one; and the largest of each chunk of `CHUNK`, written to `maxima`."""
    bad = 0
    for at in range(len(logits)):
        bad += logits[at] != logits[at]
    if bad:
        return F32(math.nan)
    return largest_of_chunks(logits, maxima)


@compiled_without_nan
def largest_of_chunks(logits, maxima):
    """As `largest`, of logits of which none is NaN."""
    top, whole = F32(NEVER), len(logits) // CHUNK
    for chunk in range(len(maxima)):
        most, start = F32(NEVER), chunk * CHUNK
        if chunk < whole:
            for at in range(CHUNK):
                most = logits[start + at] if logits[start + at] > most else most
        else:
            for at in range(start, len(logits)):
                most = logits[at] if logits[at] > most else most
        maxima[chunk] = most
        top = most if most > top else top
    return top


@compiled
def keep_all(logits, top, scale, ids, log_p):
    """The distribution without a filter."""
    weights = np.empty(len(logits), np.float32)
    exp_into(logits, top, scale, weights)
    shift = F32(math.log(total_of(weights)))
    top, factor = F32(top), F32(scale)
    for at in range(len(logits)):
        ids[at] = at
        log_p[at] = (logits[at] - top) * factor - shift
    return len(logits)


@compiled
def keep_top_k(logits, maxima, top_k, ids):
    """Ids of the `top_k` largest logits; no token below the `top_k`-th largest chunk maximum is one of them."""
    bound = F32(NEVER)
    if top_k < len(maxima):
        chunks = np.arange(len(maxima), dtype=np.int32)
        bound = F32(math.inf)
        for at in range(keep_likeliest(maxima, chunks, np.ones(len(maxima), np.float32), top_k)):
            bound = min(bound, maxima[chunks[at]])
    few = np.empty(len(logits), np.int32)
    count = keep_above(logits, maxima, bound, few)
    kept = keep_likeliest(logits, few, np.ones(count, np.float32), top_k)
    ids[:kept] = few[:kept]
    return kept


@compiled
def keep_above(logits, maxima, bound, ids):
    """Ids of the logits that are at least `bound`, in order."""
    kept = 0
    for chunk in range(len(maxima)):
        if maxima[chunk] >= bound:
            for at in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(logits))):
                ids[kept] = at  # overwritten by the next one, unless it counts
                kept += logits[at] >= bound
    return kept


@compiled
def keep_nucleus(logits, maxima, top, scale, top_p, ids):
    """Ids of the fewest tokens whose probability reaches `top_p`, out of the whole vocabulary, in order.

    What all tokens below `(1 - top_p) / V` have together is less than what may be left out. The weights of the others
    are added up in bins by their leading bits; only the tokens of the bin in which the goal is reached are sorted.
    """
    weights = np.empty(len(logits), np.float32)
    exp_into(logits, top, scale, weights)
    total = total_of(weights)
    floor = (1.0 - top_p) * total / len(logits) * (1.0 - 1e-3)
    count = keep_above(logits, maxima, top + math.log(max(floor, 1e-37)) / scale - 1e-6, ids)
    for at in range(count):
        weights[at] = weights[ids[at]]
    return keep_likeliest(logits, ids, weights[:count], top_p * total)


@compiled
def keep_likeliest(logits, ids, weights, goal):
    """Keep the fewest ids, with the largest logit first, whose weights reach `goal`; at least one; all, if none do.

    The last of them is found digit by digit: first how many sixteenths its logit lies below the largest, then the four
    bytes of the logit itself, most significant first. Each digit leaves the tokens that agree with the last one's.

    Args:
        logits: float32 [V].
        ids: int32 [..], ascending; the first n are looked at, and those that are kept are moved to the front.
        weights: float32 [n], at least 0 and not all 0.
    """
    few, mass = len(weights), 0.0
    inside, values = np.arange(few), np.empty(few, np.float32)
    for at in range(few):
        values[at] = logits[ids[at]] + NOTHING  # so that 0 and -0 have the same bits
    bits, top = values.view(np.int32), values.max()
    digits, bins = np.empty(few, np.int64), np.empty(256)
    for digit in range(5):
        bins[:] = 0.0
        for at in range(few):
            if digit == 0:
                digits[at] = 255 - np.int32(min((top - values[at]) * SIXTEENTHS, MOST_DIGIT))
            else:
                word = np.int64(bits[inside[at]])
                digits[at] = ((word if word >= 0 else ~word) + (word >= 0) * 2**31) >> (32 - 8 * digit) & 255
        for at in range(few):
            bins[digits[at]] += weights[inside[at]]
        edge, mass = last_bin(bins, mass, goal)
        count, few = few, 0
        for at in range(count):
            if digits[at] == edge:
                inside[few] = inside[at]
                few += 1
        if few == 1:
            break
    least, last = values[inside[0]], 0
    while last < few and (last == 0 or mass < goal):
        mass += weights[inside[last]]
        last += 1
    kept, most = 0, inside[last - 1]
    for at in range(len(weights)):
        ids[kept] = ids[at]
        kept += (values[at] > least) | ((values[at] == least) & (at <= most))
    return kept


@compiled
def last_bin(bins, mass, goal):
    """The bin with which a mass, added to from the last bin downwards, reaches `goal`; and the mass before it."""
    edge, before = -1, mass
    for bin in range(len(bins) - 1, -1, -1):
        if bins[bin] > 0.0:
            edge, before = bin, mass
            mass += bins[bin]
            if mass >= goal:
                break
    return edge, before


@compiled
def log_likelihood(logits, token):
    """The log-probability of a token without any filter, at temperature 1; NaN where the logits are no distribution."""
    top = largest(logits, np.empty((len(logits) + CHUNK - 1) // CHUNK, np.float32))
    if not (top > NEVER and top < math.inf):
        return math.nan
    weights = np.empty(len(logits), np.float32)
    exp_into(logits, top, 1.0, weights)
    return float(logits[token]) - float(top) - math.log(total_of(weights))


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
    lanes, whole = np.zeros(SUMS, np.float64), len(weights) // SUMS * SUMS
    for at in range(0, whole, SUMS):
        for lane in range(SUMS):
            lanes[lane] += weights[at + lane]
    total = 0.0
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
