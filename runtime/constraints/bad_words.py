"""Words that a text must not contain, as token sequences whose last token is masked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mtad.errors import InvalidInput, refused_as


class BadWords:
    """The tokens that `bad_words` forbid after a text, as vLLM defines them.

    A word is forbidden as the tokens it has by itself and, if a space before it only changes its first token, as the
    tokens it has after a space. Other tokens may still spell it. The prompt is not part of the text.

    Args:
        words: none of them empty.
        vocab_size: V; words with tokens beyond it are never emitted anyway.

    Attributes:
        window: how many tokens at the end of a text decide what may follow, at least 1.

    Raises:
        InvalidInput: a word has no tokens.
    """

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> None:
        sequences: dict[tuple[int, ...], None] = {}
        with refused_as("bad_words", words, "the tokenizer cannot read them"):
            both = [before + (word.lstrip() or word) for word in words for before in ("", " ")]
            found = [one.ids for one in tokenizer.encode_batch(both, add_special_tokens=False)]
        for word, bare, spaced in zip(words, found[::2], found[1::2], strict=True):
            if not bare:
                raise InvalidInput("bad_words", word, "it has no tokens; leave it out")
            sequences[tuple(bare)] = None
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences[tuple(spaced)] = None
        known = [sequence for sequence in sequences if max(sequence) < vocab_size]
        self.window = max([1, *(len(sequence) - 1 for sequence in known)])
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *begun, last in known:
            if begun:
                self._longer.setdefault(begun[-1], []).append((tuple(begun), last))
        allowed = np.ones(vocab_size, dtype=np.bool_)
        allowed[[sequence[0] for sequence in known if len(sequence) == 1]] = False
        self._always = np.packbits(allowed, bitorder="little")

    def allowed(self, text: tuple[int, ...]) -> NDArray[np.uint8]:
        """The tokens that complete no word after `text`, whose last `window` tokens suffice, as bits.

        A set of tokens has one bit for each, as in `runtime.constraints.follower.Bits`.
        """
        left = self._always.copy()
        for begun, last in self._longer.get(text[-1], ()) if text else ():
            if text[-len(begun) :] == begun:
                left[last // 8] &= 255 ^ 1 << last % 8
        return left
