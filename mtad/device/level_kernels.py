"""The kernel that draws a level of a draft and prepares the auxiliary's step over it, in Triton: one launch.

It is `mtad.draft.draw_slots` and `settle`. A slot is drawn in two steps: beam and block of 256 tokens, by the mass that
earlier slots have left of each, then the token in the block. Launched by `mtad.device.launches`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtad.device.filter_kernels import LOG_TOTAL, NUMBERS, log_probability
from mtad.device.tables import Given, Tables, Tree

NEVER = tl.constexpr(float("-inf"))


@triton.jit
def choose(weights: tl.tensor, goal: tl.tensor, greedy: tl.tensor) -> tl.tensor:
    """The first entry at which the running sum exceeds `goal`, else the last of positive weight; -1 where all are 0.

    The largest where nothing is random.
    """
    every, some = tl.arange(0, weights.shape[0]), weights > 0.0
    last = tl.max(tl.where(some, every, -1), 0)
    reached = tl.min(tl.where(some & (tl.cumsum(weights, 0) > goal), every, weights.shape[0]), 0)
    best = tl.where(last < 0, -1, tl.argmax(weights, 0))
    return tl.where(greedy, best, tl.minimum(reached, last))


@triton.jit(do_not_specialize=["level", "columns", "capacity"])
def draw_level(
    tree: Tree,
    step: tl.tuple,
    tables: Tables,
    given: Given,
    is_end: tl.tensor,
    level: tl.tensor,
    size: tl.tensor,
    row_stride: tl.tensor,
    position_stride: tl.tensor,
    columns: tl.tensor,
    capacity: tl.tensor,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SLOTS: tl.constexpr,
    BEAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Draw level `level` of each row. Grid: (R).

    Args:
        tree, step: written to; the step, which is the auxiliary's next one, as tokens, positions, write_at and mask.
        tables: [R, B], after the beams of the level above.
        FIRST: it is level 0, whose only beam is the root.
        SLOTS, BEAMS, BLOCKS: slots, beams and blocks, rounded up to a power of two.
    """
    step_tokens, positions, write_at, mask = step
    row = tl.program_id(0).to(tl.int64)
    beams = 1 if FIRST else WIDTH
    to = (row * LEVELS + level) * WIDTH
    above = to - WIDTH
    slots, beam, number = tl.arange(0, SLOTS), tl.arange(0, BEAMS), tl.arange(0, BLOCKS)
    every, sure = tl.arange(0, BEAMS * BLOCKS), tl.load(given.greedy + row) != 0
    scale = tl.load(given.inverse_temperature + row)
    limit = tl.where(level < tl.load(given.draft_len + row), tl.load(given.width + row), 0)
    if FIRST:
        log_w, grows = beam.to(tl.float64) * 0.0, beam == 0
    else:
        real = beam < WIDTH
        grows = tl.load(tree.growing + above + beam, mask=real, other=0) != 0
        lives = grows | (tl.load(tree.ended + above + beam, mask=real, other=0) != 0)
        log_w = tl.where(lives, tl.load(tree.log_q + above + beam, mask=real, other=NEVER), NEVER)
    place = row * beams + beam
    total = tl.load(tables.numbers + place * NUMBERS + LOG_TOTAL, mask=beam < beams, other=0.0)
    bad = (tl.max((grows & (total != total)).to(tl.int32), 0) > 0) & (limit > 0)
    count = tl.cdiv(size, BLOCK)
    inside = grows[:, None] & (number < count)[None, :]
    mass = tl.load(tables.blocks + place[:, None] * count + number[None, :], mask=inside, other=0.0)
    mass = tl.where(grows[:, None], mass, (number == 0)[None, :].to(tl.float32))  # an ended text goes on with itself
    share = tl.where(log_w > NEVER, tl.exp(log_w - tl.max(log_w, 0)), 0.0).to(tl.float32)
    mass = tl.where(bad, 0.0, tl.reshape(mass * share[:, None], (BEAMS * BLOCKS,)))
    parent, entry = tl.zeros_like(slots), tl.full(slots.shape, -1, tl.int32)
    log_q = tl.full(slots.shape, NEVER, tl.float64)
    for slot in range(WIDTH):
        goal = tl.load(given.draft + to + slot).to(tl.float32) * tl.sum(mass, 0)
        at = tl.where(slot < limit, choose(mass, goal, sure), -1)
        rest = goal - tl.sum(tl.where(every < at, mass, 0.0), 0)
        own, block = tl.maximum(at, 0) // BLOCKS, tl.maximum(at, 0) % BLOCKS
        ids, here = block * BLOCK + tl.arange(0, BLOCK), beam == own
        logits = tables.logits + row * row_stride + own * position_stride
        values = tl.load(logits + ids, mask=ids < size, other=NEVER).to(tl.float32)
        values, kept = log_probability(values, ids, size, tables, row * beams + own, scale)
        goes_on = tl.max((here & grows).to(tl.int32), 0) > 0
        values = tl.where(goes_on, tl.where(kept, values, NEVER), tl.where(ids == 0, 0.0, NEVER))
        taken = (parent == own)[:, None] & (entry[:, None] == ids[None, :])
        free = tl.max(taken.to(tl.int32), 0) == 0
        weights = tl.where(free, tl.exp(values), 0.0) * tl.sum(tl.where(here, share, 0.0), 0)
        chosen = tl.where(at >= 0, choose(weights, rest, sure), -1)
        picked = (block * BLOCK + tl.arange(0, BLOCK)) == block * BLOCK + chosen
        left = tl.where(picked, 0.0, weights)
        mass = tl.where((every == at) & (at >= 0), tl.where(sure, tl.max(left, 0), tl.sum(left, 0)), mass)
        mine = (slots == slot) & (chosen >= 0)
        parent, entry = tl.where(mine, own, parent), tl.where(mine, block * BLOCK + chosen, entry)
        likely = tl.sum(tl.where(here, log_w, 0.0), 0) + tl.sum(tl.where(picked, values, 0.0), 0)
        log_q = tl.where(mine, likely, log_q)
    alive, real = entry >= 0, slots < WIDTH
    token = tl.maximum(entry, 0).to(tl.int64)
    if FIRST:
        new, over = alive, slots < 0
    else:
        grew = tl.load(tree.growing + above + parent, mask=real, other=0) != 0
        token = tl.where(alive & ~grew, tl.load(tree.tokens + above + parent, mask=real, other=0), token)
        new, over = alive & grew, alive & ~grew
    stops = (tl.load(given.stops_at_eos + row) != 0) & (tl.load(is_end + token) != 0)
    goes = new & ~stops & (log_q >= tl.load(given.log_confidence + row)) & (level + 1 < tl.load(given.draft_len + row))
    tl.store(tree.tokens + to + slots, token, mask=real)
    tl.store(tree.log_q + to + slots, tl.where(bad, float("nan"), log_q), mask=real)
    tl.store(tree.drafted + to + slots, new, mask=real)
    tl.store(tree.growing + to + slots, goes, mask=real)
    tl.store(tree.ended + to + slots, over | (alive & stops), mask=real)
    end, behind = tl.load(given.committed + row), tl.load(given.real + row) == 0
    tl.store(step_tokens + row * WIDTH + slots, token, mask=real)
    tl.store(positions + row * WIDTH + slots, end + level + slots * 0, mask=real)
    tl.store(write_at + row, tl.where(behind, capacity, end + level * WIDTH))
    for depth in range(level + 1):
        way = slots.to(tl.int64)
        if not FIRST:
            way = tl.load(tree.ways + (above + parent) * LEVELS + depth, mask=real & (depth < level), other=0)
            way = tl.where(depth == level, slots.to(tl.int64), way)
        tl.store(tree.ways + (to + slots) * LEVELS + depth, way, mask=real)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        seen = (column < end)[None, :] | (column[None, :] == (end + level * WIDTH + slots)[:, None])
        if not FIRST:
            for depth in range(level):
                way = tl.load(tree.ways + (above + parent) * LEVELS + depth, mask=real, other=0)
                seen = seen | (column[None, :] == (end + depth * WIDTH + way)[:, None])
        at = (row * WIDTH + slots)[:, None] * columns + column[None, :]
        tl.store(mask + at, seen, mask=real[:, None] & (column < columns)[None, :])
