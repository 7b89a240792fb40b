"""Families of models: their configurations, and random checkpoints of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.checkpoints import make_tokenizer

ENDS = {"vocab_size": 320, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 512}
# wider than the tokenizer: some families' own tokenizers add tokens when they are opened
HEADS = {**ENDS, "hidden_size": 64, "num_attention_heads": 4}
GROUPED = {**HEADS, "intermediate_size": 96, "num_key_value_heads": 2}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2 + i for i in range(8)]}
KINDS = ["sliding_attention", "full_attention"]
WINDOW = 64

FAMILIES: dict[str, Callable[[int], PretrainedConfig]] = {
    "llama-3": lambda n: LlamaConfig(**GROUPED, num_hidden_layers=n, rope_scaling={"rope_type": "llama3", **SCALED}),
    "opt": lambda n: OPTConfig(**HEADS, ffn_dim=96, word_embed_proj_dim=64, num_hidden_layers=n),
    "opt-350m": lambda n: OPTConfig(
        **HEADS, ffn_dim=96, word_embed_proj_dim=32, num_hidden_layers=n, do_layer_norm_before=False
    ),
    "qwen2": lambda n: Qwen2Config(**GROUPED, num_hidden_layers=n),
    "qwen3": lambda n: Qwen3Config(**GROUPED, num_hidden_layers=n, head_dim=32),
    "mistral": lambda n: MistralConfig(**GROUPED, num_hidden_layers=n, sliding_window=WINDOW),
    "phi-3": lambda n: Phi3Config(
        **GROUPED, num_hidden_layers=n, original_max_position_embeddings=256, rope_scaling=LONGROPE
    ),
    "gemma-2": lambda n: Gemma2Config(
        **GROUPED, num_hidden_layers=n, head_dim=16, query_pre_attn_scalar=9, sliding_window=WINDOW,
        attn_logit_softcapping=2.0, final_logit_softcapping=8.0, layer_types=KINDS[:n]
    ),
    "gemma-3": lambda n: Gemma3TextConfig(
        **GROUPED, num_hidden_layers=n, head_dim=16, query_pre_attn_scalar=9, sliding_window=WINDOW,
        layer_types=KINDS[:n], tie_word_embeddings=False,
    ),
    "gpt-neox": lambda n: GPTNeoXConfig(**HEADS, intermediate_size=96, num_hidden_layers=n),
    "gpt-2": lambda n: GPT2Config(
        vocab_size=320, n_positions=512, n_embd=64, n_head=4, n_layer=n, bos_token_id=0, eos_token_id=0
    ),
}  # fmt: skip
"""Configurations of n layers; plain Llama is what all other tests run on."""
MULTI_HEAD = ("opt", "opt-350m", "gpt-neox", "gpt-2")
"""Those with one KV head per query head."""


def shallow(family: str) -> PretrainedConfig:
    """A family's configuration with as few layers as have all its kinds."""
    return FAMILIES[family](2 if family.startswith("gemma") else 1)


def write_model(folder: Path, config: PretrainedConfig) -> Path:
    """A random checkpoint; those of one configuration are alike."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))  # biases and norms that do something
        some = torch.arange(64).reshape(2, 32)
        model.get_output_embeddings().weight.mul_(2.5 / model.eval()(some).logits.std())  # neither flat nor certain
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
