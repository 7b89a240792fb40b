"""What clients of other engines send is understood, or refused by name."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from pydantic import ValidationError

from mtad import LLM
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.server.errors import api_error
from runtime.server.schema import ChatCompletionRequest, CompletionRequest
from tests.support.live_server import MODEL, LiveServer, call

PROMPT = {"model": MODEL, "prompt": "SELECT"}


def parameters(**fields: Any) -> DecodingParams:
    body = CompletionRequest.model_validate_json(json.dumps({**PROMPT, **fields}))
    return body.parameters(DecodingParams())


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"metadata": {}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"service_tier": "auto"},
        {"modalities": ["text"]},
        {"safety_identifier": "user-1", "prompt_cache_key": "k", "prompt_cache_options": {"ttl": "30m"}},
        {"verbosity": "medium", "prompt_cache_retention": "24h"},
        {"best_of": 1},
        {"function_call": "none", "functions": []},
        {"suffix": ""},
        {"suffix": None},
        {"stop": []},
        {"seed": -1},
        {"seed": None},
    ],
)
def test_values_that_ask_for_nothing_change_nothing(fields: dict[str, Any]) -> None:
    assert parameters(**fields) == DecodingParams()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"store": 0}, "store"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"structured_outputs": {"json": {}}, "json_schema": {}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"], "grammar": "start: A"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": ["a"]}, "regex": "a"}, "structured_outputs.choice"),
        ({"structured_outputs": "x"}, "structured_outputs"),
    ],
)
def test_values_that_ask_for_something_else_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((ValidationError, InvalidInput)) as refused:
        parameters(**fields)
    assert api_error(refused.value).body["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1e-7}, {"temperature": 0.0}),
        ({"temperature": 0.0099}, {"temperature": 0.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"structured_outputs": {"regex": "[a-z]+", "choice": None}}, {"regex": "[a-z]+"}),
        ({"structured_outputs": {"choice": ["a", 'b"|c']}}, {"grammar": 'start: "a" | "b\\"|c"'}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json_schema": '{"type": "object"}'}),
        ({"stop_token_ids": [3, 5]}, {"stop_token_ids": (3, 5)}),
    ],
)
def test_other_engines_words_mean_the_same_here(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parameters(**fields) == DecodingParams(**expected)


def test_an_assistants_message_needs_no_content_and_a_users_does() -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}, turn]}
    messages, _ = ChatCompletionRequest.model_validate_json(json.dumps(body)).plain()
    assert [message["content"] for message in messages] == ["Hi", ""]
    empty = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": None}]})
    with pytest.raises(ValueError, match="no content"):
        ChatCompletionRequest.model_validate_json(empty)


def test_what_other_servers_and_clients_write_into_messages_is_read() -> None:
    hinted = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": None}
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "null"}}
    turn = {"role": "assistant", "refusal": "", "provider_specific_fields": None, "tool_calls": [called]}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [hinted]}, turn]}
    messages, _ = ChatCompletionRequest.model_validate_json(json.dumps(body)).plain()
    assert messages[0]["content"] == "Hi"
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_the_messages_of_a_chat_are_nothing_for_the_garbage_collector_to_visit() -> None:
    parts = [{"type": "text", "text": "Hi"}]
    turns = [{"role": "user", "content": parts, "name": "Ann"}, {"role": "assistant", "content": "Hello"}]
    chat = ChatCompletionRequest.model_validate_json(json.dumps({"model": MODEL, "messages": turns}))
    told, _ = chat.plain()
    gc.collect()
    assert [gc.is_tracked(message) for message in told] == [False, False], "it stops all threads while it visits them"


def test_a_request_without_max_tokens_gets_what_fits(server: LiveServer, plain: LLM) -> None:
    room = plain.loop.scheduler.room_for_tokens
    status, _, answer = call(server, "POST", "/v1/completions", {**PROMPT, "ignore_eos": True, "seed": 1})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == room - answer["usage"]["prompt_tokens"]
    (alone,) = plain.generate(PROMPT["prompt"], DecodingParams(ignore_eos=True, seed=1))
    assert len(alone.token_ids) == answer["usage"]["completion_tokens"], "in Python as over HTTP"
    _, _, models = call(server, "GET", "/v1/models")
    assert models["data"][0]["mtad"]["parameters"]["max_tokens"]["default"] is None


def test_every_chunk_has_the_usage_so_far_where_it_is_asked_for(server: LiveServer) -> None:
    asked = {**PROMPT, "max_tokens": 12, "seed": 2, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"continuous_usage_stats": True, "include_obfuscation": False}
    _, _, text = call(server, "POST", "/v1/completions", asked)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12
