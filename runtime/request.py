"""A request and what becomes of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mtad.params import DecodingParams

FinishReason = Literal["stop", "length"]


@dataclass
class Statistics:
    """What a request cost.

    Attributes:
        target_passes: forward passes of the target that scored this request (prefill not counted).
        drafted: tokens drafted along one path: draft_len x blocks.
        accepted: drafted tokens that are part of the result.
        tokens: tokens of the result.
        prefill_seconds: time spent storing the prompt's keys and values, both models.
        draft_seconds: time of the drafts this request took part in; shared by the rows of the batch.
        score_seconds: time of the target passes this request took part in; shared likewise.
    """

    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    score_seconds: float = 0.0

    @property
    def block_efficiency(self) -> float:
        """Tokens per target pass."""
        return self.tokens / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens / (draft_len x blocks); 0 without a draft."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def to_dict(self) -> dict[str, float]:
        """All figures, the derived ones included."""
        return {
            **self.__dict__,
            "block_efficiency": self.block_efficiency,
            "acceptance_rate": self.acceptance_rate,
        }


@dataclass
class Request:
    """One request in flight; owned by the scheduler, written by the loop only.

    Attributes:
        id: unique within the loop.
        prompt: token ids, at least one.
        params: validated parameters.
        seed: key of its random numbers (`params.seed`, or the one drawn for it).
        tokens: new tokens so far, end-of-sequence included.
        log_probs: the target's unprocessed log-probability of each.
        blocks: decoding blocks run; the second half of the noise key.
        text: decoded text of `tokens`, cut before a stop string.
        finish_reason: `stop` (end of sequence or stop string) or `length` (max_tokens); None while running.
    """

    id: int
    prompt: list[int]
    params: DecodingParams
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    blocks: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def committed(self) -> int:
        """Tokens of the sequence so far; the caches hold all of them but the last."""
        return len(self.prompt) + len(self.tokens)

    @property
    def last_two(self) -> tuple[int, int]:
        """The last two committed tokens; a sequence of one token repeats it."""
        tail = (self.prompt[-2:] + self.tokens)[-2:] if len(self.tokens) < 2 else self.tokens[-2:]
        return tail[0], tail[-1]


@dataclass(frozen=True)
class Result:
    """What the user gets.

    Attributes:
        text: the new text, without stop string and special tokens.
        token_ids: the new tokens; a final end-of-sequence token, or the tokens that completed a stop string, included.
        finish_reason: `stop` or `length`.
        logprobs: the target's log-probability of each token, at temperature 1 without filters.
        statistics: what it cost.
        seed: reproduces the result.
        prompt_token_ids: the prompt as it was run.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float]
    statistics: Statistics
    seed: int
    prompt_token_ids: list[int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**self.__dict__, "statistics": self.statistics.to_dict()}
