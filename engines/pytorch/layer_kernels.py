"""Kernels of what a decoder layer does around its matrix products and its attention, in Triton.

What `engines.pytorch.fusion` and `engines.pytorch.attention` launch. All compute in float32 and round once, where the
model's own operations round after each. Importing this module needs Triton, see `engines.pytorch.attention_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["second", "third"])
def rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    first_stride: tl.tensor,
    second_stride: tl.tensor,
    third_stride: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Divide each vector by the root of its mean square, and multiply it by the weight. Grid: (first * second * third).

    Args:
        x: [first, second, third, SIZE], last axis contiguous.
        weight: [SIZE].
        out: of x's shape and dtype, contiguous.
        first_stride .. third_stride: of x, in elements.
        eps: is added to the mean square.
        offset: is added to the weight.
        WIDTH: SIZE rounded up to a power of two.
    """
    vector = tl.program_id(0)
    dims = tl.arange(0, WIDTH)
    real = dims < SIZE
    at = (vector // third // second).to(tl.int64) * first_stride
    at += (vector // third % second).to(tl.int64) * second_stride + (vector % third).to(tl.int64) * third_stride
    values = tl.load(x + at + dims, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    factor = tl.load(weight + dims, mask=real, other=0.0).to(tl.float32) + offset
    at = vector.to(tl.int64) * SIZE
    tl.store(out + at + dims, (values * scale * factor).to(out.dtype.element_ty), mask=real)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """By its definition, of the absolute value so that nothing overflows."""
    fall = tl.exp(-2.0 * tl.abs(x))
    bound = (1.0 - fall) / (1.0 + fall)
    return tl.where(x < 0.0, -bound, bound)


@triton.jit
def _activated(values: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        values = values / (1.0 + tl.exp(-values))
    elif ACTIVATION == "gelu":
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        values = 0.5 * values * (1.0 + tanh(0.7978845608028654 * (values + 0.044715 * values * values * values)))
    else:
        values = tl.maximum(values, 0.0)
    return values


@triton.jit
def gate(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """The first half of each vector, through an activation, times the second. Grid: (vectors, SIZE / BLOCK).

    Args:
        x: [vectors, 2 * SIZE], contiguous.
        out: [vectors, SIZE], contiguous, of x's dtype.
        ACTIVATION: one of `engines.pytorch.fused_layers.ACTIVATIONS`.
    """
    vector = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = dims < SIZE
    values = tl.load(x + vector * 2 * SIZE + dims, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(x + vector * 2 * SIZE + SIZE + dims, mask=real, other=0.0).to(tl.float32)
    tl.store(out + vector * SIZE + dims, (_activated(values, ACTIVATION) * factor).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["vectors"])
def narrow_product(
    x: tl.tensor,
    weight: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    vectors: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORMED: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """The products of few vectors with a matrix: added to `out`, or with ACTIVATION gated. Grid: (OUTPUTS / BLOCK).

    Args:
        x: [vectors, SIZE], contiguous.
        weight: [OUTPUTS, SIZE], contiguous; with ACTIVATION [2 * OUTPUTS, SIZE], as `gate` takes their products.
        norm_weight, eps, offset: with NORMED, of a norm that the vectors go through before, see `rms_norm`; what is
            divided by the root of the mean square are the products.
        out: [vectors, OUTPUTS], contiguous.
        ACTIVATION: one of `engines.pytorch.fused_layers.ACTIVATIONS`, or empty.
        VECTORS: the least that tensor cores take, 16; vectors at most.
        BLOCK, DEPTH: a program's rows of the matrix, and entries of them that it reads at a time; they divide OUTPUTS
            and SIZE.
        STAGES: such reads on the way from memory at a time.
    """
    gated: tl.constexpr = ACTIVATION != ""
    outputs = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None].to(tl.int64)
    vector = tl.arange(0, VECTORS)[None, :]
    real, depth = vector < vectors, tl.arange(0, DEPTH)
    sums = tl.zeros([BLOCK, VECTORS], dtype=tl.float32)
    factors = tl.zeros([BLOCK, VECTORS], dtype=tl.float32)
    squares = tl.zeros([VECTORS], dtype=tl.float32)
    for start in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
        dims = start + depth
        given = tl.load(x + vector * SIZE + dims[:, None], mask=real, other=0.0)
        if NORMED:
            values = given.to(tl.float32)
            squares += tl.sum(values * values, 0)
            given = (values * (tl.load(norm_weight + dims)[:, None].to(tl.float32) + offset)).to(given.dtype)
        sums = tl.dot(tl.load(weight + outputs * SIZE + dims[None, :]), given, sums)
        if gated:
            factors = tl.dot(tl.load(weight + (OUTPUTS + outputs) * SIZE + dims[None, :]), given, factors)
    if NORMED:
        scale = tl.rsqrt(squares / SIZE + eps)[None, :]
        sums *= scale
        factors *= scale
    to = out + vector * OUTPUTS + outputs
    if gated:
        sums = _activated(sums, ACTIVATION) * factors
    else:
        sums += tl.load(to, mask=real, other=0.0).to(tl.float32)
    tl.store(to, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotated(
    x: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    dims: tl.tensor,
    real: tl.tensor,
    HEAD: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
) -> tl.tensor:
    values = tl.load(x + dims, mask=real, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(values * values, 1) / HEAD + eps)[:, None]
        values *= scale * (tl.load(weight + dims, mask=dims < HEAD, other=0.0).to(tl.float32) + offset)
    if ROTARY:
        half: tl.constexpr = ROTARY // 2
        rotated = real & (dims < ROTARY)
        partner = tl.where(dims < half, dims + half, dims - half)
        others = tl.load(x + partner, mask=rotated, other=0.0).to(tl.float32)
        if NORMED:
            others *= scale * (tl.load(weight + partner, mask=dims < ROTARY, other=0.0).to(tl.float32) + offset)
        values *= tl.load(cos + dims, mask=rotated, other=1.0).to(tl.float32)
        values += tl.where(dims < half, -others, others) * tl.load(sin + dims, mask=rotated, other=0.0).to(tl.float32)
    return values


@triton.jit(
    do_not_specialize=["write_at_row", "page_table_row", "pages"],
    do_not_specialize_on_alignment=["write_at", "page_table"],
)
def store_columns(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    write_at: tl.tensor,
    query: tl.tensor,
    rotated: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    write_at_row: tl.tensor,
    page_table_row: tl.tensor,
    pages: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    value_token: tl.tensor,
    keys_head: tl.tensor,
    values_head: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    query_token: tl.tensor,
    rope_row: tl.tensor,
    rope_token: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """Write a step's keys and values into the cache and, with ROTARY, rotate queries and keys by their positions.

    HEADS heads per program. Grid: (S, R, kv_heads / HEADS), with ROTARY (S, R, kv_heads / HEADS + heads / HEADS), each
    rounded up.

    Args:
        key, value: [R, KV, S, HEAD], last axis contiguous.
        keys, values: [KV, pages * PAGE, HEAD], last two axes contiguous: column write_at[r] + s of row r is written.
        page_table: int32 [R, pages], last axis contiguous, of each row's pages, the last for all columns behind them.
        write_at: int64 [R].
        query: [R, H, S, HEAD], last axis contiguous.
        rotated: [R, S, H, HEAD], contiguous: where the rotated queries go.
        cos, sin: [R, S, ROTARY], last axis contiguous, of the same strides.
        query_weight, key_weight, eps, offset: with NORMED, of the norm of each head, see `rms_norm`; [HEAD].
        write_at_row .. rope_token: strides in elements.
    """
    token, row, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    stores = (kv_heads + HEADS - 1) // HEADS
    dims = tl.arange(0, WIDTH)[None, :]
    cos += row * rope_row + token * rope_token
    sin += row * rope_row + token * rope_token
    if block < stores:
        head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        real = (head < kv_heads) & (dims < HEAD)
        column = tl.load(write_at + row * write_at_row) + token
        page = tl.load(page_table + row * page_table_row + tl.minimum(column // PAGE, pages - 1)).to(tl.int64)
        column = (page * PAGE + column % PAGE) * HEAD
        at = key + row * key_row + head * key_head + token * key_token
        result = _rotated(at, key_weight, eps, offset, cos, sin, dims, real, HEAD, ROTARY, NORMED)
        to = keys + head * keys_head + column + dims
        tl.store(to, result.to(keys.dtype.element_ty), mask=real)
        new = tl.load(value + row * value_row + head * value_head + token * value_token + dims, mask=real)
        tl.store(values + head * values_head + column + dims, new, mask=real)
    elif ROTARY:
        head = ((block - stores) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        real = (head < heads) & (dims < HEAD)
        at = query + row * query_row + head * query_head + token * query_token
        result = _rotated(at, query_weight, eps, offset, cos, sin, dims, real, HEAD, ROTARY, NORMED)
        to = rotated + ((row * tl.num_programs(0) + token) * heads + head) * HEAD + dims
        tl.store(to, result.to(rotated.dtype.element_ty), mask=real)
