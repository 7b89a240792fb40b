"""`mtad inspect` and `mtad export --dry-run`: what they say is what is there, or what an export then writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from transformers import MixtralConfig

from engines.folder import read_spec
from export.estimate import estimate_pair
from export.options import ExportOptions
from export.plan import plan_pair
from mtad import LLM, RuntimeConfig
from runtime.commands.inspect_folder import inspect
from tests.support.commands import Run, assert_refused
from tests.support.families import GROUPED, write_model


class TestInspect:
    def test_it_says_what_the_folder_is(self, run: Run, pair_folder: Path, llm: LLM) -> None:
        found, outcome = inspect(pair_folder), run("inspect", pair_folder)
        assert (outcome.code, outcome.err, json.loads(outcome.out)) == (0, "", found)
        assert found["kind"] == "pair"
        assert found["memory"]["total"] == llm.memory.total
        assert (found["vocab_size"], found["tuned"], found["defaults"]) == (300, False, {})
        for name, engine in found["engines"].items():
            folder = pair_folder / name
            assert engine == inspect(folder)
            spec = read_spec(folder)
            assert engine["kv_bytes"] == spec.kv_bytes
            assert (engine["vocabulary"], engine["eos_tokens"]) == (300, ["<eos>"])
            assert engine["files"] == {path.name: path.stat().st_size for path in folder.iterdir()}
            assert (engine["build_hash"], engine["versions"]) == (spec.build_hash, spec.versions)

    def test_weights_in_several_files_are_all_counted(
        self, run: Run, pair_folders: Callable[[str], Path], tmp_path: Path
    ) -> None:
        pair = Path(shutil.copytree(pair_folders("torch"), tmp_path / "pair"))
        before = json.loads(run("inspect", pair).out)["memory"]["weights"]
        (pair / "target" / "model-00002-of-00002.safetensors").write_bytes(bytes(2**20))
        assert json.loads(run("inspect", pair).out)["memory"]["weights"] == before + 2**20

    def test_a_tuned_pair_says_so(self, run: Run, pair_folders: Callable[[str], Path], tmp_path: Path) -> None:
        pair = Path(shutil.copytree(pair_folders("torch"), tmp_path / "pair"))
        values = json.loads((pair / "pair.json").read_text())
        for tuned in ({"defaults": {"draft_len": 8}, "tuned": {"draft_len": 3}}, {"defaults": {"draft_len": 3}}):
            (pair / "pair.json").write_text(json.dumps(values | tuned | {"tuning": {}}))
            found = json.loads(run("inspect", pair).out)
            assert (found["tuned"], found["defaults"]) == (True, {"draft_len": 3})  # also by an earlier release

    def test_a_pair_that_the_runtime_opens_is_described(
        self, run: Run, pair_folders: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """Its method has left, so that decoding takes the default in its place."""
        pair = Path(shutil.copytree(pair_folders("torch"), tmp_path / "pair"))
        values = json.loads((pair / "pair.json").read_text())
        (pair / "pair.json").write_text(json.dumps(values | {"defaults": {"method": "gbv"}}))
        assert run("inspect", pair).code == 0


class TestDryRun:
    @pytest.fixture
    def options(self, checkpoints: tuple[Path, Path], tmp_path: Path) -> list[object]:
        target, auxiliary = checkpoints
        sizes = ["--rows", 4, "--capacity", 256, "--dry-run"]
        return [tmp_path / "pair", "--target", target, "--auxiliary", auxiliary, *sizes]

    @pytest.mark.parametrize("format", ["onnx", "torch"])
    def test_its_sizes_are_those_of_the_export(
        self, checkpoints: tuple[Path, Path], pair_folders: Callable[[str], Path], format: str, tmp_path: Path
    ) -> None:
        target, auxiliary = map(str, checkpoints)
        plan = plan_pair(ExportOptions(target, auxiliary, rows=4, capacity=256, format=format), weights=False)
        found, running = estimate_pair(tmp_path / "pair", plan)
        pair = pair_folders(format)
        for one in found:
            there = sum(path.stat().st_size for path in (pair / one.name).glob("model.*"))
            assert one.disk == pytest.approx(there, rel=0.1), "the graph itself is not estimated"
            assert one.spec.kv_bytes == read_spec(pair / one.name).kv_bytes
            assert not one.unchanged
        assert running.total == pytest.approx(LLM(pair, RuntimeConfig(threads=1)).memory.total, rel=0.02)
        assert all(one.unchanged for one in estimate_pair(pair, plan)[0])

    def test_only_matrices_of_products_are_counted_as_quantised(self, tmp_path: Path) -> None:
        source = write_model(tmp_path / "model", MixtralConfig(**GROUPED, num_hidden_layers=2, num_local_experts=4))
        sizes = []
        for precision in ("float32", "int8"):
            plan = plan_pair(ExportOptions(str(source), capacity=256, precision=precision), weights=False)
            sizes.append(estimate_pair(tmp_path / "pair", plan)[0][0].disk)
        products = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 4 * 64) + 320 * 64  # attention and routers, and the head
        assert sizes[0] - sizes[1] == pytest.approx(products * (4 - 8.16 / 8), abs=1)

    def test_nothing_is_written_nor_loaded(
        self, run: Run, options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("export.checkpoint.checkpoint.Checkpoint.load", None)
        outcome = run("export", *options)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.endswith("nothing was written\n")
        assert "102,720" in outcome.out, "the auxiliary's parameters, its padding among them"
        assert list(tmp_path.iterdir()) == []

    def test_what_is_unknown_of_a_plan_is_said(self, run: Run, options: list[object], tmp_path: Path) -> None:
        text = tmp_path / "text.jsonl"
        text.write_text('{"prompt": "SELECT name"}\n')
        quantised = ["--precision", "fp8", "--auxiliary-precision", "float16", "--calibration", text]
        for more in (["--precision", "float16"], quantised):
            outcome = run("export", *options, "--to", "tensorrt-rtx", *more)
            assert outcome.code == 0
            assert "on top, and unknown: a plan's kernels" in outcome.out
        assert list(tmp_path.iterdir()) == [text]

    def test_a_folder_that_may_not_be_replaced_or_need_not_is_said(
        self, run: Run, options: list[object], pair_folders: Callable[[str], Path]
    ) -> None:
        onto = [pair_folders("torch"), *options[1:], "--to", "torch"]
        assert run("export", *onto).out == "up to date; nothing to write\n"
        assert_refused(run("export", *onto, "--capacity", 192), "export", "--overwrite")
        assert "unchanged" not in run("export", *onto, "--capacity", 192, "--overwrite").out
        assert run("export", *onto, "--defaults", '{"seed": 1}', "--overwrite").out.count("unchanged") == 2

    def test_weights_of_a_hub_id_stay_there(
        self,
        run: Run,
        options: list[object],
        checkpoints: tuple[Path, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        asked: list[Any] = []

        def download(source: str, allow_patterns: list[str], revision: str | None) -> str:
            asked.extend(allow_patterns)
            patterns = shutil.ignore_patterns("*.safetensors")
            return str(shutil.copytree(checkpoints[0], tmp_path / "hub", ignore=patterns))

        files = [SimpleNamespace(rfilename="model.safetensors", size=3 * 2**30), SimpleNamespace(rfilename="a", size=9)]
        info = SimpleNamespace(siblings=files)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
        outcome = run("export", *options, "--target", "owner/name")
        assert outcome.code == 0, outcome.err
        assert "3.0 GiB" in outcome.out
        assert asked
        assert not [pattern for pattern in asked if "safetensors" in pattern or "bin" in pattern]
        files.pop(0)
        refused = run("export", *options, "--target", "owner/name")
        assert_refused(refused, "export", "the hub has no weights of it")
