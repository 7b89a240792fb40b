"""The objects and events of `/v1/responses`, by the official package's types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mtad.params import DecodingParams
from runtime.output.stream import OutputDelta
from runtime.scheduler.request import Request
from runtime.scheduler.statistics import Statistics
from runtime.server.calling import Calling
from runtime.server.response_objects import ResponseObjects
from runtime.server.response_request import ResponseRequest

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_ENDS = ["output_text.done", "content_part.done", "output_item.done"]
CALL = ["output_item.added", "function_call_arguments.delta"]
CALL_ENDS = ["function_call_arguments.done", "output_item.done"]
CALLED = '<tool_call>\n{"name": "heat", "arguments": {"a": ["}"]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reason", "kinds", "output"),
    [
        ("Hello there", "stop", [*TEXT, *TEXT_ENDS, "completed"], ["Hello there"]),
        ("Hello", "length", [*TEXT, *TEXT_ENDS, "incomplete"], ["Hello"]),
        ("", "stop", [*TEXT[:2], *TEXT_ENDS, "completed"], [""]),
        (f"So\n{CALLED}", "stop", [*TEXT, *TEXT_ENDS, *CALL, *CALL_ENDS, "completed"], ["So\n", '{"a": ["}"]}']),
        (f"{CALLED}\n{CALLED}", "stop", [*CALL, *CALL_ENDS] * 2 + ["completed"], ['{"a": ["}"]}'] * 2),
        (CALLED[:46], "length", [*CALL, *CALL_ENDS, "incomplete"], ['{"a"']),
    ],
)
def test_events_build_up_the_response_in_the_official_order(
    text: str, reason: Any, kinds: list[str], output: list[str]
) -> None:
    given = {"model": "m", "input": "S", "tools": [{"type": "function", "name": "heat"}]}
    body = ResponseRequest.model_validate_json(json.dumps(given))
    request = Request(0, [1, 2, 3], DecodingParams(), seed=7)
    calling = Calling.of(body.chat, "<tool_call>\n{")

    def objects() -> ResponseObjects:
        return ResponseObjects(body, [request], 1, [], None, "fingerprint", calling)

    made, data = objects(), b""
    for at in range(0, max(1, len(text)), 4):
        ended = at + 4 >= len(text)
        last: Any = {"finish_reason": reason, "statistics": Statistics()} if ended else {}
        data += made.event(OutputDelta(text[at : at + 4], [1], [0.0], [], [0], **last))
    data += made.last_events()
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    names = [line[7:] for line in data.decode().splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    found = [name.removeprefix("response.") for name in names]
    short = [name for at, name in enumerate(found) if not (name.endswith(".delta") and found[at - 1] == name)]
    assert short == ["created", "in_progress", *kinds]
    whole = json.loads(objects().whole([OutputDelta(text, [1], [0.0], [], [0], 0, 0, 0, reason, Statistics())]))
    for shown in (events[-1]["response"], whole):
        Response.model_validate(shown)
        assert [one.get("arguments") or one["content"][0]["text"] for one in shown["output"]] == output
