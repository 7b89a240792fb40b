"""The noise of a block, computed where the block runs, by integer operations that a CUDA graph can hold.

The host's (`mtad.noise.host`) draws ahead of a block. For a whole vocabulary that takes longer than the block, so
on a GPU every number is a hash of its key and its place: number `place` of the generator SplitMix64 (Steele, Lea and
Flood, doi:10.1145/2660193.2660195), begun at a hash of (seed, block). So what a row draws depends on nothing else in
the batch. The two generators draw different numbers, and the logarithms' last bits may differ between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtad.noise.host import LevelNoise, Noise, gumbel_noise, node_noise, table_noise
from mtad.ops import constant
from mtad.rows import Shape

GAMMA = 0x9E3779B97F4A7C15
FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and multipliers of SplitMix64. Its last shift changes none of the bits that are used."""

CHAIN, ACCEPT, BONUS, NODES, BEHIND, GUMBEL, TABLE = range(7)
"""What a number is for; BEHIND is for the nodes of the level behind a row's last one."""


def begin(seed: int, block: int) -> int:
    """Where the numbers of a request's block begin: `states` of `draw`, as a signed integer of 64 bits."""
    return signed(_hash(_hash(seed) + block))


def scale(temperature: float) -> tuple[float, float]:
    """A row of `scales` of `draw`: at temperature 0 all its noise is 0."""
    return (2.0**-24, -1.0) if temperature else (0.0, 0.0)


Gumbels = Sequence[tuple[Tensor, int]]
"""Offsets of slots, int64, and how many numbers each of them has."""


def draw(
    states: Tensor,
    scales: Tensor,
    shape: Shape,
    compute: Callable[[Tensor, Tensor, Tensor, Gumbels], Tensor] | None = None,
) -> Noise:
    """The noise of a block of R rows.

    Args:
        states: int64 [R], `begin` of each row's key.
        scales: float32 [R, 2], `scale` of each row's temperature.
        shape: of the batch's drafts; a row of a smaller draft draws what it would draw alone.
        compute: gives what `numbers` gives; None for that itself.
    """
    rows, levels, width, device = len(states), shape.draft_len, shape.width, states.device
    uniforms = _uniforms(levels, *node_noise(shape), shape.live, device)
    kinds = (GUMBEL, gumbel_noise(shape)), (TABLE, table_noise(shape))
    found = (compute or numbers)(
        states, scales, uniforms, [(_places(what, levels, width, device), size) for what, size in kinds]
    )
    sizes = [len(uniforms), *(levels * width * size for _, size in kinds)]
    uniform, *parts = torch.split(found, sizes, 1)
    gumbel, table = (part.view(rows, levels, width, size) for part, (_, size) in zip(parts, kinds, strict=True))
    chain, accept, nodes = uniform[:, :levels], uniform[:, levels : 2 * levels], uniform[:, 2 * levels + 1 :]
    return Noise(
        tuple(map(LevelNoise, chain.unbind(1), gumbel.unbind(1), table.unbind(1))),
        accept,
        uniform[:, 2 * levels],
        nodes,
    )


def numbers(states: Tensor, scales: Tensor, uniforms: Tensor, gumbels: Gumbels) -> Tensor:
    """Uniform numbers at the offsets `uniforms`, and behind them Gumbel noise, slot by slot: float32 [R, ..]."""
    sizes = [len(uniforms), *(len(slots) * size for slots, size in gumbels)]
    x = torch.empty(len(states), sum(sizes), dtype=torch.int64, device=states.device)
    first, *others = torch.split(x, sizes, 1)
    torch.add(states[:, None], uniforms, out=first)
    for (slots, size), part in zip(gumbels, others, strict=True):
        if part.numel():
            begins = (states[:, None] + slots)[:, :, None]
            torch.add(begins, _candidates(size, states.device), out=part.view(len(states), -1, size))
    for shift, factor in FACTORS:
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(signed(factor))
    found = (x >> 40).bitwise_and_(2**24 - 1) * scales[:, :1]
    if len(uniforms) < sum(sizes):
        # the logarithms stay finite
        found[:, len(uniforms) :].clamp_(2.0**-25, 1 - 2.0**-24).log_().neg_().log_().mul_(scales[:, 1:])
    return found


@constant
def _uniforms(levels: int, deep: int, wide: int, live: bool, device: torch.device) -> Tensor:
    """Offsets of the uniforms of a block, in the order of `draw`."""
    parts = [_places(what, count, 1, device) for what, count in ((CHAIN, levels), (ACCEPT, levels), (BONUS, 1))]
    parts += [_places(NODES, deep - live, wide, device), _places(BEHIND, int(live), wide, device)]
    return torch.cat(parts)


@constant
def _places(what: int, levels: int, slots: int, device: torch.device) -> Tensor:
    """Offsets of the first candidates of slots, level by level: int64 [levels * slots]."""
    level, slot = torch.arange(levels, device=device)[:, None], torch.arange(slots, device=device)
    return ((((what << 16) + (level << 8) + slot << 20) + 1) * signed(GAMMA)).flatten()


@constant
def _candidates(count: int, device: torch.device) -> Tensor:
    """Offsets of a slot's candidates from the first."""
    return torch.arange(count, device=device) * signed(GAMMA)


def _hash(value: int) -> int:
    """SplitMix64's number behind a state."""
    value = (value + GAMMA) % 2**64
    for shift, factor in FACTORS:
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31


def signed(value: int) -> int:
    """The integer of the same 64 bits that has a sign."""
    return value - 2**64 if value >= 2**63 else value
