"""OPT in TensorRT-LLM's checkpoint format. Its package builds OPT engines, but has no converter for it.

Written from the format: `config.json`, and for each GPU `rank{r}.safetensors`. Weights are [out, in]; column-parallel
ones are split by rows, row-parallel ones by columns. Every rank has the latter's biases in full: they are added once,
after the sum over ranks. Names were read in the library's sources; no engine was ever built from such a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import OPTForCausalLM

SKIPPED_POSITIONS = 2
"""Rows of OPT's position embeddings before that of the first token."""


def write_opt_checkpoint(model: OPTForCausalLM, folder: Path, dtype: str, tensor_parallel: int) -> None:
    """Write `folder`, of a model on the CPU; `tensor_parallel` divides heads, hidden and feed-forward sizes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(opt_config(model, dtype, tensor_parallel), indent=2) + "\n")
    for rank in range(tensor_parallel):
        weights = {
            name: value.to(getattr(torch, dtype)).contiguous()
            for name, value in opt_weights(model, rank, tensor_parallel).items()
        }
        save_file(weights, folder / f"rank{rank}.safetensors")


def opt_config(model: OPTForCausalLM, dtype: str, tensor_parallel: int) -> dict[str, object]:
    """Content of the checkpoint's `config.json`."""
    config = model.config
    return {
        "architecture": "OPTForCausalLM",
        "dtype": dtype,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.activation_function,
        "quantization": {"quant_algo": None},
        "mapping": {"world_size": tensor_parallel, "tp_size": tensor_parallel, "pp_size": 1},
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "do_layer_norm_before": config.do_layer_norm_before,
    }


def opt_weights(model: OPTForCausalLM, rank: int, tensor_parallel: int) -> dict[str, Tensor]:
    """One rank's weights, by the library's names, in the model's dtype."""
    given = model.state_dict()

    def part(value: Tensor, dim: int) -> Tensor:
        return value.chunk(tensor_parallel, dim)[rank]

    found: dict[str, Tensor] = {}
    for layer in range(model.config.num_hidden_layers):
        ours, theirs = f"model.decoder.layers.{layer}.", f"transformer.layers.{layer}."
        for kind in ("weight", "bias"):
            # each of the three is split on its own: a rank has the same heads of all
            qkv = [part(given[f"{ours}self_attn.{name}_proj.{kind}"], 0) for name in "qkv"]
            found[f"{theirs}attention.qkv.{kind}"] = torch.cat(qkv)
            found[f"{theirs}mlp.fc.{kind}"] = part(given[f"{ours}fc1.{kind}"], 0)
            found[f"{theirs}input_layernorm.{kind}"] = given[f"{ours}self_attn_layer_norm.{kind}"]
            found[f"{theirs}post_layernorm.{kind}"] = given[f"{ours}final_layer_norm.{kind}"]
        for name, source in (("attention.dense", "self_attn.out_proj"), ("mlp.proj", "fc2")):
            found[f"{theirs}{name}.weight"] = part(given[f"{ours}{source}.weight"], 1)
            found[f"{theirs}{name}.bias"] = given[f"{ours}{source}.bias"]
    embedding, head = given["model.decoder.embed_tokens.weight"], given["lm_head.weight"]
    if "model.decoder.project_in.weight" in given:  # the library knows embeddings of the hidden size only
        head = (head.float() @ given["model.decoder.project_out.weight"].float()).to(head.dtype)
        embedding = (embedding.float() @ given["model.decoder.project_in.weight"].float().T).to(embedding.dtype)
    found["transformer.vocab_embedding.weight"] = embedding
    found["transformer.position_embedding.weight"] = given["model.decoder.embed_positions.weight"][SKIPPED_POSITIONS:]
    missing = -head.shape[0] % tensor_parallel  # rows of zeros until the vocabulary can be split
    found["lm_head.weight"] = part(torch.cat([head, head.new_zeros(missing, head.shape[1])]), 0)
    for kind in ("weight", "bias") if model.config.do_layer_norm_before else ():
        found[f"transformer.ln_f.{kind}"] = given[f"model.decoder.final_layer_norm.{kind}"]
    # a tensor may stand under two names, a file may hold it once
    return {name: value.clone() for name, value in found.items()}
