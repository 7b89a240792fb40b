"""How many prompt tokens a step prefills beside the requests that run. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

SHARE = 0.25
"""Part of a block's time that a step may spend on prompts beside it, for each row that stands empty."""

MIN_TOKENS = 16
"""Fewest tokens of a step for each such row, so that prompts join in the end. A power of two."""

SAME_TIME = 1.25
"""Pieces of a prompt that take up to so many times as long as the shortest take the same time."""

BESIDE_SECONDS = 0.03
"""Prompts in a step take about so long at most beside running requests, or as long as their block if that is longer."""


class PrefillBudget:
    """Chunked prefill that adapts to the machine: how long running requests wait for prompts follows a block's time.

    The more rows stand empty, the longer they wait: a block of few rows takes nearly as long as one of many.

    Seconds of a block, by number of rows, of a prompt's token, and of a piece, by tokens to a power of two, are running
    means over the latest steps. Blocks of a number that was not seen yet take what those of the nearest one do.

    Args:
        most: tokens of a step beside which nothing runs, or of which nothing is known yet.
    """

    def __init__(self, most: int) -> None:
        self.most, self.piece_floor = most, 0
        self._block_seconds: dict[int, float] = {}
        self._token_seconds = 0.0
        self._piece_seconds: dict[int, float] = {}

    def _find_floor(self) -> int:
        """What a piece of a prompt counts as at least: the longest that takes hardly more than a short one; 0 for none.

        A GPU reads a model's weights, and a host launches its kernels, however few tokens there are. A size that is not
        known yet is tried if half of it is such a one, and quick. Neighbouring sizes may be of pieces nearly alike.
        """
        known = sorted(self._piece_seconds.items())
        quickest = min(self._piece_seconds.values(), default=0.0)
        same = [size for size, _ in itertools.takewhile(lambda one: one[1] <= SAME_TIME * quickest, known)]
        if same and 2 * same[-1] not in self._piece_seconds and quickest <= 2 * BESIDE_SECONDS:
            return min(self.most, 2 * same[-1])
        return min(self.most, same[-1]) if len(same) > 2 else 0

    def tokens(self, rows: int, empty: int = 1) -> int:
        """Prompt tokens of the next step, beside which so many rows run; requests wait for `empty` free ones."""
        nearest = min(self._block_seconds, key=lambda known: abs(known - rows), default=0)
        if not rows or not nearest or not self._token_seconds:
            return self.most
        block, floor = self._block_seconds[nearest], max(MIN_TOKENS, self.piece_floor)
        share = max(floor, int(SHARE * block / self._token_seconds))
        longest = max(floor, int(max(BESIDE_SECONDS, block) / self._token_seconds))
        return min(self.most, longest, max(1, empty) * share)

    def observe(self, tokens: int, rows: int, seconds: float, pieces: Sequence[int] = ()) -> None:
        """Learn from a step that prefilled some tokens and ran a block of some rows.

        Args:
            pieces: tokens of the pieces of prompts, if the step's seconds beyond those of its block are all theirs.
        """
        block = self._block_seconds.get(rows, 0.0)
        if not tokens and rows:
            self._block_seconds[rows] = _mean(block, seconds)
        elif tokens and (block or not rows):
            self._token_seconds = _mean(self._token_seconds, max(0.0, seconds - block) / tokens)
            if pieces and seconds > block > 0:
                size = 1 << (max(MIN_TOKENS, sum(pieces) // len(pieces)).bit_length() - 1)
                each = (seconds - block) / len(pieces)
                self._piece_seconds[size] = _mean(self._piece_seconds.get(size, 0.0), each)
                self.piece_floor = self._find_floor()


def _mean(before: float, value: float) -> float:
    return before + 0.2 * (value - before) if before else value
