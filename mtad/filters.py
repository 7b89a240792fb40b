"""The filter: temperature, top-k, top-p and min-p make a distribution of logits.

An example with 5 tokens, temperature 1 and `top_p` 0.8. The probabilities 0.1, 0.4, 0.1, 0.3, 0.1 are taken most likely
first, equal ones by id: 0.4 + 0.3 + 0.1 reach 0.8, so ids are 0, 1, 3 with probabilities 0.125, 0.5 and 0.375.

The whole vocabulary is passed over as rarely as possible: a chunk is looked at only if its largest logit says so.
"""

from __future__ import annotations

import math

import numpy as np

from mtad.compiled import compiled
from mtad.distribution import CHUNK, F32, NEVER, NOTHING, exp_into, largest, total_of

SIXTEENTHS, MOST_DIGIT = F32(16.0), F32(255.0)


@compiled
def filter_after(of, node, row):
    """Make the distribution after a node, unless that is done; returns whether the logits are a distribution."""
    at = node + 1
    if of.counts[at] < 0:
        of.counts[at] = filter_logits(of.logits[at], row, of.ids[at], of.log_p[at])
    return not math.isnan(of.log_p[at, 0])


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
    least = row.min_p
    if row.top_k >= size and row.top_p >= 1.0 and least <= 0.0:
        return keep_all(logits, top, scale, ids, log_p)
    if row.top_k < size:
        count = keep_top_k(logits, maxima, row.top_k, ids)
    elif row.top_p < 1.0:
        count = keep_nucleus(logits, maxima, top, scale, row.top_p, ids)
    else:
        count = keep_above(logits, maxima, top + (math.log(least) - 1e-6) / scale, ids)
    if row.top_k < size and row.top_p < 1.0:
        weights, total = np.empty(count, np.float32), 0.0
        for at in range(count):
            weights[at] = math.exp((logits[ids[at]] - top) * scale)
            total += weights[at]
        count = keep_likeliest(logits, ids, weights, row.top_p * total)
    kept, total = 0, 0.0
    for at in range(count):
        weight = math.exp((logits[ids[at]] - top) * scale)
        if weight >= least and weight > 0.0:
            ids[kept] = ids[at]
            kept += 1
            total += weight
    shift = math.log(total)
    for at in range(kept):
        log_p[at] = (logits[ids[at]] - top) * scale - shift
    return kept


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
    kept = np.uint64(0)  # so that no index is looked at whether it counts from the end
    for chunk in range(len(maxima)):
        if maxima[chunk] >= bound:
            for at in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(logits))):
                ids[kept] = at  # overwritten by the next one, unless it counts
                kept += np.uint64(logits[at] >= bound)
    return np.int64(kept)


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
