"""What single tokens look like in log-probabilities."""

from __future__ import annotations

import threading
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer

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

    def completion(
        self, tokens: list[int], log_probs: list[float], top: list[list[tuple[int, float]]], offsets: list[int]
    ) -> dict[str, Any]:
        """Log-probabilities in the shape of `/v1/completions`; alternatives hold the token itself as well."""
        likely = [
            {self.key(other): _finite(value) for other, value in reversed([*some, (token, own)])}
            for token, own, some in zip(tokens, log_probs, top or [[]] * len(tokens), strict=True)
        ]
        return {
            "tokens": [self.key(token) for token in tokens],
            "token_logprobs": [_finite(value) for value in log_probs],
            "top_logprobs": likely if top else None,
            "text_offset": offsets,
        }

    def chat(
        self, tokens: list[int], log_probs: list[float], top: list[list[tuple[int, float]]]
    ) -> list[dict[str, Any]]:
        """Log-probabilities in the shape of `/v1/chat/completions`."""
        return [
            self._entry(token, own) | {"top_logprobs": [self._entry(*other) for other in some]}
            for token, own, some in zip(tokens, log_probs, top or [[]] * len(tokens), strict=True)
        ]

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, raw = self.name(token)
        return {"token": text, "logprob": _finite(value), "bytes": list(raw)}


def _finite(value: float) -> float:
    return max(value, LOWEST)
