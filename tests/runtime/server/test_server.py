"""The HTTP server, over the wire: what clients get is what the engine gives."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from mtad import LLM, DecodingParams
from mtad.methods import METHODS
from runtime.constraints.grammar import Grammars
from runtime.server.logprobs import TokenNames
from runtime.server.schema import DESCRIPTIONS
from tests.support.checkpoints import make_tokenizer
from tests.support.live_server import MODEL, LiveServer, ask, call

PROMPTS = ["SELECT name FROM", "def largest(values):", "How many"]
BASE = DecodingParams(max_tokens=16, seed=5, ignore_eos=True)
ASKED = {"max_tokens": 16, "seed": 5, "extra_body": {"ignore_eos": True}}


def test_a_completion_is_what_the_engine_gives(plain: LLM, server: LiveServer) -> None:
    expected = plain.generate(PROMPTS, BASE)
    for prompt, result in zip(PROMPTS, expected, strict=True):
        for given in (prompt, result.prompt_token_ids):
            answer = server.client.completions.create(model=MODEL, prompt=given, **ASKED)
            choice, usage = answer.choices[0], answer.usage
            assert (choice.text, choice.finish_reason, choice.index) == (result.text, result.finish_reason, 0)
            assert usage is not None
            assert usage.completion_tokens == len(result.token_ids)
            assert usage.prompt_tokens == len(result.prompt_token_ids)
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            drafts = usage.to_dict()["mtad"]
            assert isinstance(drafts, dict)
            assert drafts["acceptance_rate"] == result.statistics.acceptance_rate > 0
            assert drafts["block_efficiency"] == result.statistics.block_efficiency > 1
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("mtad-")


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(plain: LLM, server: LiveServer) -> None:
    params = replace(BASE, n=2, temperature=1.5)
    expected = plain.generate(PROMPTS, params)
    asked = {"model": MODEL, "n": 2, "temperature": 1.5, "seed": 5, "max_tokens": 16}
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = server.client.completions.create(prompt=PROMPTS, extra_body=extra, **asked)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [result.text for result in expected]
    assert [choice.to_dict()["token_ids"] for choice in answer.choices] == [result.token_ids for result in expected]
    assert [choice.to_dict()["mtad"]["seed"] for choice in answer.choices] == [r.seed for r in expected]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(result.prompt_token_ids) for result in expected[::2])
    texts = dict.fromkeys(range(6), "")
    for chunk in server.client.completions.create(prompt=PROMPTS, stream=True, extra_body=extra, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [result.text for result in expected]
    ids = [result.prompt_token_ids for result in expected[::2]]
    answer = server.client.completions.create(prompt=ids, extra_body=extra, **asked)
    assert [choice.text for choice in answer.choices] == [result.text for result in expected]


@pytest.mark.parametrize(
    ("named", "same", "lossless"),
    [({}, "sample", True), ({"method": "mtad", "accept_threshold": 0.0}, "mtad", False)],
)
def test_temperature_zero_is_greedy_unless_a_lossy_method_is_named_and_answers_say_whether_they_are_lossless(
    named: dict[str, Any], same: str, lossless: bool, plain: LLM, server: LiveServer
) -> None:
    greedy = replace(BASE, method="sample", temperature=0.0)
    params = DecodingParams.from_dict({**named, "method": same}, greedy)
    expected = [one.text for one in plain.generate(PROMPTS, params)]
    assert (expected == [one.text for one in plain.generate(PROMPTS, greedy)]) == lossless
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True, **named}
    client = server.client
    whole = client.completions.with_raw_response.create(prompt=PROMPTS, **asked)
    streamed = client.completions.with_raw_response.create(prompt=PROMPTS[0], stream=True, **asked)
    chat = client.chat.completions.with_raw_response.create(messages=[{"role": "user", "content": "Hello"}], **asked)
    for answer in (whole, streamed, chat):
        assert answer.headers["x-mtad-lossless"] == str(lossless).lower()
    for answer in (whole, chat):
        assert answer.parse().usage.to_dict()["mtad"]["lossless"] is lossless
    assert [choice.text for choice in whole.parse().choices] == expected
    assert "".join(chunk.choices[0].text for chunk in streamed.parse()) == expected[0]


@pytest.mark.parametrize("method", ["sample", "traversal", "mmtad"])
def test_a_stream_says_how_its_tokens_came_about(method: str, plain: LLM, server: LiveServer) -> None:
    asked: Any = {"method": method, "draft_len": 4, "top_k": 0, "draft_details": True}
    params = replace(BASE, max_tokens=40, temperature=1.3, top_p=1.0, **asked)
    result = plain.generate("naïve 日本", params)[0]
    extra = {"ignore_eos": True, "return_token_ids": True, **asked}
    stream = server.client.completions.create(
        model=MODEL, prompt="naïve 日本", max_tokens=40, seed=5, temperature=1.3, top_p=1, extra_body=extra,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk.to_dict() for chunk in stream]
    *pieces, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 40
    choices: list[Any] = [piece["choices"][0] for piece in pieces]
    assert all(piece["usage"] is None for piece in pieces)
    assert "".join(choice["text"] for choice in choices) == result.text
    assert [token for choice in choices for token in choice["token_ids"]] == result.token_ids
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert sum(choice["mtad"]["accepted"] for choice in choices) == result.statistics.accepted
    assert sum(choice["mtad"]["drafted"] for choice in choices) == result.statistics.drafted
    assert (result.statistics.accepted > 0) == (method != "sample")
    for choice in choices:
        if choice["mtad"]["drafted"]:
            assert choice["mtad"]["tokens"] - choice["mtad"]["accepted"] in (0, 1), "at most one bonus token per block"
    assert choices[-1]["mtad"]["statistics"]["tokens"] == 40
    details = [one for choice in choices for one in choice["mtad"]["details"]]
    ends = [*(one["offset"] for one in details[1:]), None]
    pieces = [result.text[one["offset"] : end] for one, end in zip(details, ends, strict=True)]
    assert "".join(pieces) == result.text
    names = TokenNames(plain.pair.tokenizer.backend_tokenizer, plain.grammars)
    for token, logprob, piece, one, own in zip(
        result.token_ids, result.logprobs, pieces, details, result.details, strict=True
    ):
        assert (one["text"], one["p"]) == (names.name(token)[0], pytest.approx(math.exp(logprob)))
        assert "\ufffd" in one["text"] or one["text"] == piece.lstrip("\ufffd") or token in plain.pair.eos
        given = [one["accepted"], *one["rejected"]], [own.accepted, *own.rejected]
        assert [drafted and drafted["q"] for drafted in given[0]] == [drafted and drafted.q for drafted in given[1]]


def test_a_chat_is_the_completion_of_its_rendered_template(plain: LLM, server: LiveServer) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many"}]},
    ]
    prompt = "[system] Be brief.\n[user] How many\n[assistant] "
    expected = plain.generate(prompt, BASE)[0]
    asked = {"model": MODEL, "messages": messages, "seed": 5, "extra_body": {"ignore_eos": True}}
    answer = server.client.chat.completions.create(max_completion_tokens=16, **asked)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.prompt_tokens_details is not None
    messages[0]["role"] = "developer"  # whom the template does not know
    chunks = list(server.client.chat.completions.create(max_tokens=16, stream=True, n=2, **asked))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first = [chunk.choices[0].delta for chunk in chunks if chunk.choices[0].index == 0]
    assert "".join(delta.content or "" for delta in first) == expected.text
    assert [delta.role for delta in first] == ["assistant"] + [None] * (len(first) - 1)
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


def test_a_token_that_is_one_byte_is_told_as_that_byte() -> None:
    tokenizer = make_tokenizer().backend_tokenizer
    names = TokenNames(tokenizer, Grammars(tokenizer, tokenizer.get_vocab_size(), (0,)))
    assert {names.name(token)[1] for token in range(1, 257)} == {bytes([value]) for value in range(256)}
    assert names.name(0)[1] == b"<eos>"


def test_log_probabilities_have_both_shapes_and_the_engines_values(plain: LLM, server: LiveServer) -> None:
    params = replace(BASE, top_logprobs=3, temperature=2.0, top_k=0, top_p=1.0)
    result = plain.generate(PROMPTS[0], params)[0]
    extra = {"ignore_eos": True, "top_k": 0}
    asked = {"model": MODEL, "seed": 5, "max_tokens": 16, "temperature": 2, "top_p": 1, "extra_body": extra}
    found = server.client.completions.create(prompt=PROMPTS[0], logprobs=3, **asked).choices[0]
    assert found.logprobs is not None
    assert found.logprobs.token_logprobs == pytest.approx(result.logprobs)
    offsets = found.logprobs.text_offset
    assert offsets is not None
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    tokens = found.logprobs.tokens or []
    for token, begin, end in zip(tokens, offsets, [*offsets[1:], len(found.text)], strict=True):
        assert token.startswith("bytes:") or found.text[begin:end].endswith(token), "after bytes that waited for more"
    for token, value, likely in zip(tokens, result.logprobs, found.logprobs.top_logprobs or [], strict=True):
        assert likely[token] == pytest.approx(value)
        assert 3 <= len(likely) <= 4
    messages: Any = [{"role": "user", "content": "How many"}]
    rendered = plain.generate("[user] How many\n[assistant] ", params)[0]
    chat = server.client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **asked).choices[0]
    assert chat.logprobs is not None
    content = chat.logprobs.content or []
    assert [entry.logprob for entry in content] == pytest.approx(rendered.logprobs)
    assert [[one.logprob for one in entry.top_logprobs] for entry in content] == [
        pytest.approx([value for _, value in top]) for top in rendered.top_logprobs
    ]
    raw = b"".join(bytes(entry.bytes or []) for entry in content)
    assert raw.decode("utf-8", errors="replace").startswith((chat.message.content or "").rstrip("�"))
    streamed = [
        chunk.choices[0].logprobs
        for chunk in server.client.chat.completions.create(messages=messages, logprobs=True, stream=True, **asked)
    ]
    values = [entry.logprob for piece in streamed if piece for entry in piece.content or []]
    assert values == pytest.approx(rendered.logprobs)


def test_every_field_of_the_decoder_is_taken_advertised_and_explained(plain: LLM, server: LiveServer) -> None:
    given = {
        "method": "mmtad", "draft_len": 2, "beam_width": 3, "accept_threshold": 0.2, "temperature": 0.7, "top_k": 7,
        "top_p": 0.8, "seed": 11, "max_tokens": 12, "stop": ["\u0000"], "min_tokens": 3, "n": 2,
        "logit_bias": {"7": -3.0}, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
    }  # fmt: skip
    apart = {"ignore_eos": True, "regex": "[a-z]+", "grammar": 'start: "a" /[b-z]*/', "json_schema": {"type": "array"}}
    model = server.client.models.retrieve(MODEL).to_dict()["mtad"]
    names = {f.name for f in fields(DecodingParams)}
    unseen = names - given.keys() - apart.keys() - {"top_logprobs"}
    for name in unseen:  # fields that came later: their defaults at least are taken
        field = next(f for f in fields(DecodingParams) if f.name == name)
        if field.default is not MISSING and field.default is not None:
            given[name] = field.default
    assert model["parameters"].keys() == names
    assert DESCRIPTIONS.keys() >= names
    assert {name: entry["lossless"] for name, entry in model["methods"].items()} == {
        name: method.lossless for name, method in METHODS.items()
    }
    params = DecodingParams.from_dict(given)
    status, answer = ask(server, **given)
    assert status == 200, answer
    assert [choice["text"] for choice in answer["choices"]] == [r.text for r in plain.generate("S", params)]
    for name, value in apart.items():
        status, answer = ask(server, **{name: value}, max_tokens=12, seed=1)
        assert status == 200, answer
        text = json.dumps(value) if isinstance(value, dict) else value
        expected = plain.generate("S", DecodingParams.from_dict({name: text, "max_tokens": 12, "seed": 1}))[0]
        assert answer["choices"][0]["text"] == expected.text


def test_a_response_format_is_a_json_schema(plain: LLM, server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "age", "schema": schema, "strict": True}}
    for format, text in ((wanted, json.dumps(schema)), ({"type": "json_object"}, '{"type": "object"}')):
        answer = server.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "S"}], response_format=format, max_tokens=60, seed=3
        )
        params = DecodingParams(json_schema=text, max_tokens=60, seed=3)
        assert answer.choices[0].message.content == plain.generate("[user] S\n[assistant] ", params)[0].text
    assert (answer.choices[0].message.content or "").startswith("{")
    assert ask(server, response_format={"type": "text"}, max_tokens=2)[0] == 200


def test_the_document_describes_the_bodies_and_nothing_is_loaded_from_elsewhere(server: LiveServer) -> None:
    document = call(server, "GET", "/openapi.json")[2]
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        assert schemas[name]["additionalProperties"] is False
        assert {f.name for f in fields(DecodingParams)} - {"top_logprobs"} <= schemas[name]["properties"].keys()
    assert "top_logprobs" in schemas["ChatCompletionRequest"]["properties"]
    for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in schemas
    for path in ("/", "/page.js", "/page.css", "/docs"):
        status, headers, content = call(server, "GET", path)
        assert status == 200
        assert b"http://" not in content
        assert b"https://" not in content
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"], "another site could show it as its own"
    shown = content.decode()
    assert all(f" {path}</h2>" in shown for path in document["paths"])
    assert set(re.findall(r'href="#(\w+)"', shown)) <= set(re.findall(r'id="(\w+)"', shown)) == schemas.keys()
