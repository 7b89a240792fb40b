"""How many prompt tokens a step prefills beside the requests that run. No torch."""

from __future__ import annotations

SHARE = 0.25
"""Part of a block's time that a step may spend on prompts beside it, for each row that stands empty."""

MIN_TOKENS = 16
"""Fewest tokens of a step for each such row, so that prompts join in the end."""

BESIDE_SECONDS = 0.03
"""Prompts in a step take about so long at most beside running requests, or as long as their block if that is longer."""


class PrefillBudget:
    """Chunked prefill that adapts to the machine: how long running requests wait for prompts follows a block's time.

    The more rows stand empty, the longer they wait: a block of few rows takes nearly as long as one of many.

    Seconds of a block, by number of rows, and of a prompt's token are running means over the latest steps. Blocks of a
    number that was not seen yet take what those of the nearest one do.

    Args:
        most: tokens of a step beside which nothing runs, or of which nothing is known yet.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._block_seconds: dict[int, float] = {}
        self._token_seconds = 0.0

    def tokens(self, rows: int, empty: int = 1) -> int:
        """Prompt tokens of the next step, beside which so many rows run; requests wait for `empty` free ones."""
        nearest = min(self._block_seconds, key=lambda known: abs(known - rows), default=0)
        if not rows or not nearest or not self._token_seconds:
            return self.most
        block = self._block_seconds[nearest]
        share = max(MIN_TOKENS, int(SHARE * block / self._token_seconds))
        longest = max(MIN_TOKENS, int(max(BESIDE_SECONDS, block) / self._token_seconds))
        return min(self.most, longest, max(1, empty) * share)

    def observe(self, tokens: int, rows: int, seconds: float) -> None:
        """Learn from a step that prefilled some tokens and ran a block of some rows."""
        block = self._block_seconds.get(rows, 0.0)
        if not tokens and rows:
            self._block_seconds[rows] = _mean(block, seconds)
        elif tokens and (block or not rows):
            self._token_seconds = _mean(self._token_seconds, max(0.0, seconds - block) / tokens)


def _mean(before: float, value: float) -> float:
    return before + 0.2 * (value - before) if before else value
