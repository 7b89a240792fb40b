"""The comparison of methods: the command on a small pair, and its statistics against values worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtad.errors import InvalidInput
from scripts.demo import dataset
from scripts.evaluation import __main__ as evaluation
from scripts.evaluation import settings, total_variation
from scripts.evaluation.answers import Answer, Store
from scripts.evaluation.figures import Figure, figures_of, pass_at_k, self_bleu
from scripts.evaluation.gain import control_failed, gains
from scripts.evaluation.prompts import open_set
from scripts.evaluation.settings import AGAIN, TEMPERATURES, curve_label, every_setting
from scripts.evaluation.two_samples import told_apart

PROMPTS = 60
SETTINGS = {s.label: s for s in every_setting("sample,block-again,speculative,mtad,traversal,block:top_p=0.7", 128, ())}


@pytest.mark.slow
def test_a_run_that_was_broken_off_gives_the_tables_of_a_whole_one(
    pair_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All settings answer, the control among them; a broken store goes on from its last whole line."""
    prompts, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl.gz"
    prompts.write_text("".join(json.dumps({"prompt": f"SELECT {n} FROM", "answer": "x"}) + "\n" for n in range(4)))
    monkeypatch.setattr(settings, "DRAFTS", {"draft_len": (2, 4), "beam_width": (2,)})
    asked = f"jsonl={prompts} --pair {pair_folders('onnx')} --threads 1 --quick --methods sample,mtad"
    for name in ("whole", "again"):
        monkeypatch.setattr("sys.argv", f"x {asked} --answers {answers} --results {tmp_path / name}".split())
        evaluation.main()
        answers.write_bytes(answers.read_bytes()[:-200])
    found = json.loads((tmp_path / "whole" / "evaluation-questions.json").read_text())
    again = json.loads((tmp_path / "again" / "evaluation-questions.json").read_text())
    rows = found["figures"]["settings"]
    assert set(rows) == {one.label for one in every_setting("sample,mtad", 16, ())}
    assert rows["block"]["figures"]["tokens_per_pass"]["value"] > 1
    assert "tokens_per_pass" not in rows["auxiliary alone temperature=1"]["figures"]
    texts = {name: row["figures"].get("perplexity") for name, row in rows.items()}
    assert {name: row["figures"].get("perplexity") for name, row in again["figures"]["settings"].items()} == texts
    tables = evaluation.tables(found["figures"])
    assert len(tables["settings"]) == len(rows) + 1
    assert "control" in capsys.readouterr().out.splitlines()[-2].lower()
    assert (tmp_path / "whole" / "evaluation-questions.png").stat().st_size > 10_000


def test_every_setting_is_tried_with_the_drafts_that_it_has() -> None:
    assert SETTINGS["sample"].drafts == [SETTINGS["sample"].params]
    assert len(SETTINGS["speculative"].drafts) == 5
    assert len({(one.draft_len, one.beam_width) for one in SETTINGS["mtad"].drafts}) == 15
    assert {one.drafted for one in SETTINGS["traversal"].drafts} == {4, 6}
    (fixed,) = (one for one in every_setting("mtad:draft_len=5", 128, ()) if one.label.startswith("mtad"))
    assert [one.beam_width for one in fixed.drafts] == [2, 4, 8]
    with pytest.raises(InvalidInput, match="measured already"):
        every_setting("mtad,block", 128, ())


def test_the_curve_has_the_temperatures_that_are_asked_for_and_the_control_all_but_the_lowest() -> None:
    made = {one.label for one in every_setting("mtad", 128, (), (0.5, 1.0))}
    assert made == {"greedy", "mtad", "block temperature=0.5", "block", "auxiliary alone temperature=1"}
    for wrong in ((0.5,), (1.0, 0.5), (0.3, 1.0), ()):
        with pytest.raises(InvalidInput, match="temperatures"):
            every_setting("mtad", 128, (), wrong)


def answers(nll: float, passes: int, distinct: float = 0.5, alike: float | None = None) -> dict[str, Figure]:
    """Figures of two texts per prompt, which are of their own difficulty.

    Args:
        distinct: share of a text's pairs that differ.
        alike: share of the second text's tokens that the first one has (default: 1 - `distinct`).
    """
    rng = np.random.default_rng(0)
    different, same = max(2, round(32 * distinct)), round(32 * (1 - distinct if alike is None else alike))
    first = [min(at, different) for at in range(32)]
    texts = first, [token if at < same else token + 100 for at, token in enumerate(first)]
    nlls = nll + 0.3 * rng.normal(size=PROMPTS)
    return figures_of([[Answer(own, "", passes, one, passes / 10) for own in texts] for one in nlls], None)


def gained(make: Callable[[float], dict[str, Figure]], others: dict[str, dict[str, Figure]]) -> dict[str, Any]:
    """Gains over a curve that is known."""
    tables = {curve_label(t): make(t) for t in TEMPERATURES} | others
    return gains([replace(SETTINGS.get(label, SETTINGS["mtad"]), label=label) for label in tables], tables)


def test_a_method_is_divided_by_block_at_the_temperature_of_equal_quality() -> None:
    """The curve has 20 passes at any temperature, and the method 10 at the figures of temperature 0.5."""
    found = gained(lambda t: answers(1 + t, 20, 0.3 + 0.5 * t), {"mtad": answers(1.5, 10, 0.55)})["mtad"]
    for own in found["at"].values():
        assert own["temperature"]["value"] == pytest.approx(0.5, abs=0.03)
        assert own["tokens_per_pass"]["value"] == pytest.approx(2.0)
    assert found["gain"]["tokens_per_second"]["value"] == pytest.approx(2.0)
    assert found["holds"]


def test_the_smaller_gain_counts_and_what_the_curve_does_not_reach_has_none() -> None:
    def curve(t: float) -> dict[str, Figure]:
        return answers(1 + t, round(20 + 10 * t), 0.3 + 0.5 * t)

    found = gained(curve, {"mtad": answers(1.3, 10, 0.7), "far": answers(0.2, 10, 0.5)})
    assert found["mtad"]["gain"]["tokens_per_pass"] == found["mtad"]["at"]["perplexity"]["tokens_per_pass"]
    assert found["far"]["at"]["perplexity"] is None
    assert found["far"]["gain"]["tokens_per_pass"] is None
    assert not found["far"]["holds"]


def test_what_is_both_less_likely_and_less_diverse_than_block_does_not_hold() -> None:
    """As perplexing as temperature 0.9 and as repetitive as 0.4; the control is judged by the same rule."""

    def curve(t: float) -> dict[str, Figure]:
        return answers(1 + t, 20, 0.3 + 0.5 * t)

    control = "auxiliary alone temperature=0.5"
    found = gained(curve, {"mtad": answers(1.9, 10, 0.5), control: answers(1.9, 0, 0.5)})
    assert not found["mtad"]["holds"]
    assert control_failed(found)
    found = gained(curve, {control: answers(1.4, 0, 0.75)})
    assert not control_failed(found)


def test_a_method_whose_answers_to_one_prompt_are_too_much_alike_does_not_hold() -> None:
    """As likely and as diverse within each text as temperature 0.5; between texts it is as diverse as 0.5, and 0.25."""

    def curve(t: float) -> dict[str, Figure]:
        return answers(1 + t, 20, 0.3 + 0.5 * t, 0.9 - 0.8 * t)

    found = gained(curve, {"mtad": answers(1.5, 10, 0.55, 0.5), "alike": answers(1.5, 10, 0.55, 0.7)})
    assert found["mtad"]["holds"]
    assert found["alike"]["at"]["self_bleu"]["temperature"]["value"] == pytest.approx(0.25, abs=0.03)
    assert not found["alike"]["holds"]


def test_diversity_is_measured_on_beginnings_of_one_length() -> None:
    """A text that goes on, repeating itself, is no less diverse for it."""
    short = list(range(32)), list(range(1, 33))
    own = figures_of([[Answer(one, "", 1, 1.0) for one in short]], None)
    longer = figures_of([[Answer([*one, *[7] * 50], "", 1, 1.0) for one in short]], None)
    for name in ("distinct_2", "self_bleu"):
        assert own[name].with_error()["value"] == longer[name].with_error()["value"]


def test_a_lossless_method_is_compared_at_its_own_temperature_unless_its_filters_differ() -> None:
    others = {"speculative": answers(2.3, 10, 0.9), "block top_p=0.7": answers(1.5, 10, 0.55)}
    found = gained(lambda t: answers(1 + t, 20, 0.3 + 0.5 * t), others)
    assert found["speculative"]["at"]["distinct_2"]["temperature"]["value"] == pytest.approx(1.0)
    assert found["speculative"]["holds"]
    assert found["block top_p=0.7"]["at"]["perplexity"]["temperature"]["value"] == pytest.approx(0.5, abs=0.03)


def test_a_method_holds_on_verified_answers_if_it_is_shown_to_be_within_a_point() -> None:
    def judged(rights: Sequence[float], count: int) -> list[str]:
        """Share right of a method against 0.5 of `sample`, on the same prompts where possible."""
        rng = np.random.default_rng(0)

        def one(share: float) -> dict[str, Figure]:
            right = [[n < round(share * count)] * 8 for n in range(count)]
            return figures_of([[Answer([1, 2], "", 1, 1 + rng.normal(), 1.0)] * 8 for _ in right], right)

        others = {f"mtad {share}": one(share) for share in rights}
        found = gained(lambda _: one(0.5), {"greedy": one(0.5), **others})
        return [found[label]["pass"]["pass@8"] for label in others]

    assert judged([0.5, 0.1, 0.505, 0.495], 400) == ["yes", "no", "yes", "open"]
    assert judged([0.5], 100) == ["open"], "100 prompts without a difference do not show that there is none"


def test_errors_of_paired_ratios_are_as_large_as_the_ratios_spread() -> None:
    """Figures of many simulated runs scatter as each of them says."""
    rng, ratios, said = np.random.default_rng(2), [], []
    for _ in range(300):
        hard = rng.gamma(2.0, size=50)  # prompts differ far more than settings do
        tokens = rng.integers(10, 100, (2, 50))
        seconds = tokens * hard * rng.uniform(0.9, 1.1, (2, 50)) * [[2.0], [1.0]]
        slow, fast = (Figure(tokens[at].astype(float), seconds[at]) for at in (0, 1))
        found = fast.relative(slow)
        ratios.append(found["value"])
        said.append(found["error"])
    assert np.mean(ratios) == pytest.approx(2.0, rel=0.05)
    assert np.mean(said) == pytest.approx(np.std(ratios), rel=0.15)


def test_figures_by_hand() -> None:
    written = [
        [Answer([1, 2, 3, 4] * 6, "", 6, 0.5, 2.0), Answer([7], "", 1, 1.5)],
        [Answer([1, 2, 3, 4], "", 2, 1.0, 1.0, 6.0), Answer([1, 2, 3, 5], "", 4, 3.0)],
    ]
    own = {name: figure.with_error()["value"] for name, figure in figures_of(written, None).items()}
    assert own["tokens_per_pass"] == pytest.approx(33 / 13)
    assert own["tokens_per_second"] == pytest.approx(28 / 3), "of timed answers alone"
    assert own["perplexity"] == pytest.approx(math.exp(1.5)), "exp of the mean of means, not of the mean over tokens"
    assert own["distinct_2"] == pytest.approx((4 / 23 + 1 + 1) / 3), "a single token has no pairs"
    assert own["joules_per_token"] == pytest.approx(6 / 4)


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    assert pass_at_k(8, 2, 1) == pytest.approx(2 / 8)
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - (6 * 5 * 4 * 3) / (8 * 7 * 6 * 5))
    greedy = figures_of([[Answer([1], "", 1, 1.0)]] * 2, [[True], [False]])
    assert greedy["pass@8"].with_error()["value"] == 0.5, "the same answer eight times"


def test_self_bleu_by_hand() -> None:
    """1 2 3 4 against 1 2 3 5: 3 of 4 tokens; 2 of 3 pairs, 1 of 2 triples and 0 of 1, each plus one."""
    expected = (3 / 4 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert self_bleu([[1, 2, 3, 4], [1, 2, 3, 5]]) == pytest.approx(expected)
    assert self_bleu([[1, 2], [1, 2], [1, 2]]) == self_bleu([[1, 2]]) == 1.0
    assert self_bleu([[1, 2], [3, 4]]) == 0.0
    short = [[1, 1], [1, 1, 1, 1]]  # the first is half as long as its reference; of the second, 2 of 4 and 1 of 3 match
    first, second = math.exp(1 - 2), (2 / 4 * 2 / 4 * 1 / 3 * 1 / 2) ** (1 / 4)
    assert self_bleu(short) == pytest.approx((first + second) / 2)


@pytest.mark.slow
def test_total_variation_curves_begin_alike(demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no distance; both ways of moving a law cost total variation."""
    ends = {name: [points[0], points[-1]] for name, points in total_variation.CURVES.items()}
    monkeypatch.setattr(total_variation, "CURVES", ends)
    monkeypatch.setattr("sys.argv", f"x --pair {demo_pair} --threads 1 --prompts 2 --results {tmp_path}".split())
    total_variation.main()
    figures = json.loads((tmp_path / "total-variation.json").read_text())["figures"]
    first, last = ([points[at] for points in figures["curves"].values()] for at in (0, -1))
    assert len({one["tokens_per_pass"]["value"] for one in first}) == 1
    assert all(one["total_variation"]["value"] == pytest.approx(0, abs=1e-6) for one in first)
    assert all(0.001 < one["total_variation"]["value"] < 0.6 for one in last)


def test_a_classifier_tells_other_texts_apart_and_the_same_law_not() -> None:
    rng = np.random.default_rng(0)

    def texts(favourite: float) -> list[list[Answer]]:
        """Of tokens below 50, of which one is more frequent; each prompt has tokens of its own."""
        p = np.full(50, (1 - favourite) / 49)
        p[7] = favourite
        own = [rng.integers(100, 1000, 10).tolist() for _ in range(120)]
        return [[Answer([*start, *rng.choice(50, 30, p=p).tolist()], "", 1, 1.0) for _ in range(4)] for start in own]

    block = texts(0.02)
    null, other = (told_apart(one, block).with_error() for one in (texts(0.02), texts(0.1)))
    assert abs(null["value"] - 0.5) < 3 * null["error"] < 0.15
    assert other["value"] > 0.5 + 5 * other["error"]


def test_a_file_of_answers_is_of_one_pair_and_set(tmp_path: Path) -> None:
    path, setting = tmp_path / "answers.jsonl.gz", SETTINGS["mtad"]
    given = [Answer([1, 2], "text", 1, 0.5, 1.0), Answer([3], "", 1, 0.1)]
    Store(path, {"set": "code"}).add(setting, "def", given)
    again = Store(path, {"set": "code"})
    assert again.get(setting, "def") == given
    assert again.get(setting, "class") == again.get(SETTINGS[AGAIN], "def") == []
    for belongs, text in (({"set": "sql"}, None), ({"set": "code"}, b"no answers\n")):
        path.write_bytes(text or path.read_bytes())
        with pytest.raises(InvalidInput, match="give another file"):
            Store(path, belongs)


@pytest.mark.parametrize("name", ["prompts", "timed"])
def test_a_number_of_prompts_below_one_is_refused_before_anything_is_opened(name: str) -> None:
    options = evaluation.parser().parse_args(["code", "--pair", "/nowhere", f"--{name}", "0"])
    with pytest.raises(InvalidInput, match=f"{name} = 0"):
        evaluation.measured(options)


def test_prompts_that_drafts_are_chosen_on_are_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{n}", "answer": f"a{n}"}) + "\n" for n in range(8)))
    own = open_set(f"jsonl={file}")
    assert (list(own.development), own.prompts[0], own.answers) == (["p0", "p1"], "p2", 8)
    assert own.verify
    assert own.verify(0, " a2 ")
    assert not own.verify(0, "a3")
    sql, more = open_set("sql"), open_set("sql", len(open_set("sql").prompts) + 1)
    assert not set(more.prompts) & set(more.development)
    assert list(more.prompts[:-1]) == list(sql.prompts), "a longer set begins with the shorter one"
    assert open_set("sql", 3).prompts == sql.prompts[:3]
    assert more.verify
    assert not more.verify(len(sql.prompts), "SELECT 1 WHERE 0")
    code, others = open_set("code"), open_set("code-others")
    assert len(set(others.prompts)) == len(others.prompts) > 50
    assert not set(others.prompts) & {*code.prompts, *others.development}
    by_file = [one for one in dataset.held_out_code() if one in set(others.prompts)]
    assert sorted(others.prompts) == sorted(by_file)
    assert others.prompts != by_file, "functions of one file are alike, and the first prompts alone are timed"
    assert open_set("code-others").prompts == others.prompts
