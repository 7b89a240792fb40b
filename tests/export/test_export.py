"""Checkpoints to a pair folder: what is written, what is refused, and that nothing is ever left half done."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engines.base import DTYPES
from engines.folder import read_spec
from engines.onnx.engine import OnnxRuntimeEngine
from export.checkpoint.checkpoint import Checkpoint
from export.engine import expectation
from export.estimate import estimate_pair
from export.onnx.graph import OPSET, write_graph
from export.onnx.widen import rounded, write_widened
from export.options import ExportOptions
from export.pair import export_pair
from export.plan import plan_pair
from export.verification.verify import verify
from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput, VerificationFailed
from runtime.pair import open_pair
from tests.support.folders import change_json, names


@pytest.fixture(scope="module")
def graph(pair_folders: Callable[[str], Path]) -> onnx.ModelProto:
    return onnx.load(pair_folders("onnx") / "target" / "model.onnx", load_external_data=False)


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its number and time of change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


class TestGraph:
    def test_it_has_standard_operators_of_one_opset_only(self, graph: onnx.ModelProto) -> None:
        assert {entry.domain: entry.version for entry in graph.opset_import} == {"": OPSET["operator"]}
        assert {node.domain for node in graph.graph.node} == {""}
        assert not graph.functions
        assert OPSET["operator"] == 24

    def test_its_dimensions_have_names(self, graph: onnx.ModelProto, pair_folders: Callable[[str], Path]) -> None:
        spec = read_spec(pair_folders("onnx") / "target")
        shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in [*graph.graph.input, *graph.graph.output]
        }
        cache = ["rows", spec.kv_heads, spec.capacity, spec.head_dim]
        assert shapes == {
            "tokens": ["rows", "steps"],
            "positions": ["rows", "steps"],
            "mask": ["rows", 1, "steps", "length"],
            "write_at": ["rows"],
            "keep": ["kept"],
            "logits": ["rows", "kept", spec.vocab_size],
            **{
                f"{when}_{kind}.{i}": cache for when in ("past", "present") for kind in ("key", "value") for i in (0, 1)
            },
        }

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("attention", "limit"),
        [("operator", 1e-4), ("decomposed", 1e-2)],  # the constants of a GELU in parts are rounded
    )
    def test_a_16_bit_gemmas_norms_are_the_checkpoints_to_float32_rounding(
        self, attention: str, limit: float, family_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
    ) -> None:
        checkpoint, dtype = family_checkpoint("gemma-2"), "bfloat16"
        weights, empty = rounded(checkpoint.weights(), DTYPES[dtype]), checkpoint.empty("float32")
        spec = replace(checkpoint.spec(4, 256, dtype, "onnx"), attention=attention)
        write_graph(checkpoint.empty(dtype), weights, spec, tmp_path / "model.onnx")
        graph = onnx.load(tmp_path / "model.onnx").graph
        stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        scales = {name: stored[name] for node in graph.node for name in node.input if "norm.weight" in name}
        assert len(scales) == sum("norm.weight" in name for name, _ in empty.named_parameters()) > 4
        for name, scale in scales.items():
            assert scale.dtype == np.float32
            assert np.array_equal(scale, 1.0 + weights(name.removesuffix(".folded.folded")).float().numpy())
        write_widened(tmp_path / "model.onnx", tmp_path / "wide.onnx")
        engine = OnnxRuntimeEngine(tmp_path, replace(spec, precision="float32", dtype="float32"), 1, "wide.onnx")
        assert verify(engine, expectation(empty, weights, spec), allowed=limit) <= limit


class TestFolder:
    def test_engines_say_what_they_are_and_the_pair_what_both_share_and_nothing_else_is_there(
        self, pair_folder: Path
    ) -> None:
        spec = read_spec(pair_folder / "target")
        assert json.loads((pair_folder / "target" / "engine.json").read_text())["version"] == 1
        assert (spec.architecture, spec.format, spec.dtype) == ("LlamaForCausalLM", pair_folder.name, "float32")
        assert (spec.layers, spec.kv_heads, spec.head_dim, spec.vocab_size) == (2, 2, 16, 300)
        assert (spec.rows, spec.capacity, spec.eos_token_ids) == (4, 256, (0,))
        assert len(spec.checkpoint_hash) == 64
        assert spec.checkpoint_hash != read_spec(pair_folder / "auxiliary").checkpoint_hash
        assert {"python", "mtad", "torch", "transformers", "onnx", "onnxscript"} == spec.versions.keys()
        pair = json.loads((pair_folder / "pair.json").read_text())
        assert (pair["vocab_size"], pair["defaults"]) == (300, {})
        assert read_spec(pair_folder / "auxiliary").vocab_size > 300
        assert names(pair_folder) == {"target", "auxiliary", "pair.json"}
        assert not [path for path in pair_folder.parent.iterdir() if path.name.startswith(".")]

    def test_defaults_are_the_owners_over_what_the_target_recommends_to_sample_with(
        self, export: Callable[..., bool], checkpoint: Path, tmp_path: Path
    ) -> None:
        advice = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "max_new_tokens": 9}
        change_json(checkpoint / "generation_config.json", **advice)
        export(target=str(checkpoint), defaults={"method": "mmtad", "draft_len": 3, "stop": ["\n"], "top_p": 0.8})
        advised = replace(DecodingParams(), temperature=0.6, top_k=20)
        expected = replace(advised, method="mmtad", draft_len=3, stop=("\n",), top_p=0.8)
        assert open_pair(tmp_path / "pair").defaults == expected

    def test_the_same_export_again_touches_nothing(self, export: Callable[..., bool], tmp_path: Path) -> None:
        options = {"defaults": {"draft_len": 3, "stop": ["\n"]}}
        assert export(**options)
        before = state(tmp_path)
        assert not export(**options)
        assert not export(**options, overwrite=True)
        assert state(tmp_path) == before

    def test_another_export_is_refused_with_what_is_different(
        self, export: Callable[..., bool], exported: Path, tmp_path: Path
    ) -> None:
        before = state(tmp_path)
        with pytest.raises(InvalidInput, match=r"target: rows; auxiliary: rows; pair.json: defaults.*--overwrite"):
            export(rows=3, defaults={"draft_len": 2})
        assert state(tmp_path) == before

    def test_through_a_link_what_it_leads_to_is_replaced(
        self, export: Callable[..., bool], exported: Path, tmp_path: Path
    ) -> None:
        link, first = tmp_path / "link", tmp_path / "disk" / "first"
        first.parent.mkdir()
        exported.rename(first)
        link.symlink_to(first)
        assert export(folder=link, defaults={"draft_len": 5}, overwrite=True)
        assert (link.readlink(), names(first.parent)) == (first, {"first"})
        assert names(tmp_path) == {"disk", "link"}
        assert open_pair(link).defaults.draft_len == 5

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_what_is_not_a_pair_folder_is_never_replaced(
        self, export: Callable[..., bool], tmp_path: Path, kind: str
    ) -> None:
        mine = tmp_path / "pair" / "mine" if kind == "folder" else tmp_path / "pair"
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("precious")
        with pytest.raises(InvalidInput, match=r"^pair[ :]"):
            export(overwrite=True)
        assert mine.read_text() == "precious"

    def test_a_place_that_cannot_hold_a_folder_is_refused(self, export: Callable[..., bool], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidInput, match="cannot be written"):
            export(folder=tmp_path / "file" / "pair")

    @pytest.mark.parametrize(("error", "existing"), [(VerificationFailed("wrong"), True), (KeyboardInterrupt(), False)])
    def test_a_failure_in_the_middle_leaves_what_was_there(
        self,
        export: Callable[..., bool],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
        existing: bool,
    ) -> None:
        if existing:
            export()
        before = state(tmp_path / "pair")
        calls = []

        def fail_on_the_second(*args: object) -> None:
            calls.append(args)
            if len(calls) == 2:
                raise error

        monkeypatch.setattr("export.engine.verify", fail_on_the_second)
        with pytest.raises(type(error)):
            export(rows=3, overwrite=True)
        assert state(tmp_path / "pair") == before
        assert names(tmp_path) == ({"pair"} if existing else set())

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("precision", "format"), [("float16", "onnx"), ("float16", "torch"), ("bfloat16", "torch")]
    )
    def test_two_bytes_a_number_with_tied_embeddings_verify_and_generate(
        self, write_checkpoint: Callable[..., Path], tmp_path: Path, precision: str, format: str
    ) -> None:
        source = str(write_checkpoint(tmp_path / "tied", seed=3, num_hidden_layers=1, tie_word_embeddings=True))
        asked = ExportOptions(source, source, rows=2, capacity=128, precision=precision, format=format)
        expected = estimate_pair(tmp_path / "pair", plan_pair(asked, weights=False))[0][0].disk
        export_pair(tmp_path / "pair", asked)
        written = sum(path.stat().st_size for path in (tmp_path / "pair" / "target").glob("model.*"))
        assert expected == pytest.approx(written, rel=0.15), "a graph holds a tied head a second time"
        pair = open_pair(tmp_path / "pair")
        assert pair.target.cache.kv.dtype == DTYPES[precision]
        params = DecodingParams(max_tokens=9, ignore_eos=True, seed=1, draft_len=3)
        result = LLM(pair, RuntimeConfig(max_draft_len=4, max_beam_width=4)).generate("SELECT", params)[0]
        assert len(result.token_ids) == 9
        assert result.statistics.accepted > 0

    @pytest.mark.slow
    def test_a_bfloat16_graph_is_verified_and_is_not_for_the_cpu(
        self, export: Callable[..., bool], tmp_path: Path
    ) -> None:
        assert export(format="onnx", precision="bfloat16", auxiliary=None)
        assert read_spec(tmp_path / "pair" / "target").dtype == "bfloat16"
        with pytest.raises(InvalidInput, match="provider cpu computes in float32 or float16 only; export --to torch"):
            open_pair(tmp_path / "pair")

    @pytest.mark.slow
    def test_a_bfloat16_graph_with_a_wrong_weight_is_refused(
        self, export: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def write_wrong(model: Any, weights: Any, spec: Any, path: Path) -> None:
            write_graph(model, lambda name: weights(name) * (1.5 if "layers.0.mlp.up" in name else 1), spec, path)

        monkeypatch.setattr("export.engine.write_graph", write_wrong)
        with pytest.raises(VerificationFailed, match=r"allowed for bfloat16: 0\.1"):
            export(format="onnx", precision="bfloat16")
        assert not list(tmp_path.iterdir())


def test_the_capacity_is_by_default_what_both_models_allow(checkpoints: tuple[Path, Path]) -> None:
    plan = plan_pair(ExportOptions(*map(str, checkpoints)))
    assert [spec.capacity for _, spec, _ in plan.engines] == [512, 512], "the checkpoints have 512 positions"
    assert [spec.precision for _, spec, _ in plan.engines] == ["float32", "float32"]
