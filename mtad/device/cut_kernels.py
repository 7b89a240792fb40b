"""The kernel that finds where the filters of a distribution end, by bisection over keys, in Triton.

See `mtad.device.filter_kernels`. If the candidates are more than a program holds, each step of the bisection reads all
logits: the result is the same, but later.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtad.device.filter_kernels import (
    ID,
    LARGEST,
    LOG_PLAIN,
    LOG_TOTAL,
    LOWEST,
    NUMBERS,
    key_of,
    largest_of,
    logit_of,
    read,
)
from mtad.device.tables import Found, Given, Tables


@triton.jit
def _above(
    known: tl.tuple, count: tl.tensor, least: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of the keys from `least` on: how many there are, what they weigh, the smallest one; and the largest one below.

    They are among the `count` candidates, or are read if those are more than TILE.

    Args:
        known: keys and weights of the first TILE candidates; the logits; the vocabulary's size; the largest logit; the
            inverse temperature.
    """
    own, weights, logits, size, most, scale = known
    taken = own >= least
    number, mass = tl.sum(taken.to(tl.int32), 0), tl.sum(tl.where(taken, weights, 0.0), 0)
    first, below = tl.min(tl.where(taken, own, LARGEST), 0), tl.max(tl.where(taken, -LARGEST, own), 0)
    if count > TILE:
        number, mass = number * 0, mass * 0.0  # of the types that they had
        first, below = tl.full((), LARGEST, tl.int64), tl.full((), -LARGEST, tl.int64)
        for start in tl.range(0, size, TILE, num_stages=2):
            values, tokens = read(logits, start, size, TILE)
            keys = key_of(values, tokens)
            taken = (tokens < size) & (keys >= least)
            number += tl.sum(taken.to(tl.int32), 0)
            mass += tl.sum(tl.where(taken, tl.exp((values - most) * scale), 0.0), 0)
            first = tl.minimum(first, tl.min(tl.where(taken, keys, LARGEST), 0))
            below = tl.maximum(below, tl.max(tl.where(taken | (tokens >= size), -LARGEST, keys), 0))
    return number, mass, first, below


@triton.jit
def _cut(
    known: tl.tuple,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    bound: tl.tensor,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The last key of the shortest prefix that measures at least `bound`; of all candidates, if none does.

    Args:
        known: as `_above` has it.
        low, high: the smallest of the candidates' keys, and what is above the largest.
        COUNTS: tokens are counted; else their weights are added up.
    """
    inside, behind = count, 0  # keys from low to high, and from high on
    while inside > 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        number, mass, least, below = _above(known, count, middle, TILE)
        enough = (number.to(tl.float32) if COUNTS else mass) >= bound
        inside = tl.where(enough, number - behind, inside + behind - number)
        behind = tl.where(enough, behind, number)
        low, high = tl.where(enough, least, low), tl.where(enough, high, below + 1)
    return low


@triton.jit(do_not_specialize=["positions"])
def settle_tables(
    tables: Tables,
    found: Found,
    given: Given,
    positions: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """What the tables say of each distribution, but for its blocks. Grid: (R * S)."""
    place = tl.program_id(0).to(tl.int64)
    row = place // positions
    scale, some = tl.load(given.inverse_temperature + row), tl.load(given.top_k + row) < size
    nucleus, least = tl.load(given.top_p + row), tl.load(given.min_p + row)
    every = tl.arange(0, CHUNKS)
    real, at = every < chunks, place * chunks + every
    own = tl.load(found.largest + at, mask=real, other=float("-inf"))
    most = largest_of(own)
    own = tl.where(own == float("-inf"), most, own)
    whole = tl.sum(tl.load(found.totals + at, mask=real, other=0.0) * tl.exp((own - most) * scale), 0)
    plain = tl.sum(tl.load(found.plains + at, mask=real, other=0.0) * tl.exp(own - most), 0)
    every_id = tl.full((), ID, tl.int32)
    edge, total = key_of(tl.full((), float("-inf"), tl.float32), every_id), whole
    # of a distribution that is none, each token is to be seen as such
    if (whole == whole) & (some | (nucleus < 1.0) | (least > 0.0)):
        logits = tables.logits + row * row_stride + place % positions * position_stride
        count, held = tl.load(found.candidates + place), tl.arange(0, TILE)
        low = tl.min(tl.load(found.lows + at, mask=real, other=LARGEST), 0)
        high = tl.max(tl.load(found.highs + at, mask=real, other=-LARGEST), 0) + 1
        candidates = tl.load(found.keys + place * TILE + held, mask=held < count, other=-LARGEST)
        weights = tl.where(held < count, tl.exp((logit_of(candidates) - most) * scale), 0.0)
        known = candidates, weights, logits, size, most, scale
        if some:
            bound = tl.load(given.top_k + row).to(tl.float32)
            edge = _cut(known, count, low, high, bound, True, TILE)
        if nucleus < 1.0:
            bound = nucleus * whole
            if some:
                _, mass, _, _ = _above(known, count, edge, TILE)
                bound = nucleus * mass
            edge = tl.maximum(edge, _cut(known, count, low, high, bound, False, TILE))
        if least > 0.0:
            edge = tl.maximum(edge, key_of(most + tl.log(least) / scale, every_id))
        _, total, _, _ = _above(known, count, edge, TILE)
    numbers = tables.numbers + place * NUMBERS
    tl.store(numbers, most)
    tl.store(numbers + LOWEST, logit_of(edge))
    tl.store(numbers + LOG_TOTAL, tl.log(total))
    tl.store(numbers + LOG_PLAIN, tl.log(plain))
    tl.store(tables.last + place, (edge & ID) ^ ID)
