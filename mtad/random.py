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

Floats = npt.NDArray[np.float32]

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS, TOP_BITS = (np.uint64(30), np.uint64(27), np.uint64(31)), np.uint64(40)
"""SplitMix64's constants; the highest 24 bits make a number."""

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

    @classmethod
    def empty(cls, rows: int, draft_len: int, width: int) -> Noise:
        """Memory for the numbers of R rows; those of a draft that is smaller than the batch's largest are as alone."""
        draft, accept = np.empty((2, rows, draft_len, width), np.float32)
        return cls(draft, accept, np.empty(rows, np.float32))


@compiled
def fill_noise(keys, noise):
    """Write the numbers of keys uint64 [R, 2], seed and block; each purpose, level and slot has a place of its own."""
    state = np.empty(1, np.uint64)  # an array, because those wrap around in silence
    for r in range(len(keys)):
        state[0] = keys[r, 0]
        hash_word(state)
        state += keys[r, 1]
        hash_word(state)
        start = state[0]
        for level in range(noise.draft.shape[1]):
            for slot in range(noise.draft.shape[2]):
                noise.draft[r, level, slot] = number_at(state, start, DRAFT, level, slot)
                noise.accept[r, level, slot] = number_at(state, start, ACCEPT, level, slot)
        noise.bonus[r] = number_at(state, start, BONUS, 0, 0)


@compiled
def number_at(state, start, kind, level, slot):
    """A number from [0, 1), of what follows `start` in SplitMix64's sequence, at a place of its own."""
    state[0] = (kind << 16) + level * 256 + slot
    state *= GAMMA
    state += start
    hash_word(state)
    return np.float32(state[0] >> TOP_BITS) * np.float32(2.0**-24)


@compiled
def hash_word(state):
    """Replace a state, uint64 [1], by SplitMix64's number behind it."""
    state += GAMMA
    state ^= state >> SHIFTS[0]
    state *= MULTIPLIERS[0]
    state ^= state >> SHIFTS[1]
    state *= MULTIPLIERS[1]
    state ^= state >> SHIFTS[2]
