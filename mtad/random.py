"""The random numbers of a block: one counter-based generator per request.

Number `place` of a block is a hash of its key and its place: SplitMix64 (Steele, Lea and Flood,
doi:10.1145/2660193.2660195), begun at a hash of the request's seed and the block's index. So what a row draws depends
neither on the rest of the batch nor on where the block runs: the host draws the numbers for every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

GAMMA = 0x9E3779B97F4A7C15
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and multipliers of SplitMix64."""

DRAFT, ACCEPT, BONUS = range(3)
"""What a number is for."""


class Noise(NamedTuple):
    """Uniform numbers from [0, 1), multiples of 2**-24, which float32 holds.

    Attributes:
        draft: float32 [R, D, W], for the token of each slot of each level of a draft; a chain uses slot 0.
        accept: float32 [R, D, W], for the acceptance of each node; a chain uses slot 0, and the first number of all
            draws the path of `joint_sample`.
        bonus: float32 [R], for the token that the target adds.
    """

    draft: Floats
    accept: Floats
    bonus: Floats


def draw_noise(keys: Sequence[tuple[int, int]], draft_len: int, width: int) -> Noise:
    """The numbers of a block.

    Args:
        keys: (seed, block index) of each of R rows.
        draft_len, width: D and W, of the largest draft of the batch; a smaller one has the same numbers as alone.
    """
    numbers = draft_len * width
    states = np.array([hash_word(hash_word(seed) + block) for seed, block in keys], dtype=np.uint64)
    x = states[:, None] + _places(draft_len, width)
    for shift, factor in MIXERS:
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    found = (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    shape = len(keys), draft_len, width
    return Noise(found[:, :numbers].reshape(shape), found[:, numbers:-1].reshape(shape), found[:, -1].copy())


def hash_word(value: int) -> int:
    """SplitMix64's number behind a state, a word of 64 bits."""
    value = (value + GAMMA) % 2**64
    for shift, factor in MIXERS:
        value = (value ^ value >> shift) * factor % 2**64
    return value


@lru_cache(maxsize=256)
def _places(draft_len: int, width: int) -> Words:
    """Where the numbers lie behind a state: each purpose, level and slot has a place of its own."""
    level, slot = np.arange(draft_len, dtype=np.uint64)[:, None], np.arange(width, dtype=np.uint64)
    inner = (level * np.uint64(256) + slot).ravel()
    kinds = [np.uint64(kind << 16) + inner for kind in (DRAFT, ACCEPT)]
    places = np.concatenate([*kinds, np.array([BONUS << 16], dtype=np.uint64)]) + np.uint64(1)
    return places * np.uint64(GAMMA)
