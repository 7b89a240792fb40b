"""The evaluation as a whole: settings take turns on the same prompts, baselines get the same task, reports are full."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from export.options import ExportOptions
from export.pair import export_pair
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime import LLM, RuntimeConfig
from scripts.evaluation import __main__ as evaluate
from scripts.evaluation import curves
from scripts.evaluation.curves import Curve
from scripts.evaluation.decoders import Answer, Baseline, Decoder, Ids, Ours, cut, mean_nll
from scripts.evaluation.figures import Scored, summarise
from scripts.evaluation.measure import measure, score
from scripts.evaluation.prompt_set import Prompt, PromptSet
from scripts.evaluation.settings import TABLE, parse, resolve
from scripts.systems import HuggingFace
from tests.support.checkpoints import TEXT

PROMPTS = [text[start : start + 20] for text in TEXT for start in (0, 9)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def twins(write_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints with exactly the same vocabulary, as transformers wants it."""
    folder = tmp_path_factory.mktemp("twins")
    for name, seed in (("target", 1), ("auxiliary", 2)):
        write_checkpoint(folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def pair(twins: Path) -> Path:
    """Their pair folder."""
    sources = str(twins / "target"), str(twins / "auxiliary")
    export_pair(twins / "pair", ExportOptions(*sources, rows=4, capacity=512, format="torch"))
    return twins / "pair"


@pytest.fixture(scope="module")
def llm(pair: Path) -> LLM:
    return LLM(pair, RuntimeConfig(threads=1, prefix_tokens=0))


@pytest.fixture(scope="module")
def ids(llm: LLM) -> list[Ids]:
    return [llm.pair.tokenizer(text).input_ids for text in PROMPTS]


@pytest.fixture(scope="module")
def target(twins: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(twins / "target", dtype=torch.float32).eval()


def test_every_method_is_a_setting_by_itself_with_its_defaults() -> None:
    assert set(METHODS) <= set(TABLE)
    for name in METHODS:
        params = resolve(parse([name])[0], DecodingParams(), {})
        assert params == DecodingParams(method=name)


def test_changes_come_before_the_table_and_the_table_before_the_pairs_defaults() -> None:
    own = DecodingParams(method="mtad", accept_threshold=0.9, draft_len=6)
    plain, changed = parse(["mtad", "mtad:accept_threshold=0.2:beam_width=3"])
    assert resolve(plain, own, {}) == own
    assert resolve(plain, own, {"max_tokens": 9}) == replace(own, max_tokens=9)
    assert resolve(changed, own, {}) == replace(own, accept_threshold=0.2, beam_width=3)
    assert changed.label == "mtad accept_threshold=0.2 beam_width=3"
    other = parse(["mmtad"])[0]
    assert resolve(other, own, {}) == DecodingParams(method="mmtad"), "defaults are those of another method"
    assert resolve(parse(["greedy"])[0], own, {"temperature": 0.7}).temperature == 0


@pytest.mark.parametrize("name", ["medusa", "mtad:gamma=3", "mtad:draft_len", "mtad:seed=3", "mtad:method=sample"])
def test_unknown_settings_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        parse([name])
    with pytest.raises(InvalidInput):
        parse(["mtad", "mtad"])


@pytest.mark.parametrize("text", ["accept_threshold", "method=a,b", "draft_len=4", "draft_len=4,4", "draft_len=0,4"])
def test_a_curve_needs_values_of_a_number(text: str) -> None:
    with pytest.raises(InvalidInput):
        Curve.of(text)


class Noted(Decoder):
    """Notes in `calls` who was asked, with which seeds."""

    def __init__(self, label: str, deterministic: bool, calls: list[tuple[str, tuple[int, ...]]]) -> None:
        self.label, self.deterministic, self._calls = label, deterministic, calls

    def warm_up(self, prompts: Sequence[Ids]) -> None:
        pass

    def run(self, prompts: Sequence[Ids], seeds: Sequence[int]) -> Callable[[], list[Answer]]:
        self._calls.append((self.label, tuple(seeds)))
        return lambda: [Answer(0, 0, (1,), "", 1.0, 1, 1, None, None, 0.0) for _ in prompts]

    def describe(self) -> dict[str, Any]:
        return {}


def test_settings_take_turns_in_every_place_and_share_seeds(ids: list[Ids]) -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []

    answers = measure(ids[:6], [Noted(own, own == "c", calls) for own in "abc"], [5, 6], batch=2)
    labels = "".join(label for label, _ in calls)
    assert labels == "abc" + "ba" + "cab" + "ab" + "bca" + "ab", "c, without randomness, has no second seed"
    by_label = {own: [seeds for label, seeds in calls if label == own] for own in "abc"}
    assert by_label["a"] == by_label["b"]
    assert len(set(by_label["a"])) == len(by_label["a"]) == 6
    assert by_label["c"] == by_label["a"][::2], "one text is enough where every seed gives the same"
    assert [(one.prompt, one.seed) for one in answers["a"]] == [
        (p, s) for group in ((0, 1), (2, 3), (4, 5)) for s in (0, 1) for p in group
    ]


def test_only_prompts_that_are_decoded_alone_are_timed(ids: list[Ids]) -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []
    answers = measure(ids[:6], [Noted("a", False, calls)], [0, 1], batch=4, timed=2)["a"]
    second = 1 << 32
    assert [seeds for _, seeds in calls] == [
        (0,),
        (1,),
        (2, 3),
        tuple(second + at for at in range(4)),
        (4, 5),
        (second + 4, second + 5),
    ]
    assert sorted((one.seed, one.prompt) for one in answers) == [(s, p) for s in (0, 1) for p in range(6)]
    assert [(one.prompt, one.seed) for one in answers if one.seconds] == [(0, 0), (1, 0)]
    figures = summarise({"a": [Scored(one, None) for one in answers]})["a"]
    assert figures["tokens_per_second"]["value"] == pytest.approx(1.0), "the others do not count"


def test_our_own_answers_are_those_of_the_library_and_their_perplexity_is_the_targets(
    llm: LLM, ids: list[Ids], target: LlamaForCausalLM
) -> None:
    params = DecodingParams(method="mtad", accept_threshold=0.1, max_tokens=12)
    answers = measure(ids[:4], [Ours("mtad", llm, params)], [3], batch=2)["mtad"]
    for number, one in enumerate(answers):
        alone = llm.generate(ids[number], replace(params, seed=(3 << 32) + number))[0]
        assert one.tokens == tuple(alone.token_ids)
        assert (one.passes, one.drafted) == (alone.statistics.target_passes, alone.statistics.drafted)
        assert one.timed_tokens == len(one.tokens)
        assert one.nll == pytest.approx(mean_nll(target, ids[number], one.tokens), abs=1e-4)
        assert one.seconds > 0


@pytest.mark.slow
def test_hugging_faces_searches_are_scored_in_the_same_way(
    llm: LLM, ids: list[Ids], target: LlamaForCausalLM, twins: Path
) -> None:
    params = DecodingParams(method="sample", temperature=0.0, max_tokens=10)
    tokenizer = llm.pair.tokenizer
    greedy = Baseline("hf greedy", HuggingFace(target, search={"do_sample": False}), tokenizer, params)
    beams = Baseline("hf beams", HuggingFace(target, search={"num_beams": 4}), tokenizer, params)
    auxiliary = LlamaForCausalLM.from_pretrained(twins / "auxiliary", dtype=torch.float32).eval()
    assisted = Baseline("hf assisted", HuggingFace(target, auxiliary), tokenizer, replace(params, temperature=1.0))
    found = measure(ids, [Ours("greedy", llm, params), greedy, beams, assisted], [0])
    for ours, theirs in zip(found["greedy"], found["hf greedy"], strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.text == theirs.text
        assert ours.nll == pytest.approx(theirs.nll, abs=1e-4)
        assert ours.passes == theirs.passes, "the pass that stores the prompt gives the first token there"
        assert theirs.timed_tokens == len(theirs.tokens) - 1
    joint = {name: np.mean([one.nll * len(one.tokens) for one in own]) for name, own in found.items()}
    assert joint["hf beams"] < joint["hf greedy"]
    for one in found["hf assisted"]:
        assert 1 <= one.passes <= len(one.tokens)
        assert 0 <= one.timed_tokens < len(one.tokens)


def test_stop_strings_end_texts_of_baselines_as_ours(
    llm: LLM, ids: list[Ids], target: LlamaForCausalLM, twins: Path
) -> None:
    params = DecodingParams(method="sample", temperature=0.0, max_tokens=24)
    texts = [llm.generate(own, params)[0].text for own in ids]
    stop = tuple({own[0] for text in texts if (own := re.findall(r"[\x20-\x7e]{2}", text))})  # whole characters
    tokenizer, stopped = llm.pair.tokenizer, replace(params, stop=stop)
    systems = {"hf": HuggingFace(target, search={}, tokenizer=tokenizer)}
    auxiliary = LlamaForCausalLM.from_pretrained(twins / "auxiliary", dtype=torch.float32).eval()
    systems["assisted"] = HuggingFace(target, auxiliary, search={}, tokenizer=tokenizer)
    baselines = [Baseline(name, system, tokenizer, stopped) for name, system in systems.items()]
    found = measure(ids, [Ours("ours", llm, stopped), *baselines], [0])
    assert any(len(one.text) < len(text) for one, text in zip(found["ours"], texts, strict=True))
    for name in systems:
        for ours, theirs in zip(found["ours"], found[name], strict=True):
            assert (ours.text, ours.tokens) == (theirs.text, theirs.tokens)
            assert theirs.passes <= len(theirs.tokens), "it did not go on behind the stop string"
    tokens = tokenizer(TEXT[0]).input_ids
    assert cut(tokens, ("name",), tokenizer)[1] == "SELECT "
    assert cut(tokens, ("nowhere",), tokenizer) == (tokens, TEXT[0])


@pytest.fixture
def run(
    pair: Path, twins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        own = ["--pair", str(pair), "--checkpoints", str(twins), "--results", str(tmp_path), "--threads", "1"]
        monkeypatch.setattr(sys, "argv", ["evaluate", *own, *arguments])
        code = 0
        try:
            evaluate.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": prompt, "answer": "" if at else "x"} for at, prompt in enumerate([*PROMPTS[:4], "word " * 99])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_the_report_holds_every_setting_and_says_what_was_left_out(
    run: Callable[..., tuple[int, str, str]], lines: Path, tmp_path: Path
) -> None:
    code, out, err = run("--set", f"jsonl={lines}", "--params", '{"max_tokens": 6}', "--seeds", "2", "--pass-k", "2,9")
    assert code == 0, err
    assert f"written to {tmp_path / 'evaluation'}.json" in out.splitlines()[-1]
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert (tmp_path / "evaluation.png").stat().st_size > 10_000
    own = found["sets"]["mine"]
    assert set(own["settings"]) == {*TABLE, "hf sampling", "hf greedy", "hf beam search", "hf assisted"}
    assert (own["prompts"], own["left_out"]) == (4, ["mine-0005"])
    assert own["parameters"]["greedy"]["max_tokens"] == 6
    for row in own["settings"].values():
        assert row["perplexity"]["value"] > 1
        assert row["tokens_per_second"]["error"] is not None
        assert row["pass@2"] is None or row["pass@2"]["value"] >= row["accuracy"]["value"] - 1e-12
    assert set(own["settings"]["mtad"]["perplexity"]["vs"]) == {"sample", "speculative"}
    assert found["energy"].startswith("none")
    assert found["machine"]["versions"]["torch"]
    assert "| mtad " in out
    assert "1 left out" in out


@pytest.mark.slow
def test_gains_are_measured_with_the_curves_and_a_second_run_asks_nothing_again(
    run: Callable[..., tuple[int, str, str]], lines: Path, tmp_path: Path
) -> None:
    options = ["--set", f"jsonl={lines}", "--params", '{"max_tokens": 4}', "--methods", "mtad,greedy", "--gain"]
    kept = tmp_path / "answers.jsonl"
    code, out, err = run(*options, "--baselines", "none", "--answers", str(kept))
    assert code == 0, err
    found = json.loads((tmp_path / "evaluation.json").read_text())["sets"]["mine"]
    assert set(found["gain"]) == {"mtad", "greedy"}
    assert "block temperature=0.2" in found["settings"]
    assert "| gain, tokens per pass" in out
    before = kept.read_bytes()
    code, again, _ = run(*options, "--baselines", "none", "--answers", str(kept))
    assert (code, kept.read_bytes()) == (0, before)
    assert again.split("mine: 4 prompts")[1] == out.split("mine: 4 prompts")[1]


@pytest.mark.slow
def test_curves_have_a_point_a_value_and_their_references(
    run: Callable[..., tuple[int, str, str]], lines: Path, tmp_path: Path
) -> None:
    curves = ["--curve", "accept_threshold=0,0.5", "--curve", "draft_len=1,10"]
    options = ["--set", f"jsonl={lines}", "--params", '{"max_tokens": 6}', "--methods", "mtad,mmtad", "--limit", "2"]
    code, _, err = run(*options, *curves)
    assert code == 0, err
    found = json.loads((tmp_path / "curves.json").read_text())
    assert [(c["parameter"], len(c["points"]), set(c["references"])) for c in found["curves"]] == [
        ("accept_threshold", 4, {"sample", "speculative"}),
        ("draft_len", 4, {"sample", "speculative"}),
    ]
    by_value = {p["value"]: p["figures"] for p in found["curves"][0]["points"] if p["method"] == "mtad"}
    assert by_value[0]["acceptance_rate"]["value"] >= by_value[0.5]["acceptance_rate"]["value"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--set", "mbpp"], "--set"),
        (["--set", "jsonl=/no/such/file"], "prompts"),
        (["--seeds", "0"], "--seeds"),
        (["--batch", "0"], "--batch"),
        (["--limit", "0"], "--limit"),
        (["--pass-k", "0"], "--pass-k"),
        (["--params", "[]"], "--params"),
        (["--params", '{"n": 2}'], "--params"),
        (["--params", '{"gamma": 2}'], "gamma"),
        (["--methods", "medusa"], "--methods"),
        (["--methods", "mtad:draft_len=999"], "draft_len"),
        (["--baselines", "vllm"], "--baselines"),
        (["--curve", "accept_threshold=0,1", "--methods", "speculative,sample"], "--methods"),
        (["--curve", "accept_threshold=0,1", "--methods", "greedy"], "curve accept_threshold"),
        (["--curve", "stop=a,b"], "--curve"),
        (["--gain", "--curve", "draft_len=1,2"], "--gain"),
        (["--gain", "--methods", "block:temperature=0.5"], "--methods"),
        (["--answers", __file__], "--answers"),
        (["--checkpoints", "/no/such/folder"], "target"),
    ],
)
def test_bad_input_is_one_line(run: Callable[..., tuple[int, str, str]], arguments: list[str], field: str) -> None:
    code, out, err = run("--set", "sql", "--limit", "2", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"evaluate: error: {field} "), err
    assert err.count("\n") == 1


def test_checkpoints_of_another_pair_are_refused(
    run: Callable[..., tuple[int, str, str]], twins: Path, tmp_path: Path
) -> None:
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    (swapped / "target").symlink_to(twins / "auxiliary")
    (swapped / "auxiliary").symlink_to(twins / "target")
    code, _, err = run("--set", "sql", "--limit", "2", "--checkpoints", str(swapped))
    assert code == 2
    assert "not the checkpoint" in err


def test_what_a_pair_asks_of_every_text_holds_for_every_setting_and_drafting_for_its_own(llm: LLM) -> None:
    own = DecodingParams(method="mmtad", draft_len=7, beam_width=2, accept_threshold=0.3, temperature=0.6, top_k=5)
    sample, mmtad = (resolve(one, own, {}) for one in parse(["sample", "mmtad"]))
    assert sample == DecodingParams(method="sample", temperature=0.6, top_k=5)
    assert mmtad == own


def test_baselines_are_not_compared_where_they_do_not_get_the_same_task(
    run: Callable[..., tuple[int, str, str]], lines: Path
) -> None:
    common = ["--set", f"jsonl={lines}", "--params", '{"repetition_penalty": 1.2, "max_tokens": 4}', "--limit", "2"]
    code, out, err = run(*common)
    assert (code, out) == (2, "")
    assert "repetition_penalty" in err
    assert "--baselines none" in err
    assert run(*common, "--baselines", "none", "--methods", "sample,mtad")[0] == 0


def test_answers_are_scored_in_order_whatever_their_number_at_once() -> None:
    class Odd(PromptSet):
        name, scored, workers = "odd", True, 4
        prompts = tuple(Prompt(str(n), "") for n in range(40))

        def right(self, number: int, text: str) -> bool | None:
            time.sleep(0.001 * (number % 3))
            return number % 2 == 1

    answers = {label: [Answer(n, 0, (1,), "", 1.0, 1, 1, None, None, 0.0) for n in range(40)] for label in "ab"}
    for own in score(Odd(), answers).values():
        assert [one.right for one in own] == [n % 2 == 1 for n in range(40)]


def test_curves_of_all_settings_are_those_that_use_the_parameter() -> None:
    threshold, width = Curve.of("accept_threshold=0.1,0.5"), Curve.of("beam_width=1,2")
    chosen, measured = curves.settings(None, [threshold, width])
    assert {"mtad", "mmtad"} <= {one.base for one in chosen}
    assert not {"sample", "speculative", "greedy"} & {one.base for one in chosen}
    assert [one.label for one in measured[:2]] == ["sample", "speculative"]
    assert len(measured) == 2 + 4 * len(chosen)
    with pytest.raises(InvalidInput, match="does not use it"):
        curves.settings(parse(["mtad", "greedy"]), [threshold])
    with pytest.raises(InvalidInput, match="fixed"):
        curves.settings(parse(["mtad:beam_width=3"]), [width])
