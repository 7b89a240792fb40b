"""Checkpoints to a pair folder: what is written, what is refused, and that nothing is ever left half done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import onnx
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engines.base import DTYPES
from engines.folder import read_spec
from engines.onnx.engine import OnnxRuntimeEngine
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.vocabulary import common_vocabulary
from export.engine import expectation
from export.estimate import estimate_pair
from export.onnx.graph import OPSET, write_graph
from export.onnx.widen import rounded, write_widened
from export.options import ExportOptions
from export.pair import export_pair
from export.plan import plan_pair
from export.verification.verify import verify
from mtad.errors import InvalidInput, VerificationFailed
from runtime import LLM, DecodingParams, RuntimeConfig
from runtime.pair import open_pair


@pytest.fixture
def checkpoint(checkpoints: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the target's checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoints[0], tmp_path / "checkpoint"))


@pytest.fixture
def pair_copy(pair_folder: Path, tmp_path: Path) -> Path:
    """A copy of an exported pair, to be damaged."""
    return Path(shutil.copytree(pair_folder, tmp_path / "copy"))


@pytest.fixture(scope="module")
def graph(pair_folders: Callable[[str], Path]) -> onnx.ModelProto:
    return onnx.load(pair_folders("onnx") / "target" / "model.onnx", load_external_data=False)


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its number and time of change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class TestGraph:
    def test_it_is_valid_onnx(self, pair_folders: Callable[[str], Path]) -> None:
        for name in ("target", "auxiliary"):
            onnx.checker.check_model(str(pair_folders("onnx") / name / "model.onnx"), full_check=True)

    def test_it_has_standard_operators_of_one_opset_only(self, graph: onnx.ModelProto) -> None:
        assert {entry.domain: entry.version for entry in graph.opset_import} == {"": OPSET["operator"]}
        assert {node.domain for node in graph.graph.node} == {""}
        assert not graph.functions
        assert OPSET["operator"] == 24

    def test_it_uses_the_operators_that_runtimes_have_kernels_for(self, graph: onnx.ModelProto) -> None:
        spec_layers = 2
        count = {
            kind: sum(node.op_type == kind for node in graph.graph.node) for kind in ("TensorScatter", "Attention")
        }
        assert count == {"TensorScatter": 2 * spec_layers, "Attention": spec_layers}
        assert any(node.op_type == "RMSNormalization" for node in graph.graph.node)

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
        ("family", "attention", "dtype", "limit"),
        [
            ("gemma-2", "operator", "bfloat16", 1e-4),
            ("gemma-2", "decomposed", "bfloat16", 1e-2),  # the constants of a GELU in parts are rounded
            ("gemma-3", "operator", "float16", 1e-4),
        ],
    )
    def test_a_16_bit_gemmas_norms_are_the_checkpoints_to_float32_rounding(
        self,
        family: str,
        attention: str,
        dtype: str,
        limit: float,
        family_checkpoint: Callable[[str], Checkpoint],
        tmp_path: Path,
    ) -> None:
        checkpoint = family_checkpoint(family)
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
    def test_engines_say_what_they_are(self, pair_folder: Path, checkpoints: tuple[Path, Path]) -> None:
        spec = read_spec(pair_folder / "target")
        assert json.loads((pair_folder / "target" / "engine.json").read_text())["version"] == 1
        assert (spec.architecture, spec.format, spec.dtype) == ("LlamaForCausalLM", pair_folder.name, "float32")
        assert (spec.layers, spec.kv_heads, spec.head_dim, spec.vocab_size) == (2, 2, 16, 300)
        assert (spec.rows, spec.capacity, spec.eos_token_ids) == (4, 256, (0,))
        assert len(spec.checkpoint_hash) == 64
        assert spec.checkpoint_hash != read_spec(pair_folder / "auxiliary").checkpoint_hash
        assert {"python", "mtad", "torch", "transformers", "onnx", "onnxscript"} == spec.versions.keys()

    def test_the_pair_says_which_vocabulary_both_share(self, pair_folder: Path) -> None:
        pair = json.loads((pair_folder / "pair.json").read_text())
        assert pair["vocab_size"] == 300 < read_spec(pair_folder / "auxiliary").vocab_size
        assert pair["defaults"] == {}

    def test_nothing_else_is_in_it(self, pair_folder: Path) -> None:
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

    def test_another_export_is_refused_unless_it_may_overwrite(
        self, export: Callable[..., bool], exported: Path, tmp_path: Path
    ) -> None:
        before = state(tmp_path)
        with pytest.raises(InvalidInput, match="--overwrite"):
            export(capacity=192)
        assert state(tmp_path) == before
        assert export(capacity=192, overwrite=True)
        assert names(tmp_path) == {"pair"}
        assert open_pair(exported).target.spec.capacity == 192

    def test_a_changed_checkpoint_is_exported_again(
        self, export: Callable[..., bool], checkpoint: Path, tmp_path: Path
    ) -> None:
        assert export(target=str(checkpoint))
        weights = load_file(checkpoint / "model.safetensors")
        weights["model.norm.weight"] += 0.1
        save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
        assert export(target=str(checkpoint), overwrite=True)

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_what_is_not_a_pair_folder_is_never_replaced(
        self, export: Callable[..., bool], tmp_path: Path, kind: str
    ) -> None:
        mine = tmp_path / "pair" / "mine" if kind == "folder" else tmp_path / "pair"
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("precious")
        with pytest.raises(InvalidInput) as caught:
            export(overwrite=True)
        assert caught.value.field == "pair"
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
        assert export(format="onnx", precision="bfloat16", auxiliary_precision="float32")
        assert names(tmp_path / "pair" / "target") == names(tmp_path / "pair" / "auxiliary")
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


class TestVocabulary:
    @pytest.fixture(scope="class")
    def tokenizer(self, checkpoints: tuple[Path, Path]) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(checkpoints[0], local_files_only=True)

    @staticmethod
    def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> PreTrainedTokenizerBase:
        values = json.loads((source / "tokenizer.json").read_text())
        change(values["model"])
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(values))
        return PreTrainedTokenizerFast(tokenizer_file=str(path))

    def test_one_vocabulary_passes_however_much_the_embeddings_are_padded(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        for sizes in ((300, 300), (320, 300), (300, 512)):
            assert common_vocabulary(tokenizer, tokenizer, *sizes) == 300

    def test_two_swapped_tokens_are_refused_by_name_and_ids(
        self, tokenizer: PreTrainedTokenizerBase, checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        words = {id: word for word, id in tokenizer.get_vocab().items()}

        def swap(model: dict[str, Any]) -> None:
            model["vocab"][words[40]], model["vocab"][words[77]] = 77, 40

        other = self.changed(checkpoints[0], tmp_path, swap)
        with pytest.raises(InvalidInput) as caught:
            common_vocabulary(tokenizer, other, 300, 300)
        assert f"{words[40]!r}: id 40 in the target, 77 in the auxiliary" in str(caught.value)

    def test_a_token_that_one_model_lacks_is_refused_by_name(
        self, tokenizer: PreTrainedTokenizerBase, checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        last = max(tokenizer.get_vocab(), key=lambda word: int(tokenizer.get_vocab()[word]))

        def drop(model: dict[str, Any]) -> None:
            del model["vocab"][last]
            model["merges"].pop()

        other = self.changed(checkpoints[0], tmp_path, drop)
        with pytest.raises(InvalidInput) as caught:
            common_vocabulary(tokenizer, other, 300, 300)
        assert f"{last!r}: id 299 in the target, none in the auxiliary" in str(caught.value)

    def test_logits_narrower_than_the_tokenizer_are_refused(self, tokenizer: PreTrainedTokenizerBase) -> None:
        for name, sizes in (("target", (299, 300)), ("auxiliary", (300, 299))):
            with pytest.raises(InvalidInput) as caught:
                common_vocabulary(tokenizer, tokenizer, *sizes)
            assert caught.value.field == name


HERE, ONNX = Path(__file__), {"format": "onnx"}
RTX: dict[str, Any] = {"format": "tensorrt-rtx", "compute_capabilities": ["8.9"]}
STATIC = {**RTX, "precision": "fp8", "auxiliary_precision": "int8-static", "calibration": HERE}


class TestRefusal:
    @pytest.mark.parametrize(
        ("field", "values", "words"),
        [
            ("rows", {"rows": 0}, None),
            ("rows", {"rows": -1}, None),
            ("capacity", {"capacity": 100}, None),
            ("capacity", {"capacity": 0}, None),
            ("capacity", {"capacity": -64}, None),
            ("capacity", {"capacity": 576}, None),
            ("precision", {"precision": "int3"}, None),
            ("auxiliary_precision", {"auxiliary_precision": "fp32"}, None),
            ("to", {"format": "gguf"}, None),
            ("drafts", {"defaults": {"drafts": 3}}, None),
            ("draft_len", {"defaults": {"draft_len": 0}}, None),
            ("target", {"target": "/no/such/folder"}, None),
            ("auxiliary", {"auxiliary": "no-such-folder"}, None),
            ("precision", {"precision": "int8", "calibration": HERE}, None),
            ("calibration", {**ONNX, "precision": "int8"}, None),
            ("calibration", {**ONNX, "auxiliary_precision": "int8-dynamic"}, None),
            ("calibration", {**ONNX, "calibration": HERE}, None),
            ("calibration", {**ONNX, "precision": "int8", "calibration": Path("missing")}, None),
            (
                "precision",
                {**STATIC, "compute_capabilities": ["8.6", "12.0"]},
                "8.6 does not support it; 8.9",
            ),
            ("precision", {**STATIC, **ONNX, "compute_capabilities": []}, "needs --to tensorrt or tensorrt-rtx"),
            ("precision", {**STATIC, "attention": "decomposed"}, "needs --to tensorrt .*decomposed"),
            ("auxiliary_precision", {**STATIC, "auxiliary_precision": "int8"}, "needs --to onnx"),
            ("calibration", {**STATIC, "calibration": None}, "give text"),
            ("compute-capability", {**RTX, "compute_capabilities": ["8.7"]}, "builds for 7.5, .*12.1; for other GPUs"),
            ("compute-capability", {**RTX, "compute_capabilities": ["90"]}, "builds for"),
            ("compute-capability", {**RTX, **ONNX}, "only for --to tensorrt-rtx"),
            ("format", {**RTX, "format": "tensorrt"}, "tensorrt cannot be imported"),
            ("attention", {**RTX, "attention": "flash"}, "operator, decomposed"),
            ("attention", {"attention": "decomposed"}, "a checkpoint .* has only the first"),
        ],
    )
    def test_bad_options_are_refused_by_name_before_anything_is_written(
        self, export: Callable[..., bool], tmp_path: Path, field: str, values: dict[str, Any], words: str | None
    ) -> None:
        with pytest.raises(InvalidInput, match=words) as caught:
            export(**values)
        assert caught.value.field == field
        assert names(tmp_path) == set()

    @pytest.mark.parametrize(
        "error", [LocalEntryNotFoundError("offline"), HFValidationError("bad id"), OSError("no route")]
    )
    def test_a_hub_id_that_cannot_be_had_is_refused(
        self, export: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def fail(*args: object, **kwargs: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(InvalidInput, match="no such folder, and the hub") as caught:
            export(target="owner/name")
        assert (caught.value.field, caught.value.value) == ("target", "owner/name")

    def test_a_revision_goes_to_the_hub_and_is_refused_for_a_folder(
        self, export: Callable[..., bool], checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def download(source: str, **options: object) -> str:
            asked.append((source, options["revision"]))
            return str(checkpoints[0])

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        plan_pair(ExportOptions("owner/name", str(checkpoints[1]), revision="v2"))
        assert asked == [("owner/name", "v2")]
        for name in ("revision", "auxiliary_revision"):
            with pytest.raises(InvalidInput, match="local folder") as caught:
                export(**{name: "v2"})
            assert caught.value.field == name

    @pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "OPTForCausalLM"])
    def test_another_architecture_is_refused_by_name(
        self, export: Callable[..., bool], checkpoint: Path, architecture: str
    ) -> None:
        change_json(checkpoint / "config.json", architectures=[architecture])
        with pytest.raises(InvalidInput, match=architecture):
            export(auxiliary=str(checkpoint))

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda c: (c / "config.json").unlink(), "no config.json"),
            (lambda c: (c / "config.json").write_text("{"), "config.json"),
            (lambda c: (c / "config.json").write_text("[]"), "config.json"),
            (lambda c: change_json(c / "config.json", architectures=None), "config.json"),
            (lambda c: change_json(c / "config.json", hidden_size=None), "config.json|does not run"),
            (lambda c: change_json(c / "generation_config.json", eos_token_id="end"), "eos_token_id"),
            (lambda c: change_json(c / "generation_config.json", top_k=-1), "top_k = -1.*--defaults"),
            (lambda c: (c / "generation_config.json").write_text("[]"), "not a JSON object"),
            (lambda c: (c / "model.safetensors").unlink(), "safetensors"),
            (lambda c: (c / "tokenizer.json").unlink(), "tokenizer"),
            (lambda c: (c / "tokenizer.json").write_text("{}"), "tokenizer"),
            (lambda c: (c / "model.safetensors").write_bytes(b"\0" * 64), "weights cannot be loaded"),
            (lambda c: change_json(c / "config.json", intermediate_size=128), "weights cannot be loaded"),
            (lambda c: change_json(c / "config.json", num_hidden_layers=3), "weights are missing"),
        ],
    )
    def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(
        self, export: Callable[..., bool], checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
    ) -> None:
        damage(checkpoint)
        with pytest.raises(InvalidInput, match=words) as caught:
            export(target=str(checkpoint))
        assert caught.value.field == "target"
        assert names(tmp_path) == {"checkpoint"}


class TestOpening:
    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda e: (e / "engine.json").unlink(), "no engine.json"),
            (lambda e: (e / "engine.json").write_text("{"), "not a valid description"),
            (lambda e: (e / "engine.json").write_text("[1]"), "not a valid description"),
            (lambda e: (e / "engine.json").write_text("{}"), "not a valid description"),
            (lambda e: (e / "engine.json").write_bytes(b"\xff"), "not a valid description"),
            (lambda e: change_json(e / "engine.json", version=2), "version = 2"),
            (lambda e: change_json(e / "engine.json", quantised=True), "quantised"),
            (lambda e: change_json(e / "engine.json", format="plan"), "plan"),
            (lambda e: change_json(e / "engine.json", precision="int3"), "int3"),
            (lambda e: change_json(e / "engine.json", rows="4"), "rows"),
            (lambda e: change_json(e / "engine.json", rows=0), "rows"),
            (lambda e: change_json(e / "engine.json", capacity=100), "capacity"),
            (lambda e: change_json(e / "engine.json", eos_token_ids=None), "eos_token_ids"),
            (lambda e: (e / "tokenizer.json").write_text("{}"), "tokenizer"),
        ],
    )
    def test_a_damaged_description_is_one_clear_error(
        self, pair_copy: Path, damage: Callable[[Path], None], words: str
    ) -> None:
        damage(pair_copy / "target")
        with pytest.raises(InvalidInput, match=words):
            open_pair(pair_copy)

    @pytest.mark.parametrize("action", ["missing", "damaged"])
    def test_missing_or_damaged_model_files_are_one_clear_error(self, pair_copy: Path, action: str) -> None:
        folder = pair_copy / "auxiliary"
        present = [f for f in ("model.onnx", "model.onnx.data", "model.safetensors") if (folder / f).exists()]
        assert present
        for file in present:
            whole = (folder / file).read_bytes()
            if action == "missing":
                (folder / file).unlink()
            else:
                (folder / file).write_bytes(whole[:50])
            with pytest.raises(InvalidInput, match=file if action == "missing" else "cannot be opened"):
                open_pair(pair_copy)
            (folder / file).write_bytes(whole)
        open_pair(pair_copy)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"version": 9}, "version = 9"),
            ({"vocab_size": None}, "fields missing"),
            ({"vocab_size": 10**6}, "fewer logits"),
            ({"defaults": [1]}, "fields missing"),
            ({"defaults": {"gamma": 4}}, "gamma"),
            ({"defaults": {"draft_len": 0}}, "draft_len"),
        ],
    )
    def test_a_damaged_pair_is_one_clear_error(self, pair_copy: Path, values: dict[str, Any], words: str) -> None:
        change_json(pair_copy / "pair.json", **values)
        with pytest.raises(InvalidInput, match=words):
            open_pair(pair_copy)

    @pytest.mark.parametrize(("name", "value"), [("rows", 2), ("capacity", 128)])
    def test_engines_that_disagree_are_refused(self, pair_copy: Path, name: str, value: int) -> None:
        change_json(pair_copy / "auxiliary" / "engine.json", **{name: value})
        with pytest.raises(InvalidInput) as caught:
            open_pair(pair_copy)
        assert caught.value.field == name

    def test_a_folder_that_is_no_pair_is_refused(self, tmp_path: Path) -> None:
        for folder, words in ((tmp_path, "no pair.json"), (tmp_path / "nowhere", "no such folder")):
            with pytest.raises(InvalidInput, match=words):
                open_pair(folder)


def test_the_capacity_is_by_default_what_both_models_allow(checkpoints: tuple[Path, Path]) -> None:
    plan = plan_pair(ExportOptions(*map(str, checkpoints)))
    assert [spec.capacity for _, spec, _ in plan.engines] == [512, 512], "the checkpoints have 512 positions"
    assert [spec.precision for _, spec, _ in plan.engines] == ["float32", "float32"]
