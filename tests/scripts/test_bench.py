"""The benchmarks: each command makes its tables, no worker is trusted, and statistics are right."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from transformers import LlamaForCausalLM

from mtad.errors import Failed, InvalidInput
from scripts import results
from scripts.bench import __main__ as bench
from scripts.bench import overhead, pairs, steps
from scripts.bench.intervals import median_interval
from scripts.bench.peers import catalog, compare
from scripts.bench.peers.compare import perplexity, scores
from scripts.bench.peers.report import tables
from scripts.bench.peers.worker import Worker


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A command's tables by name, made of the file it wrote; it printed all of them."""

    for module in (compare, overhead, steps):  # several threads would wait for each other on busy cores
        monkeypatch.setattr(module, "cores", lambda: 1)

    def run(*arguments: str) -> dict[str, results.Rows]:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--quick", "--results", str(tmp_path)])
        bench.main()
        made = results.tables(json.loads((tmp_path / f"{arguments[0]}.json").read_text()))
        printed = capsys.readouterr().out
        assert all(results.table(rows) in printed for rows in made.values())
        return made

    return run


def test_peers_compares_our_methods_and_a_library_by_requests_in_flight(
    run: Callable[..., Any], demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "exported", lambda size, precision: demo_pair)
    monkeypatch.setattr(pairs, "folder_of", lambda size: tmp_path)
    monkeypatch.setattr(catalog, "LIBRARIES", [row for row in catalog.LIBRARIES if row[1] != "openvino"])
    monkeypatch.setattr(catalog, "DRAFTS", {"huggingface": ()})
    made = run("peers", "--methods", "mtad", "--peers", "huggingface")
    systems = ("sample, onnxruntime", "mtad, onnxruntime", "huggingface")
    (heading, *rows), ratios = made["demo-float32"], made["demo-float32-peers"]
    assert heading[1:3] == ["1", "2"]
    assert [row[0] for row in rows] == list(systems)
    assert rows[0][-1] == "1.00 ± 0.00"
    assert [row[0] for row in ratios[1:]] == ["`sample`", "`mtad`", "which is"]
    assert not list(tmp_path.glob("*.jsonl")), "a run that has ended is not gone on with"


def test_steps_times_every_engine(
    run: Callable[..., Any], pair_folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "exported", lambda size, name, precision: pair_folders(name))
    _, *rows = run("steps")["steps"]
    assert {(row[0], row[2]) for row in rows} >= {(name, n) for name in ("onnxruntime f32", "torch f32") for n in "12"}
    assert all(float(cell) > 0 for row in rows for cell in row[3:])
    assert (tmp_path / "steps.png").stat().st_size > 10_000


def test_overhead_is_a_part_of_a_block(run: Callable[..., Any], pair_folders: Callable[[str], Path]) -> None:
    pair = str(pair_folders("onnx"))
    heading, *rows = run("overhead", "--pair", pair, "--provider", "cpu", "--methods", "sample", "mtad")["overhead"]
    assert heading[1:] == ["1 row, prompts of 100", "8 rows, prompts of 100"]
    assert [row[0] for row in rows] == ["sample", "mtad"]
    assert all(0 < int(cell.partition("%")[0]) < 100 for row in rows for cell in row[1:])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("peers --loads 0", "loads"),
        ("peers --methods never", "methods"),
        ("steps --rows 0", "rows"),
        ("overhead --vocabulary 9", "vocabulary"),
        ("peers --loads 1 9999", "loads"),
        ("drafts --batches 1", "batches"),
        ("drafts --rows 9999", "rows"),
    ],
)
def test_a_mistake_is_refused_by_the_options_name(
    arguments: str, field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pairs, "exported", lambda size: Path())
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert f"--{field} = " in capsys.readouterr().err


def test_a_picture_has_the_name_of_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "run", lambda _: {"sets": {}})
    monkeypatch.setattr(compare, "plot", lambda _, path: path.touch())
    monkeypatch.setattr(sys, "argv", ["bench", "peers", "--edit", "--results", str(tmp_path)])
    bench.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peers-edit.json", "peers-edit.png"]


def test_a_picture_of_steps_needs_no_single_row(tmp_path: Path) -> None:
    ms = {"median": 1.0, "low": 1.0, "high": 1.0}
    made = [{"engine": "a", "size": "demo", "rows": 8, "tokens": tokens, "ms": ms} for tokens in steps.TOKENS]
    steps.plot({"steps": made}, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 10_000


@pytest.mark.parametrize(("load", "title"), [("1", "One request at a time."), ("8", "8 requests at a time.")])
def test_a_picture_of_peers_says_how_many_requests_it_shows(
    load: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[str]()
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.axes[0].get_title()))
    judged = {"value": 1.0, "ratio": 1.0, "error": 0.1}
    systems = {
        name: {"method": method, "perplexity": judged, "rates": {load: [1.0, 2.0, 3.0]}}
        for name, method in (("sample, a", "sample"), ("peer", ""))
    }
    compare.plot({"sets": {"demo": {"float32": systems}}}, tmp_path / "peers.png")
    assert drawn[0].startswith(title)


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "BASELINES", tmp_path)
    options = bench.parser("peers").parse_args(["--peers", "llama.cpp"])
    with pytest.raises(InvalidInput, match=r"llama\.cpp.*scripts/baselines\.sh llama\.cpp"):
        catalog.catalog(options, "float32", {})


@pytest.mark.parametrize(
    ("answer", "problem"),
    [("'{\"texts\": [[0, [7]]]}'", "was asked for 2 tokens"), ("exit(7)", "ended with code 7.*a library's banner")],
)
def test_a_worker_that_does_not_do_its_job_is_named(answer: str, problem: str, tmp_path: Path) -> None:
    program = 'import sys; print("a library\'s banner", file=sys.stderr); print(\'{"ready": {}}\', flush=True)'
    worker = Worker("fake", [sys.executable, "-c", f"{program}; input(); print({answer})"], tmp_path / "log")
    with pytest.raises(Failed, match=f"(?s)fake {problem}"):
        worker.ask({"prompts": [[1]], "tokens": 2})


def test_a_worker_that_has_died_between_two_jobs_is_named(tmp_path: Path) -> None:
    program = "print('{\"ready\": {}}', flush=True); exit(7)"
    worker = Worker("fake", [sys.executable, "-c", program], tmp_path / "log")
    worker._process.wait()
    with pytest.raises(Failed, match="fake ended with code 7"):
        worker.ask({"prompts": [[1]], "tokens": 2})


@torch.inference_mode()
def test_a_text_is_scored_by_what_the_checkpoint_gives_each_token(reference: LlamaForCausalLM) -> None:
    prompt, ids = [5, 6, 7], [5, 6, 7]
    for _ in range(6):
        ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    text, logits = ids[3:], reference(torch.tensor([ids])).logits[0, 4]
    second = int(logits.topk(2).indices[1])
    assert scores(reference, prompt, text, 299)[0] == 0
    expected = float(logits[text[2]] - logits[second])
    assert scores(reference, prompt, [*text[:2], second], 299)[0] == pytest.approx(expected, abs=1e-5)
    assert scores(reference, prompt, [*text[:2], second], text[2])[0] == 0, "skipping an end of text is no error"
    log_p = reference(torch.tensor([[5, 6, 7, 9, 8]])).logits[0].log_softmax(-1)
    surprise = -float(log_p[2, 9] + log_p[3, 8]) / 2
    assert scores(reference, prompt, [9, 8], 0)[1] == pytest.approx(surprise, abs=1e-5)


def test_ratios_are_paired_and_to_the_best_of_the_peers_that_may_be_chosen() -> None:
    assert median_interval([3, 1, 2, 5, 4]) == {"median": 3, "low": 1, "high": 5}
    assert median_interval(range(1, 11)) == {"median": 5.5, "low": 2, "high": 9}
    found = perplexity([1.5, 3.5, 2.2], [1.0, 3.0, 2.0])
    assert found == pytest.approx({"value": math.exp(2.4), "ratio": math.exp(0.4), "error": math.exp(0.4) * 0.1})

    def system(method: str, library: str, factor: float, ratio: float = 1.0) -> dict[str, Any]:
        rates = [factor * one for one in (1.0, 3.0, 0.5, 2.0, 1.5, 4.0, 0.7, 1.1)]
        judged = {"value": ratio, "ratio": ratio, "error": 0.1}
        return {"method": method, "library": library, "batches": True, "perplexity": judged, "rates": {"8": rates}}

    systems = {
        "sample, a": system("sample", "a", 10),
        "mtad, a": system("mtad", "a", 16),
        "mtad, b": system("mtad", "b", 24),
        "mtad 7x4, a": system("mtad 7x4", "a", 20),
        "mtad auto, a": system("mtad auto", "a", 19),
        "exact": system("", "exact", 8, 1.2),
        "wrong": system("", "wrong", 12, 1.4),
        "exact, T=0.5": system("", "exact", 16, 0.5),
    }
    made = tables({"sets": {"demo": {"float32": systems}}})
    assert made["demo-float32-peers"][2] == ["`mtad`", "2.00 (2.00 to 2.00)"]
    assert made["demo-float32-peers"][-1] == ["which is", "wrong"]
    assert made["demo-float32-quality"][2] == ["`mtad`", "1.50 (1.50 to 1.50)"]
    assert made["demo-float32-quality"][-1] == ["which is", "exact, T=0.5"]
    automatic = [row[1] for row in made["demo-float32-auto"][1:]]
    assert automatic == ["1.90 (1.90 to 1.90)", "0.95 (0.95 to 0.95)"]
