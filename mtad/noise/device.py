"""The noise of a block, computed where the block runs, by integer operations that a CUDA graph can hold.

The host's (`mtad.noise.host`) draws ahead of a block. For a whole vocabulary that takes longer than the block, so
on a GPU every number is a hash of its key and its place: number `place` of the generator SplitMix64 (Steele, Lea and
Flood, doi:10.1145/2660193.2660195), begun at a hash of (seed, block). So what a row draws depends on nothing else in
the batch. The two generators draw different numbers, and the logarithms' last bits may differ between devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtad.noise.host import LevelNoise, Noise, gumbel_noise, node_noise
from mtad.ops import constant
from mtad.rows import Shape

GAMMA = 0x9E3779B97F4A7C15
FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and multipliers of SplitMix64. Its last shift changes none of the bits that are used."""

CHAIN, ACCEPT, BONUS, NODES, BEHIND, GUMBEL = range(6)
"""What a number is for; BEHIND is for the nodes of the level behind a row's last one."""


def begin(seed: int, block: int) -> int:
    """Where the numbers of a request's block begin: `states` of `draw`, as a signed integer of 64 bits."""
    return _signed(_hash(_hash(seed) + block))


def scale(temperature: float) -> tuple[float, float]:
    """A row of `scales` of `draw`: at temperature 0 all its noise is 0."""
    return (2.0**-24, -1.0) if temperature else (0.0, 0.0)


def draw(states: Tensor, scales: Tensor, shape: Shape) -> Noise:
    """The noise of a block of R rows.

    Args:
        states: int64 [R], `begin` of each row's key.
        scales: float32 [R, 2], `scale` of each row's temperature.
        shape: of the batch's drafts; a row of a smaller draft draws what it would draw alone.
    """
    rows, levels, width, k = len(states), shape.draft_len, shape.width, gumbel_noise(shape)
    uniforms = _uniforms(levels, *node_noise(shape), shape.live, states.device)
    count = len(uniforms)
    x = torch.empty(rows, count + levels * width * k, dtype=torch.int64, device=states.device)
    torch.add(states[:, None], uniforms, out=x[:, :count])
    if has_gumbel := levels * width * k > 0:
        slots = states[:, None] + _places(GUMBEL, levels, width, states.device)
        torch.add(slots[:, :, None], _candidates(k, states.device), out=x[:, count:].view(rows, -1, k))
    for shift, factor in FACTORS:
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(_signed(factor))
    numbers = (x >> 40).bitwise_and_(2**24 - 1) * scales[:, :1]
    uniform, gumbel = numbers[:, :count], numbers[:, count:]
    if has_gumbel:
        # the logarithms stay finite
        gumbel.clamp_(2.0**-25, 1 - 2.0**-24).log_().neg_().log_().mul_(scales[:, 1:])
    gumbel = gumbel.reshape(rows, levels, width, k)
    chain, accept, nodes = uniform[:, :levels], uniform[:, levels : 2 * levels], uniform[:, 2 * levels + 1 :]
    return Noise(
        tuple(map(LevelNoise, chain.unbind(1), gumbel.unbind(1), gumbel[..., :0].unbind(1))),
        accept,
        uniform[:, 2 * levels],
        nodes,
    )


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
    return ((((what << 16) + (level << 8) + slot << 20) + 1) * _signed(GAMMA)).flatten()


@constant
def _candidates(count: int, device: torch.device) -> Tensor:
    """Offsets of a slot's candidates from the first."""
    return torch.arange(count, device=device) * _signed(GAMMA)


def _hash(value: int) -> int:
    """SplitMix64's number behind a state."""
    value = (value + GAMMA) % 2**64
    for shift, factor in FACTORS:
        value = (value ^ value >> shift) * factor % 2**64
    return value ^ value >> 31


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
