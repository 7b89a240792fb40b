"""What a step prefills, and what the scheduler asks of the caches to find out. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from runtime.scheduler.request import Request


class RowMemory(Protocol):
    """What the scheduler asks of the caches' rows."""

    def fits(self, requests: Sequence[Request], lookahead: int) -> bool:
        """Whether there is memory for all tokens of requests, by row, and for so many columns behind those of each."""

    def stored(self, request: Request, both: bool, running: Sequence[Request], pieces: Sequence[PromptPiece]) -> int:
        """Leading tokens of a request that need not be prefilled.

        Args:
            both: in both caches, not in the target's only.
            running: requests whose rows may be copied from, by row.
            pieces: what is going to be prefilled before.
        """

    def move(self, request: Request, source: int, to: int) -> None:
        """Copy a request's columns to another row."""

    def release(self, row: int) -> None:
        """Release a row's memory."""


class PromptPiece(NamedTuple):
    """Tokens of a prompt that a step stores, from those that its row holds.

    Attributes:
        row: the request's.
        end: how many tokens the row then holds.
        both: whether in the auxiliary's cache as well as in the target's.
    """

    request: Request
    row: int
    end: int
    both: bool


class Plan(NamedTuple):
    """What a step prefills.

    Attributes:
        pieces: what is prefilled, in this order.
        spare_tokens: prompt tokens that the step may prefill besides.
    """

    pieces: list[PromptPiece]
    spare_tokens: int
