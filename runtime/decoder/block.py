"""What a block is given and what it gives: one record each, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mtad.params import DecodingParams
from runtime.constraints.constraint import Constraint
from runtime.decoder.draft_details import TokenDetails


class BlockInput(NamedTuple):
    """The rows of a block, rows 0 .. R-1 of both caches.

    Attributes:
        params: of each row, as far as this block goes: a draft may be shorter or narrower than the request's.
        last_two: the last two committed tokens of each row; the last is the root of its tree.
        committed: number of committed tokens of each row.
        keys: (seed, block index) of each row, which its random numbers depend on.
        constraints: of each row; None for rows that ask for nothing.
        is_kept: of each row, whether what it gets is kept; else it is run idly.
        drafts: of each row whose draft is looked up, its continuations, all of one length; () for no row at all.
    """

    params: Sequence[DecodingParams]
    last_two: Sequence[tuple[int, int]]
    committed: Sequence[int]
    keys: Sequence[tuple[int, int]]
    constraints: Sequence[Constraint | None]
    is_kept: Sequence[bool]
    drafts: Sequence[Sequence[Sequence[int]]] = ()


class Block(NamedTuple):
    """The outcome of a block of R rows, as the output reads it.

    Attributes:
        given: the rows.
        tokens: of each row, the accepted tokens and then the target's own.
        log_probs: the target's log-probability of each, at temperature 1 without filters and constraints.
        drafted_levels: of each row, tokens of the longest path that was drafted.
        spent: how far `budget` moved the law of each token, in total variation; there may be more entries than tokens.
        finite: of each row, whether the models' logits were numbers wherever they were looked at.
        logits_of: the target's logits at each token of a row, float32 [len(tokens[row]), V], until the next block.
        details: of each token of rows that ask for `draft_details`; of other rows empty.
        began, drafted, scored: `time.perf_counter()` when the block began, when the draft was there, and when it was
            scored. Where a device runs the block as a whole: the second is when it was launched, the third when its
            result was there.
    """

    given: BlockInput
    tokens: list[list[int]]
    log_probs: list[list[float]]
    drafted_levels: list[int]
    spent: list[list[float]]
    finite: list[bool]
    logits_of: Callable[[int], npt.NDArray[np.float32]]
    details: list[list[TokenDetails]]
    began: float
    drafted: float
    scored: float


class BlockRunner(Protocol):
    """Runs blocks: draft, score, accept, commit. Both caches then hold what was accepted."""

    def run(self, given: BlockInput) -> Block:
        """Run one block."""
