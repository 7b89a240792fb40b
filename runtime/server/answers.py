"""Pieces of a stream to OpenAI's objects: whole answers and chunks, both kinds of request."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.async_llm import Piece
from runtime.server.bodies import Body, ChatBody, CompletionBody
from runtime.server.tokens import TokenNames
from runtime.statistics import Statistics


@dataclass
class Origins:
    """Which characters of a choice came from accepted drafts; text may lag behind its tokens.

    Attributes:
        ends: of each token whose text has not been shown: where it begins, and its origin.
        shown: characters shown so far.
    """

    begun: deque[tuple[int, str]] = field(default_factory=deque)
    shown: int = 0

    def spans(self, piece: Piece) -> list[tuple[str, int]]:
        """The piece's text as (origin, characters), origins `accepted` and `bonus`, adding up to its length."""
        for number, offset in enumerate(piece.offsets):
            self.begun.append((offset, "accepted" if number < piece.accepted else "bonus"))
        end = self.shown + len(piece.text)
        spans: list[tuple[str, int]] = []
        while self.shown < end:
            while len(self.begun) > 1 and self.begun[1][0] <= self.shown:
                self.begun.popleft()
            until = min(self.begun[1][0], end) if len(self.begun) > 1 else end
            origin = self.begun[0][1]
            if spans and spans[-1][0] == origin:
                spans[-1] = origin, spans[-1][1] + until - self.shown
            else:
                spans.append((origin, until - self.shown))
            self.shown = until
        return spans


def usage(prompts: list[list[int]], n: int, statistics: Mapping[int, Statistics]) -> dict[str, Any]:
    """OpenAI's usage and, under `mtad`, what the drafts did.

    Args:
        prompts: of each choice.
        n: choices a prompt; a prompt counts once, with what its first choice reused.
        statistics: by choice.
    """
    total = Statistics()
    for one in statistics.values():
        total.tokens += one.tokens
        total.target_passes += one.target_passes
        total.drafted += one.drafted
        total.accepted += one.accepted
    prompt = sum(len(ids) for ids in prompts[::n])
    reused = sum(one.reused_tokens for index, one in statistics.items() if index % n == 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": total.tokens,
        "total_tokens": prompt + total.tokens,
        "prompt_tokens_details": {"cached_tokens": reused},
        "mtad": {
            "acceptance_rate": total.acceptance_rate,
            "block_efficiency": total.block_efficiency,
            "drafted_tokens": total.drafted,
            "accepted_tokens": total.accepted,
            "target_passes": total.target_passes,
        },
    }


class Answer:
    """The objects of one request.

    Args:
        body: the request.
        prompts, seeds: of each choice.
        n: choices a prompt.
        echoes: text to repeat before each prompt's choices, or none.
        names: of tokens, prepared if the request wants log-probabilities.
        fingerprint: of engines and software.
    """

    def __init__(
        self,
        body: Body,
        prompts: list[list[int]],
        seeds: list[int],
        n: int,
        echoes: list[str],
        names: TokenNames,
        fingerprint: str,
    ) -> None:
        self._body, self._prompts, self._seeds, self._n, self._names = body, prompts, seeds, n, names
        self._chat = isinstance(body, ChatBody)
        self._top = body.alternatives
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._echoes = echoes
        self._begun: set[int] = set()
        self._origins = [Origins() for _ in prompts]
        self.statistics: dict[int, Statistics] = {}
        kind = "chat.completion" if self._chat else "text_completion"
        self._frame = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": fingerprint,
        }
        self._chunk_frame = {**self._frame, "object": f"{kind}.chunk" if self._chat else kind}
        self._usage_field = {"usage": None} if body.stream_options and body.stream_options.include_usage else {}
        self.usage_wanted = bool(self._usage_field)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """What a piece adds."""
        first = piece.index not in self._begun
        choice = self._choice(piece, first)
        content = choice.pop("text")
        if self._chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": content}
        else:
            choice["text"] = content
        extension: dict[str, Any] = {
            "drafted": piece.drafted,
            "accepted": piece.accepted,
            "tokens": len(piece.token_ids),
            "origins": self._origins[piece.index].spans(piece),
        }
        if piece.statistics:
            extension |= self._ending(piece)
        choice["mtad"] = extension
        return {**self._chunk_frame, "choices": [choice], **self._usage_field}

    def last_chunk(self) -> dict[str, Any]:
        """The chunk that has the usage and no choice."""
        return {**self._chunk_frame, "choices": [], "usage": self.usage}

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """All of it at once."""
        by_choice: dict[int, list[Piece]] = {index: [] for index in range(len(self._prompts))}
        for piece in pieces:
            by_choice[piece.index].append(piece)
        choices = []
        for some in by_choice.values():
            joined = Piece(
                text="".join(piece.text for piece in some),
                token_ids=[token for piece in some for token in piece.token_ids],
                logprobs=[value for piece in some for value in piece.logprobs],
                top_logprobs=[top for piece in some for top in piece.top_logprobs],
                offsets=[offset for piece in some for offset in piece.offsets],
                index=some[-1].index,
                finish_reason=some[-1].finish_reason,
                statistics=some[-1].statistics,
            )
            choice = self._choice(joined, True)
            content = choice.pop("text")
            if self._chat:
                choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            else:
                choice["text"] = content
            choices.append(choice | {"mtad": self._ending(joined)})
        return {**self._frame, "choices": choices, "usage": self.usage}

    @property
    def usage(self) -> dict[str, Any]:
        """What the choices that have ended cost."""
        return usage(self._prompts, self._n, self.statistics)

    def _choice(self, piece: Piece, first: bool) -> dict[str, Any]:
        """What the shapes share; `text` is to be put where the shape has it."""
        echo = self._echoes[piece.index // self._n] if first and self._echoes else ""
        choice = {
            "index": piece.index,
            "text": echo + piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if first:
                choice["prompt_token_ids"] = self._prompts[piece.index]
        self._begun.add(piece.index)
        if piece.statistics:
            self.statistics[piece.index] = piece.statistics
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._top is None:
            return None
        if self._chat:
            return {
                "content": self._names.chat(piece.token_ids, piece.logprobs, piece.top_logprobs),
                "refusal": None,
            }
        return self._names.completion(piece.token_ids, piece.logprobs, piece.top_logprobs, piece.offsets)

    def _ending(self, piece: Piece) -> dict[str, Any]:
        assert piece.statistics is not None
        return {"seed": self._seeds[piece.index], "statistics": piece.statistics.to_dict()}


def wants_echo(body: Body) -> bool:
    """Whether prompts are repeated."""
    return isinstance(body, CompletionBody) and body.echo
