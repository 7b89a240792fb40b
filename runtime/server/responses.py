"""Pieces of a stream to OpenAI's objects: whole answers and chunks, both kinds of request."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from runtime.output.stream import Piece
from runtime.scheduler.statistics import Statistics
from runtime.server.logprobs import TokenNames
from runtime.server.schema import Body, ChatBody, CompletionBody


@dataclass
class Origins:
    """Which characters of a choice came from accepted drafts; text may lag behind its tokens.

    Attributes:
        begun: where text of an origin begins, as far as its text has not been shown: (character, origin).
        shown: characters shown so far.
    """

    begun: deque[tuple[int, str]] = field(default_factory=deque)
    shown: int = 0

    def spans(self, piece: Piece) -> list[tuple[str, int]]:
        """The piece's text as (origin, characters), origins `accepted` and `bonus`, adding up to its length."""
        begun, offsets, end = self.begun, piece.offsets, self.shown + len(piece.text)
        if piece.accepted:
            begun.append((offsets[0], "accepted"))
        if piece.accepted < len(offsets):
            begun.append((offsets[piece.accepted], "bonus"))
        spans: list[tuple[str, int]] = []
        while self.shown < end:
            while len(begun) > 1 and begun[1][0] <= self.shown:
                begun.popleft()
            until = min(begun[1][0], end) if len(begun) > 1 else end
            origin = begun[0][1]
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
        # no secret: asking the system for its randomness would give up the interpreter's lock, to the engine's thread
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{random.getrandbits(128):032x}"
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
        self.usage_wanted = bool(body.stream_options and body.stream_options.include_usage)
        # all chunks of an answer are the same but for the choice: they are put together around it
        self._head = b"data: " + to_json({**self._chunk_frame, "choices": []}).removesuffix(b"]}")
        self._tail = b'],"usage":null}\n\n' if self.usage_wanted else b"]}\n\n"

    def event(self, piece: Piece) -> bytes:
        """What a piece adds, as a server-sent event."""
        return b"%b%b%b" % (self._head, to_json(self._delta(piece)), self._tail)

    def last_events(self) -> bytes:
        """What ends a stream: the chunk that has the usage and no choice, if it is wanted, and OpenAI's mark."""
        usage = sent_event({**self._chunk_frame, "choices": [], "usage": self.usage}) if self.usage_wanted else b""
        return usage + b"data: [DONE]\n\n"

    def _delta(self, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk."""
        first = piece.index not in self._begun
        choice, content = self._choice(piece, first)
        if self._chat:
            choice["delta"] = {"role": "assistant", "content": content} if first else {"content": content}
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
        return choice

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
            choice, content = self._choice(joined, True)
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

    def _choice(self, piece: Piece, first: bool) -> tuple[dict[str, Any], str]:
        """What the shapes share, and the text, which is to be put where the shape has it."""
        text = self._echoes[piece.index // self._n] + piece.text if first and self._echoes else piece.text
        choice: dict[str, Any] = {
            "index": piece.index,
            "logprobs": None if self._top is None else self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if first:
                choice["prompt_token_ids"] = self._prompts[piece.index]
        if first:
            self._begun.add(piece.index)
        if piece.statistics:
            self.statistics[piece.index] = piece.statistics
        return choice, text

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        if self._chat:
            return {
                "content": self._names.chat(piece.token_ids, piece.logprobs, piece.top_logprobs),
                "refusal": None,
            }
        return self._names.completion(piece.token_ids, piece.logprobs, piece.top_logprobs, piece.offsets)

    def _ending(self, piece: Piece) -> dict[str, Any]:
        assert piece.statistics is not None
        return {"seed": self._seeds[piece.index], "statistics": piece.statistics.to_dict()}


def sent_event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % to_json(value)


def wants_echo(body: Body) -> bool:
    """Whether prompts are repeated."""
    return isinstance(body, CompletionBody) and body.echo
