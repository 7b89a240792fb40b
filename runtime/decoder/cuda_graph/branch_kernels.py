"""How the kernel that draws a level draws a row's slots as branches, in Triton; see `sample_kernels`.

A slot is the n-th child of its parent. Without replacement it takes the parent's n-th largest noisy token. Of tables
(`mtad.draft.from_tables`), the first children's tokens lie in as many of the parent's blocks, those of the largest
noisy mass, so slot n looks at the n-th of these, and then siblings take the largest tokens of all their blocks in turn.
With replacement, each slot has noise of its own, is its own only sibling, and takes the largest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.decoder.cuda_graph.sample_kernels import NEVER, block_entries, conditional, kept, under, weight_of


@triton.jit
def _nth(values: tl.tensor, wanted: tl.tensor, COUNT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where each row's `wanted` largest value is, 0 for the largest, below COUNT; and what it is, -inf for none."""
    columns = tl.arange(0, values.shape[1])[None, :]
    bad = tl.sum((values != values).to(tl.int32), 1) > 0
    places, found = tl.zeros_like(wanted), tl.full(wanted.shape, NEVER, tl.float32)
    for number in range(COUNT):
        most, at = tl.max(values, 1, return_indices=True)
        places, found = tl.where(wanted == number, at, places), tl.where(wanted == number, most, found)
        values = tl.where(columns == at[:, None], NEVER, values)
    return places, tl.where(bad, float("nan"), found)


@triton.jit
def branches_from_list(
    ids: tl.tensor,
    log_prob: tl.tensor,
    above: tl.tensor,
    growing: tl.tensor,
    ended: tl.tensor,
    gumbel: tl.tensor,
    parent: tl.tensor,
    child: tl.tensor,
    again: tl.tensor,
    alive: tl.tensor,
    slots: tl.tensor,
    candidates: tl.tensor,
    CHILDREN: tl.constexpr,
    LIST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each slot's beam, token, and log-likelihood of the path.

    Args:
        ids .. gumbel: of `beams_from_list`.
        parent, child: of each slot: its beam, and which of the beam's children it is.
        again: children are drawn with replacement.
        alive: slots of the row's own draft.
        CHILDREN: most of a beam.
    """
    rank = tl.arange(0, LIST)[None, :]
    real, beam = rank < candidates, parent[:, None]
    found = tl.load(log_prob + beam * candidates + rank, mask=real, other=NEVER)
    found = conditional(found, tl.load(growing + beam), rank == 0)
    joint = found + weight_of(above, growing, ended, beam, beam >= 0)
    own = tl.where(again, slots, parent)[:, None]
    joint += tl.load(gumbel + own * candidates + rank, mask=real & alive[:, None], other=0.0)
    places, noisy = _nth(tl.where(real, joint, NEVER), tl.where(again, 0, child), CHILDREN)
    places = tl.minimum(places, candidates - 1)
    log_q = conditional(tl.load(log_prob + parent * candidates + places), tl.load(growing + parent), places == 0)
    log_q += weight_of(above, growing, ended, parent, parent >= 0)
    return parent, tl.load(ids + parent * candidates + places), kept(log_q, noisy)


@triton.jit
def branches_from_table(
    logits: tl.tensor,
    scale: tl.tensor,
    numbers: tl.tensor,
    last: tl.tensor,
    blocks: tl.tensor,
    above: tl.tensor,
    growing: tl.tensor,
    ended: tl.tensor,
    gumbel: tl.tensor,
    greedy: tl.tensor,
    parent: tl.tensor,
    child: tl.tensor,
    again: tl.tensor,
    alive: tl.tensor,
    slots: tl.tensor,
    beams: tl.tensor,
    size: tl.tensor,
    CHILDREN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each slot's beam, token, and log-likelihood of the path.

    Args:
        logits .. gumbel: of `beams_from_table`.
        parent .. alive, CHILDREN: of `branches_from_list`.
    """
    count, number = tl.cdiv(size, BLOCK), tl.arange(0, BLOCKS)[None, :]
    real, wanted = number < count, tl.where(again, 0, child)
    found = tl.load(blocks + parent[:, None] * count + number, mask=real, other=NEVER)
    found = conditional(found, tl.load(growing + parent)[:, None], number == 0)
    own = tl.where(again, slots, parent)[:, None]
    found += tl.load(gumbel + own * (count + BLOCK) + number, mask=real & alive[:, None], other=0.0)
    block, most = _nth(tl.where(real, found, NEVER), wanted, CHILDREN)
    block = tl.minimum(block, count - 1)
    entries = block_entries(logits, numbers, last, growing, parent, block, scale, beams, size, BLOCK)
    columns = tl.arange(0, BLOCK)[None, :]
    at = gumbel + slots[:, None] * (count + BLOCK) + count + columns
    noisy = entries + tl.load(at, mask=alive[:, None], other=0.0)
    noisy = tl.where(again, noisy, under(most, noisy, greedy))
    # siblings take the largest of all their tokens, one after the other
    group = tl.where(again | ~alive, -1 - slots, parent)
    siblings = group[:, None] == tl.reshape(group, (1, slots.shape[0]))
    places, best = tl.zeros_like(slots), tl.full(slots.shape, NEVER, tl.float32)
    bad = tl.sum((noisy != noisy).to(tl.int32), 1) > 0
    for turn in range(CHILDREN):
        largest, column = tl.max(noisy, 1, return_indices=True)
        first, winner = tl.max(
            tl.where(siblings, tl.reshape(largest, (1, slots.shape[0])), NEVER), 1, return_indices=True
        )
        places = tl.where(wanted == turn, winner * BLOCK + tl.gather(column, winner, 0), places)
        best = tl.where(wanted == turn, first, best)
        noisy = tl.where((winner == slots)[:, None] & (columns == column[:, None]), NEVER, noisy)
    flat = tl.reshape(entries, (slots.shape[0] * BLOCK,))
    log_q = tl.gather(flat, places, 0) + weight_of(above, growing, ended, parent, parent >= 0)
    token = tl.minimum(tl.gather(block, places // BLOCK, 0) * BLOCK + places % BLOCK, size - 1)
    return parent, token.to(tl.int64), kept(log_q, tl.where(bad, float("nan"), best))
