"""Answers over HTTP: whole or as server-sent events, ended when the client goes away or time is up."""

from __future__ import annotations

import asyncio
import contextlib

from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from runtime.output.stream import Piece, Stream
from runtime.server.errors import ApiError, api_error, cancelled, timed_out
from runtime.server.metrics import ChoiceClock
from runtime.server.options import ServerOptions
from runtime.server.responses import Answer, sent_event
from runtime.server.schema import Body
from runtime.server.tracing import Span

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Responder:
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        gone = asyncio.create_task(_gone(receive))
        gone.add_done_callback(lambda _: self._stream.cancel())  # its last pieces come with the engine's next turn
        problem: str | None = None
        try:
            async with asyncio.timeout(self._seconds):
                try:  # a task of its own: each piece wakes it alone, not all the calls it was reached through
                    await asyncio.create_task(self._events(send) if self._body.stream else self._whole(send))
                except Exception as error:
                    shown = api_error(error)
                    problem = "the client went away" if gone.done() else shown.message
                    await self._give_up(shown, scope, receive, send)
        except TimeoutError:
            shown = timed_out(self._seconds)
            problem = shown.message
            with contextlib.suppress(TimeoutError):  # the client may have stopped reading
                async with asyncio.timeout(1):
                    await self._give_up(shown, scope, receive, send)
        finally:
            self._stream.cancel()
            gone.cancel()
            self._span.end(self._answer.statistics, problem)

    async def _whole(self, send: Send) -> None:
        """One JSON object."""
        pieces: list[Piece] = []
        while taken := await self._stream.take():
            for piece in taken:
                if piece.finish_reason == "cancelled":
                    raise cancelled()
                self._clock.see(piece)
            pieces += taken
        data = to_json(self._answer.whole(pieces))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._begun = True
        await send({"type": "http.response.body", "body": data})

    async def _events(self, send: Send) -> None:
        """An event a piece. What has come together is one write, and the end goes with the last piece."""
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        self._begun = True
        while not self._stream.ended:
            taken, data = await self._stream.take(), b""
            for piece in taken:
                if piece.finish_reason == "cancelled":
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    raise cancelled()
                self._clock.see(piece)
                data += self._answer.event(piece)
            ended = self._stream.ended
            data += self._answer.last_events() if ended else b""
            await send({"type": "http.response.body", "body": data, "more_body": not ended})

    async def _give_up(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """An error, as the last event of what has begun."""
        if self._begun:
            await send({"type": "http.response.body", "body": sent_event(error.body)})
        else:
            await error.response(scope, receive, send)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
