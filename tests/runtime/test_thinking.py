"""Thoughts: the rule switches at the tags, the answer is the target's own, limits and texts are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtad import LLM
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.scheduler.request import Request, RequestFailed
from runtime.scheduler.thoughts import Thoughts, known_tags
from tests.runtime.test_schedules import Mock, make_mock
from tests.support.chi_square import p_value
from tests.support.integrity import check_loop
from tests.support.mock_engine import VOCAB

OPEN, CLOSE = [1, 2], [3]
"""A tag of two tokens, and one of a single token."""


def run(mock: Mock, params: Sequence[DecodingParams], prompt: Sequence[int] = (5, *OPEN)) -> list[Request]:
    requests = [Request(number, list(prompt), p, p.seed or 0) for number, p in enumerate(params)]
    for request in requests:
        inside = list(prompt[-len(OPEN) :]) == OPEN
        request.thoughts = Thoughts(OPEN, CLOSE, inside, request.params.thinking_token_budget)
        mock.loop.scheduler.submit(request)
    while not mock.loop.idle:
        for request in mock.loop.step():
            assert not request.error, request.error
        check_loop(mock.loop)
    return requests


def ranks(requests: Sequence[Request]) -> tuple[list[int], np.ndarray]:
    """How likely the first two tokens behind each thought were, as ranks, and how often each rank is expected."""
    drawn, law = list[int](), np.zeros(VOCAB)
    for request in requests:
        start = (
            request.thoughts.switches[0][1] if request.thoughts and request.thoughts.switches else len(request.tokens)
        )
        for token, top in zip(request.tokens[start : start + 2], request.top_log_probs[start:], strict=False):
            drawn.append([other for other, _ in top].index(token))
            law += np.exp([value for _, value in top])
    return drawn, law / law.sum()


LOSSY: tuple[dict[str, Any], ...] = (
    {"thinking_method": "mtad", "thinking_threshold": 0.0},
    {"thinking_method": "ensemble", "thinking_threshold": 0.0},
)
BASE = DecodingParams(method="block", draft_len=3, max_tokens=60, top_logprobs=VOCAB, ignore_eos=True)


def texts(asked: dict[str, Any], count: int = 600) -> list[Request]:
    mock = make_mock(rows=16, max_waiting=2 * count)
    mock.auxiliary.noise = 8.0  # the two models have little in common
    return run(mock, [replace(DecodingParams.from_dict(asked, BASE), seed=seed) for seed in range(count)])


@pytest.mark.slow
@pytest.mark.parametrize("asked", LOSSY, ids=lambda asked: asked["thinking_method"])
def test_behind_a_thought_tokens_are_the_targets_own_whatever_the_thoughts_rule(asked: dict[str, Any]) -> None:
    drawn, law = ranks(texts(asked, 300))
    assert p_value(drawn, dict(enumerate(law))) > 1e-4


@pytest.mark.slow
def test_with_what_is_drafted_behind_the_tag_they_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Thoughts.read
    monkeypatch.setattr(Thoughts, "read", lambda own, text, tokens, cut: read(own, text, tokens, False))
    drawn, law = ranks(texts(LOSSY[1]))
    assert p_value(drawn, dict(enumerate(law))) < 1e-6


def read(tokens: Sequence[int], blocks: int = 1, cut: bool = False, **given: Any) -> tuple[Thoughts, list[int]]:
    """What is kept of tokens that come in blocks of a size; what a block drops is not offered again."""
    thoughts, text = Thoughts(OPEN, CLOSE, given.pop("inside", True), **given), list[int]()
    for at in range(0, len(tokens), blocks):
        text += thoughts.read(text, list(tokens[at : at + blocks]), cut)[0]
    return thoughts, text


def split(thoughts: Thoughts, text: Sequence[int]) -> tuple[str, str]:
    return thoughts.split("".join(map(str, text)), range(len(text)))


@pytest.mark.parametrize("blocks", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("tokens", "inside", "parts"),
    [
        ([5, 6, 3, 7, 8], True, ("56", "78")),
        ([1, 2, 5, 3, 7], False, ("5", "7")),
        ([1, 5, 2, 1, 2, 6], False, ("6", "152")),
        ([5, 1, 2, 6, 3, 7, 3, 8], True, ("5126", "738")),
        ([5, 3, 7, 1, 2, 6, 3, 8], True, ("56", "78")),
        ([5, 6, 7], True, ("567", "")),
    ],
    ids=["closed", "opened", "half a tag", "tags do not nest", "two thoughts", "never closed"],
)
def test_parts_lie_between_the_tags(blocks: int, tokens: list[int], inside: bool, parts: tuple[str, str]) -> None:
    thoughts, text = read(tokens, blocks, inside=inside)
    assert (text, split(thoughts, text)) == (tokens, parts)
    whole = "".join(map(str, text))
    for start in range(len(whole)):  # what a stream sends adds up to the whole
        pieces = [thoughts.split(whole, range(len(text)), *ends) for ends in ((0, start), (start, None))]
        assert tuple("".join(some) for some in zip(*pieces, strict=True)) == parts


def test_where_the_parts_differ_a_block_ends_behind_the_tag() -> None:
    assert read([5, 3, 7, 8, 6, 1, 2, 9], blocks=4, cut=True)[1] == [5, 3, 6, 1, 2]


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("budget", [0, 2, 9])
def test_a_thought_has_no_more_tokens_than_it_may(budget: int, blocks: int) -> None:
    thoughts = Thoughts([3], [1, 2], True, budget)
    text: list[int] = []
    while len(text) < 16:
        kept, forced = thoughts.read(text, [5] * blocks, False)
        assert kept
        assert forced == (kept[-1] in (1, 2))
        text += kept
    assert text[: budget + 3] == [*[5] * budget, 1, 2, 5]
    assert thoughts.switches == [(budget, budget + 2)]


@pytest.mark.parametrize("last", [4, 7])
def test_a_limit_that_is_reached_inside_a_closing_tag_finishes_it(last: int) -> None:
    thoughts = Thoughts([3], [1, 2, 4], True, 4)
    text, _ = thoughts.read([], [9, 9, 1, 2], False)
    assert (text, thoughts.read(text, [last], False)) == ([9, 9, 1, 2], ([4], last != 4))
    assert thoughts.switches == [(2, 5)]


@pytest.mark.parametrize(("text", "begun"), [([5], 0), ([5, 1], 1), ([1, 2], 0), ([1, 2, 1], 1), ([], 0)])
def test_what_may_become_a_tag_is_known(text: list[int], begun: int) -> None:
    assert Thoughts([1, 2, 4], CLOSE, False).begun(text) == (2 if text == [1, 2] else begun)


class Words:
    """What `known_tags` looks at."""

    def __init__(self, added: Sequence[str], response_template: Any = None) -> None:
        self.added, self.response_template = added, response_template

    def get_added_vocab(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.added)}


@pytest.mark.parametrize(
    ("words", "tags"),
    [
        (Words(["<|im_end|>", "<think>", "</think>"]), ("<think>", "</think>")),
        (Words(["<think>"]), None),
        (
            Words(["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]),
            ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ),
        (Words(["<|channel>", "<channel|>", "<|turn>"]), ("<|channel>thought\n", "<channel|>")),
        (Words([], {"fields": {"reasoning_content": {"open": "[a]", "close": "[b]"}}}), ("[a]", "[b]")),
        (Words(["<think>", "</think>"], {"fields": {"content": {}}}), ("<think>", "</think>")),
    ],
)
def test_tags_are_known_by_the_response_template_or_the_added_tokens(words: Words, tags: Any) -> None:
    assert known_tags(words) == tags


TAGGED = DecodingParams(
    method="block", thinking_method="mtad", thinking_tags=("<think>", "</think>"), max_tokens=40, seed=4, draft_len=4
)
PROMPT = "How many<think>"


def test_a_limit_closes_a_thought_and_the_grammar_holds_behind_it(plain: LLM) -> None:
    params = replace(TAGGED, thinking_token_budget=9, regex="[a-z]{3,6}", n=3, top_logprobs=2, draft_details=True)
    closing = plain.tokenize("</think>", special_tokens=False)
    for result in plain.generate(PROMPT, params):
        assert result.token_ids[9 : 9 + len(closing)] == closing
        assert result.answer.isalpha()
        assert result.finish_reason == "stop"
        assert result.text.startswith(result.reasoning)  # a character that the limit cuts belongs to neither part
        assert result.text.endswith(f"</think>{result.answer}")
        assert len(result.top_logprobs) == len(result.token_ids)
        for token, own in zip(result.token_ids, result.details, strict=True):
            assert own.accepted is None or own.accepted.token == token
        scored = plain.generate(
            [*result.prompt_token_ids, *result.token_ids], DecodingParams(max_tokens=0, prompt_logprobs=0)
        )[0].prompt_logprobs[len(result.prompt_token_ids) - 1 :]
        assert result.logprobs == pytest.approx([score.logprob for score in scored], abs=1e-4)


def test_the_fewest_tokens_of_a_text_count_its_thought(plain: LLM) -> None:
    params = replace(TAGGED, thinking_token_budget=9, regex="[a-z]{3,6}", min_tokens=11)
    (result,) = plain.generate(PROMPT, params)
    assert result.answer.isalpha()
    closing = len(plain.tokenize("</think>", special_tokens=False))
    with pytest.raises(RequestFailed, match=f"can only end after {9 + closing + 1} tokens"):
        plain.generate(PROMPT, replace(params, regex="[0-9]", min_tokens=40))


def test_a_thought_that_is_not_closed_leaves_no_answer(plain: LLM) -> None:
    (result,) = plain.generate(PROMPT, TAGGED)
    assert (result.reasoning, result.answer, result.finish_reason) == (result.text, "", "length")
    assert result.statistics.thinking_passes == result.statistics.target_passes > 0
    assert result.statistics.thinking_tokens == 40


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_with_the_tag_ends_the_text_inside_the_thought(plain: LLM, include: bool) -> None:
    asked: dict[str, Any] = {"stop": ("</think>",), "thinking_token_budget": 5, "include_stop_str_in_output": include}
    (result,) = plain.generate(PROMPT, replace(TAGGED, **asked))
    assert (result.finish_reason, result.answer) == ("stop", "")
    assert result.text == result.reasoning + ("</think>" if include else "")


def test_a_thoughts_rule_and_the_answers_have_figures_of_their_own(plain: LLM) -> None:
    params = replace(TAGGED, thinking_method="sample", method="mtad", accept_threshold=0.0, thinking_token_budget=12)
    (result,) = plain.generate(PROMPT, params)
    own, closing = result.statistics, plain.tokenize("</think>", special_tokens=False)
    assert own.thinking_tokens == own.thinking_passes == 12 + len(closing), "sample gives one token per pass"
    assert own.target_passes - own.thinking_passes < own.tokens - own.thinking_tokens, "mtad gives more"


@pytest.mark.parametrize(("end", "inside"), [("", True), ("\n\n", True), (" x", False), ("</think>\n", False)])
def test_a_prompt_that_ends_with_the_tag_has_opened_the_thought(plain: LLM, end: str, inside: bool) -> None:
    assert plain.requests(PROMPT + end, TAGGED)[0].thinking is inside


@pytest.mark.parametrize("method", ["sample", "block", "mmtad_sample"])
def test_a_thought_may_open_where_a_grammar_holds_for_the_answer(
    plain: LLM, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "tags", TAGGED.thinking_tags)
    opening = plain.tokenize("<think>", special_tokens=False)
    assert len(opening) > 1
    params = replace(TAGGED, method=method, thinking_token_budget=4, regex="[a-z]{3,6}", n=3)
    asks = replace(params, logit_bias={opening[0]: 100.0})
    unasked = replace(asks, thinking_tags=(), thinking_method=None, thinking_token_budget=None)
    assert plain.generate("How many", unasked)[0].text.isalpha()
    for result in plain.generate("How many", asks):
        assert result.token_ids[: len(opening)] == opening
        assert result.reasoning
        assert result.answer.isalpha()
        assert result.finish_reason == "stop"
    for prompt, others in (("How many<think></think>\n", asks), ("How many", replace(asks, bad_words=("<think>",)))):
        for result in plain.generate(prompt, others):
            assert (result.reasoning, result.answer.isalpha()) == ("", True), "it has closed one, or may not open one"


def test_an_answer_may_end_at_once_behind_a_thought_that_has_the_fewest_tokens(plain: LLM) -> None:
    (first, *_), closing = (plain.tokenize(tag, special_tokens=False) for tag in TAGGED.thinking_tags)
    fewest = 9 + len(closing)  # so that the text cannot end inside the thought
    params = replace(TAGGED, thinking_token_budget=9, min_tokens=fewest, regex="[a-c]{0,3}")
    for prompt, biased in ((PROMPT, {}), ("How many", {first: 60.0})):
        (result,) = plain.generate(prompt, replace(params, logit_bias={plain.pair.eos[0]: 60.0} | biased))
        assert (result.answer, bool(result.reasoning), result.finish_reason) == ("", True, "stop")


def test_a_tag_inside_an_answer_of_a_grammar_is_text(plain: LLM) -> None:
    words = ("never",)  # so that it opens no thought
    (result,) = plain.generate("How many", replace(TAGGED, regex="x <think>[a-z]{3}", bad_words=words))
    assert plain.tokenize("<think>", special_tokens=False)[-1] in result.token_ids
    assert result.answer == result.text
    assert result.answer[1:9] == " <think>"
    assert result.answer[9:].isalpha()


def test_what_a_pair_has_no_tags_for_is_refused(plain: LLM) -> None:
    for name, value in {"thinking_method": "mtad", "thinking_token_budget": 3}.items():
        with pytest.raises(InvalidInput, match=f"^{name}[ :]"):
            plain.generate("S", DecodingParams.from_dict({name: value}))


def test_a_draft_that_the_thoughts_method_makes_too_wide_is_refused(plain: LLM) -> None:
    with pytest.raises(InvalidInput, match="beam_width"):
        plain.generate(PROMPT, replace(TAGGED, beam_width=9))
