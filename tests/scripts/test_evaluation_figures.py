"""Figures and their errors: definitions by hand, errors against simulation, pairs left out together."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from runtime.tuning.measure import distinct
from scripts.energy import EnergyMeter
from scripts.evaluation import report
from scripts.evaluation.decoders import Answer
from scripts.evaluation.figures import REPEATED_SPAN, Scored, longest_repeat, summarise
from scripts.evaluation.tables import present


def scored(prompt: int, seed: int = 0, right: bool | None = None, **changes: Any) -> Scored:
    values = {
        "tokens": (1, 2, 3, 4),
        "text": "",
        "seconds": 1.0,
        "timed_tokens": 4,
        "passes": 2,
        "drafted": 4,
        "accepted": 2,
        "nll": 0.5,
        **changes,
    }
    return Scored(Answer(prompt=prompt, seed=seed, **values), right)


def test_distinct_n_and_the_longest_repeat_by_hand() -> None:
    assert distinct([1, 2, 1, 2, 1], 1) == 2 / 5
    assert distinct([1, 2, 1, 2, 1], 2) == 2 / 4
    assert distinct([1, 2], 3) is None
    assert longest_repeat([]) == longest_repeat([7]) == longest_repeat([1, 2, 3]) == 0
    assert longest_repeat([1, 2, 3, 9, 1, 2, 3, 8]) == 3
    assert longest_repeat([5, 5, 5, 5]) == 3, "occurrences may overlap: a loop is found at its full length"


def test_the_longest_repeat_is_that_of_a_search_over_all_spans() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, 3, rng.integers(1, 24)).tolist()
        spans = [
            length
            for length in range(1, len(tokens))
            for at in range(len(tokens) - length)
            if any(tokens[b : b + length] == tokens[at : at + length] for b in range(at + 1, len(tokens) - length + 1))
        ]
        assert longest_repeat(tokens) == max(spans, default=0)


def test_figures_by_hand() -> None:
    loop = (1, 2, 3, 4) * 6
    rows = summarise(
        {
            "sample": [scored(0, right=True, nll=1.0, drafted=None, accepted=None), scored(1, right=False, nll=2.0)],
            "mtad": [
                scored(0, right=True, tokens=loop, timed_tokens=24, seconds=2.0, passes=6, accepted=3, nll=0.5),
                scored(1, right=True, seconds=1.0, joules=6.0, nll=1.5),
            ],
        }
    )
    own = {name: figure and figure["value"] for name, figure in rows["mtad"].items()}
    assert own["accuracy"] == 1.0
    assert own["perplexity"] == pytest.approx(math.exp(1.0)), "exp of the mean of means, not of the mean over tokens"
    assert own["tokens_per_second"] == pytest.approx(28 / 3)
    assert own["block_efficiency"] == pytest.approx(28 / 8)
    assert own["acceptance_rate"] == pytest.approx(5 / 8)
    assert own["distinct_1"] == pytest.approx((4 / 24 + 1) / 2)
    assert own["repeated_share"] == 0.5
    assert REPEATED_SPAN <= 20
    assert own["joules_per_token"] == pytest.approx(6 / 4), "answers without a reading are not counted"
    assert rows["sample"]["joules_per_token"] is None
    vs = rows["mtad"]["perplexity"]["vs"]["sample"]
    assert vs["ratio"] == pytest.approx(math.exp(-0.5))
    assert vs["error"] == pytest.approx(0.0, abs=1e-12), "the same difference on every prompt has no error"
    assert rows["mtad"]["accuracy"]["vs"]["sample"]["difference"] == 0.5
    assert "sample" not in rows["sample"]["perplexity"]["vs"]


def test_the_error_of_a_mean_is_the_usual_one_over_prompts() -> None:
    values = np.random.default_rng(1).normal(size=40)
    rows = summarise({"sample": [scored(n, nll=0.0, passes=1, tokens=(0,) * 3) for n in range(40)]})
    assert rows["sample"]["tokens"]["error"] == 0
    answers = [scored(n, right=bool(value > 0)) for n, value in enumerate(values)]
    error = summarise({"sample": answers})["sample"]["accuracy"]["error"]
    assert error == pytest.approx((values > 0).std(ddof=1) / math.sqrt(40))


def test_errors_of_ratios_are_as_large_as_the_ratios_spread() -> None:
    """Figures of many simulated runs scatter as each of them says."""
    rng, ratios, said = np.random.default_rng(2), [], []
    for _ in range(300):
        hard = rng.gamma(2.0, size=50)  # prompts differ far more than settings do

        def answers(factor: float, hard: Any = hard) -> list[Scored]:
            tokens = rng.integers(10, 100, 50)
            return [
                scored(n, timed_tokens=int(t), seconds=float(factor * t * h * rng.uniform(0.9, 1.1)))
                for n, (t, h) in enumerate(zip(tokens, hard, strict=True))
            ]

        vs = summarise({"sample": answers(2.0), "mtad": answers(1.0)})["mtad"]["tokens_per_second"]["vs"]["sample"]
        ratios.append(vs["ratio"])
        said.append(vs["error"])
    assert np.mean(ratios) == pytest.approx(2.0, rel=0.05)
    assert np.mean(said) == pytest.approx(np.std(ratios), rel=0.15)


def test_seeds_of_a_prompt_are_one_part_of_the_error_and_have_an_error_of_their_own() -> None:
    twice = [scored(n, seed, right=n % 2 == 0) for n in range(20) for seed in range(4)]
    once = [scored(n, right=n % 2 == 0) for n in range(20)]
    more, less = (summarise({"sample": own})["sample"]["accuracy"] for own in (twice, once))
    assert more["error"] == pytest.approx(less["error"]), "the same text again is no new evidence"
    assert more["seed_error"] == 0
    assert less["seed_error"] is None
    moving = [scored(n, seed, right=seed < 2) for n in range(20) for seed in range(4)]
    figure = summarise({"sample": moving})["sample"]["accuracy"]
    assert figure["error"] == pytest.approx(0.0, abs=1e-12)
    assert figure["seed_error"] == pytest.approx(np.std([1, 1, 0, 0], ddof=1) / 2)


def test_prompts_decoded_together_are_one_part_of_the_error() -> None:
    values = [bool(v) for v in np.random.default_rng(3).integers(0, 2, 40)]
    together = summarise({"sample": [scored(n, right=values[n]) for n in range(40)]}, group=4)["sample"]["accuracy"]
    means = np.array(values, dtype=float).reshape(10, 4).mean(1)
    assert together["error"] == pytest.approx(means.std(ddof=1) / math.sqrt(10))


def test_a_setting_without_randomness_is_compared_with_all_seeds_of_another() -> None:
    sample = [scored(n, seed, nll=1.0 + seed) for n in range(3) for seed in range(2)]
    greedy = [scored(n, nll=0.5, drafted=None, accepted=None) for n in range(3)]
    row = summarise({"sample": sample, "greedy": greedy})["greedy"]
    assert row["perplexity"]["vs"]["sample"]["ratio"] == pytest.approx(math.exp(0.5 - 1.5))
    assert row["acceptance_rate"] is None
    assert row["perplexity"]["seed_error"] is None


def test_pass_at_k_needs_as_many_texts() -> None:
    answers = [scored(n, seed, right=seed < n) for n in range(3) for seed in range(4)]
    row = summarise({"sample": answers}, ks=(1, 2, 5))["sample"]
    assert row["pass@1"]["value"] == pytest.approx(row["accuracy"]["value"])
    assert row["pass@2"]["value"] == pytest.approx((0 + (1 - 3 / 6) + (1 - 1 / 6)) / 3)
    assert row["pass@5"] is None


def test_without_a_meter_energy_is_none_and_never_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pynvml", "zeus.device"):
        monkeypatch.setitem(sys.modules, package, None)
    meter = EnergyMeter()
    meter.begin()
    assert meter.end() is None
    assert meter.name.startswith("none (nvidia-ml-py is not installed")
    rows = summarise({"sample": [scored(0), scored(1)]})
    line = report.table(rows, meter.name).splitlines()[-1]
    assert line.split("|")[-2].strip() == "none"


def test_a_page_has_no_rows_of_methods_that_have_left() -> None:
    rows = dict.fromkeys(
        ["mtad", "gbv", "dsbd-constant", "beam beam_width=2", "block temperature=0.2", "hf beam search"]
    )
    assert list(present(rows)) == ["mtad", "block temperature=0.2", "hf beam search"]


def test_tables_name_their_units_and_signs() -> None:
    rows = summarise(
        {
            "sample": [scored(n, right=n == 0, nll=1.0) for n in range(2)],
            "mtad": [scored(n, right=True, seconds=0.5, nll=1.0) for n in range(2)],
        }
    )
    lines = report.table(rows, "none").splitlines()
    assert "accuracy %" in lines[0]
    assert "50.0 ± 50.0" in lines[2]
    against = report.comparison(rows, "sample").splitlines()
    assert len(against) == 3
    assert "+50.0 ± 50.0" in against[2]
    assert "2.000 ± 0.000" in against[2]
