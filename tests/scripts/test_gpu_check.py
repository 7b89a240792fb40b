"""The check of a GPU, on a CPU: all checks at their smallest; and what becomes of those that die, hang or are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engines.pytorch.attention import attend_cached
from scripts.gpu import __main__ as gpu
from scripts.gpu import run
from scripts.paths import ROOT

pytestmark = pytest.mark.slow


def test_every_check_passes_in_a_bare_checkout_or_says_why_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.bare_checkout", "scripts.gpu", "--device", "cpu", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [*command, "--results", "out"], check=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    checks = json.loads((tmp_path / "out" / "gpu.json").read_text())["figures"]["checks"]
    skipped = {name: one["why"] for name, one in checks.items() if one["state"] == "skipped"}
    assert skipped.pop("attention").startswith("runs on a GPU, not on cpu")
    assert skipped == {
        **dict.fromkeys(("onnxruntime", "tensorrt-rtx", "tensorrt", "tensorrt-llm"), "needs a GPU"),
        "tensorrt-llm-worker": "needs tensorrt-llm 1.4.0rc1; installed: none",
    }
    assert {one["state"] for name, one in checks.items() if name not in (*skipped, "attention")} == {"passed"}
    assert all(checks[name]["compared"] for name in ("engine", "blocks", "pages"))
    methods = ["sample", "block", "mtad"]
    assert [row["method"] for row in checks["speed"]["rows"][:6]] == methods * 2
    assert [row["method"] for row in checks["profile"]["rows"]] == methods
    assert all(int(row["kernels"]) > 0 and float(row["gaps_ms"]) >= 0 for row in checks["profile"]["rows"])
    assert all(f"| {name} | " in done.stdout for name in checks)


def test_kernels_that_are_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.interpreter import multiply_bfloat16

    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_dot", multiply_bfloat16)
    found = run.run_check("attention", "correct:attention", "cpu", True, 300.0)
    assert (found["state"], len(found["compared"])) == ("passed", 6)
    monkeypatch.setattr("scripts.gpu.correct.TOLERANCE", {torch.float32: 2e-5})
    monkeypatch.setattr(
        "engines.pytorch.masked_attention.attend_cached", lambda *given: attend_cached(*given).mul_(1.01)
    )
    assert run.run_check("attention", "correct:attention", "cpu", True, 300.0)["state"] == "failed"


def test_a_check_that_dies_hangs_or_is_wrong_fails_and_what_it_found_before_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def works(given: run.Run) -> None:
        given.compare("a figure", 1.0, 2.0, "units")
        if given.check == "dies":
            os._exit(3)
        if given.check == "hangs":
            time.sleep(3600)
        if given.check == "is wrong":
            given.compare("a figure", float("nan"), 2.0, "units")

    monkeypatch.setattr(run, "works", works, raising=False)
    names = ("works", "dies", "hangs", "is wrong")
    found = {name: run.run_check(name, "run:works", "cpu", True, 2.0 if name == "hangs" else 60.0) for name in names}
    assert {name: (one["state"], one["why"]) for name, one in found.items()} == {
        "works": ("passed", ""),
        "dies": ("failed", "its process ended with 3"),
        "hangs": ("stopped", "after 2 s"),
        "is wrong": ("failed", "1 of 2 comparisons, such as a figure: nan units"),
    }
    assert all(one["compared"][0]["found"] == 1.0 for one in found.values())


def test_each_check_is_about_a_row_of_the_page_on_support() -> None:
    rows = [line.split(" | ")[0] for line in (ROOT / "docs" / "support.md").read_text().splitlines()]
    assert {f"| {row}" for row, _, _ in gpu.CHECKS.values()} <= set(rows)
