"""A fake of the half of TensorRT-LLM 1.2 that builds: its signatures, and the files that are made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import layer_norm, linear, relu, scaled_dot_product_attention

OPTIONS = {
    *("checkpoint_dir", "output_dir", "max_batch_size", "max_input_len", "max_seq_len", "max_beam_width"),
    *("max_num_tokens", "kv_cache_type", "workers", "logits_dtype", "speculative_decoding_mode", "max_draft_len"),
    *("gemm_plugin", "use_paged_context_fmha", "tokens_per_block"),
}
"""Of the options of `trtllm-build` 1.2 (`tensorrt_llm/commands/build.py`), those used here."""


class FakeLlama:
    """`tensorrt_llm.models.LLaMAForCausalLM`, of its signatures (`models/llama/model.py`); notes how it was called."""

    calls: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @classmethod
    def from_hugging_face(
        cls, hf_model_or_dir: str, dtype: str = "auto", mapping: Any = None, quant_config: Any = None, **kwargs: Any
    ) -> FakeLlama:
        cls.calls.append({"dtype": dtype, "mapping": mapping, **kwargs})
        assert Path(hf_model_or_dir).is_dir()
        return cls(mapping.rank)

    @classmethod
    def quantize(
        cls,
        hf_model_dir: str,
        output_dir: str,
        dtype: str = "auto",
        mapping: Any = None,
        quant_config: Any = None,
        *,
        device: str = "cuda",
        calib_dataset: str = "cnn_dailymail",
        calib_batches: int = 512,
        calib_batch_size: int = 1,
        calib_max_seq_length: int = 512,
        random_seed: int = 1234,
        tokenizer_max_seq_length: int = 2048,
        **kwargs: Any,
    ) -> None:
        assert not kwargs
        cls.calls.append({"dtype": dtype, "mapping": mapping, "quant": quant_config, "data": calib_dataset})
        Path(output_dir).mkdir(parents=True)
        (Path(output_dir) / "config.json").write_text("{}")

    def save_checkpoint(self, output_dir: str, save_config: bool = True) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if save_config:
            (Path(output_dir) / "config.json").write_text("{}")
        (Path(output_dir) / f"rank{self.rank}.safetensors").write_text("")


def fake_build(arguments: list[str], cwd: Path, check: bool) -> SimpleNamespace:
    """`trtllm-build`: makes the files it makes, of a checkpoint that is there."""
    assert not check
    values = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert {name.removeprefix("--") for name in values} <= OPTIONS
    assert (cwd / values["--checkpoint_dir"] / "config.json").is_file()
    folder = cwd / values["--output_dir"]
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for rank in range(int(values["--workers"])):
        (folder / f"rank{rank}.engine").write_text("")
    return SimpleNamespace(returncode=0)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of the library's building half."""
    FakeLlama.calls.clear()

    def module(name: str, **values: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, made)

    def mapping(world_size: int = 1, rank: int = 0, tp_size: int = 1) -> SimpleNamespace:
        return SimpleNamespace(world_size=world_size, rank=rank, tp_size=tp_size)

    module("tensorrt_llm", Mapping=mapping)
    module("tensorrt_llm.models", LLaMAForCausalLM=FakeLlama)
    module("tensorrt_llm.models.modeling_utils", QuantConfig=SimpleNamespace)
    module("tensorrt_llm.quantization", QuantAlgo={"FP8": "FP8", "W4A16_AWQ": "W4A16_AWQ"})
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")


def opt_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Logits [S, V] of an OPT checkpoint in the library's format, by its rules: what every rank computes is summed."""
    config = json.loads((folder / "config.json").read_text())
    size = config["mapping"]["tp_size"]
    ranks = [{n: v.double() for n, v in load_file(folder / f"rank{r}.safetensors").items()} for r in range(size)]
    first, before = ranks[0], config["do_layer_norm_before"]
    width, heads = config["hidden_size"], config["num_attention_heads"] // size

    def norm(hidden: Tensor, name: str) -> Tensor:
        return layer_norm(hidden, (width,), first[f"{name}.weight"], first[f"{name}.bias"])

    def attention(hidden: Tensor, name: str) -> Tensor:
        parts = []
        for rank in ranks:
            qkv = linear(hidden, rank[f"{name}.qkv.weight"], rank[f"{name}.qkv.bias"])
            q, k, v = (x.view(len(tokens), heads, -1).transpose(0, 1) for x in qkv.chunk(3, -1))
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
            parts.append(linear(mixed, rank[f"{name}.dense.weight"]))
        return torch.stack(parts).sum(0) + first[f"{name}.dense.bias"]

    def feed_forward(hidden: Tensor, name: str) -> Tensor:
        parts = [
            linear(relu(linear(hidden, r[f"{name}.fc.weight"], r[f"{name}.fc.bias"])), r[f"{name}.proj.weight"])
            for r in ranks
        ]
        return torch.stack(parts).sum(0) + first[f"{name}.proj.bias"]

    hidden = first["transformer.vocab_embedding.weight"][tokens]
    hidden = hidden + first["transformer.position_embedding.weight"][: len(tokens)]
    for layer in range(config["num_hidden_layers"]):
        name = f"transformer.layers.{layer}"
        for part, each, scale in (("attention", attention, "input_layernorm"), ("mlp", feed_forward, "post_layernorm")):
            inner = each(norm(hidden, f"{name}.{scale}") if before else hidden, f"{name}.{part}")
            hidden = hidden + inner if before else norm(hidden + inner, f"{name}.{scale}")
    if before:
        hidden = norm(hidden, "transformer.ln_f")
    return torch.cat([linear(hidden, rank["lm_head.weight"]) for rank in ranks], -1)[:, : config["vocab_size"]]
