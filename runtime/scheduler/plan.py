"""What a step prefills. No torch."""

from __future__ import annotations

from typing import NamedTuple

from runtime.scheduler.request import Request


class PromptPiece(NamedTuple):
    """Tokens of a prompt that a step stores, from those that its row holds.

    Attributes:
        row: the request's.
        tokens: how many are stored.
        end: how many tokens the row then holds.
        both: whether in the auxiliary's cache as well as in the target's.
    """

    request: Request
    row: int
    tokens: int
    end: int
    both: bool

    @property
    def scored(self) -> bool:
        """Whether each of the tokens is scored, which takes longer."""
        return self.request.params.prompt_logprobs is not None


class Plan(NamedTuple):
    """What a step prefills.

    Attributes:
        pieces: what is prefilled, in this order.
        spare_tokens: prompt tokens that the step may prefill besides.
    """

    pieces: list[PromptPiece]
    spare_tokens: int
