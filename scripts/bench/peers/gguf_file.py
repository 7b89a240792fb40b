"""Write a Llama checkpoint with a byte-level tokenizer as GGUF.

    python -m scripts.bench.peers.gguf_file FOLDER FILE F32        or BF16

Runs in the environment that scripts/baselines.sh makes for llama.cpp.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert(source: Path, path: Path, kind: str) -> None:
    config, tokenizer = (json.loads((source / name).read_text()) for name in ("config.json", "tokenizer.json"))
    if config["model_type"] != "llama":
        sys.exit(f"{source}: llama.cpp is given Llama models only, and this is {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    for add in (out.add_rope_dimension_count, out.add_key_length, out.add_value_length):
        add(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    _add_tokenizer(out, tokenizer, config["eos_token_id"])
    for name, values in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in NAMES:
            new = NAMES[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            new = f"blk.{layer}.{NAMES[part]}"
        weight = values.astype(np.float32)
        if stem.endswith(("q_proj", "k_proj")):  # its rotary embedding pairs neighbours, not halves
            pairs = (heads if stem.endswith("q_proj") else kv_heads, 2, -1, weight.shape[1])
            weight = weight.reshape(pairs).swapaxes(1, 2).reshape(weight.shape)
        if kind == "BF16" and weight.ndim == 2:
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.BF16)
            out.add_tensor(f"{new}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            out.add_tensor(f"{new}.weight", np.ascontiguousarray(weight))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _add_tokenizer(out: Any, tokenizer: dict[str, Any], eos: int) -> None:
    """The vocabulary, as the server wants to have one. Prompts are given as ids, so nothing is ever encoded."""
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    out.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]])
    out.add_bos_token_id(eos)
    out.add_eos_token_id(eos)
    out.add_add_bos_token(False)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
