"""Deltas of a stream to the objects of `/v1/responses`: the whole response, and its events."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_json

from runtime.output.stream import OutputDelta
from runtime.server.response_request import ResponseRequest
from runtime.server.responses import OpenAIResponse


class ResponseObjects(OpenAIResponse):
    """The objects of one request, whose answer is a list of items: what is thought, what is said, then calls."""

    _body: ResponseRequest

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._id = self._body.request_id or f"{random.getrandbits(128):032x}"
        self._items: list[dict[str, Any]] = []
        self._details: list[dict[str, Any]] = []
        self._sent = 0  # events
        self._status = "in_progress"

    def event(self, delta: OutputDelta) -> bytes:
        begun = b"" if self._sent else self._state("created") + self._state("in_progress")
        return begun + b"".join(self._event(kind, fields) for kind, fields in self._changes(delta))

    def last_events(self) -> bytes:
        return self._state(self._status)

    def whole(self, choices: Sequence[OutputDelta]) -> bytes:
        for _ in self._changes(choices[0]):
            pass
        return to_json(self._response())

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        kind, self._sent = f"response.{kind}", self._sent + 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            to_json({"type": kind, "sequence_number": self._sent - 1} | fields),
        )

    def _state(self, kind: str) -> bytes:
        return self._event(kind, {"response": self._response()})

    def _changes(self, delta: OutputDelta) -> Iterator[tuple[str, dict[str, Any]]]:
        ended = delta.finish_reason is not None
        text = delta.text if self._requests[0].thoughts is None else delta.answer
        said, calls = self._readers[0].read(text, ended) if self._readers else (text, [])
        if delta.reasoning:
            if self._last_type != "reasoning":
                yield from self._close("completed")
                yield from self._open({"type": "reasoning", "summary": [], "content": []}, "rs")
                self._items[-1]["content"].append({"type": "reasoning_text", "text": ""})
            self._items[-1]["content"][0]["text"] += delta.reasoning
            yield "reasoning_text.delta", self._place() | {"delta": delta.reasoning}
        if (said and self._last_type != "message") or (ended and not calls and not self._items):
            yield from self._close("completed")
            yield from self._open({"type": "message", "role": "assistant", "content": []}, "msg")
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield "content_part.added", self._place() | {"part": part}
            self._items[-1]["content"].append(part)
        if said:
            self._items[-1]["content"][0]["text"] += said
            yield "output_text.delta", self._place() | {"delta": said, "logprobs": []}
        for call in calls:
            function = call["function"]
            if "id" in call:
                yield from self._close("completed")
                item = {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""}
                yield from self._open(item, "fc")
            if function["arguments"]:
                self._items[-1]["arguments"] += function["arguments"]
                yield "function_call_arguments.delta", self._place() | {"delta": function["arguments"]}
        if ended:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            yield from self._close(self._status)
            assert delta.statistics is not None
            self.statistics[0] = delta.statistics

    @property
    def _last_type(self) -> str | None:
        return self._items[-1]["type"] if self._items else None

    def _open(self, item: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        item |= {"id": f"{prefix}_{self._id}_{len(self._items)}", "status": "in_progress"}
        self._items.append(item)
        yield "output_item.added", {"output_index": len(self._items) - 1, "item": item}

    def _close(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            yield "output_text.done", self._place() | {"text": part["text"], "logprobs": []}
            yield "content_part.done", self._place() | {"part": part}
        elif item["type"] == "reasoning":
            yield "reasoning_text.done", self._place() | {"text": item["content"][0]["text"]}
        else:
            yield "function_call_arguments.done", self._place() | {"name": item["name"], "arguments": item["arguments"]}
        yield "output_item.done", {"output_index": len(self._items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        part = {} if item["type"] == "function_call" else {"content_index": 0}
        return {"item_id": item["id"], "output_index": len(self._items) - 1, **part}

    def _response(self) -> dict[str, Any]:
        """The response as it is now. It leaves out what the client sent and may be large: several events have it."""
        body, params = self._body, self._requests[0].params
        found: dict[str, Any] = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._frame["created"],
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "max_output_tokens": params.max_tokens if body.limited else None,
            "model": body.model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"],
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }
        if self._status == "in_progress":
            return found
        costs, statistics = self._costs(), self.statistics[0]
        usage = costs.pop("usage")
        found["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            "mtad": usage["mtad"],
        }
        details = {"details": self._details} if params.draft_details else {}
        return found | costs | {"mtad": {"seed": self._requests[0].seed, "statistics": statistics.to_dict(), **details}}
