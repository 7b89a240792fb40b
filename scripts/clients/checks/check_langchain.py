"""LangChain: `OpenAI`, `ChatOpenAI`, and a tool."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from scripts.clients.checks.report import MODEL, PROMPT, URL, check

known: Any = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "max_retries": 0, "seed": 1}


def forecast(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days"


weather: Any = tool("weather")(forecast)


@check("OpenAI: invoke, batch and stream")
def _() -> None:
    model = OpenAI(**known, max_tokens=16)
    text = model.invoke(PROMPT)
    assert text
    assert model.batch([PROMPT, "class A"])[0] == text
    assert "".join(model.stream(PROMPT)) == text


@check("ChatOpenAI: invoke and stream")
def _() -> None:
    model = ChatOpenAI(**known, max_tokens=16)
    answer = model.invoke("How many singers are there?")
    assert answer.content
    assert answer.usage_metadata
    assert "".join(str(part.content) for part in model.stream("How many singers are there?")) == answer.content


@check("ChatOpenAI: structured output")
def _() -> None:
    schema = {
        "title": "person",
        "description": "Somebody.",
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    model = ChatOpenAI(**known, max_tokens=100).with_structured_output(schema, method="json_schema", strict=True)
    assert set(model.invoke("Somebody")) == {"name", "age"}


@check("ChatOpenAI: a tool, its call and what it answered")
def _() -> None:
    model = ChatOpenAI(**known, max_tokens=300)
    asked = model.bind_tools([weather], tool_choice="weather").invoke("Will it rain in Rome?")
    assert [call["name"] for call in asked.tool_calls] == ["weather"]
    result = weather.invoke(asked.tool_calls[0])
    turns: list[Any] = [("user", "Will it rain in Rome?"), asked, result]
    assert model.bind_tools([weather], tool_choice="none").invoke(turns) is not None
