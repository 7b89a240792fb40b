"""Kept step costs: found by exactly the setting they were measured in, measured again where anything differs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import runtime.llm
from engines.folder import cache_folder
from runtime import LLM, RuntimeConfig
from runtime.speculation.cost_cache import CostCache, machine
from runtime.speculation.step_costs import HostOverhead, StepCosts, StepTable

COSTS = StepCosts(StepTable((1,), (1, 2), ((2.0, 3.0),), 64), StepTable((1,), (1, 2), ((0.2, 0.3),), 64))
OTHER = StepCosts(COSTS.auxiliary, COSTS.target, HostOverhead((1,), (1.0,), (0.0,)))
SETTING: dict[str, Any] = {"threads": 2, "target": {"rows": 8, "versions": {"torch": "2"}}, **machine()}


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    assert CostCache(SETTING, tmp_path).load() is None
    CostCache(SETTING, tmp_path).save(COSTS)
    assert CostCache(dict(reversed(SETTING.items())), tmp_path).load() == COSTS
    CostCache(SETTING, tmp_path).save(OTHER)
    assert CostCache(SETTING, tmp_path).load() == OTHER
    assert len(list((tmp_path / "costs").iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [{"threads": 1}, {"processor": "another"}, {"host": "another"}, {"target": {"rows": 9}}, {"versions": {}}],
)
def test_another_setting_does_not_find_it(tmp_path: Path, change: dict[str, Any]) -> None:
    known, other = CostCache(SETTING, tmp_path), CostCache({**SETTING, **change}, tmp_path)
    known.save(COSTS)
    assert other.load() is None
    other.path.write_bytes(known.path.read_bytes())  # even where names collide
    assert other.load() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"setting": SETTING, "costs": {"target": 1}})])
def test_a_damaged_file_is_named_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    known = CostCache(SETTING, tmp_path)
    known.path.parent.mkdir()
    known.path.write_text(text, encoding="utf-8")
    assert known.load() is None
    assert str(known.path) in caplog.text


def test_a_folder_that_cannot_be_written_is_said_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    CostCache(SETTING, tmp_path / "file").save(COSTS)
    assert "cannot be kept" in caplog.text


def test_the_cache_folder_is_the_users_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTAD_CACHE", "/one")
    assert cache_folder() == Path("/one")
    monkeypatch.delenv("MTAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_folder() == Path("/two/mtad")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "mtad"


def test_a_pair_is_measured_once_on_a_machine_and_says_which_table_it_uses(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MTAD_CACHE", str(tmp_path))
    measured: list[tuple[int, int]] = []

    def measure(auxiliary: object, target: object, runner: object, *limits: int, blocks: object) -> StepCosts:
        measured.append(limits)  # type: ignore[arg-type]
        return COSTS

    monkeypatch.setattr(runtime.llm, "measure_costs", measure)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            fresh = LLM(llm.pair, RuntimeConfig(prefix_tokens=0))
            fresh.measure()
            fresh.measure()
            assert fresh.loop.planner is not None
            assert fresh.loop.planner.costs == COSTS
    assert [line.split(",")[0].split(" /")[0] for line in caplog.messages if line.startswith("step costs")] == [
        "step costs: measured",
        "step costs: from",
    ]
    assert measured == [(8, 8)]
    LLM(llm.pair, RuntimeConfig(prefix_tokens=0, max_draft_len=4)).measure()
    fresh.measure(again=True)
    assert measured == [(8, 8), (4, 8), (8, 8)]
