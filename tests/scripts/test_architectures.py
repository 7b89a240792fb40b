"""The table of architectures says what an export does now."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from engines.folder import open_engine
from scripts.architectures import TRIED, attempt, main
from scripts.paths import RESULTS
from tests.support.steps import alone_and_together

pytestmark = pytest.mark.usefixtures("traced_once")
FIGURES = json.loads((RESULTS / "architectures.json").read_text())["figures"]["architectures"]


def test_the_table_has_only_what_is_tried() -> None:
    assert FIGURES.keys() <= set(TRIED)
    assert sum(one["state"] == "verified" for one in FIGURES.values()) >= 30


def test_a_mistyped_name_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["architectures", "lama"])
    with pytest.raises(SystemExit, match="2"):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert "'lama'" in line


def test_an_architecture_is_refused_for_the_reason_in_the_table(tmp_path: Path) -> None:
    found = attempt("qwen3_5_text", tmp_path)
    assert found == FIGURES["qwen3_5_text"]
    assert "keep more than keys and values, or a state" in found["state"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma4_text", "deepseek_v3"])
def test_experts_sinks_and_other_special_cases_do_what_the_table_says(kind: str, tmp_path: Path) -> None:
    """Experts with biases and transposed weights, and, of DeepSeek, such as all other mixtures have."""
    assert attempt(kind, tmp_path) == FIGURES[kind]
    assert FIGURES[kind]["state"] == "verified"
    for alone, whole in alone_and_together(open_engine(tmp_path / "pair" / "target")):
        if kind == "gemma4_text":  # by rounding, of which the page of support says so
            torch.testing.assert_close(alone, whole, rtol=0, atol=1e-5)
        else:
            assert torch.equal(alone, whole)
