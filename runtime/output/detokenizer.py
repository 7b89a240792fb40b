"""Tokens to text, one token at a time, and where a text ends."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from runtime.scheduler.request import FinishReason, Request


def stable_prefix_length(text: str, stops: tuple[str, ...]) -> int:
    """Leading characters of `text` that will stay whatever follows: no stop string may still begin in them."""
    longest = max(map(len, stops), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(stop.startswith(text[at:]) for stop in stops):
            return at
    return len(text)


class TextStream:
    """Decodes a request's tokens as they come and applies its stop conditions inside an accepted block.

    Characters that span tokens are held back until they are complete; special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer, eos: frozenset[int]) -> None:
        self._tokenizer, self._eos = tokenizer, eos
        self._stream = DecodeStream(skip_special_tokens=True)
        self._decoded = 0

    def append(self, request: Request, token: int, log_prob: float) -> FinishReason | None:
        """Add one token to `request`; return the reason if the text ends with it."""
        params = request.params
        early = len(request.tokens) + 1 < params.min_tokens
        request.tokens.append(token)
        request.log_probs.append(log_prob)
        request.offsets.append(len(request.text))
        if token in self._eos and not params.ignore_eos:
            self._flush(request, request.tokens[:-1])
            return "stop"
        piece = self._stream.step(self._tokenizer, token)
        if piece:
            self._decoded = len(request.tokens)
            request.text += piece
            if not early and self._cut(request, len(piece)):
                return "stop"
        if len(request.tokens) >= params.max_tokens:
            return "stop" if self._flush(request, request.tokens) else "length"
        return None

    def _flush(self, request: Request, tokens: list[int]) -> bool:
        """The end of the text: an incomplete character will not be completed any more, so show what there is.

        Returns whether a stop string was found in it.
        """
        if self._decoded == len(tokens):
            return False
        whole = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if not whole.startswith(request.text):
            return False
        added, request.text = len(whole) - len(request.text), whole
        return self._cut(request, added)

    @staticmethod
    def _cut(request: Request, added: int) -> bool:
        """Cut the text before the earliest stop string; only matches that the last `added` characters complete."""
        found = [
            at
            for stop in request.params.stop_strings
            if (at := request.text.find(stop, max(0, len(request.text) - added - len(stop) + 1))) >= 0
        ]
        if found:
            request.text = request.text[: min(found)]
        return bool(found)
