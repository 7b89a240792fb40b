"""A request and what becomes of it. No torch."""

from __future__ import annotations

import itertools
import operator
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from mtad.errors import Failed
from mtad.params import DecodingParams
from runtime.scheduler.statistics import Statistics
from runtime.scheduler.thoughts import Thoughts

if TYPE_CHECKING:
    from runtime.constraints.constraint import Constraint
    from runtime.constraints.follower import Grammar
    from runtime.decoder.draft_details import TokenDetails
    from runtime.output.detokenizer import Detokenizer
    from runtime.output.stream import Choice
    from runtime.speculation.lookup import Text

EXPECTED, CAUTION, RECENT = 0.8, 12, 64
"""How often a drafted token is accepted before anything was seen, for how many tokens that counts, and how many of the
last ones a mean remembers."""

Place = tuple[int, int]
"""-priority, and order of arrival."""
FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestFailed(Failed):
    """A request that ended because something broke under it; the cause is chained."""


class TokenScore(NamedTuple):
    """What the target says of a token of a prompt, at temperature 1 without filters, penalties, constraints.

    Attributes:
        rank: 1 if it is the likeliest, 2 if one is likelier, ..
        top_logprobs: as many of the likeliest tokens as were asked for, likeliest first: (token id, log-probability).
    """

    logprob: float
    rank: int
    top_logprobs: list[tuple[int, float]]


@dataclass
class Acceptance:
    """How often a drafted token is accepted where those before it were, by its place in the draft: recent means.

    Attributes:
        usual: rates assumed until it has seen its own; without it, each place starts from the rate of the place before,
            and the first from `EXPECTED`.
        accepted, tried: tokens at each place.
    """

    usual: Acceptance | None = None
    accepted: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)

    def add(self, accepted: int, drafted: int) -> None:
        """Learn from a draft; tokens behind the first rejected one say nothing."""
        counts, tried, kept = self.accepted, self.tried, 1 - 1 / RECENT
        for place in range(min(accepted + 1, drafted)):
            if place == len(tried):
                counts.append(0.0)
                tried.append(0.0)
            counts[place] = kept * counts[place] + (place < accepted)
            tried[place] = kept * tried[place] + 1

    def rates(self, longest: int) -> list[float]:
        """Of the first `longest` places."""
        usual, rates = self.usual.rates(longest) if self.usual else [], [EXPECTED]
        for place in range(longest):
            seen = self.tried[place] if place < len(self.tried) else 0.0
            count = self.accepted[place] if seen else 0.0
            rates.append((count + CAUTION * (usual[place] if usual else rates[-1])) / (seen + CAUTION))
        return rates[1:]

    def tokens(self, longest: int) -> list[float]:
        """Expected tokens of blocks with drafts of 0, 1, .. `longest` tokens: accepted ones and the bonus token."""
        reached = itertools.accumulate(self.rates(longest), operator.mul, initial=1.0)
        return list(itertools.accumulate(reached))


@dataclass(eq=False)
class Request:
    """One request in flight; owned by the scheduler, written by the loop only once it is queued.

    Attributes:
        id: unique within the loop.
        seed: key of its random numbers (`params.seed`, or the one drawn for it).
        index: which of the prompt's `n` choices it is.
        client: who asks; rows are shared out fairly among clients.
        salt: keys and values of the prompt are reused for prompts with the same salt only; 0 is common.
        choice: of one that is streamed, how much of it has gone to its stream.
        arrived: `time.perf_counter()` when it was made.
        place: in the queue, which it goes back to where it gives up its row.
        grammar: the compiled language of a constrained one.
        thoughts: follows its thoughts; None where no tags are known.
        tokens: new tokens so far, end-of-sequence included.
        log_probs: the target's unprocessed log-probability of each.
        top_log_probs: with `top_logprobs`, its likeliest alternatives at each token, (token, log-probability).
        details: with `draft_details`, how each token came about.
        prompt_scores: with `prompt_logprobs`, of each prompt token but the first; a prompt's choices share the list.
        blocks: decoding blocks run; the second half of the noise key.
        acceptance, draft_len: what automatic drafts go by, and how long they are; a fixed draft's have no meaning.
        detokenizer, constraint: of one that has begun and has not ended; no constraint where it asks for nothing.
        looked_up: its text, where drafts are looked up in it.
        target_cached, auxiliary_cached: leading columns of its row that are right in either cache.
        auxiliary_stored, auxiliary_seconds: tokens stored in the auxiliary's cache but by drafting, and what it took.
        text: decoded text of `tokens`, cut before a stop string.
        stable: leading characters of `text` that stay whatever follows: no stop string may still begin in them.
        offsets: characters of `text` before each token; behind its end for tokens that completed a stop string.
        finish_reason: `stop` (end of sequence or stop string), `length` (max_tokens), `cancelled` or `error`; None
            until it ends.
    """

    id: int
    prompt: list[int]
    params: DecodingParams
    seed: int
    index: int = 0
    priority: int = 0
    client: str = ""
    salt: int = 0
    choice: Choice | None = None
    arrived: float = field(default_factory=time.perf_counter)
    place: Place = (0, 0)
    grammar: Grammar | None = None
    thoughts: Thoughts | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    blocks: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    draft_len: int = 0
    detokenizer: Detokenizer | None = None
    constraint: Constraint | None = None
    looked_up: Text | None = None
    target_cached: int = 0
    auxiliary_cached: int = 0
    auxiliary_stored: int = 0
    auxiliary_seconds: float = 0.0
    text: str = ""
    stable: int = 0
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        self.statistics.prompt_tokens = len(self.prompt)

    @property
    def max_tokens(self) -> int:
        """Most new tokens; whoever made the request has said how many fit."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    def fail(self, error: Exception) -> None:
        self.finish_reason, self.error = "error", error

    @property
    def thinking(self) -> bool:
        return self.thoughts is not None and self.thoughts.inside

    @property
    def part_params(self) -> DecodingParams:
        """The parameters of the part that its next token belongs to: a thought, or the answer."""
        return self.params.thinking if self.thinking else self.params

    def split(self, start: int = 0, end: int | None = None) -> tuple[str, str]:
        """What of its text, between two characters, are thoughts, and what is the answer."""
        return self.thoughts.split(self.text, self.offsets, start, end) if self.thoughts else ("", self.text[start:end])

    @property
    def committed(self) -> int:
        """Tokens of the sequence so far; the caches hold all of them but the last."""
        return len(self.prompt) + len(self.tokens)

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.tokens)

    @property
    def cost(self) -> int:
        """Tokens that were computed for it so far, for the accounts of its client."""
        return self.committed - self.statistics.reused_tokens

    @property
    def last_two(self) -> tuple[int, int]:
        """The last two committed tokens; a sequence of one token repeats it."""
        tail = (self.prompt[-2:] + self.tokens)[-2:] if len(self.tokens) < 2 else self.tokens[-2:]
        return tail[0], tail[-1]


@dataclass(frozen=True)
class Output:
    """What came of a request: all of it, in a `Result`, or what one block added, in an `OutputDelta`.

    Attributes:
        text: the new text, without stop string and special tokens.
        reasoning, answer: of the text, what is inside thoughts and what is not, without the tags.
        token_ids: the new tokens; a final end-of-sequence token, or the tokens that completed a stop string, included.
        finish_reason: `stop` or `length`; `cancelled`, with what there was by then.
        logprobs: the target's log-probability of each token, at temperature 1 without filters, penalties, constraints.
        top_logprobs: with the parameter of that name, as many of the target's likeliest tokens at each, likeliest
            first: (token id, log-probability); else empty.
        details: with the parameter `draft_details`, how each token came about; else empty.
    """

    text: str
    reasoning: str
    answer: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    details: list[TokenDetails]
    statistics: Statistics | None
    index: int

    @classmethod
    def of_part(
        cls, request: Request, index: int, token: int = 0, start: int = 0, end: int | None = None, **others: Any
    ) -> Self:
        """Of the tokens from `token` on and the text between two characters; `others` are fields of its own."""
        reasoning, answer = request.split(start, end)
        return cls(
            text=request.text[start:end],
            reasoning=reasoning,
            answer=answer,
            token_ids=request.tokens[token:],
            finish_reason=request.finish_reason,
            logprobs=request.log_probs[token:],
            top_logprobs=request.top_log_probs[token:],
            details=request.details[token:],
            statistics=request.statistics if request.finish_reason else None,
            index=index,
            **others,
        )


@dataclass(frozen=True)
class Result(Output):
    """What the user gets.

    Attributes:
        prompt_logprobs: with the parameter of that name, what the target says of each prompt token but the first; else
            empty.
        index: which of the prompt's `n` choices it is.
        seed: reproduces the result, unless drafts followed the load or kept texts and its temperature was above 0.
    """

    finish_reason: FinishReason
    statistics: Statistics
    prompt_logprobs: list[TokenScore]
    seed: int
    prompt_token_ids: list[int]

    @classmethod
    def of(cls, request: Request) -> Result:
        """The result of a request that ended.

        Raises:
            RequestFailed: it ended by an error; the cause is chained.
        """
        assert request.finish_reason is not None, "the request has not ended"
        if request.finish_reason == "error":
            raise RequestFailed(f"request {request.id} failed: {request.error}") from request.error
        own: dict[str, Any] = {"seed": request.seed, "prompt_token_ids": request.prompt}
        return cls.of_part(request, request.index, prompt_logprobs=request.prompt_scores, **own)

    def to_dict(self) -> dict[str, Any]:
        scores = [score._asdict() for score in self.prompt_logprobs]
        details = [asdict(one) for one in self.details]
        return {**self.__dict__, "details": details, "prompt_logprobs": scores, "statistics": self.statistics.to_dict()}
