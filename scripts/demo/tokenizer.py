"""One byte-level BPE vocabulary for both models, trained on the training split of both kinds of text.

python -m scripts.demo.tokenizer      # writes .work/tokenizer/
"""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.demo import corpus
from scripts.demo.dataset import training_groups

VOCABULARY = 2048
END, END_ID = "<|endoftext|>", 0
WORK = Path(__file__).parent / ".work"
# words, single digits (a number is copied digit by digit), punctuation, and runs of white space
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train() -> PreTrainedTokenizerFast:
    """Train the vocabulary; deterministic for one Python version."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    sql = (
        schema + "".join(prompt + answer for prompt, answer in pairs)
        for schema, pairs in itertools.islice(training_groups(), 2500)
    )
    code = (text for _, text in corpus.files("train"))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(sql, code), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, model_max_length=1024, padding_side="left"
    )


def load() -> PreTrainedTokenizerFast:
    """The vocabulary trained before, or a new one."""
    folder = WORK / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        train().save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


if __name__ == "__main__":
    made = train()
    made.save_pretrained(WORK / "tokenizer")
    print(f"{len(made)} tokens")
