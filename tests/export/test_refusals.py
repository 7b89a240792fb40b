"""Exports and folders that cannot be: each is refused by name, and nothing is left half done."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from export.checkpoint.find import find
from export.options import ExportOptions
from export.plan import plan_pair
from mtad.errors import InvalidInput
from runtime.pair import open_pair
from tests.support.folders import change_json, names


@pytest.fixture
def pair_copy(pair_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of an exported pair, to be damaged."""
    return Path(shutil.copytree(pair_folders("onnx"), tmp_path / "copy"))


BROKEN = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
"""A normalizer at which the tokenizer's library panics."""
HERE, ONNX = Path(__file__), {"format": "onnx"}
RTX: dict[str, Any] = {"format": "tensorrt-rtx", "compute_capabilities": ["8.9"]}
STATIC = {**RTX, "precision": "fp8", "auxiliary_precision": "int8-static", "calibration": HERE}


class TestRefusal:
    @pytest.mark.parametrize(
        ("field", "values", "words"),
        [
            ("rows", {"rows": 0}, ""),
            ("capacity", {"capacity": 100}, ""),
            ("capacity", {"capacity": 576}, ""),
            ("precision", {"precision": "int3"}, ""),
            ("auxiliary_precision", {"auxiliary_precision": "fp32"}, ""),
            ("to", {"format": "gguf"}, ""),
            ("drafts", {"defaults": {"drafts": 3}}, ""),
            ("draft_len", {"defaults": {"draft_len": 0}}, ""),
            ("target", {"target": "/no/such/folder"}, ""),
            ("auxiliary", {"auxiliary": str(HERE)}, "a file, not a folder"),
            ("precision", {"precision": "int8", "calibration": HERE}, ""),
            ("calibration", {**ONNX, "calibration": HERE}, ""),
            ("calibration", {**ONNX, "precision": "int8", "calibration": Path("missing")}, ""),
            ("precision", {**STATIC, "compute_capabilities": ["8.6", "12.0"]}, "8.6 does not support it; 8.9"),
            ("precision", {**STATIC, **ONNX, "compute_capabilities": []}, "needs --to tensorrt or tensorrt-rtx"),
            ("precision", {**STATIC, "attention": "decomposed"}, "needs --to tensorrt .*decomposed"),
            ("auxiliary_precision", {**STATIC, "auxiliary_precision": "int8"}, "needs --to onnx"),
            ("calibration", {**STATIC, "calibration": None}, "give text"),
            ("compute-capability", {**RTX, "compute_capabilities": ["8.7"]}, "builds for 7.5, .*12.1; elsewhere"),
            ("compute-capability", {**RTX, "compute_capabilities": ["90"]}, "builds for"),
            ("compute-capability", {**RTX, **ONNX}, "only for --to tensorrt-rtx"),
            ("compute-capability", {**RTX, "format": "tensorrt-llm"}, "only for --to tensorrt-rtx"),
            ("format", {"format": "tensorrt"}, "tensorrt cannot be imported"),
            ("attention", {**RTX, "attention": "flash"}, "operator, decomposed"),
            ("attention", {"attention": "decomposed"}, "what is no graph has only the first"),
        ],
    )
    def test_bad_options_are_refused_by_name_before_anything_is_written(
        self, export: Callable[..., bool], tmp_path: Path, field: str, values: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(InvalidInput, match=f"^{field}[ :].*{words}"):
            export(**values)
        assert names(tmp_path) == set()

    @pytest.mark.parametrize(
        "error", [LocalEntryNotFoundError("offline"), HFValidationError("bad id"), RuntimeError("401\n\ngated; log in")]
    )
    def test_a_hub_id_that_cannot_be_had_is_refused(
        self, export: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def fail(*args: object, **kwargs: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
        words = f"target = 'owner/name': no such folder, and the hub request failed: {' '.join(str(error).split())}"
        with pytest.raises(InvalidInput, match=f"^{re.escape(words)}$"):
            export(target="owner/name")
        with pytest.raises(InvalidInput, match=f"^{re.escape(words)}$"):
            plan_pair(ExportOptions("owner/name"), weights=False)

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
            with pytest.raises(InvalidInput, match=f"^{name} .*local folder"):
                export(**{name: "v2"})

    def test_weights_that_a_hub_id_has_a_second_time_are_left_there(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = ["model.safetensors", "original/model.safetensors", "consolidated.safetensors", "tokenizer.json"]
        asked: list[str] = []

        def download(source: str, revision: None, allow_patterns: list[str], ignore_patterns: str = "") -> str:
            asked.extend(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
            return str(checkpoint)

        info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=file, size=7) for file in files])
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
        first = find("target", "owner/name")
        assert asked == ["model.safetensors", "tokenizer.json"]
        assert find("target", "owner/name", weights=False).download == 7
        shutil.copy(checkpoint / "model.safetensors", checkpoint / "consolidated.safetensors")
        second = find("target", str(checkpoint))
        assert (second.digest, second.size) == (first.digest, first.size)

    def test_the_case_of_an_architectures_name_does_not_count(self, checkpoint: Path) -> None:
        change_json(checkpoint / "config.json", architectures=["LLaMAForCausalLM"])
        assert find("target", str(checkpoint)).config.model_type == "llama"

    def test_an_adapter_whose_weights_are_pickled_is_downloaded_whole(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("peft")
        folder = tmp_path / "hub"
        folder.mkdir()

        def download(source: str, revision: None, allow_patterns: list[str], ignore_patterns: str = "") -> str:
            files = ["adapter_config.json", "adapter_model.bin"]
            for name in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
                (folder / name).write_text(json.dumps({"base_model_name_or_path": str(checkpoint)}))
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert find("target", "owner/name").adapter == folder
        assert (folder / "adapter_model.bin").is_file()

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
            (lambda c: (c / "config.json").write_text("{"), "config.json is damaged"),
            (lambda c: (c / "config.json").write_text("[]"), "config.json names no architecture"),
            (lambda c: change_json(c / "config.json", architectures=[]), "config.json names no architecture"),
            (lambda c: change_json(c / "config.json", hidden_size=None), "config.json|does not run"),
            (lambda c: change_json(c / "generation_config.json", eos_token_id="end"), "eos_token_id"),
            (lambda c: change_json(c / "generation_config.json", top_k=-1), "top_k = -1.*--defaults"),
            (lambda c: (c / "generation_config.json").write_text("[]"), "not a JSON object"),
            (lambda c: (c / "generation_config.json").write_text('{"x":' + "[" * 100_000), "not a JSON object"),
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
        with pytest.raises(InvalidInput, match=f"^target .*({words})"):
            export(target=str(checkpoint))
        assert names(tmp_path) == {"checkpoint"}

    def test_a_model_that_is_no_graph_is_refused_in_the_words_of_the_cause(
        self, export: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            try:
                raise RuntimeError("a branch depends on data\nand more")
            except RuntimeError as cause:
                raise torch.onnx.OnnxExporterError("\x1b[96mThis is step 1/3\x1b[0m of exporting the model") from cause

        monkeypatch.setattr("torch.onnx.export", fail)  # for a graph that no other test has traced before
        with pytest.raises(InvalidInput, match=r"cannot be written as an ONNX graph: a branch depends on data$"):
            export(format="onnx", capacity=448)


class TestOpening:
    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda e: (e / "engine.json").unlink(), "no engine.json"),
            (lambda e: (e / "engine.json").write_text("{"), "not a valid description"),
            (lambda e: (e / "engine.json").write_text("{}"), "not a valid description"),
            (lambda e: (e / "engine.json").write_bytes(b"\xff"), "not a valid description"),
            (lambda e: (e / "engine.json").write_text("[" * 100_000), "not a valid description"),
            (lambda e: (e.parent / "pair.json").write_text('{"x":' + "[" * 100_000), "not a valid description"),
            (lambda e: change_json(e / "engine.json", version=2), "version = 2"),
            (lambda e: change_json(e / "engine.json", quantised=True), "quantised"),
            (lambda e: change_json(e / "engine.json", format="plan"), "plan"),
            (lambda e: change_json(e / "engine.json", precision="int3"), "int3"),
            (lambda e: change_json(e / "engine.json", rows="4"), "rows"),
            (lambda e: change_json(e / "engine.json", capacity=100), "capacity"),
            (lambda e: change_json(e / "engine.json", eos_token_ids=None), "eos_token_ids"),
            (lambda e: change_json(e / "engine.json", vocab_size=math.inf), "vocab_size"),
            (lambda e: change_json(e / "engine.json", vocab_size=-1), "vocab_size"),
            (lambda e: (e / "tokenizer.json").write_text("{}"), "tokenizer"),
            (lambda e: change_json(e / "tokenizer.json", normalizer=BROKEN), "tokenizer cannot be loaded"),
        ],
    )
    def test_a_damaged_description_is_one_clear_error(
        self, pair_copy: Path, damage: Callable[[Path], None], words: str
    ) -> None:
        damage(pair_copy / "target")
        with pytest.raises(InvalidInput, match=words):
            open_pair(pair_copy)

    @pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "vocab_size"])
    def test_sizes_unlike_the_graphs_are_one_clear_error(
        self, pair_folders: Callable[[str], Path], tmp_path: Path, name: str
    ) -> None:
        folder = shutil.copytree(pair_folders("onnx"), tmp_path / "pair")
        path = folder / "target" / "engine.json"
        change_json(path, **{name: 2 * json.loads(path.read_text())[name]})
        with pytest.raises(InvalidInput, match=r"it says that the graph's .* has the shape"):
            open_pair(folder)

    @pytest.mark.parametrize("action", ["missing", "damaged"])
    def test_missing_or_damaged_model_files_are_one_clear_error(
        self, pair_folder: Path, tmp_path: Path, action: str
    ) -> None:
        pair = shutil.copytree(pair_folder, tmp_path / "pair")
        folder = pair / "auxiliary"
        present = [f for f in ("model.onnx", "model.onnx.data", "model.safetensors") if (folder / f).exists()]
        assert present
        for file in present:
            whole = (folder / file).read_bytes()
            if action == "missing":
                (folder / file).unlink()
            else:
                (folder / file).write_bytes(whole[:50])
            with pytest.raises(InvalidInput, match=file if action == "missing" else "cannot be opened"):
                open_pair(pair)
            (folder / file).write_bytes(whole)
        open_pair(pair)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"version": 9}, "version = 9"),
            ({"vocab_size": 10**6}, "fewer logits"),
            ({"vocab_size": math.inf}, "missing or damaged"),
            ({"defaults": [1]}, "missing or damaged"),
            ({"defaults": {"method": ["block"]}}, "method"),
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
        with pytest.raises(InvalidInput, match=f"^{name}[ :]"):
            open_pair(pair_copy)

    def test_a_folder_that_is_no_pair_is_refused(self, tmp_path: Path) -> None:
        for folder, words in ((tmp_path, "no pair.json"), (tmp_path / "nowhere", "no such folder")):
            with pytest.raises(InvalidInput, match=words):
                open_pair(folder)
