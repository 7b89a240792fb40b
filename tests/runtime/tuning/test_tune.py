"""`mtad tune`: the search finds the fastest setting that keeps the quality, and pair.json is always whole."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.folder import read_json, write_json
from engines.prompts import Example
from export.options import ExportOptions
from export.pair import export_pair
from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.pair import open_pair, write_tuning
from runtime.tuning import search as tuning
from runtime.tuning.measure import FIGURES, Point, Texts, law_change, measure, with_error
from tests.support.checkpoints import TEXT
from tests.support.commands import Run, assert_refused

EXAMPLES = [Example(text[:20], "x") for text in TEXT] + [Example(text[8:24], "x") for text in TEXT]
EXPORTED: dict[str, Any] = {"method": "mtad", "accept_threshold": 0.4, "top_k": 7}
LLM_OF_A_FAKE: Any = None


@pytest.fixture(scope="module")
def exported(pair_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(pair_folders("torch"), tmp_path_factory.mktemp("tune") / "pair"))
    write_json(folder / "pair.json", read_json(folder, "pair.json") | {"defaults": EXPORTED})
    return folder


@pytest.fixture
def pair(exported: Path, tmp_path: Path) -> Path:
    """A copy to write to."""
    return Path(shutil.copytree(exported, tmp_path / "pair"))


def texts(speed: float, error: float = 0.0) -> Texts:
    """Of two prompts, whose speed has that standard error."""
    ones = np.ones(2)
    return Texts(speed + np.array([error, -error]), ones, ones, ones, ones, ones, ones * math.nan, ones)


def point(
    method: str = "mtad",
    speed: float = 1.0,
    perplexity: float = 1.0,
    distinct: float = 1.0,
    gain: float | None = None,
    error: float = 0.0,
    **values: Any,
) -> Point:
    found = {"x sample": speed, "perplexity x sample": perplexity, "distinct-2 x sample": distinct}
    figures = {**found, **({} if gain is None else {"accuracy gain": gain})}
    return Point({"method": method, **values}, texts(speed, error), {name: (v, error) for name, v in figures.items()})


def test_a_lossless_method_loses_nothing_and_another_one_what_is_worst() -> None:
    """Right answers count alone where they are known; otherwise likely text must not be repetitive text."""
    assert point("block", perplexity=1.2, distinct=0.5, gain=-0.5).quality_loss == 0
    assert point(perplexity=1.2, distinct=0.9).quality_loss == pytest.approx(0.2)
    assert point(perplexity=0.7, distinct=0.9).quality_loss == pytest.approx(0.1)
    assert point(perplexity=1.2, distinct=0.5, gain=0.25).quality_loss == -0.25
    assert point(gain=0.25, error=0.1).quality_loss == pytest.approx(-0.0855), "as far as the errors allow"
    assert point(perplexity=0.9, error=0.1).quality_loss == pytest.approx(0.1645)


def test_what_is_tried_suits_the_method_the_engines_and_its_defaults() -> None:
    assert tuple(tuning.grid_of("mtad")) == ("draft_len", "beam_width", "accept_threshold", "draft_confidence")
    assert tuple(tuning.grid_of("speculative")) == ("draft_len", "draft_confidence")
    assert tuning.grid_of("sample") == {}
    assert max(tuning.GRID["draft_len"][1:]) <= RuntimeConfig.max_draft_len
    assert max(tuning.GRID["beam_width"]) <= RuntimeConfig.max_beam_width
    for method in METHODS:
        here = tuning.setting_of(DecodingParams(method=method))
        for name, values in tuning.grid_of(method).items():
            assert here[name] in values, "a search begins there"
            for value in values:
                DecodingParams(method=method, **{name: value})


def length_of(values: dict[str, Any]) -> int:
    """As if automatic drafts had four tokens."""
    return 4 if values["draft_len"] == "auto" else int(values["draft_len"])


def measured_as(figures: Callable[[dict[str, Any]], Point], calls: list[int]) -> Callable[..., list[Point]]:
    def measured(llm: Any, examples: Any, base: Any, values: Sequence[dict[str, Any]], *_: Any) -> list[Point]:
        calls.append(len(values))
        return [replace(figures(own), values=own) for own in values]

    return measured


@pytest.mark.parametrize(("quality_loss", "threshold"), [(1.0, 0.1), (0.5, 0.5)])
def test_a_search_finds_the_fastest_that_keeps_the_quality_and_measures_nothing_twice(
    quality_loss: float, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest setting has draft_len 6, beam_width 2 and accept_threshold 0.1; thresholds below 0.5 lose more."""

    def figures(own: dict[str, Any]) -> Point:
        away = abs(length_of(own) - 6) + abs(own["beam_width"] - 2) + abs(math.log10(own["accept_threshold"]) + 1)
        speed, loss = 10 - away - own["draft_confidence"], 1 - own["accept_threshold"]
        return point(speed=speed, perplexity=1 + loss)

    calls: list[int] = []
    monkeypatch.setattr(tuning, "measure", measured_as(figures, calls))
    points = tuning.search(LLM_OF_A_FAKE, EXAMPLES, DecodingParams(method="mtad"), quality_loss)
    best = {"draft_len": 6, "beam_width": 2, "accept_threshold": threshold, "draft_confidence": 0.0}
    assert points[0].values == {"method": "mtad", **best}
    assert sum(calls) == len(points) == len({tuple(one.values.values()) for one in points})


def test_without_a_setting_that_keeps_the_quality_the_nearest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(own: dict[str, Any]) -> Point:
        return point(speed=length_of(own), distinct=1 / length_of(own))

    monkeypatch.setattr(tuning, "measure", measured_as(figures, []))
    points = tuning.search(LLM_OF_A_FAKE, EXAMPLES, DecodingParams(method="mtad"), 0.0)
    assert points[0].quality_loss == 0.5


@pytest.mark.parametrize(
    ("points", "choice"),
    [
        ([point(), point(speed=1.25, error=0.1)], 1),
        ([point(), point(speed=1.19, error=0.1)], 0),
        ([point(), point("block", 1.5), point(speed=1.6, error=0.1)], 1),  # lossy, and not clearly faster
        ([point(), point("block", 1.5), point(speed=1.9, error=0.1)], 2),
        ([point(), point(speed=3, perplexity=1.3)], 0),
        ([point(), point(speed=3, error=0.2)], 0),  # nobody knows what it loses
        ([point(perplexity=1.3), point("block", 0.5)], 1),  # the default loses too much
        ([point(perplexity=1.3), point(speed=2, distinct=0.5)], 0),  # and so does the other one
    ],
)
def test_only_a_lead_of_twice_its_error_or_a_loss_of_quality_changes_the_default(
    points: list[Point], choice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [{**one.values, "draft_len": number} for number, one in enumerate(points)]
    monkeypatch.setattr(tuning, "measure", measured_as(lambda own: points[own["draft_len"]], []))
    settings = [values[0], *reversed(values[1:])]  # the lossless one comes last
    compared, chosen, _ = tuning.decide(LLM_OF_A_FAKE, EXAMPLES, DecodingParams(), settings, 0.2)
    assert [one.values for one in compared] == values
    assert chosen is compared[choice]


@pytest.mark.slow
def test_figures_are_those_of_the_same_requests(exported: Path) -> None:
    llm = LLM(exported, RuntimeConfig(threads=1, prefix_tokens=0))
    base = DecodingParams(max_tokens=8, n=2, seed=9, temperature=0.8)
    values = [{"method": "mtad", "draft_len": 2, "accept_threshold": 0.2}, {"method": "budget", "draft_len": 3}]
    points = measure(llm, EXAMPLES, base, values, 1, "")
    assert [one.values for one in points] == values
    for one in points:
        params = [replace(base, n=1, seed=(1 << 32) + number, **one.values) for number in range(len(EXAMPLES))]
        results = llm.generate([example.prompt for example in EXAMPLES], params)
        sampled = llm.generate([example.prompt for example in EXAMPLES], [replace(p, method="sample") for p in params])
        more = [np.mean(b.logprobs) - np.mean(a.logprobs) for a, b in zip(results, sampled, strict=True)]
        ratio, error = one.figures["perplexity x sample"]
        assert ratio == pytest.approx(math.exp(np.mean(more)), rel=1e-5)
        assert error == pytest.approx(ratio * np.std(more, ddof=1) / math.sqrt(len(more)), rel=0.2)
        passes = sum(r.statistics.target_passes for r in results)
        assert one.figures["tokens per pass"][0] == pytest.approx(sum(len(r.token_ids) for r in results) / passes)
        assert (one.figures["accuracy"], one.figures["accuracy gain"]) == ((0, 0), (0, 0))
        assert one.figures["x sample"][0] > 0
        changes = [law_change(llm, result.prompt_token_ids, result.token_ids, base) for result in results]
        assert one.figures["TV of filters"][0] == pytest.approx(np.concatenate(changes).mean())
    spent, tokens = (sum(getattr(r.statistics, name) for r in results) for name in ("divergence_spent", "tokens"))
    assert points[1].figures["TV of method"][0] == pytest.approx(spent / tokens)
    assert spent > 0
    head, *rows = tuning.table(points).splitlines()
    for name in ("tokens/s", "perplexity x sample", "distinct-2 x sample", "tokens per pass", "TV of filters"):
        assert name in head
    assert [row.endswith(" -") for row in rows] == [True, False]


def test_the_error_of_a_mean_over_prompts_is_its_standard_error() -> None:
    right = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    ones = np.ones(5)
    one = Texts(ones, ones, ones, ones, ones, ones, right, ones)
    assert with_error(FIGURES["accuracy"], one, one) == pytest.approx((0.6, right.std(ddof=1) / math.sqrt(5)))


def test_tuning_lies_over_what_was_exported_and_the_next_one_replaces_it(pair: Path) -> None:
    write_tuning(pair, {"method": "mmtad", "draft_len": 6, "temperature": 0.5}, {"goal": "first"})
    first = open_pair(pair).defaults
    assert first == DecodingParams(**{**EXPORTED, "method": "mmtad", "draft_len": 6, "temperature": 0.5})
    write_tuning(pair, {"beam_width": 2}, {"goal": "second"})
    assert open_pair(pair).defaults == DecodingParams(**EXPORTED, beam_width=2)
    values = read_json(pair, "pair.json")
    assert (values["defaults"], values["tuned"], values["tuning"]) == (EXPORTED, {"beam_width": 2}, {"goal": "second"})


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


def test_the_same_export_keeps_a_tuning_and_another_one_does_not_drop_it_silently(
    pair: Path, checkpoints: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    def export(overwrite: bool = False, **changes: Any) -> bool:
        options: dict[str, Any] = {"rows": 4, "capacity": 256, "format": "torch", "defaults": EXPORTED, **changes}
        return export_pair(pair, ExportOptions(*map(str, checkpoints), **options), overwrite)

    write_tuning(pair, {"beam_width": 2}, {"goal": "speed"})
    tuned = (pair / "pair.json").read_bytes()
    assert export() is False
    assert export(overwrite=True) is False
    assert (pair / "pair.json").read_bytes() == tuned
    assert not caplog.records
    other = {**EXPORTED, "top_k": 9}
    with pytest.raises(InvalidInput, match="tuning is lost"):
        export(defaults=other)
    assert export(defaults=other, overwrite=True) is True
    assert "run mtad tune again" in caplog.text
    assert "tuned" not in read_json(pair, "pair.json")


@pytest.mark.parametrize("name", ["defaults", "tuned", "costs"])
def test_a_damaged_tuning_is_refused_by_name(pair: Path, name: str) -> None:
    write_json(pair / "pair.json", {**read_json(pair, "pair.json"), name: 3})
    with pytest.raises(InvalidInput, match=f"^pair.json {name}[ :]"):
        write_tuning(pair, {}, {})


@pytest.fixture
def tune(run: Run, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, with a small grid."""
    small = {"draft_len": (4, 2), "beam_width": (4,), "accept_threshold": (1.0,), "draft_confidence": (0.0,)}
    monkeypatch.setattr(tuning, "GRID", small)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": example.prompt}) + "\n" for example in EXAMPLES[:4]))

    own = [pair, "--prompts", prompts, "--threads", 1, "--params", '{"max_tokens": 6}', "--method", "mtad"]
    return functools.partial(run, "tune", *own)


def test_a_pair_that_cannot_be_written_is_refused_before_the_search(
    pair: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "S"}\n' * 4)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != pair)
    refused = run("tune", pair, "--prompts", tmp_path / "prompts.jsonl")
    assert_refused(refused, "tune", "cannot be written; give --dry-run")


def test_a_default_that_cannot_be_compared_is_refused_before_the_search(
    tune: Run, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tuning(pair, {"draft_len": 24}, {})
    monkeypatch.setattr(tuning, "measure", None)
    assert_refused(tune(), "tune", "draft_len = 24: give at most 16")


def test_a_clearly_faster_setting_becomes_the_default_and_a_dry_run_writes_nothing(
    tune: Run, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tuned before is replaced, not built upon."""
    write_tuning(pair, {"temperature": 0.5, "draft_len": 8}, {})
    before = (pair / "pair.json").read_bytes()
    monkeypatch.setattr(tuning, "measure", measured_as(lambda own: point(), []))
    assert tune("--method", "block,mtad").out.splitlines()[-1].startswith("kept ")
    assert (pair / "pair.json").read_bytes() == before
    bases: list[DecodingParams] = []

    def measured(llm: Any, examples: Any, base: DecodingParams, values: Any, *_: Any) -> list[Point]:
        bases.append(base)
        return [replace(point(speed=10 - own["draft_len"]), values=own) for own in values]

    monkeypatch.setattr(tuning, "measure", measured)
    code, out, err = tune("--dry-run")
    assert (code, (pair / "pair.json").read_bytes()) == (0, before), err
    assert out.splitlines()[-1].startswith("would change to method=mtad draft_len=2 ")
    code, out, err = tune()
    assert code == 0, err
    assert out.splitlines()[-1].startswith("changed to method=mtad draft_len=2 ")
    assert all(base == DecodingParams(**EXPORTED, max_tokens=6) for base in bases)
    tuned = {"method": "mtad", "draft_len": 2, "beam_width": 4, "accept_threshold": 0.5, "draft_confidence": 0.0}
    values = read_json(pair, "pair.json")
    assert (values["defaults"], values["tuned"]) == (EXPORTED, {"max_tokens": 6, **tuned})
    report = values["tuning"]
    assert (report["quality_loss"], report["prompts"]) == (0, 4)
    assert len(report["figures"]) == 2 + 2, "those of the search, and those that were compared"
