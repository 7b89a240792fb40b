"""One byte-level BPE vocabulary for both models of a pair; the demo's is trained on its training split of both texts.

python -m scripts.demo.tokenizer      # writes .work/tokenizer/
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.demo import chat, corpus
from scripts.demo.dataset import training_groups
from scripts.paths import DEMO

VOCABULARY = 2048
END_ID = chat.SPECIAL.index(chat.END)
WORK = DEMO / ".work"
# words, single digits (a number is copied digit by digit), punctuation, and runs of white space
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def demo_texts() -> Iterable[str]:
    """SQL, then code; the same for one Python version."""
    sql = (
        schema + "".join(prompt + answer for prompt, answer in pairs)
        for schema, pairs in itertools.islice(training_groups(), 2500)
    )
    return itertools.chain(sql, (text for _, text in corpus.files("train")))


def train(texts: Iterable[str], size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Train a vocabulary of up to `size` tokens, the special ones first; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(chat.SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=chat.END,
        pad_token=chat.END,
        additional_special_tokens=list(chat.SPECIAL[1:]),
        model_max_length=2048,
        padding_side="left",
    )


def load(
    folder: Path = WORK / "tokenizer", texts: Callable[[], Iterable[str]] = demo_texts, size: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """The vocabulary trained before into `folder`, or a new one of `texts`."""
    if not (folder / "tokenizer.json").exists():
        train(texts(), size).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def demo() -> PreTrainedTokenizerFast:
    """The demo's vocabulary, with its chat template."""
    words = load()
    words.chat_template = chat.TEMPLATE
    return words


if __name__ == "__main__":
    made = train(demo_texts())
    made.save_pretrained(WORK / "tokenizer")
    print(f"{len(made)} tokens")
