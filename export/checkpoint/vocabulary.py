"""Do two models share a vocabulary? Token ids of one are fed to the other, so anything but "yes" is corruption."""

from __future__ import annotations

import json

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mtad.errors import InvalidInput


def common_vocabulary(
    target: PreTrainedTokenizerBase, auxiliary: PreTrainedTokenizerBase, target_size: int, auxiliary_size: int
) -> int:
    """Number of token ids both models may use.

    Embeddings may be padded beyond the tokenizer (by different amounts); ids there are never drafted nor sampled.

    Raises:
        InvalidInput: a token has different ids, or one model lacks it; names the first such token.
    """
    ours, theirs = target.get_vocab(), auxiliary.get_vocab()
    if ours != theirs:
        token = min(
            (t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)),
            key=lambda t: (min(ours.get(t, 2**62), theirs.get(t, 2**62)), t),
        )
        shared = len(ours.keys() & theirs.keys())
        problem = (
            f"the vocabularies differ ({shared} of the target's {len(ours)} tokens are in both), first at token "
            f"{token!r}: id {ours.get(token, 'none')} in the target, {theirs.get(token, 'none')} in the auxiliary; "
            "give two models with one vocabulary, or none, and drafts are looked up in the text"
        )
        raise InvalidInput("auxiliary", auxiliary.name_or_path, problem)
    needed = int(max(ours.values())) + 1
    for name, tokenizer, size in (("target", target, target_size), ("auxiliary", auxiliary, auxiliary_size)):
        if size < needed:
            problem = f"its logits are {size} wide, but its tokenizer has ids up to {needed - 1}"
            raise InvalidInput(name, tokenizer.name_or_path, problem)
    return needed


def within(tokenizer: PreTrainedTokenizerBase, size: int) -> PreTrainedTokenizerBase:
    """A GGUF file's tokenizer without the tokens behind the model's that transformers adds, such as GPT-2's last."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < size]
    special = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str) and tokenizer.convert_tokens_to_ids(token) < size
    }
    made = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=tokenizer.chat_template, **special)
