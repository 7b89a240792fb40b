"""The comparison with other libraries: no worker is trusted, all have one task, nothing is measured twice."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from mtad.errors import Failed, InvalidInput
from scripts.bench.peers import compare as module
from scripts.bench.peers.catalog import System, at_temperature, method_params
from scripts.bench.peers.compare import Comparison, greedy_gap, surprise
from scripts.bench.peers.models import python
from scripts.bench.peers.report import EQUAL, perplexity, plot, summarise, table
from scripts.bench.peers.store import Store
from scripts.bench.peers.worker import Worker

JOB = {"prompts": [[1, 10], [2, 20], [3, 30]], "tokens": 4, "in_flight": 2}


def command(manner: str) -> tuple[str, ...]:
    return sys.executable, "-m", "tests.support.fake_peer", json.dumps({"manner": manner})


@pytest.fixture
def open_worker(tmp_path: Path) -> Iterator[Any]:
    opened: list[Worker] = []

    def start(manner: str, seconds: float = 60) -> Worker:
        opened.append(Worker("fake", command(manner), tmp_path / "log", seconds))
        return opened[-1]

    yield start
    for worker in opened:
        worker.close()


@pytest.mark.parametrize("manner", ["behaves", "reorders"])
def test_texts_belong_to_their_prompts_whatever_order_they_come_in(open_worker: Any, manner: str) -> None:
    worker = open_worker(manner)
    assert worker.ready() == {"fake": "1.0"}
    for _ in range(2):
        texts, seconds = worker.ask(JOB)
        assert texts == [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]
        assert seconds > 0


@pytest.mark.parametrize(
    ("manner", "problem"),
    [
        ("dies", "fake ended with code 7"),
        ("too few", "fake wrote 3 tokens for prompt 2, not 4"),
        ("answers one twice", "fake answered the prompts .* not each of 3 once"),
    ],
)
def test_a_worker_that_does_not_do_its_job_is_named(open_worker: Any, manner: str, problem: str) -> None:
    worker = open_worker(manner)
    worker.ready()
    with pytest.raises(Failed, match=f"(?s){problem}.*a library's banner"):
        worker.ask(JOB)
    with pytest.raises(Failed, match="fake"):
        worker.ask(JOB)


def test_a_worker_that_hangs_is_ended(open_worker: Any) -> None:
    worker = open_worker("hangs")
    worker.ready()
    worker._seconds = 0.2
    with pytest.raises(Failed, match="fake has not answered for"):
        worker.ask(JOB)
    assert worker._process.returncode is not None


def test_a_worker_that_cannot_open_says_why(open_worker: Any) -> None:
    with pytest.raises(Failed, match=r"(?s)fake ended with code 1.*no such model"):
        open_worker("cannot open").ready()


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("scripts.bench.peers.models.GENAI", tmp_path)
    with pytest.raises(InvalidInput, match=r"llama\.cpp.*scripts/baselines\.sh llama\.cpp"):
        python("llama.cpp")


def test_an_unknown_method_is_refused() -> None:
    assert method_params("mtad adaptive")["speculation"] == "adaptive"
    assert method_params("mtad 7x2") == method_params("mtad") | {"draft_len": 7, "beam_width": 2}
    assert method_params("mmtad_sample")["accept_threshold"] == method_params("mmtad")["accept_threshold"]
    with pytest.raises(InvalidInput, match="methods"):
        method_params("mtad sometimes")


SYSTEMS = [
    System("mtad, a", command("behaves"), method="mtad", drafts=True),
    System("mtad, b", command("behaves"), method="mtad", drafts=True),
    System("plain", command("reorders"), peer="plain"),
    System("slow", command("reorders"), peer="slow", drafts=True, batches=False),
]


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    models: Any = SimpleNamespace(size="tiny", folder=tmp_path)
    prompts, base = [[n] for n in range(20)], {"tokens": 3, "top_k": 10}
    made = Comparison(models, "float32", SYSTEMS, prompts, base, Store(tmp_path / "slices.jsonl"))
    for one in SYSTEMS:
        made.store.add(system=one.name, gap=0.0)
        made.store.add(system=one.name, surprise=[1.0])
    return made


def test_an_interrupted_run_measures_what_is_missing_and_nothing_else(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    ask = Worker.ask

    def noted(worker: Worker, job: dict[str, Any]) -> Any:
        asked.append(job)
        if len(asked) == 9:
            raise KeyboardInterrupt
        return ask(worker, job)

    monkeypatch.setattr(Worker, "ask", noted)
    with pytest.raises(KeyboardInterrupt):
        comparison.measure([1, 4], 2)
    comparison.store = Store(tmp_path / "slices.jsonl")
    comparison.measure([1, 4], 2)
    slices = [row for row in comparison.store.rows if "seconds" in row]
    places = [(row["system"], row["load"], row["round"]) for row in slices]
    assert len(places) == len(set(places)) == 4 * 2 * 2
    assert {(r["load"], r["tokens"]) for r in slices if r["system"] == "plain"} == {(1, 6), (4, 24)}
    assert {r["tokens"] for r in slices if r["system"] == "slow"} == {6}, "one that cannot batch gets two prompts"
    before = len(asked)
    comparison.measure([1, 4], 2)
    assert len(asked) == before


def test_greedy_texts_that_are_not_the_checkpoints_are_refused(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison.store.rows.clear()
    comparison.models = SimpleNamespace(size="tiny", checkpoints=Path())  # type: ignore[assignment]
    config = SimpleNamespace(eos_token_id=0)
    monkeypatch.setattr(module, "load_checkpoint", lambda folder: SimpleNamespace(generation_config=config))
    gaps = iter([0.0] * 8 + [0.0, 0.0, 0.0, 0.5])
    monkeypatch.setattr(module, "greedy_gap", lambda *_: next(gaps))
    workers: Any = {one.name: SimpleNamespace(ask=lambda job: ([[1]] * 4, 0.0)) for one in SYSTEMS}
    with pytest.raises(Failed, match="plain: its greedy texts"):
        comparison.check_greedy(workers)


@torch.inference_mode()
def test_the_gap_is_that_of_the_worst_token(reference: LlamaForCausalLM) -> None:
    prompt, ids = [5, 6, 7], [5, 6, 7]
    for _ in range(6):
        ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    text = ids[3:]
    assert greedy_gap(reference, prompt, text, []) == 0
    logits = reference(torch.tensor([ids])).logits[0, 4]
    second = int(logits.topk(2).indices[1])
    expected = float(logits[text[2]] - logits[second])
    assert greedy_gap(reference, prompt, [*text[:2], second], []) == pytest.approx(expected, abs=1e-5)
    assert greedy_gap(reference, prompt, [*text[:2], second], [text[2]]) == 0, "skipping an end of text is no error"


@torch.inference_mode()
def test_the_surprise_is_the_mean_of_what_the_checkpoint_gives_each_token(reference: LlamaForCausalLM) -> None:
    prompt, text = [5, 6, 7], [9, 8, 4]
    log_p = reference(torch.tensor([prompt + text])).logits[0].log_softmax(-1)
    expected = -sum(float(log_p[2 + at, token]) for at, token in enumerate(text)) / 3
    assert surprise(reference, prompt, text) == pytest.approx(expected, abs=1e-5)


def test_sampled_texts_of_every_system_are_scored_once(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison.store.rows.clear()
    monkeypatch.setattr(module, "load_checkpoint", lambda folder: None)
    monkeypatch.setattr(module, "surprise", lambda model, prompt, text: float(prompt[0] + sum(text)))
    asked = list[dict[str, Any]]()

    def ask(job: dict[str, Any]) -> tuple[list[list[int]], float]:
        asked.append(job)
        return [[1, number] for number in range(len(job["prompts"]))], 0.0

    workers: Any = {one.name: SimpleNamespace(ask=ask) for one in SYSTEMS}
    comparison.judge(workers)
    comparison.judge(workers)
    assert [job["in_flight"] for job in asked] == [8, 8, 8, 1]
    assert [row["system"] for row in comparison.store.rows] == [one.name for one in SYSTEMS]
    assert all(row["surprise"] == [1.0 + 2 * n for n in range(20)] for row in comparison.store.rows)


def test_perplexities_are_compared_prompt_by_prompt() -> None:
    plain, other = [1.0, 3.0, 2.0], [1.5, 3.5, 2.2]
    found = perplexity(other, plain)
    assert found["value"] == pytest.approx(math.exp(2.4))
    assert found["ratio"] == pytest.approx(math.exp(0.4))
    assert found["error"] == pytest.approx(math.exp(0.4) * 0.1)


def test_a_peer_whose_texts_are_less_likely_than_samples_is_not_one_of_equal_quality() -> None:
    ours = [replace(SYSTEMS[0], name="sample, a", method="sample"), SYSTEMS[0]]
    rows = rows_of({"sample, a": [1.0], "mtad, a": [4.0], "plain": [2.0], "slow": [8.0]})
    texts = {
        "sample, a": [1.0, 2.0, 3.0],
        "mtad, a": [0.5, 1.0, 2.0],
        "plain": [1.2, 1.9, 3.0],
        "slow": [2.1, 3.0, 4.2],
    }
    rows += [{"system": name, "surprise": own} for name, own in texts.items()]
    found = summarise([*ours, *SYSTEMS[2:]], rows, [1], 1)
    peers = {against: cells["mtad"][1]["peer"] for against, cells in found["against"].items()}
    assert peers == {"the best peer": "slow", EQUAL: "plain"}


def rows_of(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {"system": name, "load": 1, "round": n, "tokens": rate, "seconds": 1.0}
        for name, own in rates.items()
        for n, rate in enumerate(own)
    ]


def test_ratios_are_paired_and_to_the_best_of_all_peers(tmp_path: Path) -> None:
    noise = [1.0, 3.0, 0.5, 2.0, 1.5, 4.0, 0.7, 1.1]
    hot = at_temperature(SYSTEMS, 0.5)
    assert [one.name for one in hot] == ["slow, T=0.5"]
    factors = {"mtad, a": 10.0, "mtad, b": 12.0, "plain": 4.0, "slow": 6.0, "slow, T=0.5": 8.0}
    rates = {name: [factor * one for one in noise] for name, factor in factors.items()}
    found = summarise([*SYSTEMS, *hot], rows_of(rates), [1], len(noise))
    cell = found["against"]["the best peer"]["mtad"][1]
    assert (cell["system"], cell["peer"]) == ("mtad, b", "slow")
    assert cell["ratio"] == pytest.approx({"median": 2.0, "low": 2.0, "high": 2.0})
    other = found["against"][EQUAL]["mtad"][1]
    assert (other["peer"], other["ratio"]["median"]) == ("slow, T=0.5", pytest.approx(1.5))
    again = json.loads(json.dumps({"float32": found}))
    for one in ({"float32": found}, again):
        shown = table(one)
        assert "slow (one at a time)" in shown
        assert "2.00 (2.00 to 2.00)" in shown
        plot({"demo": one}, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000
