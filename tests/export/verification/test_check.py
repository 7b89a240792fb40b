"""`mtad check`: an engine that is right passes, and a wrong one fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from engines.folder import open_engine, read_spec
from export.checkpoint.find import find
from export.options import ExportOptions
from export.pair import export_pair
from export.verification.check import check
from export.verification.verify import NODES, expect, make_cases, verify
from mtad.errors import VerificationFailed
from tests.support.commands import Run, assert_refused
from tests.support.folders import change_json


@pytest.fixture
def onnx_copy(pair_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the ONNX target, to be damaged."""
    return Path(shutil.copytree(pair_folders("onnx") / "target", tmp_path / "engine"))


def damage(folder: Path, module: str, change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Change the weight of a module in the data file, where it lies."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    (tensor,) = [one for one in model.graph.initializer if one.name.startswith(f"{module}.weight")]
    place = {entry.key: entry.value for entry in tensor.external_data}
    data = np.memmap(
        folder / place["location"], np.float32, "r+", int(place.get("offset", 0)), shape=tuple(tensor.dims)
    )
    change(data)
    data.flush()


def test_an_engine_is_its_checkpoint(pair_folder: Path) -> None:
    found = check(pair_folder / "target")
    assert found.same
    assert found.argmax_agreement == 1.0
    assert found.positions == 2 * 3 * (NODES + 1)


@pytest.mark.parametrize(
    "module",
    ["model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj", "lm_head"],
)
def test_one_damaged_weight_is_found(onnx_copy: Path, module: str) -> None:
    def change(weight: np.ndarray[Any, Any]) -> None:
        weight[3, 5] += 0.5

    damage(onnx_copy, module, change)
    assert not check(onnx_copy).same


def test_logits_that_are_not_numbers_are_different(onnx_copy: Path, run: Run) -> None:
    def change(weight: np.ndarray[Any, Any]) -> None:
        weight[0, 0] = np.nan

    damage(onnx_copy, "model.layers.1.mlp.up_proj", change)
    outcome = run("check", onnx_copy)
    assert outcome.code == 1
    assert "largest difference nan" in outcome.out


def test_the_checkpoint_gives_no_logits_but_those_that_are_compared(
    checkpoints: tuple[Path, Path], pair_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spec = find("target", str(checkpoints[0])).load(torch.float32), read_spec(pair_folders("torch") / "target")
    expected, widths = expect(model, spec)[1], set[int]()
    monkeypatch.setattr("export.verification.verify.LOGITS", 1)
    model.lm_head.register_forward_hook(lambda head, inputs, logits: widths.add(logits.shape[1]))
    torch.testing.assert_close(expect(model, spec)[1], expected, rtol=0, atol=1e-5)
    assert widths == {NODES + 1}


@pytest.mark.parametrize(("largest", "limit"), [(3.0, 1e-4), (130.0, 3.9e-3)])
def test_large_logits_may_differ_in_proportion(
    largest: float, limit: float, pair_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, logits = open_engine(pair_folders("torch") / "target"), torch.tensor([[0.0, -largest]])
    monkeypatch.setattr("export.verification.verify.run_engine", lambda engine, case: logits)
    cases = make_cases(engine.spec, None)[:1]
    verify(engine, (cases, logits + 0.9 * limit))
    with pytest.raises(VerificationFailed, match=f"allowed for float32: {limit}"):
        verify(engine, (cases, logits + 1.1 * limit))


@pytest.mark.slow
def test_half_precision_is_within_its_own_tolerance_and_not_within_single(
    pair_folders: Callable[[str], Path], checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    options = ExportOptions(str(checkpoints[0]), rows=2, capacity=128, precision="float16")
    export_pair(tmp_path / "half", options)
    half, single = tmp_path / "half" / "target", pair_folders("onnx") / "target"
    for found in (check(half), check(half, single), check(single, half)):
        assert found.same
        assert 1e-4 < found.error < found.tolerance
    assert not check(half, single, allowed=1e-4).same


class TestCommand:
    def test_a_pair_is_both_its_engines(self, run: Run, pair_folders: Callable[[str], Path]) -> None:
        outcome = run("check", pair_folders("onnx"), pair_folders("torch"))
        assert (outcome.code, outcome.err) == (0, "")
        lines = outcome.out.splitlines()
        names = [Path(a.split()[0]).name for a, b in pairwise(lines) if b.startswith("against ")]
        assert names == ["target", "auxiliary"]

    def test_the_verdict_names_the_tolerance(self, run: Run, onnx_copy: Path) -> None:
        whole = run("check", onnx_copy)
        assert whole.code == 0
        assert "allowed 0.0002" in whole.out, "3e-5 of its largest logit"
        assert whole.out.endswith("\nsame\n")

        def change(weight: np.ndarray[Any, Any]) -> None:
            weight *= 1.5

        damage(onnx_copy, "model.layers.0.mlp.up_proj", change)
        wrong = run("check", onnx_copy)
        assert (wrong.code, wrong.err) == (1, "")
        assert wrong.out.endswith("\nDIFFERENT\n")
        assert run("check", onnx_copy, "--tolerance", "1e9").code == 0

    def test_another_checkpoint_is_different(
        self, run: Run, pair_folders: Callable[[str], Path], write_checkpoint: Callable[..., Path], tmp_path: Path
    ) -> None:
        other = write_checkpoint(tmp_path / "other", seed=5)
        outcome = run("check", pair_folders("torch") / "target", "--checkpoint", other)
        assert outcome.code == 1

    def test_a_checkpoint_that_changed_or_is_unknown_is_refused(
        self, run: Run, pair_folders: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(pair_folders("torch") / "target", tmp_path / "engine"))
        change_json(folder / "engine.json", checkpoint_hash="0" * 64)
        assert_refused(run("check", folder), "check", "has changed since")
        change_json(folder / "engine.json", source="")
        assert_refused(run("check", folder), "check", "give --checkpoint")
