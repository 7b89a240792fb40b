"""Exporting without holding the weights: the same file comes out, from any kind of checkpoint file, in any number."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, GPTJConfig

from engines.base import Engine
from engines.folder import open_engine, write_spec
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.find import find
from export.checkpoint.weights import empty_model, filled, parameter_names, stored_weights
from export.onnx.folding import FOLDED, TRANSPOSED
from export.onnx.graph import write_graph
from mtad.errors import InvalidInput
from tests.support.families import GROUPED, write_model
from tests.support.families import KINDS as KINDS_OF_LAYERS
from tests.support.steps import make_step, some_tokens

KINDS = ("tied", "gemma-2", "phi-3", "opt")
"""Tied embeddings, norms of 1 + weight, fused weights, Gemm with biases; all are verified when they are exported."""


def write(folder: Path, checkpoint: Checkpoint, streamed: bool = True) -> Engine:
    spec = checkpoint.spec(4, 256, "float32", "onnx")
    folder.mkdir()
    model = checkpoint.empty(spec.dtype) if streamed else checkpoint.load(spec.torch_dtype)
    write_graph(model, checkpoint.weights(), spec, folder / "model.onnx")
    write_spec(folder, spec)
    return open_engine(folder)


def weights_in(folder: Path) -> set[tuple[tuple[int, ...], str]]:
    """Shapes and contents of the weights, whatever they are called, equal ones once."""
    tensors = onnx.load(folder / "model.onnx").graph.initializer
    return {
        (tuple(t.dims), hashlib.sha256(onnx.numpy_helper.to_array(t).tobytes()).hexdigest())
        for t in tensors
        if t.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16) and len(t.dims) > 0
    }


def assert_same_engine(ours: Path, theirs: Path, tied: bool = False) -> None:
    more = weights_in(ours) - weights_in(theirs)  # torch's exporter leaves a tied head to be transposed in each step
    assert weights_in(theirs) <= weights_in(ours)
    assert len(more) == tied
    graphs = [onnx.load(folder / "model.onnx", load_external_data=False).graph for folder in (ours, theirs)]
    counts = [Counter(node.op_type for node in graph.node) for graph in graphs]
    assert counts[0] + Counter({"Transpose": int(tied)}) == counts[1]
    step = make_step(some_tokens(1, 40)[None], [0], length=64)
    assert torch.equal(open_engine(ours).step(step), open_engine(theirs).step(step))


@pytest.mark.parametrize("family", ["tied", "opt"])
def test_a_streamed_engine_is_the_one_made_from_a_model_in_memory(
    family: str,
    family_checkpoint: Callable[[str], Checkpoint],
    family_engine: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    checkpoint = family_checkpoint(family)
    assert stored_weights(checkpoint.folder, checkpoint.empty("float32")) is not None
    write(tmp_path / "loaded", checkpoint, streamed=False)
    assert_same_engine(family_engine(family), tmp_path / "loaded", tied=checkpoint.config.tie_word_embeddings)


@pytest.mark.parametrize("family", KINDS)
def test_nothing_is_done_to_weights_in_a_step(family: str, family_engine: Callable[[str], Path]) -> None:
    graph = onnx.load(family_engine(family) / "model.onnx", load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    assert not [node.name for node in graph.node if node.op_type in FOLDED and set(node.input) <= constants]


def test_weights_have_the_checkpoints_names(
    family_checkpoint: Callable[[str], Checkpoint], family_engine: Callable[[str], Path]
) -> None:
    graph = onnx.load(family_engine("opt") / "model.onnx", load_external_data=False).graph
    names = {name for names in parameter_names(family_checkpoint("opt").empty("float32")).values() for name in names}
    found = {tensor.name.removesuffix(TRANSPOSED) for tensor in graph.initializer}
    assert {name for name in found if name.endswith((".weight", ".bias"))} <= names
    assert len(found & names) > 15


class TestWeights:
    def test_a_filled_one_has_them_while_it_runs(self, family_checkpoint: Callable[[str], Checkpoint]) -> None:
        checkpoint = family_checkpoint("tied")
        model, tokens = checkpoint.empty("float32"), some_tokens(2, 20)[None]
        with torch.no_grad(), filled(model, checkpoint.weights(), torch.float32):
            found = model(tokens).logits
            torch.testing.assert_close(found, checkpoint.load(torch.float32)(tokens).logits, rtol=1e-5, atol=1e-5)
        assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())

    def test_a_vector_that_is_used_where_its_module_does_not_run_is_there(self, tmp_path: Path) -> None:
        config = Gemma3nTextConfig(
            **GROUPED, num_hidden_layers=2, head_dim=16, vocab_size_per_layer_input=320,
            hidden_size_per_layer_input=16, num_kv_shared_layers=0, layer_types=KINDS_OF_LAYERS,
        )  # fmt: skip
        checkpoint = find("target", str(write_model(tmp_path, config)))
        tokens = torch.arange(20)[None]
        with torch.no_grad(), filled(checkpoint.empty("float32"), checkpoint.weights(), torch.float32) as model:
            assert torch.equal(model(tokens).logits, checkpoint.load(torch.float32)(tokens).logits)

    @pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors"])
    def test_an_index_names_files_of_its_own_folder_only(
        self, name: str, family_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
    ) -> None:
        source, folder = family_checkpoint("gpt-2"), tmp_path / "checkpoint"
        folder.mkdir()
        tensors = load_file(source.folder / "model.safetensors")
        save_file(tensors, tmp_path / "x.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(InvalidInput, match=r"x\.safetensors.*own folder"):
            stored_weights(folder, source.empty("float32"))

    @pytest.mark.parametrize("kind", ["index", "without its body's prefix"])
    def test_every_kind_of_file_is_read_in_place(
        self, kind: str, family_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
    ) -> None:
        source = family_checkpoint("gpt-2")
        model = source.empty("float32")
        tensors = load_file(source.folder / "model.safetensors")
        if kind == "without its body's prefix":
            bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
            save_file(bare, tmp_path / "model.safetensors")
        else:
            split, names = len(tensors) // 2, ("1.safetensors", "2.safetensors")
            parts = [dict(list(tensors.items())[:split]), dict(list(tensors.items())[split:])]
            for name, part in zip(names, parts, strict=True):
                save_file(part, tmp_path / name)
            places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        weights = stored_weights(tmp_path, model)
        assert weights is not None
        loaded = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
        for name, parameter in loaded.named_parameters(remove_duplicate=False):
            assert torch.equal(weights(name), parameter)

    def test_a_scale_that_no_configuration_speaks_of_is_refused(
        self, family_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
    ) -> None:
        source = family_checkpoint("opt")
        tensors = load_file(source.folder / "model.safetensors")
        first = next(name for name in tensors if name.endswith("proj.weight"))
        tensors |= {first: tensors[first].to(torch.float8_e4m3fn), f"{first}_scale": torch.ones(1)}
        shutil.copytree(source.folder, tmp_path / "scaled")
        save_file(tensors, tmp_path / "scaled" / "model.safetensors")
        with pytest.raises(InvalidInput, match=r"no quantization_config says how .*proj\.weight_scale is used"):
            find("target", str(tmp_path / "scaled"))

    def test_a_missing_or_misshapen_tensor_is_left_to_transformers_to_refuse(
        self, family_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
    ) -> None:
        source = family_checkpoint("opt")
        model, tensors = source.empty("float32"), load_file(source.folder / "model.safetensors")
        first = next(iter(tensors))
        save_file({**tensors, first: tensors[first][..., :-1].contiguous()}, tmp_path / "model.safetensors")
        assert stored_weights(tmp_path, model) is None
        del tensors[first]
        save_file(tensors, tmp_path / "model.safetensors")
        assert stored_weights(tmp_path, model) is None


def test_angles_are_made_in_float32_whatever_the_dtype() -> None:
    config = GPTJConfig(n_layer=1, n_embd=64, n_head=2, rotary_dim=16, n_positions=2048, vocab_size=32)
    exact, ours = (
        empty_model(config, dtype).get_buffer("transformer.h.0.attn.embed_positions")
        for dtype in (torch.float32, torch.bfloat16)
    )
    torch.testing.assert_close(ours.float(), exact, atol=0.01, rtol=0)
