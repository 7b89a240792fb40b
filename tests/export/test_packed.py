"""Checkpoints whose matrices are packed integers: what they stand for, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export.checkpoint.find import find
from export.checkpoint.packed import Packing
from export.checkpoint.weights import STORED
from export.options import ExportOptions
from export.plan import plan_pair
from export.quantization.weight_only import _as_blocks, dequantized
from mtad.errors import InvalidInput
from tests.support.checkpoints import make_checkpoint
from tests.support.commands import Run

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


def test_a_matrix_of_which_a_part_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    write_packed(tmp_path / "packed", gptq, GPTQ)
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    save_file({key: part for key, part in stored.items() if key != f"{name}.g_idx"}, tmp_path / "packed" / STORED)
    with pytest.raises(InvalidInput, match=rf"^weights = '{name}\.qweight': not as gptq packs a matrix"):
        find("target", str(tmp_path / "packed")).weights()(f"{name}.weight")


def test_columns_in_an_order_of_their_own_are_found_by_whatever_says_so() -> None:
    for ordered in (True, "group", "dynamic", None, False, "static", "weight"):
        groups = {"0": {"weights": WEIGHTS | {"actorder": ordered}}}
        in_order = Packing.of(COMPRESSED | {"config_groups": groups}).in_order
        assert in_order == (ordered in (None, False, "static", "weight"))


def test_scales_of_which_no_configuration_tells_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", seed=1) / STORED
    save_file({**load_file(path), "model.layers.0.mlp.up_proj.SCB": torch.ones(4)}, path, {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"no quantization_config says how .*SCB is used"):
        find("target", str(path.parent))
