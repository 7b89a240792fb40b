"""The kernel that draws a level of a draft and prepares the auxiliary's step over it, in Triton: one launch.

One program per row. It runs the sampler of the row's own form on the row's own kind of distributions; the rest is
`mtad.draft.levels.Level` and the step's inputs. Launched by `runtime.decoder.cuda_graph.fused`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.decoder.cuda_graph.branch_kernels import branches_from_list, branches_from_table
from runtime.decoder.cuda_graph.sample_kernels import (
    NEVER,
    beams_from_list,
    beams_from_table,
    chain_from_list,
    chain_from_table,
)


@triton.jit(
    do_not_specialize=["level", "beams", "columns", "uniform_row", "gumbel_row", "table_row"],
    do_not_specialize_on_alignment=["uniform", "gumbel", "table", "bias", "behind", "branch_at"],  # parts of others
)
def draw_level(
    tokens: tl.tensor,
    parents: tl.tensor,
    log_q: tl.tensor,
    drafted: tl.tensor,
    growing: tl.tensor,
    ended: tl.tensor,
    paths: tl.tensor,
    positions: tl.tensor,
    write_at: tl.tensor,
    mask: tl.tensor,
    above_log_q: tl.tensor,
    above_growing: tl.tensor,
    above_ended: tl.tensor,
    above_paths: tl.tensor,
    sees: tl.tensor,
    holds: tl.tensor,
    ids: tl.tensor,
    log_prob: tl.tensor,
    logits: tl.tensor,
    numbers: tl.tensor,
    last: tl.tensor,
    blocks: tl.tensor,
    uniform: tl.tensor,
    gumbel: tl.tensor,
    table: tl.tensor,
    committed: tl.tensor,
    behind: tl.tensor,
    bias: tl.tensor,
    ends_here: tl.tensor,
    form: tl.tensor,
    tabulated: tl.tensor,
    greedy: tl.tensor,
    inverse_temperature: tl.tensor,
    log_confidence: tl.tensor,
    log_fallback: tl.tensor,
    ends: tl.tensor,
    stops_at_eos: tl.tensor,
    branch_at: tl.tensor,
    replacement: tl.tensor,
    live_tokens: tl.tensor,
    live_lengths: tl.tensor,
    live_weights: tl.tensor,
    level: tl.tensor,
    beams: tl.tensor,
    columns: tl.tensor,
    candidates: tl.tensor,
    size: tl.tensor,
    uniform_row: tl.tensor,
    gumbel_row: tl.tensor,
    table_row: tl.tensor,
    LISTS: tl.constexpr,
    TABLES: tl.constexpr,
    CHILDREN: tl.constexpr,
    LIVE: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BEAMS: tl.constexpr,
    LEVELS: tl.constexpr,
    DEPTHS: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Draw each row's next level. Grid: (R).

    Args:
        tokens .. paths: of the level, `mtad.draft.levels.Level`, [R, WIDTH] and [R, WIDTH, LEVELS].
        positions .. mask: of the step over it, `mtad.block.Inputs`.
        above_log_q .. above_paths: of the level above, [R, beams] and [R, beams, LEVELS].
        sees: bool [R, 1, beams, columns].
        holds: int64 [R, 1, columns].
        ids, log_prob: of a list, [R, beams, candidates].
        logits: float32 [R, beams, size].
        numbers, last, blocks: of a table; see `beams_from_table`.
        uniform, gumbel, table: of `mtad.noise.host.LevelNoise`, and uniform_row .. table_row their first strides.
        committed: int64 [R].
        behind .. ends_here: of `mtad.rows.Place`; `level`: its number, from 0.
        form .. stops_at_eos, replacement: of `mtad.rows.Rows`.
        branch_at: of `mtad.rows.Place`.
        live_tokens .. live_weights: of `mtad.draft.live.Live`; read if there are any, which LIVE says.
        LISTS, TABLES: whether some row's distributions are lists, or tables.
        CHILDREN: most of a beam in a draft with branches; 0 if there is no such draft.
        SLOTS, BEAMS, DEPTHS, BLOCKS: WIDTH, `beams`, LEVELS and blocks, rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    slots, depth = tl.arange(0, SLOTS), tl.arange(0, DEPTHS)
    real, first, to = slots < WIDTH, row * beams, row * WIDTH + slots
    kind, sure = tl.load(form + row), tl.load(greedy + row) != 0
    own = tl.load(bias + to, mask=real, other=NEVER)
    above_log_q, above_growing, above_ended = above_log_q + first, above_growing + first, above_ended + first
    beam, token, likelihood = tl.zeros_like(slots), tl.zeros_like(slots).to(tl.int64), slots * 0.0
    most = slots * 0.0
    tabled = TABLES
    if LISTS and TABLES:  # the conditions below are nested: only what is known is left out when this is compiled
        tabled = tl.load(tabulated + row) != 0
    if CHILDREN:
        which = tl.load(branch_at + to, mask=real, other=0).to(tl.int32)
        parent, child, again = which // candidates, which % candidates, tl.load(replacement + row) != 0
    if TABLES:
        if tabled:
            logits, numbers, last, table = logits + first * size, numbers + first, last + first, table + row * table_row
            blocks, scale = blocks + first * tl.cdiv(size, BLOCK), tl.load(inverse_temperature + row)
            most -= tl.load(numbers + 2 * tl.num_programs(0) * beams)
            if kind == 0:
                beam, token, likelihood = chain_from_table(
                    *(logits, scale, numbers, last, blocks, above_log_q, above_growing, above_ended),
                    *(tl.load(uniform + row * uniform_row), sure, slots, beams, size, BLOCK, BLOCKS),
                )
            if kind == 1:
                beam, token, likelihood = beams_from_table(
                    *(logits, scale, numbers, last, blocks, above_log_q, above_growing, above_ended),
                    *(table, sure, slots, beams, size, WIDTH, BEAMS, BLOCK, BLOCKS),
                )
            if CHILDREN:
                if kind == 2:
                    beam, token, likelihood = branches_from_table(
                        *(logits, scale, numbers, last, blocks, above_log_q, above_growing, above_ended),
                        *(table, sure, parent, child, again, own == 0.0, slots, beams, size, CHILDREN, BLOCK, BLOCKS),
                    )
    if LISTS:
        if not tabled:
            ids, log_prob, gumbel = ids + first * candidates, log_prob + first * candidates, gumbel + row * gumbel_row
            most += tl.load(log_prob)
            if kind == 0:
                beam, token, likelihood = chain_from_list(
                    *(ids, log_prob, above_log_q, above_growing, above_ended),
                    *(tl.load(uniform + row * uniform_row), slots, candidates, LIST),
                )
            if kind == 1:
                beam, token, likelihood = beams_from_list(
                    *(ids, log_prob, above_log_q, above_growing, above_ended),
                    *(gumbel, slots, beams, candidates, WIDTH, BEAMS, LIST),
                )
            if CHILDREN:
                if kind == 2:
                    beam, token, likelihood = branches_from_list(
                        *(ids, log_prob, above_log_q, above_growing, above_ended, gumbel),
                        *(parent, child, again, own == 0.0, slots, candidates, CHILDREN, LIST),
                    )
    likelihood += own
    grew, alive = tl.load(above_growing + beam) != 0, likelihood > NEVER
    stops = (tl.load(ends + token) != 0) & (tl.load(stops_at_eos + row) != 0)
    new = alive & grew
    likely = (likelihood >= tl.load(log_confidence + row)) & (most >= tl.load(log_fallback + row))
    grows = new & likely & ~stops & (tl.load(ends_here + row) == 0)
    over = alive & (stops | ~grew)
    if LIVE:
        held = tl.load(live_lengths + to, mask=real, other=0)
        has, replays = held > level, (tl.max(held, 0) > level) & real
        kept = tl.load(live_tokens + (row * LEVELS + level) * WIDTH + slots, mask=real & has, other=0)
        weight = tl.load(live_weights + to, mask=real, other=NEVER)
        ending = ~has | ((tl.load(ends + kept) != 0) & (tl.load(stops_at_eos + row) != 0))
        token, likelihood = tl.where(replays, kept, token), tl.where(replays, weight, likelihood)
        beam = tl.where(replays, tl.minimum(slots, beams - 1), beam)
        new, over = tl.where(replays, has, new), tl.where(replays, ending & (weight > NEVER), over)
        grows = tl.where(replays, ~ending & (tl.load(ends_here + row) == 0), grows)
    tl.store(tokens + to, token, mask=real)
    tl.store(parents + to, beam.to(tl.int64), mask=real)
    tl.store(log_q + to, likelihood, mask=real)
    tl.store(drafted + to, new, mask=real)
    tl.store(growing + to, grows, mask=real)
    tl.store(ended + to, over, mask=real)
    at = real[:, None] & (depth < LEVELS)[None, :]
    way = tl.load(above_paths + (first + beam)[:, None] * LEVELS + depth[None, :], mask=at, other=0)
    way = tl.where((depth == level)[None, :], slots[:, None].to(tl.int64), way)
    tl.store(paths + to[:, None] * LEVELS + depth[None, :], way, mask=at)
    end = tl.load(committed + row)
    tl.store(positions + to, end + level + slots * 0, mask=real)
    tl.store(write_at + row, end + tl.load(behind + row))
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = real[:, None] & (column < columns)[None, :]
        seen = tl.load(sees + (first + beam)[:, None] * columns + column[None, :], mask=inside, other=0) != 0
        node = tl.load(holds + row * columns + column, mask=column < columns, other=0)[None, :]
        here = node == (slots + (level * WIDTH + 1))[:, None]
        tl.store(mask + to[:, None] * columns + column[None, :], seen | here, mask=inside)
