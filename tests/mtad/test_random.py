"""The numbers of a block: SplitMix64 as published, the same alone and in any batch, uniform, none used twice."""

from __future__ import annotations

import numpy as np
import pytest

from mtad.random import hash_word
from tests.support.chi_square import fit
from tests.support.noise import draw_noise

WORD = 2**64 - 1
PUBLISHED = [
    *(6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431),
    16408922859458223821,
]
"""The first outputs of the authors' implementation for the seed 1234567."""


def split_mix(state: int) -> int:
    """SplitMix64's output behind a state, in Python's integers."""
    z = (state + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & WORD
    return z ^ z >> 31


def by_definition(seed: int, block: int, kind: int, level: int, slot: int) -> float:
    """A number: the highest 53 bits of an entry of the sequence that begins at a hash of seed and block."""
    start = split_mix((split_mix(seed) + block) & WORD)
    place = (kind << 16) + level * 256 + slot
    return (split_mix((start + place * 0x9E3779B97F4A7C15) & WORD) >> 11) / 2**53


def hashed(state: int) -> int:
    word = np.array([state], np.uint64)
    hash_word(word)
    return int(word[0])


def test_the_hash_is_split_mix_as_published() -> None:
    states = [(1234567 + at * 0x9E3779B97F4A7C15) & WORD for at in range(5)]
    assert [split_mix(state) for state in states] == PUBLISHED
    assert [hashed(state) for state in states] == PUBLISHED
    for state in (0, 1, 2**63 - 1, 2**63, WORD):
        assert hashed(state) == split_mix(state)


@pytest.mark.parametrize("key", [(0, 0), (0, 1), (1, 0), (2**63 - 1, 10**6), (1234567, 3)])
def test_every_number_is_the_one_of_its_place(key: tuple[int, int]) -> None:
    noise = draw_noise([key], 128, 64)
    for level in (0, 1, 5, 127):
        for slot in (0, 1, 7, 63):
            assert noise.draft[0, level, slot] == by_definition(*key, 0, level, slot)
            assert noise.accept[0, level, slot] == by_definition(*key, 1, level, slot)
    assert noise.bonus[0] == by_definition(*key, 2, 0, 0)


def test_a_rows_numbers_depend_neither_on_the_batch_nor_on_the_largest_draft_in_it() -> None:
    keys = [(7, 0), (7, 1), (2**62, 5), (0, 0)]
    together = draw_noise(keys, 9, 8)
    for row, key in enumerate(keys):
        for draft_len, width in ((1, 1), (4, 3), (9, 8)):
            alone = draw_noise([key], draft_len, width)
            assert np.array_equal(alone.draft[0], together.draft[row, :draft_len, :width])
            assert np.array_equal(alone.accept[0], together.accept[row, :draft_len, :width])
            assert alone.bonus[0] == together.bonus[row]
    assert draw_noise([(7, 0)], 0, 0).bonus[0] == together.bonus[0]


def test_numbers_are_uniform_and_neighbours_independent() -> None:
    noise = draw_noise([(seed, block) for seed in range(50) for block in range(20)], 8, 4)
    for numbers in (noise.draft, noise.accept, noise.bonus):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert fit(np.bincount((numbers.ravel() * 64).astype(int), minlength=64)) > 1e-4
    flat = np.concatenate([noise.draft.reshape(1000, -1), noise.accept.reshape(1000, -1), noise.bonus[:, None]], 1)
    bins = (flat * 8).astype(int)
    for along in (bins[:, :-1] * 8 + bins[:, 1:], bins[:-1] * 8 + bins[1:]):
        assert fit(np.bincount(along.ravel(), minlength=64)) > 1e-4
