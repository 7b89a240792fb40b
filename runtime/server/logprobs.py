"""What single tokens look like in log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache, partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from runtime.constraints.grammar import Grammars
from runtime.decoder.draft_details import DraftedToken
from runtime.output.stream import OutputDelta
from runtime.scheduler.request import Request

MIN_LOGPROB = -9999.0
"""What OpenAI reports for a log-probability that is (nearly) minus infinity; JSON has no infinity."""

LAST_BYTE = ("ÿ", "<0xFF>")
"""Names of the byte 0xFF in vocabularies of bytes; llguidance marks special tokens by it, and decodes it to nothing."""

MAX_PROMPT_LOGPROBS = 2**19
"""Most log-probabilities of prompts in an answer, with alternatives and for each choice: 50 MB while it is made."""


class Echo(NamedTuple):
    """A prompt that is repeated: its text, and where in it each of its tokens begins, in characters."""

    text: str
    offsets: list[int]

    @classmethod
    def of(cls, text: str, ids: list[int], tokenizer: Tokenizer) -> Echo:
        own, decode = tokenizer.encode(text), partial(tokenizer.decode, skip_special_tokens=True)
        if own.ids == ids:  # a token whose space is not counted to it begins where the one before it ends
            starts, ends = zip(*own.offsets, strict=True)
            return cls(text, list(map(min, starts, (0, *ends))))
        offsets, at, known, whole = list[int](), 0, 0, 0
        for count in range(1, len(ids) + 1):
            offsets.append(min(at, len(text)))
            before, now = len(decode(ids[known:whole])), decode(ids[known:count])
            if (len(now) > before and not now.endswith("�")) or count - whole == 16:  # no character has more tokens
                at, known, whole = at + len(now) - before, whole, count
        return cls(text, offsets)


class TokenNames:
    """Bytes and names of tokens, by the vocabulary that grammars read; a token may be a part of a character only."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._tokenizer, self._grammars = tokenizer, grammars
        self.name = cache(self._name)

    def _name(self, token: int) -> tuple[str, bytes]:
        """Text of a token (`�` for parts of characters) and its bytes."""
        raw = bytes(self._grammars.prepare().decode_bytes([token]))
        if not raw and self._tokenizer.id_to_token(token) in LAST_BYTE:
            raw = b"\xff"
        return raw.decode("utf-8", errors="replace"), raw

    def key(self, token: int) -> str:
        r"""Text of a token that tells it from others: `bytes:\xe6\x97` for parts of characters, as OpenAI does."""
        text, raw = self.name(token)
        return "bytes:" + "".join(rf"\x{byte:02x}" for byte in raw) if "�" in text else text

    def completion(self, delta: OutputDelta, count: int, echo: Echo | None, prompt: Request | None) -> dict[str, Any]:
        """Log-probabilities in the shape of `/v1/completions`; alternatives hold the token itself as well.

        Args:
            prompt: whose prompt stands before this delta.
        """
        tokens: list[tuple[int, float | None, list[tuple[int, float]]]] = list(_tokens(delta))
        offsets = [at + len(echo.text) for at in delta.offsets] if echo else delta.offsets
        if echo and prompt:
            told = zip(prompt.prompt[1:], prompt.prompt_scores, strict=True)
            others = [(token, score.logprob, score.top_logprobs[:count]) for token, score in told]
            tokens, offsets = [(prompt.prompt[0], None, []), *others, *tokens], [*echo.offsets, *offsets]
        likely = [
            None
            if own is None
            else {self.key(other): max(value, MIN_LOGPROB) for other, value in (*some[::-1], (token, own))}
            for token, own, some in tokens
        ]
        return {
            "tokens": [self.key(token) for token, _, _ in tokens],
            "token_logprobs": [None if own is None else max(own, MIN_LOGPROB) for _, own, _ in tokens],
            "top_logprobs": likely if count else None,
            "text_offset": offsets,
        }

    def prompt(self, request: Request, count: int) -> list[dict[str, Any] | None]:
        """What the target says of a prompt, in the shape of vLLM's `prompt_logprobs`: nothing of its first token."""

        def entry(token: int, value: float, rank: int) -> dict[str, Any]:
            return {"logprob": max(value, MIN_LOGPROB), "rank": rank, "decoded_token": self.name(token)[0]}

        return [
            None,
            *(
                {str(token): entry(token, score.logprob, score.rank)}
                | {str(o): entry(o, value, rank) for rank, (o, value) in enumerate(score.top_logprobs[:count], 1)}
                for token, score in zip(request.prompt[1:], request.prompt_scores, strict=True)
            ),
        ]

    def chat(self, delta: OutputDelta) -> dict[str, Any]:
        """Log-probabilities in the shape of `/v1/chat/completions`."""
        content = [
            self._entry(token, own) | {"top_logprobs": [self._entry(*other) for other in some]}
            for token, own, some in _tokens(delta)
        ]
        return {"content": content, "refusal": None}

    def details(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """What `draft_details` asks for: one object per token."""

        def entry(one: DraftedToken) -> dict[str, Any]:
            return {"text": self.name(one.token)[0], **asdict(one)}

        each = zip(delta.token_ids, delta.offsets, delta.logprobs, delta.details, strict=True)
        return [
            {"text": self.name(token)[0], "offset": offset, "p": math.exp(own)}
            | {"accepted": one.accepted and entry(one.accepted), "rejected": [entry(other) for other in one.rejected]}
            for token, offset, own, one in each
        ]

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, raw = self.name(token)
        return {"token": text, "logprob": max(value, MIN_LOGPROB), "bytes": list(raw)}


def _tokens(delta: OutputDelta) -> Iterable[tuple[int, float, list[tuple[int, float]]]]:
    return zip(delta.token_ids, delta.logprobs, delta.top_logprobs or [[]] * len(delta.token_ids), strict=True)
