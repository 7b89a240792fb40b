"""Do two models share a vocabulary, or enough of two?"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engines.folder import vocabulary_hash
from engines.vocabulary import Translation
from mtad.errors import InvalidInput

LEAST = 0.3
"""Part of the target's tokens that the auxiliary must have."""


def describe_vocabularies(
    target: PreTrainedTokenizerBase, auxiliary: PreTrainedTokenizerBase, target_size: int, auxiliary_size: int
) -> dict[str, Any]:
    """What `pair.json` says of them: the target's, and the auxiliary's where that is another.

    Embeddings may be padded beyond the tokenizer (by different amounts); ids there are never drafted nor sampled.

    Raises:
        InvalidInput: too few tokens are in both, or none that ends a text.
    """
    ours, theirs = target.get_vocab(), auxiliary.get_vocab()
    for name, tokenizer, size in (("target", target, target_size), ("auxiliary", auxiliary, auxiliary_size)):
        if size <= (last := int(max(tokenizer.get_vocab().values()))):
            problem = f"its logits are {size} wide, but its tokenizer has ids up to {last}"
            raise InvalidInput(name, tokenizer.name_or_path, problem)
    said = {"vocab_size": max(ours.values()) + 1, "vocabulary_hash": vocabulary_hash(ours)}
    if ours == theirs:
        return said
    drafted = Translation.of(target, auxiliary).drafted
    shared, end = int((drafted >= 0).sum()), target.eos_token_id
    if shared < LEAST * len(ours) or end is None or drafted[end] < 0:
        problem = f"{shared} of the target's {len(ours)} tokens are in both vocabularies ({shared / len(ours):.0%})"
        needed = f"at least {LEAST:.0%}" if shared < LEAST * len(ours) else "the one that ends a text"
        remedy = "give another, or none, and drafts are looked up"
        raise InvalidInput("auxiliary", auxiliary.name_or_path, f"{problem}, but {needed} must be; {remedy}")
    return said | {"auxiliary_vocabulary_hash": vocabulary_hash(theirs), "shared_tokens": shared}


def within(tokenizer: PreTrainedTokenizerBase, size: int) -> PreTrainedTokenizerBase:
    """A tokenizer without added tokens behind the model's, such as Gemma 3's for images or GPT-2's in a GGUF file."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < size]
    special = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str) and tokenizer.convert_tokens_to_ids(token) < size
    }
    made = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=tokenizer.chat_template, **special)
