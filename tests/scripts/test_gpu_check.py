"""The check of a GPU, on a CPU: the same code at small sizes; and what becomes of stages that die, hang or fail."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtad.methods import METHODS
from scripts.gpu import __main__ as gpu_check
from scripts.gpu.models import MadePair, bytes_read, engine_of, random_model, shape
from scripts.gpu.report import Found, Report, Skip
from scripts.gpu.setup import Setup
from scripts.gpu.supervisor import BROKEN, Supervisor
from scripts.gpu.timing import HostTimer, Spread, Timer
from scripts.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of all stages of parts A and C at their smallest, from a checkout that is not installed; each stage once."""
    folder = tmp_path_factory.mktemp("gpu")
    path = folder / "part-a.json"
    Report(path, {"device": "cpu"}).save()
    stages = {**gpu_check.limits_of("A", "tiny"), **gpu_check.limits_of("C", "tiny")}
    run_bare(folder, "A", "--device", "cpu", "--sizes", "tiny", "--folder", str(folder), "--worker", *stages)
    return Report(path)


def run_bare(folder: Path, *options: str) -> None:
    """Run the check in a folder, where little is installed."""
    command = [sys.executable, "-m", "tests.support.bare_checkout", "scripts.gpu", *options]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_every_stage_runs_in_a_bare_checkout_or_says_why_not(report: Report) -> None:
    stages = report.values["stages"]
    assert set(stages) == {*gpu_check.limits_of("A", "tiny"), *gpu_check.limits_of("C", "tiny")}
    assert {name: stage.get("why") for name, stage in stages.items() if stage["state"] != "done"} == {
        "attention": "the kernels run on a GPU; test_attention.py has them in Triton's interpreter",
        "onnxruntime": "onnxruntime is not installed",
    }
    assert report.right
    assert all(name in report.table() for name in stages)


@pytest.mark.slow
def test_onnxruntimes_stage_runs_where_it_is_installed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    Report(path, {"device": "cpu"}).save()
    assert gpu_check.run_stages(path, "cpu", "tiny", ["onnxruntime"]) == 0
    assert Report(path).values["stages"]["onnxruntime"]["state"] == "done"
    assert Report(path).right


@pytest.mark.slow
def test_a_larger_pair_is_made_and_compared_in_a_bare_checkout(tmp_path: Path) -> None:
    for package in ("asyncio", "email", "multiprocessing", "unittest", "http", "urllib", "json", "logging", "xml"):
        shutil.copytree(Path(json.__file__).parent.parent / package, tmp_path / "sources" / package)
    options = ["--device", "cpu", "--sizes", "tiny", "--folder", "out", "--minutes", "9", "--sources", "sources"]
    run_bare(tmp_path, "B", *options, "--prompts", "1", "--max-tokens", "4")
    values = json.loads((tmp_path / "out" / "part-b.json").read_text())
    assert {stage["state"] for stage in values["stages"].values()} == {"done"}
    found = values["stages"]["evaluation"]["facts"]["fastest_at_equal_quality"]
    assert {"sample", "speculative", "block"} <= set(found)


@pytest.mark.slow
def test_every_method_is_compared_with_graphs_and_without(report: Report) -> None:
    for dtype in ("float32", "bfloat16"):
        names = [check.name for stage, check in report.checks if stage == f"agreement {dtype}"]
        assert {f"graphs on = off: {method}" for method, row in METHODS.items() if row.captured} < set(names)
        assert any(name.startswith("graphs on = off: mixed, 5 rows") for name in names)
        assert {"adaptive = sample, greedy", "recorded in advance, and then again"} < set(names)


@pytest.mark.slow
def test_times_and_floors_are_there_for_every_size(report: Report) -> None:
    rows = report.values["stages"]["steps tiny"]["rows"]
    assert [(row["rows"], row["context"], row["tokens"]) for row in rows[:3]] == [(1, 64, 1), (1, 64, 5), (2, 64, 1)]
    assert all(row["floor_ms"] > 0 and row["graph_ms"] > 0 and row["launched_ms"] > 0 for row in rows)
    assert rows[0]["floor_ms"] < rows[-1]["floor_ms"], "more rows and columns are more to read"
    for row in report.values["stages"]["blocks tiny + tinier"]["rows"]:
        assert row["of_floor"] == pytest.approx(row["block_ms"] / row["floor_ms"])


@pytest.mark.slow
def test_a_blocks_largest_kernels_and_its_launches_are_listed(report: Report) -> None:
    stage = report.values["stages"]["profile tiny + tinier"]
    for method in ("sample", "speculative", "mtad", "mmtad"):
        own = [row for row in stage["rows"] if row["method"] == method]
        assert [row["us"] for row in own] == sorted((row["us"] for row in own), reverse=True)
        assert 0 < len(own) <= 30
        assert stage["facts"][method]["launches"] >= sum(row["calls"] for row in own)


@pytest.mark.slow
def test_other_systems_give_the_same_greedy_tokens(report: Report) -> None:
    rows = report.values["stages"]["baselines tiny"]["rows"]
    assert [row["system"] for row in rows[3:]] == [
        "generate",
        "generate, static, compiled",
        "generate, assistant_model",
    ]
    lossless = [row for row in rows if row["system"] != "mtad, mtad"]
    assert {row.get("same_tokens") for row in lossless} == {"6 of 6"}, rows


@pytest.mark.slow
def test_energy_is_a_meters_or_none(report: Report) -> None:
    for name in ("energy demo", "energy tiny"):
        stage = report.values["stages"][name]
        methods = ["sample", "speculative", "mtad", "mmtad"]
        assert [row["method"] for row in stage["rows"]] == methods * 3, "each window is reported when it ends"
        assert list(stage["facts"]["medians"]) == methods
        assert all(row["tokens_s"] > 0 for row in stage["rows"])
        has_meter = not stage["facts"]["meter"].startswith("none")
        assert all(("joules_token" in row) == has_meter for row in stage["rows"])


@pytest.mark.slow
def test_drafts_of_a_made_pair_are_accepted_and_both_models_are_whole(report: Report) -> None:
    facts = report.values["stages"]["energy tiny"]["facts"]
    assert facts["acceptance_rate"] >= 0.7
    made = MadePair("tiny", 1, "cpu", torch.float32)
    made.scale(0.0)
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        theirs, ours = (model(input_ids=tokens).logits for model in (made.target, made.auxiliary))
    torch.testing.assert_close(ours, theirs, msg="without its later layers the target is the auxiliary")


def test_an_embedding_is_read_only_where_it_is_a_head() -> None:
    model = random_model(shape("tiny"), "cpu", torch.float32)
    table = 4 * 256 * 64
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert bytes_read(model) == whole - table
    engine = engine_of(model, 2, 100)
    assert (engine.spec.capacity, engine.spec.head_dim) == (128, 16)


def test_spread_is_of_quartiles_in_milliseconds() -> None:
    assert Spread.of([0.004, 0.001, 0.003, 0.002, 0.005]) == (3.0, 2.0, 4.0, 5)
    assert Spread.of([0.002]) == (2.0, 2.0, 2.0, 1)
    timer = Timer.of("cpu")
    assert isinstance(timer, HostTimer)
    calls: list[int] = []
    assert timer.measure(lambda: calls.append(1), 5, warm_up=2).times == 5
    assert len(calls) == 7


def run_one(monkeypatch: pytest.MonkeyPatch, path: Path, work: Any, answers: bool = True) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(gpu_check, "work_of", lambda name: work)
    monkeypatch.setattr(gpu_check, "_answers", lambda device: answers)
    Report(path, {}).save()
    code = gpu_check.run_stages(path, "cpu", "tiny", ["first", "second"])
    return code, json.loads(path.read_text())["stages"]


def test_a_failure_is_recorded_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(setup: Setup, found: Found) -> None:
        found.check("a figure", 1.0, 2.0, "units")
        raise ArithmeticError("no such number")

    with caplog.at_level(logging.CRITICAL):
        code, stages = run_one(monkeypatch, tmp_path / "report.json", work)
    assert code == 0
    for stage in stages.values():
        assert (stage["state"], stage["why"]) == ("failed", "ArithmeticError: no such number")
        assert stage["checks"][0]["found"] == 1.0, "what was found before is kept"
    assert not Report(tmp_path / "report.json").right


def test_a_broken_gpu_ends_the_process_for_a_new_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(setup: Setup, found: Found) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(logging, "exception", lambda *args: None)
    code, stages = run_one(monkeypatch, tmp_path / "report.json", work, answers=False)
    assert (code, list(stages)) == (BROKEN, ["first"])


def test_what_cannot_run_is_skipped_and_nothing_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(setup: Setup, found: Found) -> None:
        raise Skip("there is none")

    _, stages = run_one(monkeypatch, tmp_path / "report.json", work)
    assert [(stage["state"], stage["why"]) for stage in stages.values()] == [("skipped", "there is none")] * 2
    assert Report(tmp_path / "report.json").right


def test_a_comparison_out_of_its_bound_is_a_failure(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.json", {})
    for value in (1.0, float("nan")):
        report.stage(f"with {value}", state="done")
        Found(report, f"with {value}").check("a figure", value, 0.5, "units")
    assert not Report(tmp_path / "report.json").right
    assert report.table().count("FAILED") == 2


WORKER = """
import os, sys, time
from scripts.gpu.report import Report
path, *names = sys.argv[1:]
for name in names:
    report = Report(path := __import__("pathlib").Path(path))
    report.stage(name, state="running", started=time.time())
    if name == "dies": os.abort()
    if name == "hangs": time.sleep(3600)
    report.stage(name, state="done")
    if name == "breaks": sys.exit(75)
"""
"""A worker without torch."""


def test_a_stage_that_dies_or_hangs_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    Report(path, {}).save()
    limits = {"first": 600.0, "dies": 600.0, "breaks": 600.0, "hangs": 0.5, "last": 600.0}
    report = Supervisor([sys.executable, "-c", WORKER, str(path)], path, limits, 3600).run()
    stages = report.values["stages"]
    assert {name: stage["state"] for name, stage in stages.items()} == {
        **dict.fromkeys(("first", "breaks", "last"), "done"),
        **dict.fromkeys(("dies", "hangs"), "failed"),
    }
    assert stages["dies"]["why"] == "its process ended with -6"
    assert "stopped after" in stages["hangs"]["why"]


def test_a_worker_that_cannot_begin_is_not_started_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    Report(path, {}).save()
    report = Supervisor([sys.executable, "-c", "raise SystemExit(3)"], path, {"a": 600.0, "b": 600.0}, 3600).run()
    assert {stage["why"] for stage in report.values["stages"].values()} == {"its process ended with 3"}


def test_when_the_time_is_used_up_the_rest_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    Report(path, {}).save()

    def monotonic() -> float:
        """A clock that stands until the first stage has begun; then the time is over."""
        return 3600.0 if Report(path).values["stages"] else 0.0

    clock = SimpleNamespace(monotonic=monotonic, time=time.time, sleep=time.sleep)
    monkeypatch.setattr("scripts.gpu.supervisor.time", clock)
    limits = {"hangs": 36000.0, "last": 36000.0}
    report = Supervisor([sys.executable, "-c", WORKER, str(path)], path, limits, 3600).run()
    assert [stage["state"] for stage in report.values["stages"].values()] == ["failed", "out of time"]
    assert not report.right


def test_a_stage_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "A", "--device", "cpu", "--sizes", "tiny", "--stages", "steps 8B"])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 2
    assert "stages = 'steps 8B'" in capsys.readouterr().err


def test_every_stage_of_a_full_run_has_a_function_and_the_main_ones_fit_into_nine_minutes() -> None:
    for part in gpu_check.PARTS:
        for name, limit in gpu_check.limits_of(part, "full").items():
            assert callable(gpu_check.work_of(name))
            assert limit > 0
        assert sum(gpu_check.PARTS[part].values()) <= 540
    assert 60 * gpu_check.MINUTES < 540
    with pytest.raises(KeyError):
        gpu_check.work_of("nothing")
