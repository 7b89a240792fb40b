"""How the kernel that draws a level draws a row's slots, in Triton: from lists or tables, a chain or beams.

The samplers are those of `mtad.draft.levels` and `mtad.draft.from_tables`. Each says for every slot of a row which beam
of the level above it goes on with, which token it takes, and how likely the path is.

The largest of some numbers are taken one after the other: a level has few slots. What is not a number among them makes
the log-likelihoods of the whole level so, which is how the host learns of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))


@triton.jit
def _best(values: tl.tensor, slots: tl.tensor, COUNT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where the COUNT largest values are, largest first, and what they are; -inf where there are no more."""
    every = tl.arange(0, values.shape[0])
    bad = tl.sum((values != values).to(tl.int32), 0) > 0
    places, found = tl.zeros_like(slots), tl.full(slots.shape, NEVER, tl.float32)
    for number in range(COUNT):
        most, at = tl.max(values, 0, return_indices=True)
        places, found = tl.where(slots == number, at, places), tl.where(slots == number, most, found)
        values = tl.where(every == at, NEVER, values)
    return places, tl.where(bad, float("nan"), found)


@triton.jit
def _invert(weights: tl.tensor, noise: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The entry of positive weight that is drawn, and noise times the weight of all.

    The running sum is added up in parallel, so rounding may leave an entry's below the one's before it.
    """
    every, mass = tl.arange(0, weights.shape[0]), tl.cumsum(weights, 0)
    bound = noise * tl.sum(tl.where(every == weights.shape[0] - 1, mass, 0.0), 0)
    last = tl.max(tl.where(weights > 0.0, every, 0), 0)
    return tl.minimum(tl.sum((mass <= bound).to(tl.int32), 0), last), bound


@triton.jit
def _descend(weights: tl.tensor, noise: tl.tensor, greedy: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """`mtad.distributions.table.descend` of one distribution."""
    every = tl.arange(0, weights.shape[0])
    entry, bound = _invert(weights, noise)
    entry = tl.where(greedy, tl.argmax(weights, 0), entry)
    before = tl.sum(tl.where(every < entry, weights, 0.0), 0)
    own = tl.sum(tl.where(every == entry, weights, 0.0), 0)
    return entry, tl.minimum(tl.maximum((bound - before) / tl.maximum(own, 1e-30), 0.0), 1.0 - 2.0**-24)


@triton.jit
def block_entries(
    logits: tl.tensor,
    numbers: tl.tensor,
    last: tl.tensor,
    growing: tl.tensor,
    beam: tl.tensor,
    block: tl.tensor,
    scale: tl.tensor,
    beams: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """`mtad.draft.from_tables.Beams.entries` of some beams' blocks of one row: [M, BLOCK] of [M].

    Args:
        numbers: `largest`, `lowest` and `log_total` of a table, [3, R * beams], from the row's first on.
        last: of the table.
    """
    every = tl.num_programs(0) * beams
    tokens = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + beam.to(tl.int64)[:, None] * size + tokens, mask=tokens < size, other=NEVER)
    lowest = tl.load(numbers + every + beam)[:, None]
    kept = (values > lowest) | ((values == lowest) & (tokens <= tl.load(last + beam)[:, None]))
    found = (values - tl.load(numbers + beam)[:, None]) * scale - tl.load(numbers + 2 * every + beam)[:, None]
    itself = tl.where(tokens == 0, 0.0, NEVER)
    return tl.where(tl.load(growing + beam)[:, None] != 0, tl.where(kept & (tokens < size), found, NEVER), itself)


@triton.jit
def under(largest: tl.tensor, noisy: tl.tensor, greedy: tl.tensor) -> tl.tensor:
    """`mtad.draft.from_tables._under` of one row."""
    largest, most = largest[:, None], tl.max(noisy, 1)[:, None]
    below = largest - noisy + tl.log(1.0 - tl.exp(noisy - most))
    known = largest - tl.maximum(below, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(below)))
    possible = (noisy != NEVER) & (largest != NEVER)
    return tl.where(possible, tl.where(greedy, noisy, known), NEVER)


@triton.jit
def conditional(found: tl.tensor, growing: tl.tensor, first: tl.tensor) -> tl.tensor:
    """Log-likelihoods of beams' continuations, given the beam; an ended beam has a single one, itself, the first."""
    return tl.where(growing != 0, found, tl.where(first, 0.0, NEVER))


@triton.jit
def weight_of(above: tl.tensor, growing: tl.tensor, ended: tl.tensor, beam: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Log-likelihoods of beams of the level above that grow or have ended; -inf for the others."""
    lives = (tl.load(growing + beam, mask=real, other=0) != 0) | (tl.load(ended + beam, mask=real, other=0) != 0)
    return tl.where(lives, tl.load(above + beam, mask=real, other=NEVER), NEVER)


@triton.jit
def kept(log_q: tl.tensor, noisy: tl.tensor) -> tl.tensor:
    """Of what was chosen as the largest, the log-likelihoods: -inf where there was no more, or no number."""
    return tl.where(noisy == NEVER, NEVER, tl.where(noisy != noisy, noisy, log_q))


@triton.jit
def chain_from_list(
    ids: tl.tensor,
    log_prob: tl.tensor,
    above: tl.tensor,
    growing: tl.tensor,
    ended: tl.tensor,
    uniform: tl.tensor,
    slots: tl.tensor,
    candidates: tl.tensor,
    LIST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each slot's beam, token, and log-likelihood; see `beams_from_list`."""
    rank = tl.arange(0, LIST)
    found = tl.load(log_prob + rank, mask=rank < candidates, other=NEVER)
    found = conditional(found, tl.load(growing), rank == 0)
    entry, _ = _invert(tl.exp(found), uniform)
    beam = tl.zeros_like(slots)
    own = tl.sum(tl.where(rank == entry, found, 0.0), 0)
    return beam, tl.load(ids + beam + entry), own + weight_of(above, growing, ended, beam, slots >= 0)


@triton.jit
def beams_from_list(
    ids: tl.tensor,
    log_prob: tl.tensor,
    above: tl.tensor,
    growing: tl.tensor,
    ended: tl.tensor,
    gumbel: tl.tensor,
    slots: tl.tensor,
    beams: tl.tensor,
    candidates: tl.tensor,
    WIDTH: tl.constexpr,
    BEAMS: tl.constexpr,
    LIST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each slot's beam, token, and log-likelihood of the path.

    Args:
        ids, log_prob: of the row's lists, [beams, candidates].
        above, growing, ended: of the level above: log-likelihoods, and which beams grow or have ended; [beams].
        gumbel: [WIDTH, candidates].
        slots: 0, 1, .., a power of two, at least WIDTH.
    """
    every = tl.arange(0, BEAMS * LIST)
    beam, rank = every // LIST, every % LIST
    real, at = (beam < beams) & (rank < candidates), beam * candidates + rank
    found = tl.load(log_prob + at, mask=real, other=NEVER)
    found = conditional(found, tl.load(growing + beam, mask=real, other=0), rank == 0)
    joint = found + weight_of(above, growing, ended, beam, real) + tl.load(gumbel + at, mask=real, other=0.0)
    places, noisy = _best(tl.where(real, joint, NEVER), slots, WIDTH)
    parent, place = tl.minimum(places // LIST, beams - 1), tl.minimum(places % LIST, candidates - 1)
    own = conditional(tl.load(log_prob + parent * candidates + place), tl.load(growing + parent), place == 0)
    log_q = own + weight_of(above, growing, ended, parent, slots >= 0)
    return parent, tl.load(ids + parent * candidates + place), kept(log_q, noisy)


@triton.jit
def chain_from_table(
    logits: tl.tensor,
    scale: tl.tensor,
    numbers: tl.tensor,
    last: tl.tensor,
    blocks: tl.tensor,
    above: tl.tensor,
    growing: tl.tensor,
    ended: tl.tensor,
    uniform: tl.tensor,
    greedy: tl.tensor,
    slots: tl.tensor,
    beams: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each slot's beam, token, and log-likelihood; see `beams_from_table`."""
    number = tl.arange(0, BLOCKS)
    found = tl.load(blocks + number, mask=number < tl.cdiv(size, BLOCK), other=NEVER)
    found = conditional(found, tl.load(growing), number == 0)
    place, rest = _descend(tl.exp(found), uniform, greedy)
    one = tl.zeros((1,), tl.int32)
    own = block_entries(logits, numbers, last, growing, one, one + place, scale, beams, size, BLOCK)
    own = tl.reshape(own, (BLOCK,))
    entry, _ = _descend(tl.exp(own), rest, greedy)
    beam, log_q = tl.zeros_like(slots), tl.sum(tl.where(tl.arange(0, BLOCK) == entry, own, 0.0), 0)
    token = tl.minimum(beam + place * BLOCK + entry, size - 1).to(tl.int64)
    return beam, token, log_q + weight_of(above, growing, ended, beam, slots >= 0)


@triton.jit
def beams_from_table(
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
    slots: tl.tensor,
    beams: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
    BEAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each slot's beam, token, and log-likelihood of the path.

    Args:
        logits, scale: of the row, [beams, size], and by what they are multiplied.
        numbers, last: of its table, see `block_entries`; blocks: [beams, blocks of the vocabulary].
        above, growing, ended, slots: of `beams_from_list`.
        gumbel: [WIDTH, blocks of the vocabulary + BLOCK].
    """
    every, count = tl.arange(0, BEAMS * BLOCKS), tl.cdiv(size, BLOCK)
    beam, number = every // BLOCKS, every % BLOCKS
    real = (beam < beams) & (number < count)
    found = tl.load(blocks + beam * count + number, mask=real, other=NEVER)
    found = conditional(found, tl.load(growing + beam, mask=real, other=0), number == 0)
    joint = found + weight_of(above, growing, ended, beam, real)
    joint += tl.load(gumbel + beam * (count + BLOCK) + number, mask=real, other=0.0)
    places, noisy = _best(tl.where(real, joint, NEVER), slots, WIDTH)
    parent, block = tl.minimum(places // BLOCKS, beams - 1), tl.minimum(places % BLOCKS, count - 1)
    own = block_entries(logits, numbers, last, growing, parent, block, scale, beams, size, BLOCK)
    own += weight_of(above, growing, ended, parent, slots >= 0)[:, None]
    at = slots[:, None] * (count + BLOCK) + count + tl.arange(0, BLOCK)[None, :]
    noise = tl.load(gumbel + at, mask=(slots < WIDTH)[:, None], other=0.0)
    limited = tl.reshape(under(noisy, own + noise, greedy), (slots.shape[0] * BLOCK,))
    places, noisy = _best(limited, slots, WIDTH)
    slot, log_q = places // BLOCK, tl.gather(tl.reshape(own, limited.shape), places, 0)
    token = tl.minimum(tl.gather(block, slot, 0) * BLOCK + places % BLOCK, size - 1)
    return tl.gather(parent, slot, 0), token.to(tl.int64), kept(log_q, noisy)
