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
from typing import Any

import pytest
import torch

from engines.tensorrt_llm_spec import write_executor_spec
from export.options import ExportOptions
from export.tensorrt_llm.build import ExecutorPairPlan, plan_pair
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM, AsyncLLM, RuntimeConfig
from runtime.commands import generate
from runtime.commands.pair_source import check_pair, open_llm
from runtime.tensorrt_llm import compat as library
from runtime.tensorrt_llm import llm as executor_llm
from runtime.tensorrt_llm.llm import ExecutorLLM, read_pair
from scripts.gpu import tensorrt_llm_check as check
from scripts.paths import ROOT
from tests.support import fake_executor as fake
from tests.support.fake_executor import write_fake_pair

PROMPTS = ["SELECT name FROM", "def largest(values):", "How many singers", "x"]
TREES: dict[str, object] = {"method": "mmtad", "draft_len": 3, "beam_width": 3}


@pytest.fixture(scope="module")
def executor_pair(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair folder as an export would leave it, whose engines the fake library can open."""
    folder = tmp_path_factory.mktemp("executors")
    asked = ExportOptions(*map(str, checkpoints), rows=3, capacity=256, defaults=TREES, format="tensorrt-llm")
    write_fake_pair(plan_pair(asked, draft_len=4, beam_width=3, drafting="steps"), folder)
    return folder


@pytest.fixture
def llm(executor_pair: Path) -> ExecutorLLM:
    return ExecutorLLM(executor_pair, bindings=fake)


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
    params = DecodingParams(method="mtad", beam_width=3, max_tokens=6, seed=1)

    async def run() -> list[str]:
        async with AsyncLLM(llm) as engine:
            streams = [await engine.submit(prompt, params) for prompt in PROMPTS]
            return [(await stream.result()).text for stream in streams]

    assert asyncio.run(run()) == [result.text for result in llm.generate(PROMPTS, params)]


def test_keys_and_values_are_shared_among_requests_of_one_salt_only(llm: ExecutorLLM) -> None:
    executors = fake.Executor.made[-2:]

    params = DecodingParams.from_dict({**TREES, "max_tokens": 2, "seed": 1})

    def computed(salt: str) -> list[int]:
        before = [executor.counts["computed"] for executor in executors]
        (request,) = llm.requests(list(range(1, 65)), params, cache_salt=salt)
        llm.submit(request)
        while not llm.loop.scheduler.idle:
            llm.step()
        return [executor.counts["computed"] - count for executor, count in zip(executors, before, strict=True)]

    first, other, again, common = (computed(salt) for salt in ("a", "b", "a", ""))
    assert first == other == common
    assert all(short + 32 < whole for short, whole in zip(again, first, strict=True))


def test_the_commands_open_it_where_the_library_is(
    llm: ExecutorLLM, executor_pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidInput, match="NVIDIA's package index"):
        open_llm(executor_pair, RuntimeConfig())
    with pytest.raises(InvalidInput, match="mtad generate and mtad serve"):
        check_pair(executor_pair)
    monkeypatch.setattr(executor_llm, "executor_bindings", lambda: fake)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    arguments = ["--method", "mtad", "--max-tokens", "6", "--seed", "1", "--beam-width", "3"]
    monkeypatch.setattr(sys, "argv", ["mtad generate", str(executor_pair), "SELECT", *arguments])
    generate.main()
    (expected,) = llm.generate("SELECT", DecodingParams(method="mtad", draft_len=3, beam_width=3, max_tokens=6, seed=1))
    captured = capsys.readouterr()
    assert captured.out == expected.text + "\n"
    assert captured.err.startswith("keys and values: ")


def test_defaults_limits_and_what_is_not_there(llm: ExecutorLLM, executor_pair: Path) -> None:
    (request,) = llm.requests("x")
    assert request.params.draft_len == 3
    for values in ({"draft_len": 5}, {"beam_width": 4}, {"max_tokens": 250}):
        with pytest.raises(InvalidInput):
            llm.requests("x", DecodingParams.from_dict(values, request.params))
    with pytest.raises(InvalidInput, match="adaptive"):
        llm.requests("x", DecodingParams(method="speculative", speculation="adaptive"))
    with pytest.raises(InvalidInput, match="prompt_logprobs"):
        llm.requests("x", DecodingParams(prompt_logprobs=0))
    (result,) = llm.generate("x", DecodingParams(method="speculative", max_tokens=4))  # adaptive elsewhere
    assert result.token_ids
    llm.close()
    for name, value in (("rows", 2), ("device", "cuda"), ("prefix_tokens", 0), ("max_draft_len", 4)):
        with pytest.raises(InvalidInput) as caught:
            ExecutorLLM(executor_pair, RuntimeConfig(**{name: value}), bindings=fake)  # type: ignore[arg-type]
        assert caught.value.field == name
    assert ExecutorLLM(executor_pair, RuntimeConfig(max_waiting=2), bindings=fake).loop.scheduler.max_waiting == 2


def test_a_pair_that_does_not_belong_together_or_has_no_room_is_refused(executor_pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    shutil.copytree(executor_pair, folder)
    for role in ("target", "auxiliary"):
        fake.ENGINES[str(folder / role)] = fake.ENGINES[str(executor_pair / role)]
    pair: Any = read_pair(folder)
    write_executor_spec(folder / "target", replace(pair.target.spec, max_batch_size=3))
    with pytest.raises(InvalidInput, match="1 path per row, not 3"):
        ExecutorLLM(folder, bindings=fake).requests("x")
    write_executor_spec(folder / "auxiliary", replace(pair.auxiliary.spec, rows=7))
    with pytest.raises(InvalidInput, match="must agree"):
        read_pair(folder)
    with pytest.raises(InvalidInput):
        LLM(folder)


def run_check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["trtllm_check.sh", *arguments])
    try:
        check.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, "logits", "rows"])
def test_the_check_answers_every_question_compares_and_writes_one_json(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """All of it but the library and the GPU: their names are the fake's."""

    def build(plan: ExecutorPairPlan, folder: Path, overwrite: bool) -> None:
        write_fake_pair(plan, folder)

    def spoiled(self: fake.Executor, tokens: list[int]) -> torch.Tensor:
        assert self.limits.model is not None
        logits = self.limits.model(tokens)
        return logits.flip(0) if fault == "logits" and self.limits.max_draft_len else logits

    verified = fake.Executor._verified
    if fault == "rows":
        monkeypatch.setattr(fake.Executor, "_verified", lambda *a: tuple(part[:1] for part in verified(*a)))
    monkeypatch.setattr(fake.Executor, "logits", spoiled)
    monkeypatch.setattr(library, "executor_bindings", lambda: fake)
    monkeypatch.setattr(check, "build_pair", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fake")
    pair = ["--target", str(checkpoints[0]), "--auxiliary", str(checkpoints[1])]
    code = run_check(monkeypatch, "--work", str(tmp_path), "--tokens", "6", *pair)
    result = json.loads((tmp_path / "check.json").read_text())
    assert result["passed"] == (code == 0) == (fault is None)
    assert {each["name"] for each in result["checks"]} >= {"C1", "C2", "C3", "C4", "C5"}
    answers = [each for each in result["checks"] if "answer" in each]
    failed = {each["name"] for each in result["checks"] if not each["passed"]}
    if fault is None:
        assert [each["question"] for each in answers if each["answer"] != each["assumed"]] == [
            "Are logits the same when chunked context reuses keys and values?"  # the fake computes them anew
        ]
    assert fault != "rows" or "C1" in failed
    assert fault != "logits" or "sample: text not the torch engine's" in failed
    assert result["tokens_per_second"].keys() == {"sample", "mtad"}
    assert result["versions"]["device"] == "a fake"
    assert result["plan"]["engines"]["target"]["build"][0] == "trtllm-build"


def test_the_check_refuses_a_machine_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_check(monkeypatch, "--work", str(tmp_path / "work")) == 2
    assert "NVIDIA's package index" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
    for wrong in (["--target", "a"], ["--tokens", "0"], ["--dtype", "float64"]):
        assert run_check(monkeypatch, *wrong) == 2
        assert wrong[0].removeprefix("--") in capsys.readouterr().err


@pytest.mark.slow
def test_the_shell_script_says_the_same(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    script = [str(ROOT / "scripts" / "gpu" / "trtllm_check.sh"), "--work", str(tmp_path / "work")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "NVIDIA's package index" in done.stderr
    assert "Traceback" not in done.stderr
