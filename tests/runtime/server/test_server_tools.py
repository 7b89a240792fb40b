"""Functions that a chat's model may call: calls keep to the schemas, and clients get them in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLTokenizer
from openai import BadRequestError
from tokenizers import AddedToken, Tokenizer

from mtad.params import DecodingParams
from runtime import LLM
from runtime.constraints.trial_process import compile_grammar
from runtime.server.calling import HERMES, LLAMA, Calling, CallReader, Form
from runtime.server.schema import ChatCompletionRequest
from runtime.server.tools import Function
from tests.support.checkpoints import make_tokenizer
from tests.support.live_server import MODEL, LiveServer, call, live, own

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
FUNCTIONS = [Function.model_validate(tool["function"]) for tool in TOOLS]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Answer with <tool_call>\n{'name': .., 'arguments': ..}\n</tool_call>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.unit }}>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MESSAGES: Any = [{"role": "user", "content": "How warm?"}]
ASKED: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "seed": 3, "max_tokens": 100}
SAID = 'Let me <tool see. {"name": '
ONE, TWO = '{"name": "weather", "arguments": {"unit": "C"}}', '{"name": "heat", "arguments": {"unit":"F"}}'
CALLS = [("weather", '{"unit": "C"}'), ("heat", '{"unit":"F"}')]


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[LiveServer]:
    with live(own(plain), chat_template=TEMPLATE) as running:
        yield running


def calling(form: Form, forced: bool = False, several: bool = True) -> Calling:
    return Calling(form, FUNCTIONS, forced, several)


@pytest.mark.parametrize(
    ("form", "text", "said", "expected"),
    [
        (HERMES, SAID, SAID, []),
        (HERMES, f"{SAID}\n<tool_call>\n{ONE}\n</tool_call>", f"{SAID}\n", CALLS[:1]),
        (HERMES, f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", "", CALLS),
        (HERMES, f"<tool_call>\n{ONE[:-6]}", "", [("weather", '{"unit": ')]),
        (HERMES, '<tool_call>\n{"name', '<tool_call>\n{"name', []),
        (LLAMA, ONE.replace("arguments", "parameters"), "", CALLS[:1]),
        (LLAMA, '{"name": "Alice"}', '{"name": "Alice"}', []),
        (LLAMA, f"So: {ONE}", f"So: {ONE}", []),
    ],
)
def test_a_text_is_read_the_same_in_whatever_pieces_it_comes(
    form: Form, text: str, said: str, expected: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 7, len(text)):
        reader, told, found = CallReader(calling(form)), "", dict[int, list[str]]()
        for at in range(0, len(text), size):
            more, calls = reader.read(text[at : at + size], at + size >= len(text))
            assert said.startswith(told := told + more), "what was told stays"
            for one in calls:
                assert ("id" in one) == (one["index"] not in found), "the first delta of a call has its id"
                name, arguments = found.setdefault(one["index"], [one["function"].get("name"), ""])
                found[one["index"]] = [name, arguments + one["function"]["arguments"]]
        assert told == said
        assert [tuple(one) for one in found.values()] == expected


@pytest.mark.parametrize("tokens", [[], ["<tool_call>", "</tool_call>", "<think>"]], ids=["texts", "tokens"])
@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_the_grammar_allows_any_text_and_keeps_calls_to_their_schemas(form: Form, tokens: list[str]) -> None:
    tokenizer = make_tokenizer().backend_tokenizer
    tokenizer.add_tokens([AddedToken(token) for token in tokens])
    first = form.opening + f'weather", "{form.key}": {{"unit": "C"}}}}{form.after}'
    several = [first + first, f"{first}\n{first}"][form is HERMES :]
    free, forced = calling(form), calling(form, forced=True)
    assert follows(free, tokenizer, "", SAID, first, *([f"{SAID}{first}"] if form is HERMES else []))
    assert follows(forced, tokenizer, first) == follows(calling(form, several=False), tokenizer, first) == 1
    for text in (first.replace("weather", "wether"), first.replace('"C"', '"K"'), first[:-1], f"{first} so"):
        assert not follows(free, tokenizer, text)
        assert not follows(forced, tokenizer, text)
    assert not follows(forced, tokenizer, "")
    assert follows(forced, tokenizer, several[-1]) == (form is HERMES)
    assert not follows(calling(form, several=False), tokenizer, several[-1])
    if tokens and form is HERMES:
        assert follows(free, tokenizer, f"<think>{SAID}")


def follows(calling: Calling, tokenizer: Tokenizer, *texts: str) -> bool:
    """Whether all texts are complete under the grammar of calls."""
    made = LLTokenizer(tokenizer.to_str(), eos_token=[0])
    matcher, problems = compile_grammar("grammar", calling.grammar(tokenizer, [0]), made)
    assert matcher is not None
    assert not problems
    for text in texts:
        matcher.reset()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
            return False
    return True


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "heat"}}])
def test_a_call_that_is_asked_for_is_made(choice: Any, server: LiveServer) -> None:
    whole = server.client.chat.completions.create(**ASKED, tool_choice=choice, parallel_tool_calls=False).choices[0]
    (made,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, made.type) == ("tool_calls", None, "function")
    assert made.function.name in ("weather", "heat") if choice == "required" else made.function.name == "heat"
    assert json.loads(made.function.arguments)["unit"] in ("C", "F")
    with server.client.chat.completions.stream(**ASKED, tool_choice=choice, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert last.finish_reason == "tool_calls"
    again = last.message.tool_calls[0]
    assert (again.function.name, again.function.arguments) == (made.function.name, made.function.arguments)
    assert again.id.startswith("call_") and again.id != made.id  # noqa: PT018


def test_a_model_that_may_call_sees_the_tools_and_may_answer(server: LiveServer, plain: LLM) -> None:
    answer = server.client.chat.completions.create(**{**ASKED, "max_tokens": 12}, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content
    prompt = plain.pair.tokenizer.decode(choice.to_dict()["prompt_token_ids"])
    assert all(json.dumps(tool["function"]["parameters"]) in prompt for tool in TOOLS)
    chunks = list(server.client.chat.completions.create(**{**ASKED, "max_tokens": 12}, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    asked = {**ASKED, "max_tokens": 12, "tool_choice": "none"}
    answer = server.client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    assert "weather" not in plain.pair.tokenizer.decode(answer.choices[0].to_dict()["prompt_token_ids"])


def test_calls_and_their_results_are_given_to_the_template(server: LiveServer, plain: LLM) -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20"},
    ]
    _, _, answer = call(server, "POST", "/tokenize", {"messages": messages})
    text = plain.pair.tokenizer.decode(answer["tokens"])
    assert text == "[user] How warm?\n[assistant] <weather C>\n[tool] 20\n[assistant] "


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "regex": "a"}, "regex"),
        ({"functions": [{}]}, "functions"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}},
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_refused_by_field(body: dict[str, Any], param: str, server: LiveServer) -> None:
    status, _, answer = call(
        server, "POST", "/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, **body}
    )
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


def test_a_template_without_tools_can_only_be_made_to_call(plain: LLM) -> None:
    with live(own(plain)) as server:
        with pytest.raises(BadRequestError, match=r"tools.*chat template.*required") as caught:
            server.client.chat.completions.create(**ASKED)
        assert caught.value.param == "tools"
        answer = server.client.chat.completions.create(**ASKED, tool_choice="required")
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["unit"] in ("C", "F")
        with pytest.raises(BadRequestError, match="no place for calls"):
            server.client.chat.completions.create(model=MODEL, messages=[{"role": "tool", "content": "20"}])


def test_tools_that_ask_for_nothing_change_nothing() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    body = ChatCompletionRequest.model_validate_json(json.dumps(asked))
    assert body.parameters(DecodingParams()) == DecodingParams()
    assert Calling.of(body.tools, body.tool_choice, body.parallel_tool_calls, "") is None
