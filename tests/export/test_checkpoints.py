"""Checkpoints that are more than a folder of weights: packed matrices, GGUF files, LoRA adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from engines.folder import read_spec
from export.checkpoint.find import _complete, find
from export.checkpoint.packed import Packing
from export.options import ExportOptions
from export.plan import plan_pair
from export.quantization.weight_only import _as_blocks, dequantized
from mtad.errors import InvalidInput
from tests.support.checkpoints import make_checkpoint, make_tokenizer
from tests.support.commands import Run
from tests.support.families import SCALED
from tests.support.folders import change_json

GROUP = 32
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
WEIGHTS = {"type": "int", "num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"0": {"weights": WEIGHTS}},
}


def joined(columns: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Int32 [A, B / 8] of numbers [A, B]: of eight neighbours the one at order[i] has bits 4 i to 4 i + 3."""
    words = torch.zeros(columns.shape[0], columns.shape[1] // 8, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, which in enumerate(order):
            words[:, word] |= columns[:, 8 * word + which].long() << 4 * place
    return words.to(torch.int32)


def awq(numbers: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # `order_map` of AutoAWQ's WQLinear_GEMM
    return {"qweight": joined(numbers.T, order), "qzeros": joined(zeros.T, order), "scales": scales.T}


def gptq(numbers: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    groups = torch.arange(numbers.shape[1], dtype=torch.int32) // GROUP
    return {
        "qweight": joined(numbers).T,
        "qzeros": joined((zeros.T.int() - 1) & 15),
        "scales": scales.T,
        "g_idx": groups,
    }


def compressed(numbers: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    shape = {"weight_shape": torch.tensor(numbers.shape), "weight_zero_point": joined(zeros.T).T}
    return {"weight_packed": joined(numbers), "weight_scale": scales, **shape}


Pack = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]


def write_packed(folder: Path, pack: Pack, described: dict[str, Any], **changes: Any) -> dict[str, Tensor]:
    """A Llama whose matrices are packed; returns what its weights are."""
    plain = load_file(make_checkpoint(folder, seed=1) / "model.safetensors")
    generator, stored = torch.Generator().manual_seed(2), dict[str, Tensor]()
    for name, weight in plain.items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        rows, groups = weight.shape[0], weight.shape[1] // GROUP
        numbers = torch.randint(16, weight.shape, generator=generator, dtype=torch.uint8)
        zeros = torch.randint(16, (rows, groups), generator=generator, dtype=torch.uint8)
        scales = (0.01 + 0.01 * torch.rand(rows, groups, generator=generator)).half()
        whole = (numbers.float() - zeros.float().repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(
            GROUP, 1
        )
        plain[name] = whole
        parts = pack(numbers, zeros, scales)
        stored |= {name.replace("weight", part): tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**described, **changes}}))
    return plain


FORMS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "awq": (awq, AWQ),
    "gptq": (gptq, GPTQ),
    "compressed-tensors": (compressed, COMPRESSED),
}


@pytest.mark.parametrize("method", FORMS)
def test_packed_matrices_are_what_their_library_says(method: str, tmp_path: Path) -> None:
    left_alone: Any = {"dynamic": {"-:.*lm_head.*": {}}} if method == "gptq" else {}
    expected = write_packed(tmp_path / "packed", *FORMS[method], **left_alone)
    found = find("target", str(tmp_path / "packed"))
    read, loaded = found.weights(), found.load(torch.float32).state_dict()
    for name, weight in expected.items():
        assert torch.equal(read(name), weight)
        assert torch.equal(loaded[name], weight)


def test_a_short_last_group_has_its_own_scale_and_no_place_in_an_int4_engine() -> None:
    numbers, scales = torch.randint(16, (4, 192)).to(torch.uint8), torch.tensor([[1.0, 2.0]] * 4)
    parts = {"weight_shape": torch.tensor([4, 192]), "weight_packed": joined(numbers), "weight_scale": scales}
    weights = WEIGHTS | {"group_size": 128, "symmetric": True}
    packed = Packing.of(COMPRESSED | {"config_groups": {"0": {"weights": weights}}}).read(parts.__getitem__)
    assert packed.groups.tolist() == [0] * 128 + [1] * 64
    unsaid = COMPRESSED | {"config_groups": {"0": {"weights": weights | {"group_size": None}}}}
    assert Packing.of(unsaid).read(parts.__getitem__).groups.tolist() == [0] * 96 + [1] * 96
    wrong = COMPRESSED | {"config_groups": {"0": {"weights": weights | {"group_size": 64}}}}
    with pytest.raises(ValueError, match="2 scales for groups of 64 of 192 columns"):
        Packing.of(wrong).read(parts.__getitem__)
    assert torch.equal(packed.matrix(), (numbers.float() - 8) * torch.tensor([1.0] * 128 + [2.0] * 64))
    with pytest.raises(InvalidInput, match="192 columns are in 2 groups"):
        _as_blocks(packed)


@pytest.mark.slow
def test_int4_takes_packed_matrices_over_and_rounds_nothing_again(tmp_path: Path, calibration: Path, run: Run) -> None:
    expected = write_packed(tmp_path / "packed", *FORMS["awq"])
    options = ("--precision", "int4", "--calibration", calibration)
    assert run("export", tmp_path / "pair", "--target", tmp_path / "packed", *options).code == 0
    report = json.loads((tmp_path / "pair" / "target" / "quantization.json").read_text())
    assert (report["text"]["file"], report["text"]["bundled"]) == (calibration.name, False)
    matrices = dequantized(tmp_path / "pair" / "target" / "model.onnx")
    assert len(matrices) == 14
    for name, read in matrices.items():
        assert np.array_equal(read(), expected[name.removesuffix(".transposed")].numpy().T)


@pytest.mark.parametrize(
    ("method", "changes", "precision", "words"),
    [
        ("awq", {"version": "gemv"}, None, r"awq \(gemv, 4 bits\); readable are"),
        ("awq", {"quant_method": "bitsandbytes"}, None, "bitsandbytes"),
        ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {}}}}, None, r"\(transforms, 4 bits\)"),
        ("compressed-tensors", {"format": "float-quantized"}, None, "float-quantized"),
        ("gptq", {"bits": 3}, None, "3 bits"),
        ("gptq", {"dynamic": {"+:.*down_proj.*": {"bits": 8}}}, None, "several widths"),
        ("gptq", {"desc_act": True}, "int4", "ordered its columns by activations"),
    ],
)
def test_what_cannot_be_read_is_refused_before_any_work(
    method: str, changes: dict[str, Any], precision: str | None, words: str, tmp_path: Path, calibration: Path
) -> None:
    write_packed(tmp_path / "packed", *FORMS[method], **changes)
    source, text = str(tmp_path / "packed"), calibration if precision else None
    with pytest.raises(InvalidInput, match=words):
        plan_pair(ExportOptions(source, source, capacity=256, precision=precision, calibration=text))


def test_a_packed_matrix_that_is_missing_is_refused_before_any_work(tmp_path: Path) -> None:
    write_packed(tmp_path / "packed", *FORMS["awq"])
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    del stored["model.layers.0.self_attn.q_proj.qweight"]
    save_file(stored, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(InvalidInput, match="not every weight of LlamaForCausalLM"):
        plan_pair(ExportOptions(str(tmp_path / "packed"), str(tmp_path / "packed"), capacity=256))


def test_a_scale_that_is_not_a_matrix_own_is_refused_before_any_work(tmp_path: Path) -> None:
    write_packed(tmp_path / "packed", *FORMS["awq"])
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    stored["model.layers.1.mlp.act.scales"] = torch.ones(96)  # as AutoAWQ has it for Starcoder2
    save_file(stored, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"^target .*divides activations by model\.layers\.1\.mlp\.act\.scales"):
        plan_pair(ExportOptions(str(tmp_path / "packed"), capacity=256))


def test_a_tied_head_that_is_stored_has_to_be_the_embeddings(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", seed=1)
    change_json(source / "config.json", tie_word_embeddings=True)
    found, stored = find("target", str(source)), load_file(source / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"^target .*lm_head\.weight is not model\.embed_tokens\.weight; set tie"):
        found.weights()
    same = stored["model.embed_tokens.weight"].clone()
    save_file({**stored, "lm_head.weight": same}, source / "model.safetensors", {"format": "pt"})
    assert torch.equal(found.weights()("lm_head.weight"), same)


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
    scales = {"rope_freqs": plain / original.model.rotary_emb.inv_freq}
    write_gguf(path, load_file(source / "model.safetensors"), "F32", scales, eot_token_id=5)
    found, tokens = find("target", str(path)), torch.arange(200)[None]
    assert found.eos_token_ids() == (0, 5)
    with torch.no_grad():
        torch.testing.assert_close(found.load(torch.float32)(tokens).logits, original(tokens).logits, rtol=0, atol=1e-4)
    assert found.load(torch.float32).config.rope_parameters == found.empty("float32").config.rope_parameters


@pytest.mark.parametrize(
    ("scales", "values"),
    [
        ({"rope_freqs": torch.linspace(1, 8, 8)}, {}),
        ({"rope_factors_long": torch.ones(8), "rope_factors_short": torch.ones(8)}, {}),
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
        writer.add_tensor(f"{name}.weight", scale.numpy())
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
