"""Kernels of a block's end, in Triton: whole distributions, and the tokens of a row once its last kept node is known.

Launched by `mtad.device.launches`. Importing this module needs Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtad.device.filter_kernels import LOG_PLAIN, LOG_TOTAL, NUMBERS, probability
from mtad.device.level_kernels import NEVER, choose
from mtad.device.tables import Given, Results, Scored, Tables

VARYING = ("wanted", "positions", "nodes", "parents_row", "depths_row", "ancestors_row")
"""Arguments that change from step to step, see `mtad.device.filter_kernels`."""


@triton.jit(do_not_specialize=VARYING)
def spread(
    tables: Tables,
    out: tl.tensor,
    places: tl.tensor,
    wanted: tl.tensor,
    positions: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """All probabilities of some of a row's distributions. Grid: (R * N, chunks).

    Args:
        out: float32 [R, N, size].
        places: int64 [R, N], contiguous, which of the row's S distributions; `wanted` is N, `positions` S.
    """
    number, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    row, place = number // wanted, tl.load(places + number)
    logits = tables.logits + row * row_stride + place * position_stride
    values = tl.load(logits + ids, mask=ids < size, other=NEVER).to(tl.float32)
    scale = tl.load(tables.inverse_temperature + row)
    found = probability(values, ids, size, tables, row * positions + place, scale)
    tl.store(out + number * size + ids, found, mask=ids < size)


@triton.jit(do_not_specialize=VARYING)
def emit(
    out: Results,
    node: tl.tensor,
    finite: tl.tensor,
    scored: Scored,
    weights: tl.tensor,
    masses: tl.tensor,
    tables: Tables,
    given: Given,
    nodes: tl.tensor,
    size: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    parents_row: tl.tensor,
    depths_row: tl.tensor,
    ancestors_row: tl.tensor,
    LEVELS: tl.constexpr,
    DEPTHS: tl.constexpr,
    NODES: tl.constexpr,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """The accepted tokens of each row, and one more. Grid: (R).

    The one more is drawn as `mtad.device.level_kernels.draw_level` draws: a block by its mass, then a token in it.

    Args:
        out: written to, but for `longest` and `spent`.
        node: int64 [R], the last kept node, -1 for none. finite: bool [R], whether the draft's logits are.
        scored: the last axes contiguous; `nodes` is M.
        weights, masses: with WEIGHED, float32 [R, size], what the one more is drawn by, and [R, blocks], its sums over
            blocks, for greedy rows its largest; without, `masses` is `blocks` of the tables.
        tables: of the target, [R, 1 + M].
        DEPTHS, NODES, BLOCKS: LEVELS + 1, M and the blocks of the vocabulary, rounded up to a power of two.
    """
    row, every = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    kept, real, here = tl.load(node + row), every < nodes, row * (1 + nodes)
    depth = tl.load(scored.depths + row * depths_row + every, mask=real, other=0)
    through = scored.ancestors + row * ancestors_row + tl.maximum(kept, 0) * nodes + every
    through = tl.load(through, mask=real, other=0) != 0
    length = tl.sum(tl.where(every == kept, depth, 0), 0)
    level = tl.arange(0, DEPTHS)
    own = tl.where(through[None, :] & (depth[None, :] == level[:, None] + 1), every[None, :], NODES)
    above = tl.where(through[None, :] & (depth[None, :] == level[:, None]), every[None, :], NODES)
    own, above = tl.min(own, 1) % NODES, tl.min(above, 1) % NODES

    count, number, sure = tl.cdiv(size, BLOCK), tl.arange(0, BLOCKS), tl.load(given.greedy + row) != 0
    masses += (row if WEIGHED else here + kept + 1) * count
    mass = tl.load(masses + number, mask=number < count, other=0.0).to(tl.float64)
    goal = tl.load(given.bonus + row) * tl.sum(mass, 0)
    block = tl.maximum(choose(mass, goal, sure), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits = tables.logits + row * row_stride
    if WEIGHED:
        weight = tl.load(weights + row * size + ids, mask=ids < size, other=0.0)
    else:
        values = tl.load(logits + (kept + 1) * position_stride + ids, mask=ids < size, other=NEVER).to(tl.float32)
        scale = tl.load(given.inverse_temperature + row)
        weight = probability(values, ids, size, tables, here + kept + 1, scale)
    rest = goal - tl.sum(tl.where(number < block, mass, 0.0), 0)
    one = tl.minimum(block * BLOCK + tl.maximum(choose(weight.to(tl.float64), rest, sure), 0), size - 1)

    token = tl.load(scored.tokens + row * nodes + own, mask=level < length, other=0)
    token = tl.where(level == length, one.to(tl.int64), token)
    at = tl.where(level == 0, 0, above + 1)
    likely = tl.load(logits + at * position_stride + token, mask=level <= LEVELS, other=0.0).to(tl.float32)
    numbers = tables.numbers + here * NUMBERS
    likely = likely - tl.load(numbers + at * NUMBERS) - tl.load(numbers + at * NUMBERS + LOG_PLAIN)
    tl.store(out.tokens + row * (LEVELS + 1) + level, token, mask=level <= LEVELS)
    tl.store(out.log_probs + row * (LEVELS + 1) + level, likely, mask=level <= LEVELS)
    tl.store(out.paths + row * LEVELS + level, own.to(tl.int64), mask=level < LEVELS)
    tl.store(out.lengths + row, length.to(tl.int64))
    parent = tl.load(scored.parents + row * parents_row + every, mask=real, other=-1)
    looked = real & (tl.load(scored.drafted + row * nodes + every, mask=real, other=0) != 0)
    looked_at = tl.load(numbers + (parent + 1) * NUMBERS + LOG_TOTAL)
    bonus_at = tl.load(numbers + (kept + 1) * NUMBERS + LOG_TOTAL)
    bad = tl.sum((looked & (looked_at != looked_at)).to(tl.int32), 0)
    bad += tl.sum(((level <= length) & ~(tl.abs(likely) < float("inf"))).to(tl.int32), 0)
    tl.store(out.finite + row, (tl.load(finite + row) != 0) & (bad == 0) & (bonus_at == bonus_at))
