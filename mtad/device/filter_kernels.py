"""Kernels that filter logits by temperature, top-k, top-p and min-p, in Triton: two launches, no sort.

A token's *key* is an integer in the order of the filter: larger logits first, of equal ones the smaller id first. No
two tokens have the same key, so ties need no code of their own. What is not a number comes first, and makes the whole
distribution no number.

Each filter keeps the shortest prefix of the tokens, in the order of their keys, whose count or mass reaches a bound.
Programs say how many tokens of a chunk there are, and how much weight they have, in bins of one nat. Those of all
chunks show in which bin a prefix ends. One program per distribution takes the keys of that bin together, and finds the
last one by bisection. If they are more than it holds, each step of the bisection reads all logits: the result is the
same, but later.

An example: logits 5.0, 4.2, 4.1, 2.0 at temperature 1, top-p 0.8. The bins are [5, 6), [4, 5), .., with 0.51, 0.44, 0
and 0.03 of the mass. Bin [4, 5) reaches 0.8. Its keys are those of tokens 1 and 2, with 0.23 and 0.21 of the mass:
0.51 + 0.23 is too little, so the last key is that of token 2.

No kernel here adds anything atomically, and sums run in an order that depends on the vocabulary alone, so a row's bits
depend on no other row. Launched by `mtad.device.launches`. Importing this module needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

VARYING = ("positions",)
"""Arguments that change from step to step: `do_not_specialize` keeps kernels from being compiled again where one of
them is 1 or a multiple of 16."""

LARGEST = tl.constexpr(2**63 - 1)
ID = tl.constexpr(2**31 - 1)


@triton.jit
def key_of(logits: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """The bits of a logit in the order of the numbers, then the id. What is not a number comes first."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    bits = tl.where(logits != logits, ID, bits ^ ((bits >> 31) & ID))
    return (bits.to(tl.int64) << 32) | (tokens ^ ID).to(tl.int64)


@triton.jit
def logit_of(keys: tl.tensor) -> tl.tensor:
    """The logit that a key was made from."""
    bits = (keys >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & ID)).to(tl.float32, bitcast=True)


@triton.jit
def read(logits: tl.tensor, start: tl.tensor, size: tl.tensor, COUNT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Logits and ids of COUNT tokens; beyond the vocabulary, impossible ones."""
    tokens = start + tl.arange(0, COUNT)
    return tl.load(logits + tokens, mask=tokens < size, other=float("-inf")).to(tl.float32), tokens


_BINS, STAGES = tl.constexpr(32), tl.constexpr(2)


@triton.jit
def _bin(logits: tl.tensor, top: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The bin of each logit: how many whole nats it lies below bin `top`. The last bin also holds everything lower."""
    return tl.minimum(top - tl.floor(logits * scale), _BINS - 1.0)


@triton.jit
def _largest(values: tl.tensor) -> tl.tensor:
    """The largest value, or no number if there is one that is none."""
    return tl.where(tl.sum((values != values).to(tl.int32), 0) > 0, float("nan"), tl.max(values, 0))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["plains", "masses"])
def scan_tables(
    logits: tl.tensor,
    largest: tl.tensor,
    plains: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    inverse_temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    positions: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """What the tokens of a chunk count and weigh, by bins of a nat below its largest logit's. Grid: (R * S, chunks).

    Args:
        logits: [R, S, size], last axis contiguous; `positions` is S, the strides are in elements.
        largest, plains: float32 [R, S, chunks], each chunk's largest logit, and its weight at temperature 1.
        counts, masses: float32 [R, S, chunks, 32], by bin; weights relative to the chunk's largest.
        inverse_temperature .. top_p: of the rows; bins are left out where neither filter is on.
    """
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = place // positions
    scale = tl.load(inverse_temperature + row)
    logits += row * row_stride + place % positions * position_stride
    values, tokens = read(logits, chunk * CHUNK, size, CHUNK)
    most = _largest(values)
    above = tl.where(most == float("-inf"), 0.0, most)
    bins = _bin(values, tl.floor(above * scale), scale)
    weights = tl.exp((values - above) * scale)
    at = place * tl.num_programs(1) + chunk
    tl.store(largest + at, most)
    tl.store(plains + at, tl.sum(tl.exp(values - above), 0))
    filters = (tl.load(top_k + row) < size) | (tl.load(top_p + row) < 1.0)
    for number in range(tl.where(filters, _BINS, 0)):
        mine = bins == number
        tl.store(counts + at * _BINS + number, tl.sum((mine & (tokens < size)).to(tl.float32), 0))
        tl.store(masses + at * _BINS + number, tl.sum(tl.where(mine, weights, 0.0), 0))


@triton.jit
def _above(keys: tl.tensor, measures: tl.tensor, least: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of the keys from `least` on: how many there are, what they measure, and the smallest one."""
    taken = keys >= least
    measured = tl.sum(tl.where(taken, measures, 0.0), 0)
    return tl.sum(taken.to(tl.int32), 0), measured, tl.min(tl.where(taken, keys, LARGEST), 0)


@triton.jit
def _measured(
    logits: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    bin: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Keys of a tile's tokens of one bin, and what they measure; of others, a key below all, and 0."""
    values, tokens = read(logits, start, size, TILE)
    mine = (tokens < size) & (_bin(values, tl.floor(largest * scale), scale) == bin)
    measures = (values == values).to(tl.float32) if COUNTS else tl.exp((values - largest) * scale)
    return tl.where(mine, key_of(values, tokens), -LARGEST), tl.where(mine, measures, 0.0)


@triton.jit
def _cut(
    logits: tl.tensor,
    scratch: tl.tensor,
    table: tl.tensor,
    bins: tl.tensor,
    bound: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    size: tl.tensor,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The last key of the shortest prefix that measures at least `bound`; of all tokens, if none does.

    Args:
        logits: of the distribution.
        scratch: int64 [TILE], for keys.
        table: float32, what tokens measure, in groups, whose bins below the largest logit's are `bins`.
        COUNTS: tokens are counted; else their weights are added up.
    """
    bin, before = 0, 0.0
    reached = tl.sum(tl.where(bins == 0, table, 0.0), 0)
    while (reached < bound) & (bin < _BINS - 1):
        bin, before = bin + 1, reached
        reached = tl.sum(tl.where(bins <= bin, table, 0.0), 0)
    count, low, high = 0, tl.full((), LARGEST, tl.int64), tl.full((), -LARGEST, tl.int64)
    for start in tl.range(0, size, TILE, num_stages=STAGES):
        keys, _ = _measured(logits, start, size, bin, largest, scale, COUNTS, TILE)
        mine = keys > -LARGEST
        at = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(scratch + at, keys, mask=mine & (at < TILE))
        count += tl.sum(mine.to(tl.int32), 0)
        low, high = tl.minimum(low, tl.min(tl.where(mine, keys, LARGEST), 0)), tl.maximum(high, tl.max(keys, 0))
    tl.debug_barrier()  # other threads stored some of what a thread is going to load
    at = tl.arange(0, TILE)
    own = tl.load(scratch + at, mask=at < count, other=-LARGEST)
    held = tl.where(at < count, 1.0 if COUNTS else tl.exp((logit_of(own) - largest) * scale), 0.0)
    inside, behind, high = count, 0, high + 1  # keys from low to high, and from high on
    while inside > 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        number, measured, least = _above(own, held, middle)
        if count > TILE:
            number, measured, least = number * 0, measured * 0.0, tl.full((), LARGEST, tl.int64)
            for start in range(0, size, TILE):
                keys, measures = _measured(logits, start, size, bin, largest, scale, COUNTS, TILE)
                more, weight, first = _above(keys, measures, middle)
                number, measured, least = number + more, measured + weight, tl.minimum(least, first)
        enough = before + measured >= bound
        inside = tl.where(enough, number - behind, inside + behind - number)
        behind = tl.where(enough, behind, number)
        low, high = tl.where(enough, least, low), tl.where(enough, high, middle)
    tl.debug_barrier()  # the scratch memory is used again
    return low


@triton.jit(
    do_not_specialize=VARYING,
    do_not_specialize_on_alignment=["chunk_plains", "masses", "lowest", "log_total", "log_plain"],
)
def settle_tables(
    logits: tl.tensor,
    chunk_largest: tl.tensor,
    chunk_plains: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    scratch: tl.tensor,
    largest: tl.tensor,
    lowest: tl.tensor,
    last: tl.tensor,
    log_total: tl.tensor,
    log_plain: tl.tensor,
    blocks: tl.tensor,
    greedy: tl.tensor,
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
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """What `mtad.device.tables.Tables` says of each distribution. Grid: (R * S).

    Args:
        chunk_largest .. masses: of `scan_tables`.
        scratch: int64 [R, S, TILE].
        largest .. blocks: of `mtad.device.tables.Tables`, the result.
        greedy .. min_p: of the rows.
        CHUNKS, BLOCKS: of the vocabulary, rounded up to a power of two.
    """
    place = tl.program_id(0).to(tl.int64)
    row = place // positions
    logits += row * row_stride + place % positions * position_stride
    scratch += place * TILE
    scale, some = tl.load(inverse_temperature + row), tl.load(top_k + row) < size
    nucleus, least = tl.load(top_p + row), tl.load(min_p + row)
    every = tl.arange(0, CHUNKS * _BINS)
    real, at = every < chunks * _BINS, place * chunks
    own = tl.load(chunk_largest + at + every // _BINS, mask=real, other=float("-inf"))
    most = _largest(own)
    own = tl.where(own == float("-inf"), most, own)  # a chunk of impossible tokens
    plain = tl.load(chunk_plains + at + every // _BINS, mask=real & (every % _BINS == 0), other=0.0)
    plain = tl.sum(plain * tl.exp(own - most), 0)
    bins = tl.minimum(tl.floor(most * scale) - tl.floor(own * scale) + every % _BINS, _BINS - 1.0)
    every_id = tl.full((), ID, tl.int32)
    edge = key_of(tl.full((), float("-inf"), tl.float32), every_id)
    if some:
        table = tl.load(counts + at * _BINS + every, mask=real, other=0.0)
        bound = tl.load(top_k + row).to(tl.float32)
        edge = _cut(logits, scratch, table, bins, bound, most, scale, size, True, TILE)
    if nucleus < 1.0:
        table = tl.load(masses + at * _BINS + every, mask=real, other=0.0) * tl.exp((own - most) * scale)
        whole = tl.sum(table, 0)
        if some:
            whole = 0.0
            for start in tl.range(0, size, TILE, num_stages=STAGES):
                values, tokens = read(logits, start, size, TILE)
                whole += tl.sum(tl.where(key_of(values, tokens) >= edge, tl.exp((values - most) * scale), 0.0), 0)
        bound = nucleus * whole
        edge = tl.maximum(edge, _cut(logits, scratch, table, bins, bound, most, scale, size, False, TILE))
    if least > 0.0:
        edge = tl.maximum(edge, key_of(most + tl.log(least) / scale, every_id))
    # of a distribution that is none, each token is to be seen as such
    edge = tl.where(most == most, edge, key_of(tl.full((), float("-inf"), tl.float32), every_id))
    count, sure, few = tl.cdiv(size, BLOCK), tl.load(greedy + row) != 0, tl.arange(0, TILE // BLOCK)
    totals = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, size, TILE, num_stages=STAGES):
        values, tokens = read(logits, start, size, TILE)
        weights = tl.where(key_of(values, tokens) >= edge, tl.exp((values - most) * scale), 0.0)
        each = tl.reshape(weights, (TILE // BLOCK, BLOCK))
        mass = tl.where(sure, tl.max(each, 1), tl.sum(each, 1))
        tl.store(blocks + place * count + start // BLOCK + few, mass, mask=start // BLOCK + few < count)
        totals += weights
    total = tl.sum(totals, 0)
    tl.debug_barrier()  # other threads stored some of what a thread is going to load
    every = tl.arange(0, BLOCKS)
    mass = tl.load(blocks + place * count + every, mask=every < count, other=0.0)
    tl.store(blocks + place * count + every, mass / total, mask=every < count)
    tl.store(largest + place, most)
    tl.store(lowest + place, logit_of(edge))
    tl.store(last + place, (edge & ID) ^ ID)
    tl.store(log_total + place, tl.log(total))
    tl.store(log_plain + place, tl.log(plain))
