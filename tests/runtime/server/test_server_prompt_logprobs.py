"""Prompts scored over HTTP: OpenAI's `echo` with `logprobs`, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtad import LLM, DecodingParams
from runtime.server import service
from runtime.server.logprobs import Echo
from tests.support.checkpoints import make_other_tokenizer, make_tokenizer
from tests.support.live_server import MODEL, LiveServer, ask, call

PROMPT = "naïve 日本 SELECT"
BASE = DecodingParams(max_tokens=6, seed=5, ignore_eos=True, top_logprobs=2, prompt_logprobs=2)
ASKED = {"model": MODEL, "seed": 5, "echo": True, "logprobs": 2}


@pytest.mark.parametrize(("as_ids", "max_tokens"), [(True, 0), (False, 6)])
def test_an_echo_has_the_prompts_log_probabilities_before_the_texts(
    plain: LLM, server: LiveServer, as_ids: bool, max_tokens: int
) -> None:
    expected = plain.generate(PROMPT, replace(BASE, max_tokens=max_tokens))[0]
    prompt: Any = expected.prompt_token_ids if as_ids else PROMPT
    asked = {**ASKED, "prompt": prompt, "max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
    answer = server.client.completions.create(**asked)
    choice, pieces = answer.choices[0], list(server.client.completions.create(**asked, stream=True))
    assert answer.usage.completion_tokens == max_tokens
    assert choice.text == PROMPT + expected.text == "".join(piece.choices[0].text for piece in pieces)
    logprobs = choice.logprobs
    scores = expected.prompt_logprobs
    alone = server.client.completions.create(**(asked | {"echo": False, "max_tokens": 6})).choices[0]
    offsets = alone.logprobs.text_offset[:max_tokens]
    count = len(scores) + 1 + max_tokens
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx([*(s.logprob for s in scores), *expected.logprobs])
    assert {len(logprobs.tokens), len(logprobs.top_logprobs), len(logprobs.text_offset)} == {count}
    assert logprobs.top_logprobs[0] is None
    for own, name, top in zip(logprobs.token_logprobs[1:], logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True):
        assert top[name] == own
        assert len(top) in (2, 3)
    for name, at in zip(logprobs.tokens[: len(scores) + 1], logprobs.text_offset, strict=False):
        assert name.startswith("bytes:") or choice.text.startswith(name, at)
    assert logprobs.text_offset[len(scores) + 1 :] == [len(PROMPT) + at for at in offsets]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for piece in pieces for value in getattr(piece.choices[0].logprobs, name)]
        assert streamed == getattr(logprobs, name)


def test_tokens_begin_where_the_echoed_text_has_them_behind_special_tokens_and_broken_characters_too() -> None:
    tokenizer, other = make_tokenizer().backend_tokenizer, make_other_tokenizer().backend_tokenizer
    text, shown = "<eos>SELECT é<eos> yes", "SELECT é yes"
    ids = tokenizer.encode(text).ids
    offsets, before = Echo.of(text, ids, tokenizer).offsets, len(tokenizer.encode("<eos>SELECT é").ids)
    assert (offsets[1], offsets[before : before + 2]) == (5, [13, 18])
    offsets = Echo.of(shown, ids, tokenizer).offsets
    assert (offsets[1], offsets[before : before + 2]) == (0, [8, 8]), "token ids whose special tokens are not shown"
    emoji, byte, word = other.encode("😀").ids, other.token_to_id("<0xE6>"), other.encode("SELECT a").ids
    for ids in ([*emoji, byte, *word], [byte] * 40 + word):
        text = other.decode(ids)
        assert Echo.of(text, ids, other).offsets[-1] == len(text) - len(" a")


def test_an_echo_without_new_tokens_needs_no_logprobs(server: LiveServer) -> None:
    status, answer = ask(server, prompt=PROMPT, echo=True, max_tokens=0)
    assert (status, answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == (200, PROMPT, None)
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_prompts_are_reported_on_as_vllm_does(plain: LLM, server: LiveServer, route: str) -> None:
    text = {"prompt": PROMPT} if route == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {"model": MODEL, **text, "prompt_logprobs": 2, "max_tokens": 1, "return_token_ids": True}
    status, _, answer = call(server, "POST", f"/v1/{route}", body)
    assert status == 200
    told = (answer["choices"][0] if route == "completions" else answer)["prompt_logprobs"]
    ids = answer["choices"][0]["prompt_token_ids"]
    scores = plain.generate([ids], BASE)[0].prompt_logprobs
    assert told[0] is None
    for token, score, entry in zip(ids[1:], scores, told[1:], strict=True):
        own = entry[str(token)]
        assert (own["logprob"], own["rank"]) == (pytest.approx(score.logprob), score.rank)
        assert set(entry) == {str(token), *(str(other) for other, _ in score.top_logprobs)}
        assert {"logprob", "rank", "decoded_token"} == own.keys()


def test_an_answer_has_a_bounded_number_of_them(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_PROMPT_LOGPROBS", 5 * 3 * 2)
    asked = {"prompt": [[7] * 5], "logprobs": 2, "echo": True, "max_tokens": 1}
    assert ask(server, **asked, n=2)[0] == 200
    status, answer = ask(server, **asked, n=3)
    assert (status, answer["error"]["param"]) == (400, "echo")
