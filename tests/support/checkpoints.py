"""Small random Llamas with a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "SELECT name FROM singer WHERE age > 20 ORDER BY age DESC LIMIT 1",
    "def largest(values): return max(values)  # of the list",
    "How many singers are older than twenty, and where do they live? Ωμέγα naïve 日本語",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def make_other_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes them: a text begins with `<s>` and a space, and bytes have tokens."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(TEXT * 4, trainers.BpeTrainer(vocab_size=120, limit_alphabet=60, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(learnt["vocab"])]
    merges = [(left, right) for left, right in learnt["merges"]]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(parts))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


def byte_tokenizer(*added: str, merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """A token a byte and one for each of `merges`, then `<eos>`, and some more."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken(token) for token in added])
    return tokenizer


def make_checkpoint(
    folder: Path, seed: int, padding: int = 0, tokenizer: PreTrainedTokenizerFast | None = None, **changes: int
) -> Path:
    """A random Llama checkpoint. Its logits are scaled up so that distributions are far from uniform."""
    tokenizer = tokenizer or make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer) + padding,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Target and auxiliary checkpoints; the auxiliary is the target with noise, and has padded embedding rows."""
    target = make_checkpoint(folder / "target", seed=1)
    auxiliary = make_checkpoint(folder / "auxiliary", seed=1)
    model = LlamaForCausalLM.from_pretrained(auxiliary)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.std() * 0.15 * torch.randn(parameter.shape, generator=generator))
        model.resize_token_embeddings(model.config.vocab_size + 20)
    model.save_pretrained(auxiliary)
    return target, auxiliary
