"""`ExecutorLLM` over a fake library whose engines run the small pair's checkpoints: texts are the torch engine's."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engines.folder import write_json
from engines.tensorrt_llm_spec import write_executor_spec
from export.tensorrt_llm.build import ExecutorPairPlan, plan_pair
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM, AsyncLLM, RuntimeConfig
from runtime.tensorrt_llm import compat as library
from runtime.tensorrt_llm.llm import ExecutorLLM, read_pair
from scripts.gpu import tensorrt_llm_check as check
from scripts.paths import ROOT
from tests.support import fake_executor as fake
from tests.support.fake_executor import torch_model

QUICK = ("mtad", "mmtad")
PROMPTS = ["SELECT name FROM", "def largest(values):", "How many singers", "x"]


@pytest.fixture(scope="module")
def executor_pair(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair folder as an export would leave it, whose engines the fake library can open."""
    folder = tmp_path_factory.mktemp("executors")
    defaults: dict[str, object] = {"draft_len": 3, "beam_width": 3}
    plan = plan_pair(*map(str, checkpoints), rows=3, capacity=256, draft_len=4, beam_width=3, defaults=defaults)
    write_fake_pair(plan, folder)
    return folder


def write_fake_pair(plan: ExecutorPairPlan, folder: Path) -> None:
    """What `build_pair` leaves, of engines that the fake runs with the checkpoints' weights."""
    for each in plan.engines:
        spec = each.spec
        (folder / spec.role).mkdir(parents=True)
        for name in ("config.json", "rank0.engine"):
            (folder / spec.role / name).write_text("{}")
        each.checkpoint.tokenizer().save_pretrained(folder / spec.role)
        write_executor_spec(folder / spec.role, spec)
        names = ("max_input_len", "max_seq_len", "max_draft_len", "max_beam_width")
        limits = {name: getattr(spec, name) for name in names}
        fake.ENGINES[str(folder / spec.role)] = fake.Limits(model=torch_model(each.checkpoint.folder), **limits)
    write_json(folder / "pair.json", plan.description)


@pytest.fixture
def llm(executor_pair: Path) -> ExecutorLLM:
    return ExecutorLLM(executor_pair, drafting="steps", bindings=fake)


@pytest.mark.parametrize("method", ["mtad", "mmtad", "speculative", "sample"])
def test_texts_are_those_of_the_torch_engine(
    llm: ExecutorLLM, pair_folders: Callable[[str], Path], method: str
) -> None:
    params = DecodingParams(method=method, draft_len=3, beam_width=3, max_tokens=10, seed=11, speculation="fixed")
    ours = llm.generate(PROMPTS, params)
    theirs = LLM(pair_folders("torch"), RuntimeConfig(rows=3)).generate(PROMPTS, params)
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    assert [result.text for result in ours] == [result.text for result in theirs]
    assert llm.loop.scheduler.idle
    llm.loop.check_integrity()


def test_a_server_takes_it_for_an_llm(llm: ExecutorLLM) -> None:
    async def run() -> list[str]:
        async with AsyncLLM(llm) as engine:
            params = DecodingParams(method="mtad", beam_width=3, max_tokens=6, seed=1)
            streams = [await engine.submit(prompt, params) for prompt in PROMPTS]
            return [(await stream.result()).text for stream in streams]

    params = DecodingParams(method="mtad", beam_width=3, max_tokens=6, seed=1)
    assert asyncio.run(run()) == [result.text for result in llm.generate(PROMPTS, params)]


def test_defaults_limits_and_what_is_not_there(llm: ExecutorLLM, executor_pair: Path) -> None:
    (request,) = llm.requests("x")
    assert request.params.draft_len == 3
    for values in ({"draft_len": 5}, {"beam_width": 4}, {"max_tokens": 250}):
        with pytest.raises(InvalidInput):
            llm.requests("x", DecodingParams.from_dict(values, request.params))
    with pytest.raises(InvalidInput, match="adaptive"):
        llm.requests("x", DecodingParams(method="speculative", speculation="adaptive"))
    (result,) = llm.generate("x", DecodingParams(method="speculative", max_tokens=4))  # adaptive elsewhere
    assert result.token_ids
    llm.close()
    with pytest.raises(InvalidInput, match=r"mtad\[tensorrt-llm\]"):
        ExecutorLLM(executor_pair)
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        ExecutorLLM(executor_pair, cache_fractions=(0.9, 1.5), bindings=fake)


def test_executors_in_processes_of_their_own_run_the_librarys_worker(
    executor_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"mtad\[tensorrt-llm\]"):
        ExecutorLLM(executor_pair, bindings=fake, workers=True)
    module = ModuleType("tensorrt_llm")
    module.__file__ = "/packages/tensorrt_llm/__init__.py"
    monkeypatch.setitem(sys.modules, "tensorrt_llm", module)
    monkeypatch.setattr(fake.Executor, "made", [])
    ExecutorLLM(executor_pair, bindings=fake, workers=True, devices=([0, 1], [2]))
    for executor, devices in zip(fake.Executor.made, ([0, 1], [2]), strict=True):
        parallel = executor.config.parallel_config
        assert parallel.orchestrator_config.worker_executable_path == "/packages/tensorrt_llm/bin/executorWorker"
        assert parallel.device_ids == devices


def test_a_pair_that_does_not_belong_together_is_refused(executor_pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    shutil.copytree(executor_pair, folder)
    spec = read_pair(folder).auxiliary.spec
    write_executor_spec(folder / "auxiliary", replace(spec, rows=7))
    with pytest.raises(InvalidInput, match="must agree"):
        read_pair(folder)
    write_executor_spec(folder / "auxiliary", replace(spec, max_beam_width=1))
    with pytest.raises(InvalidInput, match="--drafting search"):
        ExecutorLLM(folder, bindings=fake)
    with pytest.raises(InvalidInput):
        LLM(folder)


def test_the_check_passes_engines_that_compute_what_their_checkpoints_compute(
    executor_pair: Path, checkpoints: tuple[Path, Path], pair_folders: Callable[[str], Path]
) -> None:
    found = check.check_executors(executor_pair, checkpoints, pair_folders("torch"), fake, tokens=6, methods=QUICK)
    assert {each.name for each in found} >= {"target logits", "target logits, reused", "auxiliary log-probabilities"}
    assert all(each.passed for each in found), [str(each) for each in found]
    assert json.loads(json.dumps(check.report(found)))["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["logits", "log_probs", "graphs"])
def test_the_check_notices_engines_that_compute_something_else(
    executor_pair: Path,
    checkpoints: tuple[Path, Path],
    pair_folders: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    def spoiled(self: fake.Executor, tokens: list[int]) -> torch.Tensor:
        assert self.limits.model is not None
        logits = self.limits.model(tokens)
        graphs = self.config.extended_runtime_perf_knob_config.cuda_graph_mode
        wrong = {
            "logits": bool(self.limits.max_draft_len),
            "log_probs": not self.limits.max_draft_len,
            "graphs": graphs,
        }
        return logits.flip(0) if wrong[fault] else logits

    monkeypatch.setattr(fake.Executor, "logits", spoiled)
    found = check.check_executors(executor_pair, checkpoints, pair_folders("torch"), fake, tokens=4, methods=QUICK)
    failed = {each.name for each in found if not each.passed}
    expected = {"logits": "target logits", "log_probs": "auxiliary log-probabilities", "graphs": "graphs on and off"}
    assert expected[fault] in failed


def test_the_check_refuses_a_machine_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["tensorrt_llm_check", *arguments])
        with pytest.raises(SystemExit) as stop:
            check.main()
        return int(stop.value.code or 0), capsys.readouterr().err

    code, message = run("--work", str(tmp_path / "work"))
    assert code == 2
    assert "mtad[tensorrt-llm]" in message
    assert not (tmp_path / "work").exists()
    for wrong in (["--target", "a"], ["--tokens", "0"], ["--dtype", "float64"]):
        code, message = run(*wrong)
        assert code == 2
        assert wrong[0].removeprefix("--") in message


@pytest.mark.slow
def test_the_check_builds_compares_and_ends_with_one_json(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it but the library and the GPU: their names are the fake's."""

    def build(plan: ExecutorPairPlan, folder: Path, overwrite: bool) -> None:
        write_fake_pair(plan, folder)

    monkeypatch.setattr(library, "executor_bindings", lambda: fake)
    monkeypatch.setattr(check, "build_pair", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fake")
    arguments = ["--work", str(tmp_path), "--tokens", "2", "--no-pytorch"]
    pair = ["--target", str(checkpoints[0]), "--auxiliary", str(checkpoints[1])]
    monkeypatch.setattr("sys.argv", ["tensorrt_llm_check", *arguments, *pair])
    check.main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["passed"]
    assert result["device"] == "a fake"
    assert result["plan"]["engines"]["target"]["build"][0] == "trtllm-build"
    assert len([line for line in lines if line.startswith("ok")]) == len(result["checks"])


@pytest.mark.slow
def test_the_shell_script_says_the_same(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [ROOT / "scripts" / "trtllm_check.sh", "--work", tmp_path / "work"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "mtad[tensorrt-llm]" in done.stderr
    assert "Traceback" not in done.stderr
