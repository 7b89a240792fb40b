"""Tokens to text, and where a text ends."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mtad.params import DecodingParams
from runtime.scheduler.request import FinishReason, Request

MOST_HELD = 8
"""After this many tokens without text, what later ones cannot change of it is shown: else each new token would decode
all held ones again."""


class Detokenizer:
    """Decodes a request's tokens as they come and applies its stop conditions inside an accepted block.

    Characters that span tokens are held back until they are complete.
    """

    def __init__(self, tokenizer: Tokenizer, eos: frozenset[int], params: DecodingParams) -> None:
        self._tokenizer, self._eos = tokenizer, frozenset() if params.ignore_eos else eos
        self._stop_tokens, self._stops = frozenset(params.stop_token_ids), params.stop_strings
        self._skip = params.skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._decoded = 0  # tokens whose text is shown
        self._last: int | None = None  # the last of them that gave some

    def append(self, request: Request, tokens: list[int]) -> FinishReason | None:
        """Add tokens to `request` up to the one that its text ends with, if any; return the reason then."""
        known, least, most = request.tokens, request.params.min_tokens, request.max_tokens
        for token in tokens:
            early = len(known) + 1 < least
            known.append(token)
            request.offsets.append(len(request.text))
            if token in self._eos or (token in self._stop_tokens and not early):
                self._flush(request, known[:-1])
                return "stop"
            if (piece := self._step(known)) and self._add(request, piece, early):
                return "stop"
            if len(known) >= most:
                return "stop" if self._flush(request, known) else "length"
        return None

    def _flush(self, request: Request, tokens: list[int]) -> bool:
        """The end of the text: an incomplete character will not be completed any more, so show what there is.

        Returns whether a stop string was found in it.
        """
        if self._decoded == len(tokens):
            return False
        whole = self._decode(tokens)
        return whole.startswith(request.text) and self._add(request, whole[len(request.text) :])

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))

    def _step(self, known: list[int]) -> str:
        """The text that the last token completes, or that of held tokens which no further one changes."""
        held, unfinished = known[self._decoded :], [0]
        try:
            if (piece := self._stream.step(self._tokenizer, held[-1])) or len(held) % MOST_HELD:
                self._decoded += len(held) if piece else 0
                self._last = held[-1] if piece else self._last
                return piece or ""
            unfinished = [1, 2, 3, 4]  # tokens at the end, of a character that may yet be completed
        except Exception as error:  # with byte fallback, broken bytes turn the character before them into �
            if "prefix" not in str(error):
                raise
        whole = self._decode(held)
        for count in unfinished:
            at = len(held) - count
            if (shown := self._decode(held[:at])) + self._decode(held[at:]) == whole:
                self._decoded += at
                self._last = held[at - 1] if shown else self._last
                clean = self._last is not None and not self._decode([self._last]).endswith("\ufffd")
                self._stream = DecodeStream(skip_special_tokens=self._skip)
                for token in [*([self._last] if clean else []), *held[at:]]:  # it tells whether a space follows
                    self._stream.step(self._tokenizer, token)
                return shown
        return ""

    def _add(self, request: Request, piece: str, early: bool = False) -> bool:
        """Add to the text; cut it at the earliest stop string that this completes, unless it is too early."""
        before, stops = len(request.text), self._stops
        text = request.text = request.text + piece
        request.stable = len(text)
        if not stops:
            return False
        request.stable -= max(_begun(text, stop) for stop in stops)
        found = [at for stop in stops if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if early or not found:
            return False
        end = min(found)
        if request.params.include_stop_str_in_output:
            end += min(len(stop) for stop in stops if text.startswith(stop, end))
        request.text = text[:end]
        return True


def _begun(text: str, stop: str) -> int:
    """Characters at a text's end that may yet become a stop string: the most that it begins with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if stop[n - 1] == text[-1] and text.endswith(stop[:n])), 0)
