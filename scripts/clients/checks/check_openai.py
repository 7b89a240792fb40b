"""OpenAI's own client, in both its forms."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAI

from scripts.clients.checks.report import MODEL, PROMPT, URL, check

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
messages: Any = [{"role": "user", "content": "How many singers are there?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]


@check("models")
def _() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check("completions: whole, streamed and token by token alike")
def _() -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "seed": 1, "temperature": 0.8}
    whole = client.completions.create(**asked)
    assert whole.usage
    assert whole.usage.completion_tokens <= 24
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage


@check("completions: several prompts and choices, stop, echo")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=4, stop=["\n"], echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]


@check("completions: log-probabilities")
def _() -> None:
    found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, logprobs=3).choices[0].logprobs
    assert found
    assert found.token_logprobs
    assert found.top_logprobs
    assert len(found.tokens or []) == len(found.token_logprobs) == len(found.top_logprobs)
    assert all(value is not None and value <= 0 for value in found.token_logprobs)


@check("completions: echo with log-probabilities of the prompt")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, logprobs=1, echo=True)
    found = answer.choices[0].logprobs
    assert found
    assert found.token_logprobs
    assert answer.usage
    assert len(found.token_logprobs) == answer.usage.prompt_tokens + 1
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])


@check("chat: whole and streamed alike")
def _() -> None:
    asked: Any = {"model": MODEL, "messages": messages, "max_completion_tokens": 24, "seed": 1}
    whole = client.chat.completions.create(**asked).choices[0].message
    assert whole.role == "assistant"
    parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    assert "".join(part.content or "" for part in parts) == whole.content


@check("chat: log-probabilities")
def _() -> None:
    asked = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, logprobs=True, top_logprobs=2)
    found = asked.choices[0].logprobs
    assert found
    assert found.content
    assert all(len(token.top_logprobs) == 2 for token in found.content)


@check("chat: a JSON schema")
def _() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=100, response_format=form)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"name", "age"}


@check("chat: a tool that must be called")
def _() -> None:
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"model": MODEL, "messages": messages, "tools": TOOLS, "tool_choice": chosen, "max_tokens": 200}
    answer = client.chat.completions.create(**asked, seed=2).choices[0]
    calls = answer.message.tool_calls or []
    assert [call.function.name for call in calls] == ["weather"]
    assert set(json.loads(calls[0].function.arguments)) == {"city", "days"}
    streamed = ""
    for chunk in client.chat.completions.create(**asked, seed=2, stream=True):
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            streamed += (call.function and call.function.arguments) or ""
    assert streamed == calls[0].function.arguments


@check("responses: whole and streamed alike")
def _() -> None:
    asked: Any = {"model": MODEL, "input": "How many singers are there?", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    parts = [
        one.delta for one in client.responses.create(**asked, stream=True) if one.type == "response.output_text.delta"
    ]
    assert "".join(parts) == whole.output_text


@check("errors name the field")
def _() -> None:
    named = None
    try:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    except BadRequestError as error:
        named = error.param
    assert named == "temperature"


@check("the asynchronous client: 16 streams at once")
def _() -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as many:

            async def one(seed: int, stream: bool) -> str:
                asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "seed": seed, "temperature": 1}
                if not stream:
                    return str((await many.completions.create(**asked)).choices[0].text)
                parts = [part async for part in await many.completions.create(**asked, stream=True)]
                return "".join(part.choices[0].text for part in parts)

            streamed = await asyncio.gather(*(one(seed, True) for seed in range(16)))
            whole = await asyncio.gather(*(one(seed, False) for seed in range(16)))
            assert streamed == whole
            assert len(set(whole)) > 1
            assert (await many.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)).choices

    asyncio.run(run())
