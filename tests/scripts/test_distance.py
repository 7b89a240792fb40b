"""The distances to the joint are those of the methods: lossless ones are as near as a sample is, the others are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.evaluation import distance


@pytest.mark.slow
def test_lossless_methods_are_at_the_floor_and_a_lower_threshold_is_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["distance", "--texts", "1000", "--pairs", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    distance.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "distance.json").read_text()) == report
    assert (tmp_path / "distance.png").stat().st_size > 10_000
    found = {(row["method"], row["threshold"]): row["variation"] for row in report["rows"]}
    for method in ("sample", "speculative"):
        assert found[method, 0.0] < 1.6 * report["floor"]
    assert found["mtad", 0.01] > found["mtad", 1.0] > 1.6 * report["floor"]
