"""Exporting without holding the weights: the same file comes out, from any kind of checkpoint file, in any number."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM

from engines import Engine, open_engine
from engines.base import EngineSpec
from engines.folder import read_spec, write_spec
from export.checkpoint import Checkpoint, find
from export.folding import FOLDED
from export.graph import write_graph
from export.weights import filled, parameter_names, stored_weights
from mtad.errors import InvalidInput
from tests.test_engines import make_step, some_tokens
from tests.test_families import FAMILIES, write_model

KINDS = ("tied", "gemma-2", "phi-3", "opt", "gpt-2")
"""Tied embeddings, norms of 1 + weight, fused weights, Gemm with biases, matrices stored transposed."""


@pytest.fixture(scope="module")
def checkpoints_of(
    tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Path]
) -> Callable[[str], Checkpoint]:
    parent = tmp_path_factory.mktemp("streaming")

    @functools.cache
    def write(family: str) -> Checkpoint:
        if family == "tied":
            write_checkpoint(parent / family, seed=3, num_hidden_layers=1, tie_word_embeddings=True)
        else:
            write_model(parent / family, FAMILIES[family](1))
        return find("target", str(parent / family))

    return write


def write(folder: Path, checkpoint: Checkpoint, precision: str = "float32", streamed: bool = True) -> Engine:
    spec: EngineSpec = checkpoint.spec(2, 128, precision, "onnx")
    folder.mkdir()
    model = checkpoint.empty(spec.dtype) if streamed else checkpoint.load(spec.dtype)
    write_graph(model, checkpoint.weights(), spec, folder / "model.onnx")
    write_spec(folder, spec)
    return open_engine(folder)


def weights_in(folder: Path) -> Counter[tuple[tuple[int, ...], str]]:
    """Shapes and contents of what is large, whatever it is called."""
    tensors = onnx.load(folder / "model.onnx").graph.initializer
    return Counter(
        (tuple(t.dims), hashlib.sha256(onnx.numpy_helper.to_array(t).tobytes()).hexdigest())
        for t in tensors
        if t.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16) and len(t.dims) > 0
    )


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("family", KINDS)
def test_a_streamed_engine_is_the_one_made_from_a_model_in_memory(
    family: str, precision: str, checkpoints_of: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    checkpoint = checkpoints_of(family)
    assert stored_weights(checkpoint.folder, checkpoint.empty("float32")) is not None
    engines = [write(tmp_path / str(kind), checkpoint, precision, kind) for kind in (True, False)]
    assert weights_in(tmp_path / "True") == weights_in(tmp_path / "False")
    kinds = [
        Counter(node.op_type for node in onnx.load(tmp_path / kind / "model.onnx").graph.node)
        for kind in ("True", "False")
    ]
    assert kinds[0] == kinds[1]
    step = make_step(some_tokens(1, 40)[None], [0], length=64)
    assert torch.equal(*(engine.step(step) for engine in engines))


@pytest.mark.parametrize("family", KINDS)
def test_nothing_is_done_to_weights_in_a_step(
    family: str, checkpoints_of: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    write(tmp_path / "engine", checkpoints_of(family))
    graph = onnx.load(tmp_path / "engine" / "model.onnx", load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    assert not [node.name for node in graph.node if node.op_type in FOLDED and set(node.input) <= constants]
    names = [name for alias in parameter_names(checkpoints_of(family).empty("float32")).values() for name in alias]
    assert {t.name.partition(".weight")[0] for t in graph.initializer if ".weight" in t.name} <= {
        name.partition(".weight")[0] for name in names
    }


class TestShards:
    @pytest.fixture
    def folder(
        self, checkpoints_of: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Path:
        monkeypatch.setattr("export.folding.SHARD", 100_000)
        write(tmp_path / "sharded", checkpoints_of("tied"))
        return tmp_path / "sharded"

    def test_an_engine_in_several_files_is_the_same_engine(
        self, folder: Path, checkpoints_of: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = sorted(file.name for file in folder.glob("*.data"))
        assert len(files) > 1
        assert files[0] == f"model.onnx-00001-of-{len(files):05}.data"
        monkeypatch.undo()
        whole = write(folder.parent / "whole", checkpoints_of("tied"))
        assert (folder.parent / "whole" / "model.onnx.data").is_file()
        step = make_step(some_tokens(1, 40)[None], [0], length=64)
        assert torch.equal(open_engine(folder).step(step), whole.step(step))

    @pytest.mark.parametrize("number", [0, -1])
    def test_one_that_is_missing_is_noticed(self, folder: Path, number: int) -> None:
        sorted(folder.glob("*.data"))[number].unlink()
        with pytest.raises(InvalidInput, match=r"model.onnx.data is missing"):
            read_spec(folder)


class TestWeights:
    def test_an_empty_model_has_none(self, checkpoints_of: Callable[[str], Checkpoint]) -> None:
        model = checkpoints_of("gemma-2").empty("float16")
        assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
        assert all(parameter.dtype == torch.float16 for parameter in model.parameters())
        assert not any(isinstance(buffer, FakeTensor) for buffer in model.buffers())

    def test_a_filled_one_has_them_while_it_runs(self, checkpoints_of: Callable[[str], Checkpoint]) -> None:
        checkpoint = checkpoints_of("tied")
        model, tokens = checkpoint.empty("float32"), some_tokens(2, 20)[None]
        with torch.no_grad(), filled(model, checkpoint.weights(), torch.float32):
            found = model(tokens).logits
            torch.testing.assert_close(found, checkpoint.load("float32")(tokens).logits, rtol=1e-5, atol=1e-5)
        assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())

    @pytest.mark.parametrize("kind", ["index", "older", "older index", "without its body's prefix"])
    def test_every_kind_of_file_is_read_in_place(
        self, kind: str, checkpoints_of: Callable[[str], Checkpoint], tmp_path: Path
    ) -> None:
        source = checkpoints_of("gpt-2")
        model = source.empty("float32")
        tensors = load_file(source.folder / "model.safetensors")
        if kind == "without its body's prefix":
            save_file(
                {name.removeprefix("transformer."): t for name, t in tensors.items()}, tmp_path / "model.safetensors"
            )
        else:
            split = len(tensors) // 2 if "index" in kind else len(tensors)
            parts = [dict(list(tensors.items())[:split]), dict(list(tensors.items())[split:])]
            base = "pytorch_model.bin" if "older" in kind else "model.safetensors"
            names = [base] if split == len(tensors) else [f"{number}-{base}" for number in (1, 2)]
            for name, part in zip(names, parts, strict=False):
                if "older" in kind:
                    torch.save(part, tmp_path / name)
                else:
                    save_file(part, tmp_path / name)
            if "index" in kind:
                places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
                (tmp_path / f"{base}.index.json").write_text(json.dumps({"weight_map": places}))
        weights = stored_weights(tmp_path, model)
        assert weights is not None
        loaded = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
        for name, parameter in loaded.named_parameters(remove_duplicate=False):
            assert torch.equal(weights(name), parameter)

    def test_a_missing_or_misshapen_tensor_is_left_to_transformers_to_refuse(
        self, checkpoints_of: Callable[[str], Checkpoint], tmp_path: Path
    ) -> None:
        source = checkpoints_of("opt")
        model, tensors = source.empty("float32"), load_file(source.folder / "model.safetensors")
        first = next(iter(tensors))
        save_file({**tensors, first: tensors[first][..., :-1].contiguous()}, tmp_path / "model.safetensors")
        assert stored_weights(tmp_path, model) is None
        del tensors[first]
        save_file(tensors, tmp_path / "model.safetensors")
        assert stored_weights(tmp_path, model) is None
