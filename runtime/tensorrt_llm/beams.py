"""Beams that an executor found, as levels of a draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from mtad.draft import Level


class Path(NamedTuple):
    """One beam: its tokens, the joint log-likelihood up to each of them, and whether its text has ended."""

    tokens: tuple[int, ...]
    log_q: tuple[float, ...]
    ended: bool = False

    @classmethod
    def of(cls, tokens: Sequence[int], log_probs: Sequence[float]) -> Path:
        """A beam from each token's own log-probability."""
        return cls(tuple(tokens), tuple(accumulate(log_probs)))

    def known(self, vocab_size: int) -> Path:
        """The tokens before the first that may not be drafted here: of probability 0, or an id of padding."""
        each = zip(self.tokens, self.log_q, strict=True)
        odd = (at for at, (token, log_q) in enumerate(each) if token >= vocab_size or log_q == -math.inf)
        count = next(odd, len(self.tokens))
        return Path(self.tokens[:count], self.log_q[:count])

    def cut(self, ends: Sequence[bool] | None, log_confidence: float) -> Path:
        """The beam up to the first token that ends a text, or at which its likelihood falls below `log_confidence`.

        Args:
            ends: by token id; None where texts go on.
            log_confidence: see `mtad.rows.Rows`.
        """
        for depth, (token, log_q) in enumerate(zip(self.tokens, self.log_q, strict=True), 1):
            ended = ends is not None and ends[token]
            if log_q < log_confidence or ended:
                return Path(self.tokens[:depth], self.log_q[:depth], ended)
        return self


def levels_of(rows: Sequence[Sequence[Path]], draft_len: int, width: int) -> list[Level]:
    """Levels of a draft [R, width] from each row's beams, as `mtad.draft.expand` makes them.

    Beams that begin alike share nodes. A text that has ended is carried down with the weight it has.

    Args:
        rows: of each row, at most `width` beams, the likeliest first, none of them empty; none of which goes on where
            another one ended.
        draft_len: levels.
        width: slots a level.
    """
    count = len(rows)
    levels = []
    above: list[dict[tuple[int, ...], int]] = [{(): 0} for _ in rows]
    paths = torch.zeros(count, 1, draft_len, dtype=torch.int64)
    for depth in range(1, draft_len + 1):
        tokens = torch.zeros(count, width, dtype=torch.int64)
        parents = torch.zeros_like(tokens)
        log_q = torch.full((count, width), -math.inf)
        drafted = torch.zeros_like(tokens, dtype=torch.bool)
        growing, ended = drafted.clone(), drafted.clone()
        for row, beams in enumerate(rows):
            slots: dict[tuple[int, ...], int] = {}
            for beam in beams:
                prefix = beam.tokens[:depth]
                carried = depth > len(beam.tokens)
                if prefix in slots or (carried and not beam.ended):
                    continue
                slot = slots[prefix] = len(slots)
                tokens[row, slot] = prefix[-1]
                parents[row, slot] = above[row][prefix if carried else prefix[:-1]]
                log_q[row, slot] = beam.log_q[len(prefix) - 1]
                drafted[row, slot] = not carried
                growing[row, slot] = depth < len(beam.tokens)
                ended[row, slot] = beam.ended and depth >= len(beam.tokens)
            above[row] = slots
        paths = paths.gather(1, parents[:, :, None].expand(-1, -1, draft_len)).clone()
        paths[:, :, depth - 1] = torch.arange(width)
        levels.append(Level(tokens, parents, log_q, drafted, growing, ended, paths))
    return levels
