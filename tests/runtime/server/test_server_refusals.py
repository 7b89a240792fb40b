"""What the HTTP server refuses: nothing asked for is ignored, and errors name the field."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from mtad import LLM
from tests.runtime.server.test_server_tools import ASKED
from tests.support.live_server import MODEL, LiveServer, ask, call, live
from tests.support.waiting import own

TEXT_PART = {"type": "text", "text": "What is this?"}
NO_TYPE = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max-tokens": 3}, "max-tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logit_bias": {"5": 1e999}}, "logit_bias"),
        ({"priority": "high"}, "priority"),
        ({"prompt": [10**30], "echo": True}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["S"] * 40, "n": 2}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include-usage": True}}, "stream_options.include-usage"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": NO_TYPE}, "response_format"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    body: dict[str, Any], param: str, server: LiveServer
) -> None:
    status, answer = ask(server, **body)
    error = answer["error"]
    assert (status, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert param in error["message"]
    assert len(error["message"]) < 1000
    if isinstance(given := body.get(param), str | float) and error["code"] == "invalid_type":
        assert repr(given) in error["message"], "the wrong value is echoed"


def test_a_request_without_a_model_is_told_where_to_find_it(server: LiveServer) -> None:
    status, _, answer = call(server, "POST", "/v1/completions", {"prompt": "S"})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert answer["error"]["message"] == "model: required; GET /v1/models lists it"
    assert answer["error"]["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [TEXT_PART, {"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[1].image_url",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "metadata": {"a": 1}}]}, "messages[0].metadata"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "functio", "function": {"name": "f"}}}, "tool_choice.type"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": "word " * 999}]}, "messages"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"echo": True}, "echo"),
        ({"chat_template_kwargs": {"depth": 3}}, "chat_template_kwargs"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_a_chat_that_cannot_be_honoured_is_refused_by_field(
    body: dict[str, Any], param: str, server: LiveServer
) -> None:
    given = {"model": MODEL, "messages": [{"role": "user", "content": "S"}], **body}
    status, _, answer = call(server, "POST", "/v1/chat/completions", given)
    assert (status, answer["error"]["param"]) == (400, param)


def test_nulls_mean_not_given(server: LiveServer) -> None:
    status, answer = ask(server, tools=None, suffix=None, stop=None, seed=None, temperature=None, max_tokens=2)
    assert status == 200, answer
    status, answer = ask(server, provider_specific_fields=None, max_tokens=2)
    assert status == 200, "also for fields that others have, which their clients write"


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"", "invalid_json"), (b"{", "invalid_json"), (b"[]", "invalid_type"), (b"\xff\xfe", "invalid_json"),
     (b"[" * 40_000, "invalid_json"), (b'{"prompt": "\\ud800"}', "invalid_json"), (b"9" * 10_000, "invalid_json")],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes, code: str, server: LiveServer) -> None:
    status, _, answer = call(server, "POST", "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, code)
    status, _, answer = call(server, "POST", "/v1/completions", b"{}", content_type="text/plain")
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


def test_the_openai_client_raises_its_own_errors(server: LiveServer) -> None:
    with pytest.raises(NotFoundError, match="there is no model 'gpt'"):
        server.client.completions.create(model="gpt", prompt="S")
    with pytest.raises(NotFoundError):
        server.client.models.retrieve("gpt")
    with pytest.raises(BadRequestError, match="top_p") as caught:
        server.client.completions.create(model=MODEL, prompt="S", top_p=2)
    assert caught.value.param == "top_p"
    for method, path in (("GET", "/v1/nothing"), ("POST", "/v1/responses"), ("POST", "/chat/completions")):
        status, headers, answer = call(server, method, path)
        assert (status, "/v1/chat/completions" in answer["error"]["message"]) == (404, True)
    status, headers, answer = call(server, "GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert answer["error"]["type"] == "invalid_request_error"
    status, headers, _ = call(server, "POST", "/health")
    assert (status, set(headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    status, headers, _ = call(server, "GET", "/health/")
    assert (status, headers["location"]) == (307, f"{server.url}/health")


def test_a_pair_without_a_chat_template_says_so(plain: LLM) -> None:
    with live(own(plain), chat_template=None) as server:
        with pytest.raises(BadRequestError, match=r"no chat template.*--chat-template"):
            server.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "S"}])
        assert server.client.models.retrieve(MODEL).to_dict()["mtad"]["chat"] is False


def test_a_template_without_tools_can_only_be_made_to_call(server: LiveServer) -> None:
    with pytest.raises(BadRequestError, match=r"tools.*chat template.*required") as caught:
        server.client.chat.completions.create(**ASKED)
    assert caught.value.param == "tools"
    answer = server.client.chat.completions.create(**ASKED, tool_choice="required")
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["unit"] in ("C", "F")
    with pytest.raises(BadRequestError, match="no place for calls"):
        server.client.chat.completions.create(model=MODEL, messages=[{"role": "tool", "content": "20"}])


BREAKING = {
    "divides": ("{{ 1 // 0 }}", "division or modulo by zero"),
    "overflows": ("{{ 10.0 ** 400 }}", "out of range"),
    "raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "recurses": ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    "fills": ("{{ ('x' * 999999) * 999999 }}", "MemoryError"),
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.5 s"),
}
"""What a message makes the template do, and the words that say what became of it."""


def test_a_template_that_breaks_or_takes_too_much_is_a_400_and_others_go_on(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.constraints.trial_process.SECONDS", 0.5)
    cases = "".join(
        f"{{% if messages[0].content == '{name}' %}}{template}{{% endif %}}" for name, (template, _) in BREAKING.items()
    )
    with (
        live(own(plain), chat_template=f"{cases}{{{{ messages[0].content }}}}") as server,
        ThreadPoolExecutor(12) as clients,
    ):

        def ask(content: str) -> Any:
            messages = [{"role": "user", "content": content}]
            return server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)

        names = [*BREAKING, "loops"]  # two processes are kept busy
        bad = [(clients.submit(ask, name), BREAKING[name][1]) for name in names]
        assert ask("S").usage.completion_tokens == 2
        assert server.client.completions.create(model=MODEL, prompt="S", max_tokens=2).usage.completion_tokens == 2
        for one, words in bad:
            with pytest.raises(BadRequestError, match=words):
                one.result()
