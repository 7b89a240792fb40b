"""The serving benchmark: what it counts, what it times, and that all systems are given the same task."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from mtad.errors import InvalidInput
from runtime import LLM, DecodingParams, RuntimeConfig
from scripts.bench import __main__ as bench
from scripts.bench import serving
from scripts.bench.gate import compare_adaptive, median_interval
from scripts.bench.overhead import measure_overhead
from scripts.bench.serving import measure, measure_eight, summarise
from scripts.bench.serving_tables import throughput_table
from scripts.demo import dataset
from scripts.demo.dataset import Example
from scripts.systems import GENAI, Finished, GenAI, HuggingFace, InFlight, Prompt, Slice, System, useful
from tests.support.checkpoints import TEXT

GREEDY = DecodingParams(method="sample", top_k=1, max_tokens=24)
"""Sampling from one token: every system must give the same text."""


@pytest.fixture(scope="module")
def llm(pair_folders: Callable[[str], Path]) -> LLM:
    """The random pair, without kept prompts; tests leave it idle."""
    return LLM(pair_folders("onnx"), RuntimeConfig(threads=1, rows=8, prefix_tokens=0))


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[Prompt]:
    """Prompts of different lengths."""
    ids = [llm.pair.tokenizer(text[start:]).input_ids for start in (0, 7, 20) for text in TEXT]
    return [Prompt(number, tuple(own)) for number, own in enumerate(ids)]


def test_useful_tokens_end_with_the_text() -> None:
    assert useful([5, 6, 0, 0, 0], [0]) == [5, 6, 0]
    assert useful([5, 6, 7], [0]) == [5, 6, 7]
    assert useful([0, 5], [0]) == [0]
    assert useful([5, 9, 0], [0, 9]) == [5, 9]


@pytest.mark.parametrize("method", ["sample", "mtad"])
def test_a_closed_loop_counts_every_token_once_and_stays_full(
    llm: LLM, prompts: list[Prompt], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight: list[int] = []
    clock, step, scheduler = SimpleNamespace(now=0.0), llm.step, llm.loop.scheduler

    def watched() -> object:
        clock.now += 1.0
        in_flight.append(len(scheduler.holders) + len(scheduler.waiting))
        return step()

    system = InFlight(method, llm)
    system.begin(itertools.cycle(prompts), 3, DecodingParams(method=method, max_tokens=12))
    monkeypatch.setattr(llm, "step", watched)
    monkeypatch.setattr("scripts.systems.in_flight.time", SimpleNamespace(perf_counter=lambda: clock.now))
    before = llm.loop.totals.tokens
    slices = [system.slice(20.0) for _ in range(3)]
    counted = llm.loop.totals.tokens - before
    assert in_flight == [3] * 60
    system.end()
    assert sum(part.tokens for part in slices) == counted > 0
    assert all(len(one.tokens) <= 12 for part in slices for one in part.finished)
    assert scheduler.idle


def test_time_between_slices_is_not_counted(llm: LLM, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks once a step, `sample` has its first token after 1 tick and then one a tick."""
    clock, step = SimpleNamespace(now=0.0), llm.step

    def ticking() -> object:
        clock.now += 1.0
        return step()

    monkeypatch.setattr("scripts.systems.in_flight.time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(llm, "step", ticking)
    system = InFlight("sample", llm)
    system.begin(itertools.cycle(prompts), 2, DecodingParams(method="sample", max_tokens=9, ignore_eos=True))
    slices = []
    for _ in range(4):
        slices.append(system.slice(7.0))
        clock.now += 1000.0
    system.end()
    finished = [one for part in slices for one in part.finished]
    assert len(finished) >= 4
    assert {(one.first, one.whole, one.per_token) for one in finished} == {(1.0, 9.0, 1.0)}
    assert {(part.tokens, part.seconds) for part in slices} == {(14, 7.0)}


def test_answers_are_those_of_the_same_requests_alone(llm: LLM, prompts: list[Prompt]) -> None:
    params = DecodingParams(method="mtad", accept_threshold=0.05, max_tokens=10)
    eight = measure_eight([InFlight("mtad", llm)], {"mtad": params}, prompts[:8], 1)
    assert eight["mtad"]["same_tokens"]
    part = InFlight("mtad", llm).run(prompts, 4, params)
    assert [one.prompt for one in part.finished] == [prompt.number for prompt in prompts]
    for one, prompt in zip(part.finished, prompts, strict=True):
        alone = llm.generate(prompt.ids, replace(params, seed=prompt.number))[0]
        assert one.tokens == alone.token_ids
    assert part.tokens == sum(len(one.tokens) for one in part.finished)


@pytest.fixture(scope="module")
def twins(write_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random pair's target, and of auxiliaries with exactly its vocabulary, as transformers wants it."""
    folder = tmp_path_factory.mktemp("twins")
    for name, seed in (("target", 1), ("auxiliary", 1), ("unrelated", 2)):
        write_checkpoint(folder / name, seed=seed)
    return folder


def test_what_is_outside_a_block_is_all_but_its_engines_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks when it is read, a step takes 1 tick, and the rest of a block 1 more than its steps."""
    ticks = itertools.count()
    monkeypatch.setattr("scripts.bench.overhead.time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    compared = {method: DecodingParams(method=method, draft_len=2, beam_width=2) for method in ("sample", "mtad")}
    found = measure_overhead(llm, 8, compared, [5] * 4000, (10,))
    assert len(found) == 4
    for name, one in found.items():
        steps = 3 if name.startswith("mtad") else 1
        assert (one["target_ms"], one["auxiliary_ms"], one["outside_ms"]) == (1e3, (steps - 1) * 1e3, (steps + 1) * 1e3)
        assert one["block_ms"] == (2 * steps + 1) * 1e3
        assert one["outside_share"] == pytest.approx((steps + 1) / (2 * steps + 1))
    assert not {"step"} & (vars(llm.pair.target).keys() | vars(llm.pair.auxiliary).keys())


@pytest.mark.slow
def test_hugging_face_is_given_the_same_task(llm: LLM, twins: Path) -> None:
    texts = [llm.pair.tokenizer(text).input_ids for text in TEXT]
    heads = [Prompt(0, tuple(text[:count])) for text in texts for count in range(1, len(text))]
    ours = InFlight("sample", llm)
    ends = {at: ours.run([prompt], 1, GREEDY).tokens < GREEDY.max_tokens for at, prompt in enumerate(heads)}
    early, late = ([at for at, is_early in ends.items() if is_early == wanted][:5] for wanted in (True, False))
    assert len(early) >= 2, "no text ends early: padding is not tested"
    prompts = [Prompt(number, heads[at].ids) for number, at in enumerate(sorted(early + late))]
    expected = ours.run(prompts, 4, GREEDY)
    for system in (HuggingFace(twins / "target"), HuggingFace(twins / "target", twins / "unrelated")):
        theirs = system.run(prompts, 4, GREEDY)
        assert [one.tokens for one in theirs.finished] == [one.tokens for one in expected.finished]
        assert theirs.tokens == expected.tokens
        assert all(0 < one.first <= one.whole <= theirs.seconds for one in theirs.finished)


@pytest.mark.slow
@pytest.mark.skipif(not (GENAI / "target").is_dir(), reason="optional: scripts/baselines.sh installs it")
def test_onnxruntime_genai_is_given_the_same_task() -> None:
    genai, reference = GenAI(), HuggingFace(serving.CHECKPOINTS / "target")
    tokenizer = AutoTokenizer.from_pretrained(serving.CHECKPOINTS / "target")
    texts = [example.prompt for example in dataset.load("development", "sql")[:8]]
    batch = [Prompt(number, tuple(tokenizer(text).input_ids)) for number, text in enumerate(texts)]
    theirs, expected = genai.run(batch, 4, GREEDY), reference.run(batch, 4, GREEDY)
    assert [one.tokens for one in theirs.finished] == [one.tokens for one in expected.finished]


def test_missing_baselines_say_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"scripts/baselines\.sh.*--baselines"):
        GenAI(tmp_path)


def test_ratios_are_taken_round_by_round() -> None:
    def slices(*rates: float) -> list[Slice]:
        return [Slice(int(rate), 1.0, [Finished(0, [1, 2, 3], 0.1, 0.3)]) for rate in rates]

    rows = summarise({"sample": slices(10, 20, 40), "mtad": slices(20, 60, 80)}, ["sample", "absent"])
    assert rows["mtad"]["vs"] == {"sample": {"median": 2.0, "low": 2.0, "high": 3.0}}
    assert rows["sample"]["tokens_per_second"] == {"median": 20.0, "low": 10.0, "high": 40.0}
    assert rows["sample"]["requests"] == 3
    assert rows["sample"]["first_token_ms"]["p50"] == pytest.approx(100)
    assert rows["sample"]["per_token_ms"]["p99"] == pytest.approx(100)
    assert rows["sample"]["end_to_end_ms"]["p90"] == pytest.approx(300)
    lines = throughput_table({1: rows}).splitlines()
    assert any("mtad" in line and "2.00 (2.00 .. 3.00)" in line for line in lines)


def test_every_system_has_its_turn_in_every_place(prompts: list[Prompt]) -> None:
    order: list[str] = []

    class Noted(System):
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, prompts: Iterator[Prompt], load: int, params: DecodingParams) -> None:
            pass

        def slice(self, seconds: float) -> Slice:
            order.append(self.name)
            return Slice(1, 1.0, [])

        def end(self) -> None:
            pass

        def run(self, prompts: object, load: int, params: DecodingParams) -> Slice:
            raise NotImplementedError

    names = "abc"
    cells = measure([Noted(n) for n in names], dict.fromkeys(names, GREEDY), prompts, [1], 3, 0.1)
    rounds = ["".join(order[at : at + 3]) for at in range(0, 9, 3)]
    assert sorted(rounds) == ["abc", "bca", "cab"]
    assert {name: len(taken) for name, taken in cells[1].items()} == dict.fromkeys(names, 3)


@pytest.mark.slow
def test_the_command_reports_every_system_at_every_load(
    llm: LLM,
    pair_folders: Callable[[str], Path],
    twins: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    database = {"schema": "CREATE TABLE singer (name TEXT)", "rows": {"singer": [["Ann"]]}}
    examples = {
        kind: [
            Example(str(n), kind, TEXT[n % 3][n % 5 :], "SELECT name FROM singer", database if kind == "sql" else None)
            for n in range(12)
        ]
        for kind in ("sql", "code")
    }
    monkeypatch.setattr(dataset, "load", lambda split, kind: examples[kind])
    monkeypatch.setattr(serving, "CHECKPOINTS", twins)
    arguments = f"bench serving --quick --pair {pair_folders('onnx')} --threads 1 --baselines huggingface --loads 1 2"
    monkeypatch.setattr(sys, "argv", f"{arguments} --rounds 2 --seconds 0.02 --results {tmp_path}".split())
    bench.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads((tmp_path / "serving.json").read_text())
    assert (tmp_path / "serving.png").stat().st_size > 10_000
    names = {*serving.OURS, "huggingface", "huggingface assisted"}
    for kind in ("sql", "code"):
        assert list(report[kind]["load"]) == ["1", "2"]
        for rows in report[kind]["load"].values():
            assert set(rows) == names
            for row in rows.values():
                assert set(row["vs"]) == {"sample", "huggingface", "huggingface assisted"}
                assert 0 < row["tokens_per_second"]["low"] <= row["tokens_per_second"]["high"]
        assert set(report[kind]["check"]) == names
        assert all(row["same_tokens"] for row in report[kind]["same_eight"].values())
    assert report["machine"]["versions"]["torch"]
    assert report["settings"]["threads"] == 1


def test_a_load_of_none_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "serving", "--loads", "0", "--baselines", "none"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert "loads" in capsys.readouterr().err


def test_adaptive_drafts_are_compared_round_by_round_with_their_best_fixed_setting() -> None:
    noise = [1.0, 3.0, 0.5, 2.0, 1.5, 4.0, 0.7]
    factors = {"sample": 10.0, "mtad": 20.0, "mtad adaptive": 19.0, "block": 5.0, "block adaptive": 9.0}
    rates = {name: [factor * one for one in noise] for name, factor in factors.items()}
    found = compare_adaptive(rates)
    assert {name: cell["best"] for name, cell in found.items()} == {"mtad adaptive": "mtad", "block adaptive": "sample"}
    for name, sample, fixed in (("mtad adaptive", 1.9, 0.95), ("block adaptive", 0.9, 0.9)):
        assert found[name]["sample"] == pytest.approx({"median": sample, "low": sample, "high": sample})
        assert found[name]["fixed"] == pytest.approx({"median": fixed, "low": fixed, "high": fixed})
    assert median_interval([3, 1, 2, 5, 4]) == {"median": 3, "low": 1, "high": 5}
    assert median_interval(range(1, 11)) == {"median": 5.5, "low": 2, "high": 9}


def test_a_vocabulary_too_small_for_the_prompts_is_refused_by_the_options_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["scripts.bench", "vocabulary", "--size", "10"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--size = 10: give at least 1024" in capsys.readouterr().err
