"""Answers over HTTP: whole or as server-sent events, ended when the client goes away or time is up."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.async_llm import Stream
from runtime.server.answers import Answer
from runtime.server.bodies import Body
from runtime.server.errors import ApiError, api_error, cancelled, timed_out
from runtime.server.metrics import ChoiceClock
from runtime.server.options import ServerOptions
from runtime.server.tracing import Span

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Responder(Response):
    """The response of one submitted request; owns its stream from now on.

    Whatever ends it early (the client went away, time is up, the server gave it up) cancels what still runs: the
    rows are free by the engine's next turn.
    """

    def __init__(
        self, stream: Stream, answer: Answer, body: Body, span: Span, clock: ChoiceClock, options: ServerOptions
    ) -> None:
        self._stream, self._answer, self._body = stream, answer, body
        self._span, self._clock, self._seconds = span, clock, options.request_seconds
        self._begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        work = asyncio.create_task(self._events(send) if self._body.stream else self._whole(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        problem: str | None = None
        try:
            await asyncio.wait({work, gone}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                problem = work.result()
            elif gone.done():
                problem = "the client went away"
            else:
                await _stop(work)
                error = timed_out(self._seconds)
                problem = error.message
                if not gone.done():
                    async with asyncio.timeout(1):  # the client may have stopped reading
                        await self._give_up(error, scope, receive, send)
        except TimeoutError:
            pass
        finally:
            self._stream.cancel()
            await _stop(work)
            await _stop(gone)
            self._span.end(self._answer.statistics, problem)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> str | None:
        """One JSON object. Returns what went wrong."""
        pieces = []
        try:
            async for piece in self._stream:
                self._clock.see(piece)
                if piece.finish_reason == "cancelled":
                    raise cancelled()
                pieces.append(piece)
        except Exception as error:
            shown = api_error(error)
            await shown.response(scope, receive, send)
            return shown.message
        await _json(200, self._answer.whole(pieces), send)
        return None

    async def _events(self, send: Send) -> str | None:
        """A chunk a piece. Returns what went wrong."""
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        self._begun = True
        try:
            async for piece in self._stream:
                self._clock.see(piece)
                if piece.finish_reason == "cancelled":
                    raise cancelled()
                await _event(to_json(self._answer.chunk(piece)), send)
        except Exception as error:
            shown = api_error(error)
            await _event(to_json(shown.body), send)
            await send({"type": "http.response.body", "body": b""})
            return shown.message
        if self._answer.usage_wanted:
            await _event(to_json(self._answer.last_chunk()), send)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        return None

    async def _give_up(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._begun:
            await _event(to_json(error.body), send)
            await send({"type": "http.response.body", "body": b""})
        else:
            await error.response(scope, receive, send)


async def _event(data: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


async def _json(status: int, value: dict[str, Any], send: Send) -> None:
    data = to_json(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(task: asyncio.Task[Any]) -> None:
    """End a task and wait for it; its failure is nobody's business any more."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
