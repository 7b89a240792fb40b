"""The random numbers of a block: one counter-based generator per request.

Number `place` of a block is a hash of its key and its place: SplitMix64 (Steele, Lea and Flood,
doi:10.1145/2660193.2660195), begun at a hash of the request's seed and the block's index. So what a row draws depends
neither on the rest of the batch nor on where the block runs: the host draws the numbers for every engine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.compiled import compiled

Reals = npt.NDArray[np.float64]

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS, TOP_BITS = (np.uint64(30), np.uint64(27), np.uint64(31)), np.uint64(11)
"""SplitMix64's constants; the highest 53 bits make a number."""

DRAFT, ACCEPT, BONUS = range(3)
"""What a number is for."""


class Noise(NamedTuple):
    """Uniform numbers from [0, 1), multiples of 2**-53: 24 bits pass over tokens below 6e-8.

    Attributes:
        draft: float64 [R, D, W], for the token of each slot of each level of a draft; a chain uses slot 0.
        accept: float64 [R, D, W], for the acceptance of each node; a chain uses slot 0, and the first number of all
            draws the path of `joint_sample`.
        bonus: float64 [R], for the token that the target adds.
    """

    draft: Reals
    accept: Reals
    bonus: Reals

    @classmethod
    def empty(cls, rows: int, draft_len: int, width: int) -> Noise:
        """Memory for the numbers of R rows; those of a draft that is smaller than the batch's largest are as alone."""
        draft, accept = np.empty((2, rows, draft_len, width))
        return cls(draft, accept, np.empty(rows))


@compiled
def fill_noise(keys, noise):
    """Write the numbers of keys uint64 [R, 2], seed and block; each purpose, level and slot has a place of its own."""
    _, levels, slots = noise.draft.shape
    size = levels * slots
    places, start = np.empty(2 * size + 1, np.uint64), np.empty(1, np.uint64)  # arrays wrap around in silence
    for kind in (DRAFT, ACCEPT):
        for at in range(size):
            places[kind * size + at] = (kind << 16) + at // slots * 256 + at % slots
    places[2 * size] = BONUS << 16
    places *= GAMMA
    for r in range(len(keys)):
        start[0] = keys[r, 0]
        hash_word(start)
        start += keys[r, 1]
        hash_word(start)
        state = places + start
        hash_word(state)
        numbers = (state >> TOP_BITS) * 2.0**-53
        noise.draft[r] = numbers[:size].reshape(levels, slots)
        noise.accept[r] = numbers[size : 2 * size].reshape(levels, slots)
        noise.bonus[r] = numbers[2 * size]


@compiled
def hash_word(state):
    """Replace states, uint64 [n], by SplitMix64's numbers behind them."""
    state += GAMMA
    state ^= state >> SHIFTS[0]
    state *= MULTIPLIERS[0]
    state ^= state >> SHIFTS[1]
    state *= MULTIPLIERS[1]
    state ^= state >> SHIFTS[2]
