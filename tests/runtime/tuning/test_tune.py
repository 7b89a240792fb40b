"""`mtad tune`: the search finds what the objective asks for, and pair.json is never anything but whole."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.folder import read_json, write_json
from export.options import ExportOptions
from export.pair import export_pair
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime import LLM, RuntimeConfig
from runtime.commands import tune as tune_command
from runtime.pair import open_pair, write_tuning
from runtime.tuning import search as tune
from runtime.tuning.measure import Point
from runtime.tuning.search import Objective, grid_of
from tests.support.checkpoints import TEXT

PROMPTS = [text[:20] for text in TEXT] + [text[8:24] for text in TEXT]
EXPORTED: dict[str, Any] = {"method": "mtad", "accept_threshold": 0.4, "top_k": 7}


@pytest.fixture(scope="module")
def exported(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune") / "pair"
    target, auxiliary = map(str, checkpoints)
    export_pair(folder, ExportOptions(target, auxiliary, rows=2, capacity=256, format="torch", defaults=EXPORTED))
    return folder


@pytest.fixture
def pair(exported: Path, tmp_path: Path) -> Path:
    """A copy to write to."""
    return Path(shutil.copytree(exported, tmp_path / "pair"))


def point(speed: float = 1.0, perplexity: float = 1.0, gain: float | None = None, **changes: Any) -> Point:
    values = {
        "values": {},
        "tokens_per_second": 100 * speed,
        "speed": speed,
        "speed_error": 0.1,
        "speed_vs_speculative": speed / 2,
        "perplexity": 5 * perplexity,
        "perplexity_ratio": perplexity,
        "perplexity_ratio_error": 0.1,
        "accuracy": None if gain is None else 0.5 + gain,
        "accuracy_gain": gain,
        "accuracy_gain_error": None,
        "block_efficiency": 3.0,
        "acceptance_rate": 0.5,
        "distinct_2": 0.8,
        "distinct_ratio": 1.0,
        **changes,
    }
    return Point(**values)


def best(objective: Objective, points: Iterable[Point]) -> Point:
    return max(points, key=objective.better)


def test_speed_is_sought_within_the_bounds_on_quality() -> None:
    slow, fast, faster = point(1.5, 0.9), point(2.0, 1.0), point(3.0, 1.01)
    assert best(Objective(), [slow, fast, faster]) is fast
    assert best(Objective(max_perplexity=1.1), [slow, fast, faster]) is faster
    assert best(Objective(max_perplexity=0.5), [slow, fast, faster]) is slow, "the nearest, where none is within"
    wrong, right = point(3.0, 0.9, gain=-0.05), point(2.0, 0.9, gain=0.0)
    assert best(Objective(), [wrong, right]) is right
    assert best(Objective(accuracy_loss=0.05), [wrong, right]) is wrong
    repeating = point(4.0, 0.5, distinct_ratio=0.4)
    assert best(Objective(), [fast, repeating]) is repeating
    assert best(Objective(min_distinct=0.9), [fast, repeating]) is fast


def test_quality_is_sought_within_the_bound_on_speed() -> None:
    slow, fast = point(1.0, 0.7), point(2.2, 0.9)
    assert best(Objective("quality"), [slow, fast]) is fast
    assert best(Objective("quality", min_speed=0.5), [slow, fast]) is slow
    likely, right = point(2.2, 0.5, gain=0.0), point(2.2, 0.9, gain=0.1)
    assert best(Objective("quality"), [likely, right]) is right, "right answers count before likely ones"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("goal", "both"),
        ("max_perplexity", 0.0),
        ("max_perplexity", math.nan),
        ("min_speed", -1.0),
        ("accuracy_loss", -0.1),
    ],
)
def test_unusable_objectives_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Objective(**{name: value})
    assert caught.value.field == name


def test_thresholds_of_a_rule_are_those_its_methods_try() -> None:
    rules = {method.rule: grid_of(method) for method in METHODS.values()}
    for rule, values in tune.THRESHOLDS.items():
        assert rules[rule]["accept_threshold"] == values


def test_only_parameters_a_method_uses_are_varied() -> None:
    assert tuple(grid_of(METHODS["mtad"])) == ("draft_len", "beam_width", "accept_threshold", "draft_confidence")
    assert tuple(grid_of(METHODS["speculative"])) == ("draft_len", "draft_confidence")
    assert tuple(grid_of(METHODS["sample"])) == ()


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measurements are a known function with its maximum at draft_len 6, beam_width 2, accept_threshold 0.1."""
    sizes: list[int] = []

    def measured(llm: Any, prompts: Any, base: Any, settings: list[Any], *_: Any) -> dict[Any, Point]:
        sizes.append(len(settings))
        found = {}
        for values in settings:
            own = dict(values)
            away = abs(own["draft_len"] - 6) + abs(own["beam_width"] - 2) + abs(math.log10(own["accept_threshold"]) + 1)
            away += own["draft_confidence"]
            found[values] = point(10 - away, 0.9, values=own)
        return found

    monkeypatch.setattr(tune, "measure", measured)
    return sizes


class AnyLLM:
    """Takes every request."""

    def requests(self, prompt: str, params: DecodingParams) -> None:
        pass


@pytest.mark.parametrize("search", ["coordinate", "grid"])
def test_both_searches_find_the_maximum_and_measure_nothing_twice(peak: list[int], search: Any) -> None:
    llm: Any = AnyLLM()
    found = tune.tune(llm, PROMPTS, DecodingParams(), Objective(), search=search)
    best = {"draft_len": 6, "beam_width": 2, "accept_threshold": 0.1, "draft_confidence": 0.0}
    assert found.choice.values == best
    assert found.fits
    assert sum(peak) == len(found.points)
    assert len(found.points) == (
        5 * 4 * 8 * 4 if search == "grid" else 5 + 3 + 7 + 3 + 4 + 3
    )  # the second round changes nothing


def test_no_point_within_the_bounds_is_said(peak: list[int]) -> None:
    llm: Any = AnyLLM()
    assert not tune.tune(llm, PROMPTS, DecodingParams(), Objective(max_perplexity=0.5)).fits


@pytest.mark.slow
def test_points_are_what_the_same_requests_give(exported: Path) -> None:
    llm = LLM(exported, RuntimeConfig(threads=1, prefix_tokens=0))
    base = DecodingParams(max_tokens=8, n=2, seed=9)
    grid = {"draft_len": (2, 3), "accept_threshold": (0.2,)}
    found = tune.tune(
        llm, PROMPTS, base, Objective(max_perplexity=100.0), grid, "grid", seeds=2, right=lambda n, text: n % 2 == 0
    )
    assert [p.values["draft_len"] for p in found.points] == [2, 3]
    for one in found.points:
        params = replace(base, n=1, **one.values)
        seeds = [[replace(params, seed=(s << 32) + n) for n in range(len(PROMPTS))] for s in range(2)]
        results = [r for own in seeds for r in llm.generate(PROMPTS, own)]
        nll = [-np.mean(r.logprobs) for r in results]
        assert one.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)
        drafted, accepted = (sum(getattr(r.statistics, k) for r in results) for k in ("drafted", "accepted"))
        assert one.acceptance_rate == pytest.approx(accepted / drafted)
        passes = sum(r.statistics.target_passes for r in results)
        assert one.block_efficiency == pytest.approx(sum(len(r.token_ids) for r in results) / passes)
        assert (one.accuracy, one.accuracy_gain) == (0.5, 0.0)
        assert one.speed > 0


def test_tuning_lies_over_what_was_exported_and_the_next_one_replaces_it(pair: Path) -> None:
    write_tuning(pair, {"method": "mmtad", "draft_len": 6, "temperature": 0.5}, {"goal": "first"})
    first = open_pair(pair).defaults
    assert first == DecodingParams(**{**EXPORTED, "method": "mmtad", "draft_len": 6, "temperature": 0.5})
    write_tuning(pair, {"beam_width": 2}, {"goal": "second"})
    assert open_pair(pair).defaults == DecodingParams(**EXPORTED, beam_width=2)
    assert read_json(pair, "pair.json")["tuning"] == {"goal": "second", "exported_defaults": EXPORTED}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, files = (pair / "pair.json").read_bytes(), sorted(pair.iterdir())
    with pytest.raises(InvalidInput, match="gamma"):
        write_tuning(pair, {"gamma": 3}, {})
    with pytest.raises(ValueError, match="JSON"):
        write_tuning(pair, {"beam_width": 2}, {"speed": math.nan})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidInput, match="No space"):
        write_tuning(pair, {"beam_width": 2}, {})
    assert (pair / "pair.json").read_bytes() == before
    assert sorted(pair.iterdir()) == files


def test_a_reader_never_sees_half_a_file(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = pair / "pair.json", []
    real = os.fsync

    def look(descriptor: int) -> None:
        seen.append(json.loads(path.read_text()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_json(path, {"defaults": {}})
    assert "vocabulary_hash" in seen[0], "while the new one is written, the old one is there"
    assert json.loads(path.read_text()) == {"version": 1, "defaults": {}}


def test_the_same_export_keeps_a_tuning_and_another_one_does_not_drop_it_silently(
    pair: Path, checkpoints: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    def export(overwrite: bool = False, **changes: Any) -> bool:
        options: dict[str, Any] = {"rows": 2, "capacity": 256, "format": "torch", "defaults": EXPORTED, **changes}
        return export_pair(pair, ExportOptions(*map(str, checkpoints), **options), overwrite)

    write_tuning(pair, {"beam_width": 2}, {"goal": "speed"})
    tuned = (pair / "pair.json").read_bytes()
    assert export() is False
    assert export(overwrite=True) is False
    assert (pair / "pair.json").read_bytes() == tuned
    assert not caplog.records
    with pytest.raises(InvalidInput, match="tuning is lost"):
        export(capacity=320)
    assert export(capacity=320, overwrite=True) is True
    assert "run mtad tune again" in caplog.text
    assert "tuning" not in read_json(pair, "pair.json")


@pytest.mark.parametrize("damage", [{"tuning": 3}, {"tuning": {}}, {"tuning": {"exported_defaults": None}}])
def test_a_damaged_tuning_is_refused_by_name(pair: Path, damage: dict[str, Any]) -> None:
    write_json(pair / "pair.json", {**read_json(pair, "pair.json"), **damage})
    with pytest.raises(InvalidInput) as caught:
        write_tuning(pair, {}, {})
    assert caught.value.field == "pair.json defaults"


def found(method: str, speed: float, **changes: Any) -> tune.Tuning:
    one = point(speed, 0.9, values={"draft_len": 4}, **changes)
    return tune.Tuning(one, [point(0.5), one], fits=True)


def test_a_lossy_method_must_be_clearly_faster_than_the_best_lossless_one() -> None:
    """Each speed has an error of 0.1, so a lead of 0.28 is twice that of the difference."""
    near, far = {"block": found("block", 2.0), "mtad": found("mtad", 2.2)}, {"block": found("block", 2.0)}
    joined = tune.join(near, Objective())
    assert joined.choice.values == {"method": "block", "draft_len": 4}
    assert [p.values["method"] for p in joined.points] == ["block", "block", "mtad", "mtad"]
    assert tune.join({**far, "mtad": found("mtad", 2.4)}, Objective()).choice.values["method"] == "mtad"
    unfit = found("block", 2.0, distinct_ratio=0.2)
    bound = Objective(min_distinct=0.5)
    assert tune.join({"block": unfit, "mtad": found("mtad", 1.5)}, bound).choice.values["method"] == "mtad"


@pytest.mark.parametrize(
    ("answers", "options", "varied"), [(True, (), True), (False, (), False), (False, ("--min-distinct", "0.9"), True)]
)
def test_temperatures_are_tried_only_where_something_bounds_what_they_cost(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, options: tuple[str, ...], varied: bool
) -> None:
    """A lower temperature always makes text likelier; without a bound it would always win."""
    if not answers:
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:3])
        (tmp_path / "prompts.jsonl").write_text(lines)
    seen: list[tuple[str, bool]] = []

    def noted(llm: Any, prompts: Any, base: DecodingParams, objective: Any, grid: Any, *_: Any) -> tune.Tuning:
        seen.append((base.method, "temperature" in grid))
        return found(base.method, 2.0)

    monkeypatch.setattr(tune, "tune", noted)
    monkeypatch.setattr(tune, "compare", lambda *_: (point(), point()))
    run("--method", "block,mtad", *options)
    assert seen == [("block", varied), ("mtad", varied)]


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in PROMPTS[:3]))

    def call(*arguments: str) -> tuple[int, str, str]:
        own = [str(pair), "--prompts", str(prompts), "--threads", "1", "--params", '{"max_tokens": 6}']
        own += ["--method", "mtad"]
        monkeypatch.setattr(sys, "argv", ["mtad tune", *own, *arguments])
        code = 0
        try:
            tune_command.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


SMALL = (
    *("--draft-len", "2,8", "--beam-width", "2", "--accept-threshold", "0.1,0.5", "--draft-confidence", "0"),
    *("--temperature", "1"),
)


def test_the_choice_becomes_the_pairs_default_with_its_curve(
    run: Run, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "compare", lambda *_: (point(), point(1.5)))
    code, out, err = run(*SMALL, "--max-perplexity", "100", "--search", "grid")
    assert code == 0, err
    values = read_json(pair, "pair.json")
    choice = values["tuning"]["choice"]["values"]
    tuned = {"draft_len", "beam_width", "accept_threshold", "draft_confidence"}
    assert set(choice) == {"method", "temperature", *tuned}
    assert values["defaults"] == {**EXPORTED, "max_tokens": 6, "method": "mtad", **choice}
    curve = values["tuning"]["curve"]
    assert len(curve) == 4
    fits = [one for one in curve if one["perplexity_ratio"] <= 100]
    assert choice == max(fits, key=lambda one: one["speed"])["values"]
    assert values["tuning"]["objective"]["max_perplexity"] == 100
    assert out.count("<- chosen") == 1
    assert out.splitlines()[-1].startswith("changed method=mtad ")
    assert LLM(pair, RuntimeConfig(threads=1)).generate("SELECT")[0].token_ids


def test_a_lead_within_its_error_leaves_the_default_as_it_is(
    run: Run, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (pair / "pair.json").read_bytes()
    monkeypatch.setattr(tune, "compare", lambda *_: (point(), point(1.15)))  # +15 % with an error of 10 %
    code, out, err = run(*SMALL, "--max-perplexity", "100")
    assert code == 0, err
    assert out.splitlines()[-1].startswith("kept method=mtad ")
    assert "+15.0% ±10.0% tokens per second, which is not clearly better" in out
    assert (pair / "pair.json").read_bytes() == before


@pytest.mark.parametrize(
    ("objective", "before", "lead", "change"),
    [
        (Objective(), point(), point(1.25), True),
        (Objective(), point(), point(1.19), False),
        (Objective(), point(perplexity=1.1), point(0.5), True),  # the default is out of bounds
        (Objective("quality", min_speed=0), point(), point(gain=0.3, accuracy_gain_error=0.1), True),
        (Objective("quality", min_speed=0), point(), point(gain=0.1, accuracy_gain_error=0.1), False),
        (Objective("quality", min_speed=0), point(), point(perplexity=0.7), True),
        (Objective("quality", min_speed=0), point(), point(perplexity=0.9), False),
    ],
)
def test_only_a_lead_of_twice_its_error_changes_the_default(
    objective: Objective, before: Point, lead: Point, change: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "compare", lambda *_: (before, lead))
    llm: Any = AnyLLM()
    verdict = tune.judge(llm, PROMPTS, DecodingParams(), DecodingParams(draft_len=2), objective)
    assert verdict.change == change


def test_a_choice_is_judged_on_texts_that_the_search_has_not_seen(exported: Path) -> None:
    llm = LLM(exported, RuntimeConfig(threads=1, prefix_tokens=0))
    seeds: list[int] = []
    make = llm.requests

    def noted(prompt: Any, params: Any) -> Any:
        seeds.append(params.seed)
        return make(prompt, params)

    llm.requests = noted  # type: ignore[assignment, method-assign]
    now, choice = DecodingParams(max_tokens=4), DecodingParams(max_tokens=4, draft_len=2)
    tune.judge(llm, PROMPTS, now, choice, Objective(), seeds=2)
    assert {seed >> 32 for seed in seeds if seed} == {2, 3}


def test_without_a_setting_within_the_bounds_pair_json_stays_as_it_is(run: Run, pair: Path) -> None:
    before = (pair / "pair.json").read_bytes()
    code, out, err = run(*SMALL, "--max-perplexity", "1e-6")
    assert (code, err.count("mtad tune: error: --goal")) == (2, 1)
    assert "the nearest one is" in err
    assert "tokens/s" in out, "the curve is shown all the same"
    assert (pair / "pair.json").read_bytes() == before


def test_what_is_measured_is_what_will_be_written(run: Run, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tuning(pair, {"temperature": 0.5, "draft_len": 8}, {})
    bases: list[DecodingParams] = []

    def noted(llm: Any, prompts: Any, base: DecodingParams, *_: Any) -> tune.Tuning:
        bases.append(base)
        chosen = point(values={"draft_len": 2})
        return tune.Tuning(chosen, [chosen], fits=True)

    monkeypatch.setattr(tune, "tune", noted)
    monkeypatch.setattr(tune, "compare", lambda *_: (point(), point(1.5)))
    code, _, err = run()
    assert code == 0, err
    assert bases == [DecodingParams(**{**EXPORTED, "max_tokens": 6})], "an earlier tuning is replaced, not built upon"
    assert open_pair(pair).defaults == replace(bases[0], draft_len=2)


@pytest.mark.slow
def test_a_dry_run_writes_nothing_and_json_is_one_object(run: Run, pair: Path) -> None:
    before = (pair / "pair.json").read_bytes()
    code, out, _ = run(*SMALL, "--goal", "quality", "--min-speed", "0", "--dry-run", "--json", "--method", "mmtad")
    assert code == 0
    report = json.loads(out)
    assert report["method"] == "mmtad"
    assert report["objective"]["goal"] == "quality"
    assert report["prompts"]["count"] == 3
    assert (pair / "pair.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--method", "medusa"], "--method"),
        (["--method", "sample"], "--method"),
        (["--method", "speculative", "--beam-width", "2"], "--beam-width"),
        (["--goal", "both"], "--goal"),
        (["--max-perplexity", "0"], "--max-perplexity"),
        (["--search", "random"], "--search"),
        (["--method", "block,medusa"], "--method"),
        (["--temperature", "1,hot"], "--temperature"),
        (["--estimate"], "--target:"),
        (["--estimate", "--target", "a", "--auxiliary", "b", "--token-cost", "1"], "--auxiliary-cost"),
        (["--draft-len", "0,4"], "--draft-len"),
        (["--draft-len", "4,four"], "--draft-len"),
        (["--draft-len", "4,9"], "--draft-len"),
        (["--accept-threshold", "0.1,0.1"], "--accept-threshold"),
        (["--method", "ensemble", "--accept-threshold", "0.5,1.5"], "--accept-threshold"),
        (["--seeds", "0"], "--seeds"),
        (["--limit", "1"], "--prompts"),
        (["--params", "{"], "argument --params:"),
        (["--params", '{"beam_width": 2}'], "--params"),
        (["--params", '{"gamma": 2}'], "gamma"),
        (["--params", '{"max_tokens": 9999}'], "max_tokens"),
        (["--prompts", "/no/such/file"], "--prompts"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(run: Run, pair: Path, arguments: list[str], field: str) -> None:
    before = (pair / "pair.json").read_bytes()
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"mtad tune: error: {field} "), err
    assert err.count("\n") == 1
    assert (pair / "pair.json").read_bytes() == before
