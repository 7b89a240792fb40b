"""Prompts become token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

from transformers import PreTrainedTokenizerBase

from mtad.errors import CapacityExceeded, InvalidInput, refused_as

Prompt = str | Sequence[int]
"""Text, or token ids."""


class Prompts:
    """Makes token ids of prompts, for several threads at once.

    Args:
        vocab_size: ids are smaller.
        room: tokens that fit into a row.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, room: int) -> None:
        self._tokenizer, self._vocab_size, self._room = tokenizer, vocab_size, room

    def tokenize(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds to every text or without.

        Raises:
            CapacityExceeded: the text could not fit even if all its tokens were as long as the vocabulary's longest;
                it is not tokenized then.
            InvalidInput: the tokenizer cannot read it.
        """
        if len(text) > self._room * self.longest_token:
            problem = f"give fewer than {self._room} tokens, of {self.longest_token} characters at most"
            raise CapacityExceeded("prompt", f"{len(text)} characters", problem)
        with refused_as("prompt", text, "the tokenizer cannot read it"):  # such as half of a surrogate pair
            return list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a byte-level vocabulary has a character per byte, so text has no more."""
        return max(map(len, self._tokenizer.get_vocab()))

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidInput: it is neither text nor token ids, or empty.
            CapacityExceeded: see `tokenize`.
        """
        if isinstance(prompt, str):
            ids = self.tokenize(prompt)
        elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidInput("prompt", prompt, "give text or a sequence of token ids")
        else:
            ids = list(cast("Sequence[int]", prompt))
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                    raise InvalidInput("prompt", token, f"token ids are integers from 0 to {self._vocab_size - 1}")
        if not ids:
            raise InvalidInput("prompt", prompt, "empty; give at least one token")
        return ids
