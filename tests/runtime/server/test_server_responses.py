"""`/v1/responses`, as the official client reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from runtime import LLM, DecodingParams
from tests.runtime.server.test_server_tools import TEMPLATE, UNIT
from tests.support.live_server import MODEL, LiveServer, call, live
from tests.support.waiting import own

BASE = DecodingParams(max_tokens=16, seed=5, ignore_eos=True)
ASKED: Any = {"model": MODEL, "max_output_tokens": 16, "extra_body": {"seed": 5, "ignore_eos": True}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": UNIT}


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[LiveServer]:
    with live(own(plain), chat_template=TEMPLATE) as running:
        yield running


def test_a_response_is_the_chat_of_its_input(server: LiveServer, plain: LLM) -> None:
    parts = [{"type": "input_text", "text": "How "}, {"type": "input_text", "text": "many"}]
    expected = plain.generate("[system] Be brief.\n[user] How many\n[assistant] ", BASE)[0]
    for given in ("How many", [{"role": "user", "content": parts}]):
        answer = server.client.responses.create(input=given, instructions="Be brief.", **ASKED)
        assert (answer.output_text, answer.status) == (expected.text, "incomplete")
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage.input_tokens == len(expected.prompt_token_ids)
        assert answer.usage.output_tokens == 16
        assert answer.id.startswith("resp_")
        assert answer.to_dict()["mtad"]["statistics"]["tokens"] == 16
    again = [{"role": "user", "content": "How many"}, *answer.to_dict()["output"], {"role": "user", "content": "So?"}]
    answer = server.client.responses.create(input=again, **ASKED)
    prompt = f"[user] How many\n[assistant] {expected.text}\n[user] So?\n[assistant] "
    assert answer.output_text == plain.generate(prompt, BASE)[0].text


def test_a_response_keeps_to_the_format_that_is_asked_for(server: LiveServer) -> None:
    class Age(BaseModel):
        age: Literal[7, 42]

    answer = server.client.responses.parse(model=MODEL, input="How many", text_format=Age, max_output_tokens=60)
    assert answer.output_parsed.age in (7, 42)


def test_the_events_of_a_stream_add_up_to_the_response(server: LiveServer, plain: LLM) -> None:
    expected = plain.generate("[user] How many\n[assistant] ", BASE)[0]
    asked = ASKED | {"extra_body": {"seed": 5, "ignore_eos": True, "draft_details": True}}
    events = list(server.client.responses.create(input="How many", **asked, stream=True))
    whole = events[-1].response
    assert sum(event.type == "response.output_text.delta" for event in events) > 1
    assert whole.output_text == expected.text
    assert [events[at].response.status for at in (0, 1, -1)] == ["in_progress", "in_progress", "incomplete"]
    assert whole.usage.output_tokens == len(whole.to_dict()["mtad"]["details"]) == 16


def test_a_response_calls_functions(server: LiveServer, plain: LLM) -> None:
    asked: Any = {
        "model": MODEL,
        "input": "How warm?",
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "weather"},
        "extra_body": {"seed": 5},
    }
    answer = server.client.responses.create(**asked)
    (made,) = answer.output
    assert (made.type, made.name, answer.status) == ("function_call", "weather", "completed")
    assert json.loads(made.arguments)["unit"] in ("C", "F")
    with server.client.responses.stream(**asked) as stream:
        assert {"response.function_call_arguments.delta", "response.completed"} <= {event.type for event in stream}
        assert stream.get_final_response().output[0].arguments == made.arguments
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "20"}
    given = [{"role": "user", "content": "How warm?"}, made.to_dict(), result]
    unit = json.loads(made.arguments)["unit"]
    prompt = f"[user] How warm?\n[assistant] <weather {unit}>\n[tool] 20\n[assistant] "
    answer = server.client.responses.create(**ASKED, input=given)
    assert answer.output_text == plain.generate(prompt, BASE)[0].text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, None),
        ({"input": "word " * 999}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 3, "max_tokens": 4}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"n": 2}, "n"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}}, "text"),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_a_response_cannot_be_is_refused_by_field(body: dict[str, Any], param: str, server: LiveServer) -> None:
    given = {"model": MODEL, "input": "S", "max_output_tokens": 2, "store": False, **body}
    if "max_tokens" in body:
        given["max_output_tokens"] = 3
    status, _, answer = call(server, "POST", "/v1/responses", given)
    assert (status, status == 400 and answer["error"]["param"]) == ((400, param) if param else (200, False)), answer
