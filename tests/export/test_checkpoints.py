"""Checkpoints that are more than a folder of weights: GGUF files, LoRA adapters, tied heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    Phi3Config,
    StableLmConfig,
    Starcoder2Config,
)

from engines.folder import read_spec
from export.checkpoint.find import _complete, find
from export.options import ExportOptions
from export.plan import plan_pair
from mtad.errors import InvalidInput
from tests.support.checkpoints import make_checkpoint, make_tokenizer
from tests.support.commands import Run
from tests.support.families import SCALED
from tests.support.folders import change_json


def test_a_tied_head_that_is_stored_has_to_be_the_embeddings(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", seed=1)
    change_json(source / "config.json", tie_word_embeddings=True)
    found, stored = find("target", str(source)), load_file(source / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"^target .*lm_head\.weight is not model\.embed_tokens\.weight; set tie"):
        found.weights()
    same = stored["model.embed_tokens.weight"].clone()
    save_file({**stored, "lm_head.weight": same}, source / "model.safetensors", {"format": "pt"})
    assert torch.equal(found.weights()("lm_head.weight"), same)


@pytest.mark.parametrize(
    "changed",
    [{"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
)
def test_an_adapter_of_one_of_two_tied_ends_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make_checkpoint(tmp_path / "base", seed=1, tie_word_embeddings=True)
    config = peft.LoraConfig(**changed, r=4, init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(InvalidInput, match="embeddings that are tied"):
        find("target", str(tmp_path / "adapter")).load(torch.float32)


def test_an_adapter_that_saved_its_embeddings_is_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = make_checkpoint(tmp_path / "base", seed=1)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], r=4)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        adapted.get_output_embeddings().weight.mul_(2)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    found = find("target", str(tmp_path / "adapter")).load(torch.float32).get_output_embeddings().weight
    assert torch.equal(found, 2 * AutoModelForCausalLM.from_pretrained(base).get_output_embeddings().weight)


def test_an_adapter_is_its_checkpoint_with_it_merged(tmp_path: Path, run: Run) -> None:
    peft = pytest.importorskip("peft")
    base, adapter = make_checkpoint(tmp_path / "base", seed=1), tmp_path / "adapter"
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=4, lora_alpha=16, init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    adapted.save_pretrained(adapter)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)  # as of a chat's turn, which the base does not know
    tokenizer.save_pretrained(adapter)
    found, tokens = find("target", str(adapter)), torch.arange(40)[None]
    with torch.no_grad():
        expected, logits = adapted(tokens).logits, found.load(torch.float32)(tokens).logits
    assert torch.allclose(logits, expected, atol=1e-4)
    assert found.digest != find("target", str(base)).digest
    assert found.source == str(adapter)
    assert torch.equal(found.weights()("lm_head.weight"), adapted.get_output_embeddings().weight)
    assert run("export", tmp_path / "pair", "--target", adapter, "--to", "torch").code == 0
    assert read_spec(tmp_path / "pair" / "target").eos_token_ids == (0, 5)
    exported, merged = load_file(tmp_path / "pair" / "target" / "model.safetensors"), found.weights()
    assert all(torch.allclose(weight, merged(name)) for name, weight in exported.items())
    shutil.copy(base / "config.json", adapter)  # as some trainers leave it there
    assert find("target", str(adapter)).digest == found.digest
    shutil.copy(base / "model.safetensors", adapter)
    with pytest.raises(InvalidInput, match="beside a whole model"):
        find("target", str(adapter))
    (adapter / "model.safetensors").unlink()
    own = load_file(adapter / "adapter_model.safetensors")
    deeper = {name.replace("layers.1.", "layers.7."): part.clone() for name, part in own.items()}
    save_file(own | deeper, adapter / "adapter_model.safetensors")
    with pytest.raises(InvalidInput, match=r"no place for \d+ weights, such as .*layers\.7"):
        find("target", str(adapter)).load(torch.float32)
    save_file({f"_orig_mod.{name}": part for name, part in own.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(InvalidInput, match="cannot be merged: Found missing adapter keys"):
        find("target", str(adapter)).load(torch.float32)
    base.rename(tmp_path / "moved")
    with pytest.raises(InvalidInput, match="its base_model_name_or_path"):
        find("target", str(adapter))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_file_is_a_checkpoint_of_what_its_numbers_stand_for(kind: str, tmp_path: Path) -> None:
    source, path = make_checkpoint(tmp_path / "source", seed=1), tmp_path / "model.gguf"
    expected = write_gguf(path, load_file(source / "model.safetensors"), kind)
    found, original = find("target", str(path)), find("target", str(source))
    assert found.config.architectures == ["LlamaForCausalLM"]
    assert found.eos_token_ids() == (0,)
    assert found.tokenizer().encode("SELECT name") == original.tokenizer().encode("SELECT name")
    loaded, read = found.load(torch.float32).state_dict(), found.weights()
    for name, weight in expected.items():
        assert torch.allclose(loaded[name], weight, atol=1e-6)
        assert torch.equal(read(name), loaded[name])
    plan_pair(ExportOptions(str(path), str(path), capacity=256))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_a_gguf_file_of_llama_3_has_its_scaled_positions_and_both_of_its_ends(factor: float, tmp_path: Path) -> None:
    source, path = make_checkpoint(tmp_path / "source", seed=1), tmp_path / "model.gguf"
    scaling = {"rope_type": "llama3", **SCALED, "factor": factor, "original_max_position_embeddings": 8192}
    change_json(source / "config.json", rope_parameters={"rope_theta": 10000.0, **scaling})
    original = find("target", str(source)).load(torch.float32)
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    scales = {"rope_freqs.weight": plain / original.model.rotary_emb.inv_freq}
    write_gguf(path, load_file(source / "model.safetensors"), "F32", scales, eot_token_id=5)
    found, tokens = find("target", str(path)), torch.arange(200)[None]
    assert found.eos_token_ids() == (0, 5)
    with torch.no_grad():
        torch.testing.assert_close(found.load(torch.float32)(tokens).logits, original(tokens).logits, rtol=0, atol=1e-4)
    assert found.load(torch.float32).config.rope_parameters == found.empty("float32").config.rope_parameters


@pytest.mark.parametrize(
    ("scales", "values"),
    [
        ({"rope_freqs.weight": torch.linspace(1, 8, 8)}, {}),
        ({"rope_factors_long.weight": torch.ones(8), "rope_factors_short.weight": torch.ones(8)}, {}),
        ({}, {"type": "yarn", "factor": 4.0}),
        ({}, {"type": "linear", "factor": 8.0}),
    ],
)
def test_a_gguf_file_whose_positions_are_scaled_in_another_way_is_refused(
    scales: dict[str, Tensor], values: dict[str, Any], tmp_path: Path
) -> None:
    weights = load_file(make_checkpoint(tmp_path / "source", seed=1) / "model.safetensors")
    write_gguf(tmp_path / "plain.gguf", weights, "F32", type="linear", factor=1.0)
    find("target", str(tmp_path / "plain.gguf"))
    _complete(GPT2Config(), tmp_path / "plain.gguf")  # which has no rotary positions
    for config in (Phi3Config(), StableLmConfig(), Starcoder2Config(), Gemma2Config(hidden_size=4608)):
        with pytest.raises(ValueError, match="leaves a part of such a file out"):
            _complete(config, tmp_path / "plain.gguf")
    write_gguf(tmp_path / "biased.gguf", weights, "F32", {"blk.0.attn_q.bias": torch.ones(64)})
    with pytest.raises(InvalidInput, match="leaves a part of such a file out"):
        find("target", str(tmp_path / "biased.gguf"))
    write_gguf(tmp_path / "model.gguf", weights, "F32", scales, **values)
    with pytest.raises(InvalidInput, match=r"^target .*model\.gguf.*positions are scaled; give the checkpoint in safe"):
        find("target", str(tmp_path / "model.gguf"))


@pytest.mark.slow
def test_a_chat_exports_quantized_gguf_files_on_the_way(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, traced_once: None
) -> None:
    monkeypatch.setenv("MTAD_CACHE", str(tmp_path / "cache"))
    for name, kind in (("model", "Q8_0"), ("small", "Q4_0")):
        source = make_checkpoint(tmp_path / name, seed=1)
        write_gguf(tmp_path / f"{name}.gguf", load_file(source / "model.safetensors"), kind)
    files = (tmp_path / "model.gguf", "--auxiliary", tmp_path / "small.gguf")
    found = run("chat", *files, "--max-tokens", "8", "--ignore-eos", "--provider", "cpu", stdin=b"name\n/quit\n")
    assert found.code == 0, found.err
    assert "1 of 1 texts cut at --max-tokens 8" in found.err


def write_gguf(
    path: Path, weights: dict[str, Tensor], kind: str, scales: dict[str, Tensor] | None = None, **values: Any
) -> dict[str, Tensor]:
    """The Llama of `make_checkpoint` as llama.cpp has it, its matrices of a `kind`; returns what these stand for.

    Args:
        scales: further tensors, of its rotary positions.
        values: `type` and `factor` of the scaling of its rotary positions, and `eot_token_id`.
    """
    gguf, expected = pytest.importorskip("gguf"), dict[str, Tensor]()
    pytest.importorskip("accelerate")
    writer, tokenizer = gguf.GGUFWriter(path, "llama"), make_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokenizer))
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokenizer) - 1))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    add = {"type": lambda name: writer.add_rope_scaling_type(gguf.RopeScalingType(name))}
    add |= {"factor": writer.add_rope_scaling_factor, "eot_token_id": writer.add_eot_token_id}
    for name, value in values.items():
        add[name](value)
    for name, scale in (scales or {}).items():
        writer.add_tensor(name, scale.numpy())
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    names = {
        "embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.": "",
        "layers": "blk",
    }
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, weight in weights.items():
        form = gguf.GGMLQuantizationType[kind if weight.dim() > 1 else "F32"]
        stands_for = gguf.quants.dequantize(gguf.quants.quantize(weight.float().numpy(), form), form)
        expected[name] = torch.from_numpy(stands_for)
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, not halves
            weight = weight.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(weight.shape)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
