"""Kernels of attention over a cache of pages, in Triton: what `engines.pytorch.attention` launches.

The tile of a program is some queries of one row that share a KV head: query m is token m // GROUP, head m % GROUP of
the group, so each column is read once for all of them. Offsets that grow with the cache are 64 bits wide, those within
one page 32. Nothing is added atomically: the same inputs give the same bits.

Importing this module needs Triton. With TRITON_INTERPRET=1 in the environment before anything imports Triton, the
kernels run in its interpreter, on a CPU. The scheme is flash-decoding's
(https://pytorch.org/blog/flash-decoding), the running softmax FlashAttention-2's (arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engines.pytorch.layer_kernels import tanh

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter; decided when they were made."""

VARYING = ("steps", "splits", "write_at_row", "positions_row", "page_table_row")
"""Arguments that change from step to step: kernels are not compiled again for those that are 1 or multiples of 16."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _reach(
    write_at: tl.tensor,
    positions: tl.tensor,
    tile: tl.tensor,
    steps: tl.tensor,
    length: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """First column (a multiple of COLUMNS) and end of what a tile attends to; `write_at`, `positions` of its row."""
    start = tl.load(write_at).to(tl.int32)
    end = tl.where(start < length, tl.minimum(start + steps, length), 0)
    first = end * 0
    if WINDOWED:
        token = (tile * QUERIES + tl.arange(0, QUERIES)) // GROUP
        at = tl.load(positions + token, mask=token < steps, other=2**31 - 1).to(tl.int32)
        first = tl.maximum(tl.min(at, 0) - window + 1, 0) // COLUMNS * COLUMNS
    return first, end


@triton.jit
def _split_columns(
    first: tl.tensor, end: tl.tensor, splits: tl.tensor, COLUMNS: tl.constexpr, SHORTEST: tl.constexpr
) -> tl.tensor:
    """Columns of a split, a multiple of COLUMNS: the fewest that divide first .. end - 1 into `splits` or fewer."""
    columns = tl.maximum((end - first + splits - 1) // splits, SHORTEST)
    return (columns + COLUMNS - 1) // COLUMNS * COLUMNS


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["write_at", "positions", "page_table"])
def attend_split(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    page_table: tl.tensor,
    mask: tl.tensor,
    write_at: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    query_token: tl.tensor,
    key_head: tl.tensor,
    key_column: tl.tensor,
    value_head: tl.tensor,
    value_column: tl.tensor,
    page_table_row: tl.tensor,
    mask_row: tl.tensor,
    mask_token: tl.tensor,
    write_at_row: tl.tensor,
    positions_row: tl.tensor,
    kv_heads: tl.tensor,
    steps: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHORTEST: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """Attention of one tile of queries to one split of what it attends to.

    Grid: (tiles, splits, R * KV); a program whose split is behind the row's end returns. Without SPLIT there is one
    split and `out` is written; with it `partial` (sums of values, not yet divided) and `statistics` (largest score in
    units of log 2, sum of weights).

    Args:
        query, key, value: [R, KV * GROUP, S, HEAD], [KV, pages * PAGE, HEAD] twice; last axis contiguous.
        page_table: int32 [R, >= L / PAGE], of each row's pages; last axis contiguous. COLUMNS divides PAGE.
        mask: uint8 [R, S, L]; last axis contiguous, L a multiple of COLUMNS.
        write_at: int64 [R].
        positions: int64 [R, S]; last axis contiguous; read only with WINDOWED.
        out: [R, S, KV * GROUP, HEAD], contiguous.
        partial: float32 [R * KV, splits, tiles * QUERIES, WIDTH], contiguous.
        statistics: float32 [R * KV, splits, tiles * QUERIES, 2], contiguous.
        query_row .. positions_row: strides in elements.
        kv_heads, steps, length: KV, S, L.
        scale, softcap, window: of scores; caps only with SOFTCAPPED, window only with WINDOWED.
        SHORTEST: columns of a split at least.
        WIDTH: HEAD rounded up to a power of two.
    """
    tile, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    write_at += row * write_at_row
    positions += row * positions_row
    first, end = _reach(write_at, positions, tile, steps, length, window, GROUP, QUERIES, COLUMNS, WINDOWED)
    if SPLIT:
        columns = _split_columns(first, end, tl.num_programs(1), COLUMNS, SHORTEST)
        first += split * columns
        end = tl.minimum(end, first + columns)
        if first >= end:
            return

    member = tile * QUERIES + tl.arange(0, QUERIES)
    token, real = (member // GROUP).to(tl.int64), member < steps * GROUP
    heads = head * GROUP + member % GROUP
    dims, offsets = tl.arange(0, WIDTH), tl.arange(0, COLUMNS)
    wide = dims < HEAD

    at = query + row * query_row + heads * query_head + token * query_token
    queries = tl.load(at[:, None] + dims[None, :], mask=real[:, None] & wide[None, :], other=0.0)
    key += head * key_head
    value += head * value_head
    page_table += row * page_table_row
    sees = mask + row * mask_row + token * mask_token
    if WINDOWED:
        position = tl.load(positions + token, mask=real, other=0).to(tl.int32)

    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    weights = tl.full([QUERIES], 0.0, tl.float32)
    sums = tl.full([QUERIES, WIDTH], 0.0, tl.float32)
    for start in range(first, end, COLUMNS):
        column = start + offsets
        inside = column < end
        page = tl.load(page_table + start // PAGE).to(tl.int64) * PAGE + start % PAGE
        # without `inside`, which would make it a load of single bytes: the mask reaches to the end of the block
        seen = tl.load(sees[:, None] + column[None, :], mask=real[:, None], other=0) != 0
        seen = seen & inside[None, :]
        if WINDOWED:
            seen = seen & (position[:, None] - column[None, :] < window)
        # what lies behind a row's end is never read: it may be anything, and 0 times NaN is NaN
        keys = tl.load(
            key + page * key_column + offsets[:, None] * key_column + dims[None, :],
            mask=inside[:, None] & wide[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAPPED:
            scores = softcap * tanh(scores / softcap)
        scores = tl.where(seen, scores * _LOG2_E, -float("inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(above == -float("inf"), 0.0, above)  # a query may have seen nothing yet
        weight = tl.exp2(scores - shift[:, None])
        before = tl.exp2(largest - shift)
        weights = weights * before + tl.sum(weight, 1)
        values = tl.load(
            value + page * value_column + offsets[:, None] * value_column + dims[None, :],
            mask=inside[:, None] & wide[None, :],
            other=0.0,
        )
        sums = tl.dot(weight.to(values.dtype), values, sums * before[:, None], input_precision="ieee")
        largest = above

    if SPLIT:
        at = (pair.to(tl.int64) * tl.num_programs(1) + split) * (tl.num_programs(0) * QUERIES) + member
        tl.store(partial + at[:, None] * WIDTH + dims[None, :], sums)
        tl.store(statistics + at * 2, largest)
        tl.store(statistics + at * 2 + 1, weights)
    else:
        sums = sums / tl.where(weights == 0.0, 1.0, weights)[:, None]
        at = ((row * steps + token) * kv_heads * GROUP + heads) * HEAD
        tl.store(out + at[:, None] + dims[None, :], sums.to(out.dtype.element_ty), mask=real[:, None] & wide[None, :])


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["write_at", "positions"])
def combine_splits(
    partial: tl.tensor,
    statistics: tl.tensor,
    write_at: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    write_at_row: tl.tensor,
    positions_row: tl.tensor,
    kv_heads: tl.tensor,
    steps: tl.tensor,
    length: tl.tensor,
    splits: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHORTEST: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The output of MEMBERS queries from the splits that were not empty. Arguments as of `attend_split`.

    Grid: (S * GROUP / MEMBERS, R * KV); MEMBERS divides QUERIES. Added in the order of the columns, CHUNK splits at a
    time; of a row that has but one split, the result is what it would be unsplit.
    """
    block, pair = tl.program_id(0), tl.program_id(1)
    row, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    tile = block * MEMBERS // QUERIES
    write_at += row * write_at_row
    positions += row * positions_row
    first, end = _reach(write_at, positions, tile, steps, length, window, GROUP, QUERIES, COLUMNS, WINDOWED)
    columns = _split_columns(first, end, splits, COLUMNS, SHORTEST)
    end = (end - first + columns - 1) // columns
    members, dims, offsets = block * MEMBERS + tl.arange(0, MEMBERS), tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    queries = (steps * GROUP + QUERIES - 1) // QUERIES * QUERIES
    base = pair.to(tl.int64) * splits * queries + members

    largest = tl.full([CHUNK, MEMBERS], -float("inf"), tl.float32)
    for start in range(0, end, CHUNK):
        split = start + offsets[:, None]
        at = statistics + (base[None, :] + split * queries) * 2
        largest = tl.maximum(largest, tl.load(at, mask=split < end, other=-float("inf")))
    top = tl.max(largest, 0)
    top = tl.where(top == -float("inf"), 0.0, top)

    weights = tl.full([CHUNK, MEMBERS], 0.0, tl.float32)
    sums = tl.full([MEMBERS, WIDTH], 0.0, tl.float32)
    for start in range(0, end, CHUNK):
        split = start + offsets[:, None]
        at = base[None, :] + split * queries
        factor = tl.exp2(tl.load(statistics + at * 2, mask=split < end, other=-float("inf")) - top[None, :])
        weights += factor * tl.load(statistics + at * 2 + 1, mask=split < end, other=0.0)
        part = partial + at[:, :, None] * WIDTH + dims[None, None, :]
        sums += tl.sum(factor[:, :, None] * tl.load(part, mask=(split < end)[:, :, None], other=0.0), 0)
    total = tl.sum(weights, 0)
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    token, heads = (members // GROUP).to(tl.int64), head * GROUP + members % GROUP
    at = ((row * steps + token) * kv_heads * GROUP + heads) * HEAD
    real = (members < steps * GROUP)[:, None] & (dims < HEAD)[None, :]
    tl.store(out + at[:, None] + dims[None, :], sums.to(out.dtype.element_ty), mask=real)
