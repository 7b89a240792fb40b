"""Thoughts over HTTP: apart from the answer, whole and streamed alike, and switched by the template's variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mtad import LLM, DecodingParams
from tests.support.live_server import MODEL, LiveServer, call, live
from tests.support.waiting import own

TEMPLATE = (
    "{# developer #}"
    "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
    "{{ m.content }}\n{% endfor %}[assistant] "
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)
MESSAGES: Any = [{"role": "user", "content": "How many"}]
THINKING: Any = {
    "thinking_tags": ["<think>", "</think>"],
    "thinking_method": "mtad",
    "thinking_token_budget": 9,
    "draft_len": 4,
}
ASKED: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "seed": 3}


@pytest.fixture(scope="module")
def server(plain: LLM) -> Iterator[LiveServer]:
    with live(own(plain), chat_template=TEMPLATE) as running:
        yield running


def test_thoughts_are_apart_from_the_answer_whole_and_streamed(server: LiveServer, plain: LLM) -> None:
    params = DecodingParams.from_dict({**THINKING, "max_tokens": 24, "seed": 3})
    (expected,) = plain.generate("[user] How many\n[assistant] <think>", params)
    whole = server.client.chat.completions.create(**ASKED, extra_body=THINKING)
    message, usage = whole.choices[0].message, whole.usage
    assert (message.reasoning_content, message.content) == (expected.reasoning, expected.answer)
    assert expected.reasoning
    assert expected.answer
    assert usage.completion_tokens_details.reasoning_tokens == expected.statistics.thinking_tokens > 9
    assert usage.mtad["thinking_passes"] == expected.statistics.thinking_passes
    assert not usage.mtad["lossless"]
    chunks = [
        c.choices[0].delta for c in server.client.chat.completions.create(**ASKED, extra_body=THINKING, stream=True)
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks) == expected.reasoning
    assert "".join(delta.content or "" for delta in chunks) == expected.answer


def test_the_template_is_told_how_much_to_think_and_the_roles_it_knows(server: LiveServer, plain: LLM) -> None:
    def prompt(**given: Any) -> str:
        asked = {**ASKED, "max_tokens": 1, "return_token_ids": True, **given}
        status, _, answer = call(server, "POST", "/v1/chat/completions", asked)
        assert status == 200, answer
        text = plain.pair.tokenizer.decode(answer["choices"][0]["prompt_token_ids"])
        return str(text).partition("\n")[2]

    assert prompt() == prompt(reasoning_effort="low") == "[assistant] <think>"
    assert prompt(reasoning_effort="none") == "[assistant] "
    assert prompt(chat_template_kwargs={"enable_thinking": False}) == "[assistant] "
    assert prompt(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="none") == "[assistant] <think>"
    for name in ("reasoning_content", "reasoning"):
        before = [*MESSAGES, {"role": "assistant", "content": "3", name: "1 + 2"}, *MESSAGES]
        assert prompt(messages=before).startswith("[assistant] (1 + 2) 3\n")
    told = [*MESSAGES, {"role": "developer", "content": "Be brief."}]
    assert prompt(messages=told).startswith("[developer] Be brief.\n"), "the template knows this role"


def test_a_chat_may_think_before_an_answer_with_a_grammar_and_a_completion_may_not(
    server: LiveServer, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine.llm, "tags", ("<think>", "</think>"))
    first = plain.tokenize("<think>", special_tokens=False)[0]
    others = {"regex": "[a-z]{3}", "logit_bias": {str(first): 60}, "thinking_token_budget": 5}
    others["chat_template_kwargs"] = {"enable_thinking": False}  # so that the prompt opens no thought
    cases: list[dict[str, Any]] = [{}, {"thinking_tags": []}]
    for declined in cases:
        _, _, chat = call(server, "POST", "/v1/chat/completions", ASKED | others | declined)
        message = chat["choices"][0]["message"]
        assert bool(message.get("reasoning_content")) == (not declined)
        assert message["content"].isalpha()
    text = {"prompt": "How many"} | {name: value for name, value in others.items() if name != "chat_template_kwargs"}
    _, _, answer = call(server, "POST", "/v1/completions", {"model": MODEL, "seed": 3, "max_tokens": 24} | text)
    assert answer["choices"][0]["text"].isalpha()
