"""Functions that a chat's model may call: calls keep to the schemas, and clients get them in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from mtad import LLM
from runtime.constraints.follower import Follower
from tests.support.live_server import MODEL, LiveServer, call, live
from tests.support.waiting import own

UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "Tells it.", "parameters": UNIT}}
    for name in ("weather", "heat")
]
TEMPLATE = (
    "{# <tool_call>\n{'name': .. #}"
    "{% for t in tools or [] %}{{ t.function.name }} {{ t.function.parameters.required }} {% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.unit }}>{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Shows the form of calls, and all that a request says about them, in few tokens."""
MESSAGES: Any = [{"role": "user", "content": "How warm?"}]
MADE = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C"}'}}
ASKED: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "seed": 3, "max_tokens": 90}
LISTED = {"role": "assistant", "tool_calls": [MADE | {"function": {"name": "f", "arguments": "[1]"}}]}
TEXT = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
"""A call with arguments, and a function with parameters, that are no object."""


class Unit(BaseModel):
    unit: Literal["C", "F"]


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[LiveServer]:
    with live(own(plain), chat_template=TEMPLATE) as running:
        yield running


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "heat"}}])
def test_a_call_that_is_asked_for_is_made(choice: Any, server: LiveServer) -> None:
    whole = server.client.chat.completions.create(**ASKED, tool_choice=choice, parallel_tool_calls=False).choices[0]
    (made,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, made.type) == ("tool_calls", None, "function")
    assert made.function.name in ("weather", "heat") if choice == "required" else made.function.name == "heat"
    assert json.loads(made.function.arguments)["unit"] in ("C", "F")
    with server.client.chat.completions.stream(**ASKED, tool_choice=choice, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        assert "content.delta" not in kinds, "nothing is said"
        last = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert (last.finish_reason, last.message.content) == ("tool_calls", None)
    again = last.message.tool_calls[0]
    assert (again.function.name, again.function.arguments) == (made.function.name, made.function.arguments)
    assert again.id != made.id
    assert (len(again.id), again.id.isalnum()) == (9, True), "templates of Mistral's take no other"


def test_a_model_that_may_call_sees_the_tools_and_may_answer(server: LiveServer, plain: LLM) -> None:
    answer = server.client.chat.completions.create(**{**ASKED, "max_tokens": 12}, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert (choice.finish_reason in ("stop", "length"), choice.message.tool_calls) == (True, None)
    assert choice.message.content
    prompt = plain.pair.tokenizer.decode(choice.to_dict()["prompt_token_ids"])
    assert prompt == "weather ['unit'] heat ['unit'] [user] How warm?\n[assistant] "
    chunks = list(server.client.chat.completions.create(**{**ASKED, "max_tokens": 12}, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    asked = {**ASKED, "max_tokens": 12, "tool_choice": "none"}
    answer = server.client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    assert "weather" not in plain.pair.tokenizer.decode(answer.choices[0].to_dict()["prompt_token_ids"])


def test_calls_and_their_results_are_given_to_the_template(server: LiveServer, plain: LLM) -> None:
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [MADE]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20"},
    ]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 1, "return_token_ids": True}
    _, _, answer = call(server, "POST", "/v1/chat/completions", asked)
    text = plain.pair.tokenizer.decode(answer["choices"][0]["prompt_token_ids"])
    assert text == "[user] How warm?\n[assistant] <weather C>\n[tool] 20\n[assistant] "


def test_a_call_that_was_cut_off_may_be_sent_back(server: LiveServer) -> None:
    whole = '{"unit": "C"}'
    for end in range(len(whole)):
        cut = {**MADE, "function": {"name": "weather", "arguments": whole[:end]}}
        told = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [cut]}]
        asked = {"model": MODEL, "messages": told, "max_tokens": 1}
        status, _, answer = call(server, "POST", "/v1/chat/completions", asked)
        assert status == 200, (whole[:end], answer)


@pytest.mark.parametrize("asked", [{"tools": TOOLS, "tool_choice": "required"}, {"response_format": Unit}])
def test_the_openai_packages_own_messages_may_be_sent_back(server: LiveServer, asked: Any) -> None:
    chats = server.client.chat.completions
    tools = [one | {"function": one["function"] | {"strict": True}} for one in TOOLS]
    asked = {"model": MODEL, "messages": MESSAGES, "seed": 3, "max_tokens": 90} | asked
    asked |= {"tools": tools, "parallel_tool_calls": False} if "tools" in asked else {}
    with chats.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (chats.parse(**asked).choices[0].message, streamed):
        assert message.tool_calls[0].function.parsed_arguments if "tools" in asked else message.parsed.unit
        results = [{"role": "tool", "tool_call_id": one.id, "content": "20"} for one in message.tool_calls or []]
        told = [*MESSAGES, message, *results, *MESSAGES]
        again = chats.create(model=MODEL, messages=told, max_tokens=1, extra_body={"ignore_eos": True})
        assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "regex": "a"}, "regex"),
        ({"functions": [{}]}, "functions"),
        ({"tools": [TEXT]}, "tools[0].function.parameters"),
        ({"messages": [LISTED]}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_by_field(body: dict[str, Any], param: str, server: LiveServer) -> None:
    given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, **body}
    status, _, answer = call(server, "POST", "/v1/chat/completions", given)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert "Lark" not in answer["error"]["message"]


def test_what_a_schema_cannot_be_held_to_is_refused_only_where_it_is_strict(server: LiveServer) -> None:
    schema = {**UNIT, "not": {}}
    for strict in (False, True):
        function = {"name": "f", "parameters": schema, "strict": strict}
        asked = {**ASKED, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        status, _, answer = call(server, "POST", "/v1/chat/completions", asked)
        assert status == (400 if strict else 200)
    assert answer["error"]["param"] == "tools"
    assert '["not"]' in answer["error"]["message"]


def test_a_text_that_cannot_go_on_is_blamed_on_the_field_that_was_sent(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower, "advance", lambda self, tokens: self._problem("no token can follow"))
    for param, value in (("response_format", {"type": "json_object"}), ("tools", TOOLS)):
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, param: value}
        status, _, answer = call(server, "POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, param)
