"""How much a text repeats itself: likely text that only says the same again is no better text."""

from __future__ import annotations

from collections.abc import Sequence

REPEATED_SPAN = 16
"""Tokens; a text in which a span this long comes again counts as repeating itself."""


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Different n-grams / n-grams of a text (distinct-n); None for fewer than n tokens."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def longest_repeat(tokens: Sequence[int]) -> int:
    """Tokens of the longest span that is in the text twice, perhaps overlapping; 0 if no token comes again."""
    low, high = 0, max(len(tokens) - 1, 0)
    while low < high:  # a repeated span's own spans are repeated too, so lengths can be halved
        middle = (low + high + 1) // 2
        spans = {tuple(tokens[at : at + middle]) for at in range(len(tokens) - middle + 1)}
        low, high = (middle, high) if len(spans) < len(tokens) - middle + 1 else (low, middle - 1)
    return low
