"""What requests cost: figures of one request, and running totals over all of them. No torch.

One definition each, used everywhere: **block efficiency** is tokens per target pass; **acceptance rate** is accepted
tokens / drafted tokens, where a block drafts as many tokens as its path could have kept (its draft length), however
many beams it drew them from. Tokens behind the end of a text count as neither produced nor accepted.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counts:
    """What one request and all of them have in common.

    Attributes:
        reused_tokens: of them, those whose keys and values the target took from an earlier prompt.
        preemptions: times that it gave up its row because pages ran out, and computed its caches anew later.
        target_passes: forward passes of the target that scored a request (prefill not counted).
        thinking_passes, thinking_tokens: of these, the passes that began inside a thought, and the tokens they gave.
        drafted: tokens drafted along one path: the sum of the levels that the blocks' drafts had.
        accepted: drafted tokens that are part of the result.
        divergence_spent: how far `budget` moved the laws of its tokens from the target's, in total variation, added up;
            divided by `tokens` it is the mean.
        accepted_lengths: blocks with a draft, by how many of its tokens were accepted: at index 0 those with none.
        prefill_seconds, draft_seconds, score_seconds, commit_seconds: see the classes.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    tokens: int = 0
    target_passes: int = 0
    thinking_passes: int = 0
    thinking_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    divergence_spent: float = 0.0
    accepted_lengths: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    score_seconds: float = 0.0
    commit_seconds: float = 0.0

    def add_seconds(self, draft: float, score: float, commit: float) -> None:
        self.draft_seconds += draft
        self.score_seconds += score
        self.commit_seconds += commit

    def add(self, drafted: int, accepted: int, tokens: int, spent: float, thinking: bool) -> None:
        """Count what a block gave one row, by how much it moved laws, and whether it began inside a thought."""
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens
        self.target_passes += 1
        self.divergence_spent += spent
        self.thinking_tokens += tokens * thinking
        self.thinking_passes += thinking
        if drafted:
            self.accepted_lengths += [0] * (accepted + 1 - len(self.accepted_lengths))
            self.accepted_lengths[accepted] += 1

    @property
    def block_efficiency(self) -> float:
        return self.tokens / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 without a draft."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def to_dict(self) -> dict[str, Any]:
        own = self.__dict__ | {"block_efficiency": self.block_efficiency, "acceptance_rate": self.acceptance_rate}
        return {name: value.to_dict() if isinstance(value, Histogram) else value for name, value in own.items()}


@dataclass
class Statistics(Counts):
    """What one request cost.

    Attributes:
        queue_seconds: from submission until a row was free.
        prefill_seconds: steps that stored this prompt's keys and values, of both models, before its first block.
        draft_seconds, score_seconds, commit_seconds: of the blocks this request took part in, shared by the batch:
            drafting, with what of its text the auxiliary reads late; the target's pass; and everything after it
            (acceptance, cache, text).
        first_token_seconds: from submission to the first token; None before.
        total_seconds: from submission to the end; None before.
    """

    queue_seconds: float = 0.0
    first_token_seconds: float | None = None
    total_seconds: float | None = None


@dataclass
class Histogram:
    """Counts of values by upper bound, as Prometheus keeps them (but not cumulated).

    Attributes:
        bounds: upper bounds, inclusive, ascending; one more bucket holds what is above.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def to_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum, "count": sum(self.counts)}


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LENGTHS = (*range(17), 24, 32, 48, 64)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass
class Totals(Counts):
    """Running totals of a loop since it began; plain numbers that only grow, and histograms.

    Attributes:
        turns: decoding blocks, each of one or more rows.
        prefill_seconds, draft_seconds, score_seconds, commit_seconds: sums over blocks, each counted once.
        unrecorded: on a GPU, blocks that were not launched as a CUDA graph, by reason.
        queue, first_token, total: seconds a request.
        per_token: seconds between a request's tokens, its mean after the first.
        prompt, output: tokens a request.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0))
    turns: int = 0
    unrecorded: dict[str, int] = field(default_factory=dict)
    queue: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    total: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    per_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prompt: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def ended(self, reason: str, s: Statistics) -> None:
        self.requests[reason] += 1
        self.prompt_tokens += s.prompt_tokens
        self.reused_tokens += s.reused_tokens
        self.preemptions += s.preemptions
        self.prompt.add(s.prompt_tokens)
        self.output.add(s.tokens)
        if s.first_token_seconds is not None:
            self.queue.add(s.queue_seconds)
            self.first_token.add(s.first_token_seconds)
            if s.total_seconds is not None:
                self.total.add(s.total_seconds)
                if s.tokens > 1:
                    self.per_token.add((s.total_seconds - s.first_token_seconds) / (s.tokens - 1))
