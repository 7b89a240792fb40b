"""Kernels that filter logits by temperature, top-k, top-p and min-p and list what is left, in Triton.

Two launches, for distributions of at most LIST candidates (`mtad.distributions.candidates`): programs find the largest
keys of a chunk of the vocabulary each, and one program per distribution the largest of those. A token's *key* is an
integer in the order of the filter: larger logits first, of equal ones the smaller id first. No two tokens have the same
key, so ties need no code of their own. What is not a number comes first, and makes the whole distribution no number.

No kernel here adds anything atomically, and sums run in an order that depends on the vocabulary alone, so a row's bits
depend on no other row. Launched by `runtime.decoder.cuda_graph.fused`. Importing this module needs Triton, see
`engines.pytorch.attention_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

VARYING = ("positions", "row_stride", "position_stride")
"""Arguments that change from step to step. `do_not_specialize` keeps kernels from being compiled again where one
of them is 1; it also turns off the specialisation for multiples of 16."""

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


@triton.jit(do_not_specialize=VARYING)
def scan_lists(
    logits: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    size: tl.tensor,
    LIST: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The LIST largest keys of a chunk. Grid: (R * S, chunks).

    Args:
        logits: [R, S, size], last axis contiguous.
        keys: int64 [R, S, chunks, LIST].
        positions: S.
        row_stride, position_stride: of the logits, in elements.
    """
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += place // positions * row_stride + place % positions * position_stride
    values, tokens = read(logits, chunk * CHUNK, size, CHUNK)
    found = tl.topk(key_of(values, tokens), LIST)
    tl.store(keys + (place * tl.num_programs(1) + chunk) * LIST + tl.arange(0, LIST), found)


@triton.jit(do_not_specialize=VARYING)
def settle_lists(
    keys: tl.tensor,
    ids: tl.tensor,
    log_prob: tl.tensor,
    inverse_temperature: tl.tensor,
    rank_bias: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    positions: tl.tensor,
    chunks: tl.tensor,
    candidates: tl.tensor,
    LIST: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """What `mtad.distributions.candidates.process` gives. Grid: (R * S).

    Sums run over LIST candidates, however many the batch asks for, so their bits do not depend on it.

    Args:
        keys: of `scan_lists`.
        ids, log_prob: int64 and float32 [R, S, candidates], the result.
        inverse_temperature .. min_p: of `mtad.rows.Rows`.
        CHUNKS: chunks, rounded up to a power of two.
    """
    place = tl.program_id(0).to(tl.int64)
    row, rank, every = place // positions, tl.arange(0, LIST), tl.arange(0, CHUNKS * LIST)
    own = tl.load(keys + place * chunks * LIST + every, mask=every < chunks * LIST, other=-LARGEST)
    best = tl.topk(own, LIST)
    logits = logit_of(best)
    likeliest = tl.sum(tl.where(rank == 0, logits, 0.0), 0)
    bias = tl.load(rank_bias + row * candidates + rank, mask=rank < candidates, other=float("-inf"))
    values = bias + (logits - likeliest) * tl.load(inverse_temperature + row)
    weights = tl.exp(values)
    mass = tl.cumsum(weights, 0)
    whole = tl.sum(tl.where(rank == LIST - 1, mass, 0.0), 0)
    dropped = (mass - weights >= tl.load(top_p + row) * whole) | (weights < tl.load(min_p + row))
    kept = tl.max(tl.where(dropped, 0.0, mass), 0)
    at = place * candidates + rank
    tl.store(ids + at, (best & ID) ^ ID, mask=rank < candidates)
    tl.store(log_prob + at, tl.where(dropped, float("-inf"), values - tl.log(kept)), mask=rank < candidates)
