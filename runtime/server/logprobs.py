"""What single tokens look like in log-probabilities."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from runtime.output.stream import OutputDelta

LOWEST = -9999.0
"""What OpenAI reports for a log-probability that is (nearly) minus infinity; JSON has no infinity."""


class TokenNames:
    """Bytes and names of tokens; a token may be a part of a character only.

    Args:
        tokenizer: the pair's.
        eos: its end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Tokenizer, eos: tuple[int, ...]) -> None:
        self._tokenizer, self._eos = tokenizer, eos
        self._bytes: LLTokenizer | None = None
        self._known: dict[int, tuple[str, bytes]] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the vocabulary, once; seconds for large ones, so not in an event loop."""
        with self._lock:
            if self._bytes is None:
                self._bytes = LLTokenizer(self._tokenizer.to_str(), eos_token=list(self._eos) or None)

    def name(self, token: int) -> tuple[str, bytes]:
        """Text of a token (`�` for parts of characters) and its bytes."""
        found = self._known.get(token)
        if found is None:
            assert self._bytes is not None, "not prepared"
            raw = bytes(self._bytes.decode_bytes([token]))
            found = self._known[token] = raw.decode("utf-8", errors="replace"), raw
        return found

    def key(self, token: int) -> str:
        r"""Text of a token that tells it from others: `bytes:\xe6\x97` for parts of characters, as OpenAI does."""
        text, raw = self.name(token)
        return "bytes:" + "".join(rf"\x{byte:02x}" for byte in raw) if "�" in text else text

    def completion(self, delta: OutputDelta) -> dict[str, Any]:
        """Log-probabilities in the shape of `/v1/completions`; alternatives hold the token itself as well."""
        likely = [
            {self.key(other): max(value, LOWEST) for other, value in reversed([*some, (token, own)])}
            for token, own, some in _tokens(delta)
        ]
        return {
            "tokens": [self.key(token) for token in delta.token_ids],
            "token_logprobs": [max(value, LOWEST) for value in delta.logprobs],
            "top_logprobs": likely if delta.top_logprobs else None,
            "text_offset": delta.offsets,
        }

    def chat(self, delta: OutputDelta) -> dict[str, Any]:
        """Log-probabilities in the shape of `/v1/chat/completions`."""
        content = [
            self._entry(token, own) | {"top_logprobs": [self._entry(*other) for other in some]}
            for token, own, some in _tokens(delta)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, raw = self.name(token)
        return {"token": text, "logprob": max(value, LOWEST), "bytes": list(raw)}


def _tokens(delta: OutputDelta) -> Iterable[tuple[int, float, list[tuple[int, float]]]]:
    """Each token with its log-probability and its alternatives."""
    return zip(delta.token_ids, delta.logprobs, delta.top_logprobs or [[]] * len(delta.token_ids), strict=True)
