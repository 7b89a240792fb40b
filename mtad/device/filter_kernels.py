"""Kernels that filter logits by temperature, top-k, top-p and min-p, in Triton: four launches, no sort.

A token's *key* is an integer in the order of the filter: larger logits first, of equal ones the smaller id first. No
two tokens have the same key, so ties need no code of their own. What is not a number comes first, and makes the whole
distribution no number.

Each filter keeps the shortest prefix of the tokens, in the order of their keys, whose count or mass reaches a bound.
Programs say how many tokens of a chunk there are, and how much weight they have, in bins of one nat. Those of all
chunks show in which bin a prefix ends. The keys up to that bin, the candidates, are gathered, and one program per
distribution finds the last one (`mtad.device.cut_kernels`). At the end the blocks of what is left are weighed.

An example: logits 5.0, 4.2, 4.1, 2.0 at temperature 1, top-p 0.8. The bins are [5, 6), [4, 5), .., with 0.51, 0.44, 0
and 0.03 of the mass. Bin [4, 5) reaches 0.8. The candidates are tokens 0, 1 and 2, with 0.51, 0.23 and 0.21 of the
mass: 0.51 + 0.23 is too little, so the last key is that of token 2.

No kernel here adds anything atomically, and sums run in an order that depends on the vocabulary alone, so a row's bits
depend on no other row. Launched by `mtad.device.launches`. Importing this module needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtad.device.tables import Found, Given, Tables

VARYING = ("positions",)
"""Arguments that change from step to step: `do_not_specialize` keeps kernels from being compiled again where one of
them is 1 or a multiple of 16. Triton specializes whatever is in a tuple, so tuples hold no numbers, and only tensors
that begin at multiples of 16 bytes."""

LOWEST, LOG_TOTAL, LOG_PLAIN, NUMBERS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
"""Where they are in the `numbers` of a distribution, behind the largest logit; and how many numbers it has."""
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


@triton.jit
def log_probability(
    values: tl.tensor, ids: tl.tensor, size: tl.tensor, tables: Tables, at: tl.tensor, scale: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Log-probabilities of the tokens `ids`, whose logits at entry `at` are `values`; and which the filter kept."""
    numbers = tables.numbers + at * NUMBERS
    low = tl.load(numbers + LOWEST)
    kept = (ids < size) & ((values > low) | ((values == low) & (ids <= tl.load(tables.last + at))))
    return (values - tl.load(numbers)) * scale - tl.load(numbers + LOG_TOTAL), kept


@triton.jit
def probability(
    values: tl.tensor, ids: tl.tensor, size: tl.tensor, tables: Tables, at: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """What the filter left of the tokens `ids`, whose logits at entry `at` are `values`."""
    log_p, kept = log_probability(values, ids, size, tables, at, scale)
    return tl.where(kept, tl.exp(log_p), 0.0)


BINS = tl.constexpr(16)


@triton.jit
def _bin(logits: tl.tensor, top: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The bin of each logit: how many whole nats it lies below bin `top`. The last bin also holds everything lower."""
    below = top - tl.floor(logits * scale)
    return tl.where(below < BINS - 1.0, below, BINS - 1.0)  # also where it is no number


@triton.jit
def largest_of(values: tl.tensor) -> tl.tensor:
    """The largest value, or no number if there is one that is none."""
    return tl.where(tl.sum((values != values).to(tl.int32), 0) > 0, float("nan"), tl.max(values, 0))


@triton.jit(do_not_specialize=VARYING)
def scan_tables(
    tables: Tables,
    found: Found,
    given: Given,
    positions: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """What the tokens of a chunk count and weigh, by bins of a nat below its largest logit's. Grid: (R * S, chunks).

    Args:
        found: `largest` .. `masses` are written to; bins are left out where no filter is on.
        positions: S; `size` is V, and the strides are of the logits, in elements.
    """
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = place // positions
    scale = tl.load(given.inverse_temperature + row)
    logits = tables.logits + row * row_stride + place % positions * position_stride
    values, tokens = read(logits, chunk * CHUNK, size, CHUNK)
    most = largest_of(values)
    above = tl.where(most == float("-inf"), 0.0, most)
    weights = tl.exp((values - above) * scale)
    at = place * tl.num_programs(1) + chunk
    tl.store(found.largest + at, most)
    tl.store(found.totals + at, tl.sum(weights, 0))
    tl.store(found.plains + at, tl.sum(tl.exp(values - above), 0))
    bins = _bin(values, tl.floor(above * scale), scale)
    some, nucleus, least = tl.load(given.top_k + row) < size, tl.load(given.top_p + row), tl.load(given.min_p + row)
    filters = some | (nucleus < 1.0) | (least > 0.0)
    for number in range(tl.where(filters, BINS, 0)):
        mine = bins == number
        tl.store(found.counts + at * BINS + number, tl.sum((mine & (tokens < size)).to(tl.float32), 0))
        tl.store(found.masses + at * BINS + number, tl.sum(tl.where(mine, weights, 0.0), 0))


@triton.jit(do_not_specialize=VARYING)
def gather_candidates(
    tables: Tables,
    found: Found,
    given: Given,
    positions: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The keys of a chunk's tokens in the bins that a filter keeps something of. Grid: (R * S, chunks).

    Args:
        found: `candidates` .. `highs` are written to.
        CHUNKS: of the vocabulary, rounded up to a power of two.
    """
    place, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = place // positions
    scale, some = tl.load(given.inverse_temperature + row), tl.load(given.top_k + row) < size
    nucleus, least = tl.load(given.top_p + row), tl.load(given.min_p + row)
    if some | (nucleus < 1.0) | (least > 0.0):
        every = tl.arange(0, CHUNKS * BINS)
        real, at = every < chunks * BINS, place * chunks
        own = tl.load(found.largest + at + every // BINS, mask=real, other=float("-inf"))
        most = largest_of(own)
        own = tl.where(own == float("-inf"), most, own)  # a chunk of impossible tokens
        top = tl.floor(most * scale)
        bins = top - tl.floor(own * scale) + every % BINS
        bins = tl.where(bins < BINS - 1.0, bins, BINS - 1.0)
        count = tl.load(found.counts + at * BINS + every, mask=real, other=0.0)
        mass = tl.load(found.masses + at * BINS + every, mask=real, other=0.0) * tl.exp((own - most) * scale)
        # of min-p alone one bin more, because its bound is rounded
        end = tl.minimum(top - tl.floor(most * scale + tl.log(least)) + 1.0, BINS - 1.0)
        end = tl.where(some | (nucleus < 1.0), 0.0, end)
        table, bound = mass, tl.where(nucleus < 1.0, nucleus * tl.sum(mass, 0), 0.0)
        if some:
            table, bound = count, tl.load(given.top_k + row).to(tl.float32)
        while (tl.sum(tl.where(bins <= end, table, 0.0), 0) < bound) & (end < BINS - 1.0):
            end += 1.0
        count = tl.where(bins <= end, count, 0.0)
        tl.store(found.candidates + place, tl.sum(count, 0).to(tl.int32), mask=chunk == 0)
        logits = tables.logits + row * row_stride + place % positions * position_stride
        values, tokens = read(logits, chunk * CHUNK, size, CHUNK)
        mine = (tokens < size) & (_bin(values, top, scale) <= end)
        before = tl.sum(tl.where(every // BINS < chunk, count, 0.0), 0).to(tl.int32)
        to, own_keys = before + tl.cumsum(mine.to(tl.int32), 0) - 1, key_of(values, tokens)
        tl.store(found.keys + place * TILE + to, own_keys, mask=mine & (to < TILE))
        tl.store(found.lows + at + chunk, tl.min(tl.where(mine, own_keys, LARGEST), 0))
        tl.store(found.highs + at + chunk, tl.max(tl.where(mine, own_keys, -LARGEST), 0))


@triton.jit(do_not_specialize=VARYING)
def weigh_blocks(
    tables: Tables,
    given: Given,
    positions: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`blocks` of the tables from what else they have, of a chunk. Grid: (R * S, chunks)."""
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, count = place // positions, tl.cdiv(size, BLOCK)
    logits = tables.logits + row * row_stride + place % positions * position_stride
    values, tokens = read(logits, chunk * CHUNK, size, CHUNK)
    each = probability(values, tokens, size, tables, place, tl.load(given.inverse_temperature + row))
    each = tl.reshape(each, (CHUNK // BLOCK, BLOCK))
    mass = tl.where(tl.load(given.greedy + row) != 0, tl.max(each, 1), tl.sum(each, 1))
    at = chunk * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK)
    tl.store(tables.blocks + place * count + at, mass, mask=at < count)
