"""A pair of random models with a large vocabulary: what filtering, drawing and acceptance cost of a block."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from export.options import ExportOptions
from export.pair import export_pair
from mtad.params import DecodingParams

SIZES: dict[str, dict[str, int]] = {
    "target": {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8},
    "auxiliary": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""97 and 35 million parameters at a vocabulary of 128,256."""

FILTERS: dict[str, dict[str, Any]] = {
    "top_k 10, top_p 0.9": {"top_k": 10, "top_p": 0.9},
    "none": {"top_k": 0, "top_p": 1.0},
    "top_p 0.9": {"top_k": 0, "top_p": 0.9},
    "min_p 0.05": {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
}


def settings(methods: Sequence[str]) -> dict[str, DecodingParams]:
    """Each method under each filter; no draft stops early."""
    return {
        f"{method}, {name}": DecodingParams(method=method, draft_confidence=0.0, **values)
        for method in methods
        for name, values in FILTERS.items()
    }


MIN_VOCABULARY = 1024
"""Tokens of a vocabulary, so that the prompts of the benchmark lie within it."""


def vocabulary_pair(folder: Path, size: int) -> Path:
    """The exported pair, made where it is not there yet.

    Logits have a standard deviation of 4, so that a distribution has the entropy of a language model's, about 4 nats.
    """
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as made:
        for role, sizes in SIZES.items():
            torch.manual_seed(0)
            config = LlamaConfig(
                **sizes, vocab_size=size, tie_word_embeddings=True, max_position_embeddings=1024, eos_token_id=0
            )
            model = LlamaForCausalLM(config)
            with torch.no_grad():
                model.model.norm.weight.fill_(4 / (config.initializer_range * config.hidden_size**0.5))
            model.save_pretrained(Path(made, role))
            words = Tokenizer(models.WordLevel({str(token): token for token in range(size)}, unk_token="0"))
            PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(Path(made, role))
        export_pair(folder, ExportOptions(str(Path(made, "target")), str(Path(made, "auxiliary")), rows=8))
    return folder
