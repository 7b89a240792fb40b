"""What requests under constraints ask for, and a tokenizer for them."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models

from mtad.params import DecodingParams

FREE = DecodingParams(temperature=1.0, top_k=0, top_p=1.0, draft_len=3, beam_width=3, max_tokens=200)
Asked = dict[str, Any]


def letters(text: str) -> Tokenizer:
    """A tokenizer of single characters; id 0 ends a text, id n is the n-th character."""
    vocabulary = {"<eos>": 0, **{letter: index + 1 for index, letter in enumerate(text)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer
