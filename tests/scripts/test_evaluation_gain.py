"""Gains at equal quality, on curves that are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from scripts.evaluation import report
from scripts.evaluation.decoders import Answer
from scripts.evaluation.figures import Scored
from scripts.evaluation.gain import TEMPERATURES, curve_settings, gains, known, on_curve
from scripts.evaluation.settings import parse, resolve
from scripts.evaluation.store import Store

PROMPTS = 60
PAIR = {"target": "a", "auxiliary": "b"}


def answers(nll: float, passes: int, distinct: float = 0.5, right: float | None = None) -> list[Scored]:
    """40 tokens per text, of which `distinct` pairs differ; prompts are of their own difficulty."""
    rng = np.random.default_rng(0)
    different = max(2, round(40 * distinct))
    tokens = tuple(min(at, different) for at in range(40))
    made = []
    for prompt in range(PROMPTS):
        one = Answer(prompt, 0, tokens, "", passes / 10, 40, passes, 40, 20, nll + 0.3 * rng.normal())
        made.append(Scored(one, None if right is None else prompt < round(right * PROMPTS)))
    return made


def curve(make: Callable[[float], list[Scored]]) -> dict[str, list[Scored]]:
    return {f"block temperature={temperature:g}": make(temperature) for temperature in TEMPERATURES}


def test_the_settings_of_the_curves_have_their_labels() -> None:
    assert all(on_curve(one.label) for one in parse(curve_settings()))
    assert not on_curve("block")


def test_a_method_is_divided_by_the_curve_at_the_temperature_of_equal_quality() -> None:
    """The curve has 20 passes at any temperature, and the method 10 at the quality of temperature 0.5."""
    block = curve(lambda t: answers(nll=1 + t, passes=20, distinct=0.3 + 0.5 * t))
    found = gains({**block, "mtad": answers(nll=1.5, passes=10, distinct=0.55)})["mtad"]
    for quality in ("perplexity", "distinct_2"):
        assert found["at"][quality]["temperature"]["value"] == pytest.approx(0.5, abs=0.03)
        assert found["at"][quality]["block_efficiency"]["value"] == pytest.approx(2.0)
    assert found["gain"]["tokens_per_second"]["value"] == pytest.approx(2.0)
    assert "2.00 ± 0.00" in report.gain_table({"mtad": found})


def test_the_smaller_gain_counts() -> None:
    block = curve(lambda t: answers(nll=1 + t, passes=round(20 + 10 * t), distinct=0.3 + 0.5 * t))
    found = gains({**block, "mtad": answers(nll=1.3, passes=10, distinct=0.7)})["mtad"]
    at = found["at"]
    assert at["perplexity"]["block_efficiency"]["value"] < at["distinct_2"]["block_efficiency"]["value"]
    assert found["gain"]["block_efficiency"] == at["perplexity"]["block_efficiency"]


def test_what_the_curve_does_not_reach_has_no_match() -> None:
    block = curve(lambda t: answers(nll=1 + t, passes=20))
    found = gains({**block, "mtad": answers(nll=0.2, passes=10)})["mtad"]
    assert found["at"]["perplexity"] is None
    assert found["gain"]["block_efficiency"] is None
    assert "no match" in report.gain_table({"mtad": found})


def test_a_lossless_method_matches_the_end_of_the_curve_within_the_error() -> None:
    block = curve(lambda t: answers(nll=1 + t, passes=20))
    rng = np.random.default_rng(1)
    same = [
        Scored(Answer(n, 0, one.answer.tokens, "", 1.0, 40, 10, 40, 20, 2.02 + 0.3 * rng.normal()), None)
        for n, one in enumerate(answers(2.0, 10))
    ]
    found = gains({**block, "specinfer": same})["specinfer"]
    assert found["at"]["perplexity"]["temperature"]["value"] > 0.9


def test_the_quality_of_a_lossless_method_is_known_from_its_temperature() -> None:
    """Noise cannot put it beyond the curve; filters of its own, or temperature 0, make it another distribution."""
    block = curve(lambda t: answers(nll=1 + t, passes=20, distinct=0.3 + 0.5 * t))
    measured = {**block, "specinfer": answers(nll=2.3, passes=10, distinct=0.9)}
    found = gains(measured, lossless={"specinfer": 0.5})["specinfer"]
    assert found["at"]["distinct_2"]["temperature"]["value"] == pytest.approx(0.5)
    assert found["gain"]["block_efficiency"]["value"] == pytest.approx(2)
    labels = [
        "specinfer:draft_len=2",
        "traversal:temperature=0.5",
        "greedy",
        "block:top_p=0.7",
        "mtad",
        *curve_settings(),
    ]
    params = {one.label: resolve(one, DecodingParams(), {}) for one in parse(labels)}
    of_curve = {label: own.temperature for label, own in params.items() if on_curve(label)}
    assert known(params) == {"specinfer draft_len=2": 1.0, "traversal temperature=0.5": 0.5, **of_curve}


def test_at_equal_accuracy_the_fastest_temperature_that_is_as_accurate_counts() -> None:
    """Low temperatures are slower here, so the method is compared with the highest that is accurate enough."""
    block = curve(lambda t: answers(nll=1, passes=round(30 - 10 * t), right=0.9 - 0.4 * t))
    found = gains({**block, "mtad": answers(nll=1, passes=10, right=0.7)})["mtad"]
    at = found["at"]["accuracy"]
    assert at["temperature"]["value"] == pytest.approx(0.5, abs=0.03)
    assert at["block_efficiency"]["value"] == pytest.approx(2.5, rel=0.02)
    assert gains({**block, "mtad": answers(nll=1, passes=10, right=1.0)})["mtad"]["at"]["accuracy"] is None


def test_the_bootstrap_error_is_that_of_a_ratio_of_means() -> None:
    """Passes vary from prompt to prompt; both settings' do so together, or each on its own."""
    rng = np.random.default_rng(2)
    passes = rng.integers(10, 31, PROMPTS)

    def varied(own: np.ndarray[tuple[int, ...], np.dtype[np.int64]], scale: float) -> list[Scored]:
        made = answers(nll=1.5, passes=1)
        return [
            Scored(Answer(n, 0, one.answer.tokens, "", 1.0, 40, int(scale * own[n]), 40, 20, one.answer.nll), None)
            for n, one in enumerate(made)
        ]

    block = curve(lambda t: varied(passes, 2))
    together = gains({**block, "mtad": varied(passes, 1)})["mtad"]["gain"]["block_efficiency"]
    apart = gains({**block, "mtad": varied(rng.permutation(passes), 1)})["mtad"]["gain"]["block_efficiency"]
    spread = passes.std() / passes.mean() / math.sqrt(PROMPTS)
    assert together["error"] == pytest.approx(0, abs=1e-9)
    assert apart["error"] == pytest.approx(2 * math.sqrt(2) * spread, rel=0.35)


def test_non_inferiority_is_open_where_the_error_is_larger_than_the_margin() -> None:
    block = curve(lambda t: answers(nll=1, passes=20, right=0.5))
    many = {**block, "greedy": answers(1, 20, right=0.5)}
    found = gains({**many, "same": answers(1, 10, right=0.5), "worse": answers(1, 10, right=0.1)})
    assert found["same"]["not_inferior"]["accuracy"] == "yes"
    assert found["worse"]["not_inferior"]["accuracy"] == "no"
    found = gains({**many, "slightly": answers(1, 10, right=0.5 - 1 / PROMPTS)})
    assert found["slightly"]["not_inferior"]["accuracy"] == "open"


class Named:
    """What a store asks of a decoder."""

    label = "mtad"

    def describe(self) -> dict[str, object]:
        return {"method": "mtad", "temperature": 0.5}


def test_a_run_that_was_broken_off_finds_its_answers_again(tmp_path: Path) -> None:
    path, decoder = tmp_path / "answers.jsonl", Named()
    given = [one.answer for one in answers(1.0, 10)[:3]]
    Store(path, PAIR).of("code", "abcd").add(decoder, given)  # type: ignore[arg-type]
    with path.open("a", encoding="utf-8") as file:
        file.write('["half a li')
    for _ in range(2):
        again = Store(path, PAIR).of("code", "abcd")
        assert again.get(decoder, [0, 1, 2], 0) == given  # type: ignore[arg-type]
        assert again.get(decoder, [3], 0) is None  # type: ignore[arg-type]
        assert again.get(decoder, [0], 1) is None  # type: ignore[arg-type]
    assert Store(path, PAIR).of("sql", "abcd").get(decoder, [0], 0) is None  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="another pair"):
        Store(path, {"target": "c"})
