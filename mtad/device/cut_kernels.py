"""The kernel that finds where the filters of a distribution end, by bisection over keys, in Triton.

See `mtad.device.filter_kernels`. If the candidates are more than a program holds, each step of the bisection reads all
logits: the result is the same, but later.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtad.device.filter_kernels import ID, LARGEST, VARYING, key_of, largest_of, logit_of, read


@triton.jit
def _above(
    logits: tl.tensor,
    own: tl.tensor,
    weights: tl.tensor,
    count: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    size: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of the keys from `least` on: how many there are, what they weigh, the smallest one; and the largest one below.

    They are among the `count` candidates, whose keys and weights are `own` and `weights`, or are read if those are
    not all.
    """
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
    logits: tl.tensor,
    own: tl.tensor,
    weights: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    bound: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    size: tl.tensor,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The last key of the shortest prefix that measures at least `bound`; of all candidates, if none does.

    Args:
        low, high: the smallest of the candidates' keys, and what is above the largest.
        COUNTS: tokens are counted; else their weights are added up.
    """
    inside, behind = count, 0  # keys from low to high, and from high on
    while inside > 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        number, mass, least, below = _above(logits, own, weights, count, middle, most, scale, size, TILE)
        enough = (number.to(tl.float32) if COUNTS else mass) >= bound
        inside = tl.where(enough, number - behind, inside + behind - number)
        behind = tl.where(enough, behind, number)
        low, high = tl.where(enough, least, low), tl.where(enough, high, below + 1)
    return low


@triton.jit(
    do_not_specialize=VARYING,
    do_not_specialize_on_alignment=["totals", "plains", "highs", "lowest", "log_total", "log_plain"],
)
def settle_tables(
    logits: tl.tensor,
    chunk_largest: tl.tensor,
    totals: tl.tensor,
    plains: tl.tensor,
    found: tl.tensor,
    keys: tl.tensor,
    lows: tl.tensor,
    highs: tl.tensor,
    largest: tl.tensor,
    lowest: tl.tensor,
    last: tl.tensor,
    log_total: tl.tensor,
    log_plain: tl.tensor,
    inverse_temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    positions: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """What `mtad.device.tables.Tables` says of each distribution, but for its blocks. Grid: (R * S).

    Args:
        chunk_largest .. plains: of `scan_tables`. found .. highs: of `gather_candidates`.
        largest .. log_plain: of `mtad.device.tables.Tables`, the result.
    """
    place = tl.program_id(0).to(tl.int64)
    row = place // positions
    scale, some = tl.load(inverse_temperature + row), tl.load(top_k + row) < size
    nucleus, least = tl.load(top_p + row), tl.load(min_p + row)
    every = tl.arange(0, CHUNKS)
    real, at = every < chunks, place * chunks + every
    own = tl.load(chunk_largest + at, mask=real, other=float("-inf"))
    most = largest_of(own)
    own = tl.where(own == float("-inf"), most, own)
    whole = tl.sum(tl.load(totals + at, mask=real, other=0.0) * tl.exp((own - most) * scale), 0)
    plain = tl.sum(tl.load(plains + at, mask=real, other=0.0) * tl.exp(own - most), 0)
    every_id = tl.full((), ID, tl.int32)
    edge, total = key_of(tl.full((), float("-inf"), tl.float32), every_id), whole
    # of a distribution that is none, each token is to be seen as such
    if (whole == whole) & (some | (nucleus < 1.0) | (least > 0.0)):
        logits += row * row_stride + place % positions * position_stride
        count, held = tl.load(found + place), tl.arange(0, TILE)
        low = tl.min(tl.load(lows + at, mask=real, other=LARGEST), 0)
        high = tl.max(tl.load(highs + at, mask=real, other=-LARGEST), 0) + 1
        candidates = tl.load(keys + place * TILE + held, mask=held < count, other=-LARGEST)
        weights = tl.where(held < count, tl.exp((logit_of(candidates) - most) * scale), 0.0)
        if some:
            bound = tl.load(top_k + row).to(tl.float32)
            edge = _cut(logits, candidates, weights, count, low, high, bound, most, scale, size, True, TILE)
        if nucleus < 1.0:
            bound = nucleus * whole
            if some:
                _, mass, _, _ = _above(logits, candidates, weights, count, edge, most, scale, size, TILE)
                bound = nucleus * mass
            last_key = _cut(logits, candidates, weights, count, low, high, bound, most, scale, size, False, TILE)
            edge = tl.maximum(edge, last_key)
        if least > 0.0:
            edge = tl.maximum(edge, key_of(most + tl.log(least) / scale, every_id))
        _, total, _, _ = _above(logits, candidates, weights, count, edge, most, scale, size, TILE)
    tl.store(largest + place, most)
    tl.store(lowest + place, logit_of(edge))
    tl.store(last + place, (edge & ID) ^ ID)
    tl.store(log_total + place, tl.log(total))
    tl.store(log_plain + place, tl.log(plain))
