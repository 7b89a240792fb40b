"""Prompts become token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from mtad.errors import InvalidInput

Prompt = str | Sequence[int]
"""Text, or token ids."""


def several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, also from a single one; raises InvalidInput where it is neither."""
    if not isinstance(prompts, Sequence):
        problem = "give text, token ids, or a sequence of them, such as a `list` of what is generated"
        raise InvalidInput("prompts", prompts, problem)
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast("Sequence[Prompt]", [prompts] if one else prompts)


def token_ids(prompt: Prompt, vocab_size: int, tokenize: Callable[[str], list[int]]) -> list[int]:
    """Token ids of a prompt; they are smaller than `vocab_size`.

    Raises:
        InvalidInput: it is neither text nor token ids, or empty.
    """
    if isinstance(prompt, str):
        ids = tokenize(prompt)
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise InvalidInput("prompt", prompt, "give text or a sequence of token ids, such as an array's `tolist()`")
    else:
        ids = list(cast("Sequence[int]", prompt))
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise InvalidInput("prompt", token, f"token ids are integers from 0 to {vocab_size - 1}")
    if not ids:
        raise InvalidInput("prompt", prompt, "empty; give at least one token")
    return ids
