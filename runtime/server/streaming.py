"""Answers over HTTP: whole or as server-sent events, ended when the client goes away or time is up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from opentelemetry.trace import Span
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from runtime.output.stream import OutputDelta, Stream
from runtime.resting import RestingThread
from runtime.scheduler.statistics import Histogram
from runtime.server.errors import ApiError, api_error, cancelled, timed_out
from runtime.server.responses import OpenAIResponse, sent_event
from runtime.server.tracing import end_span

T = TypeVar("T")

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def cancel_on_disconnect(receive: Receive, arrived: float, seconds: float, work: Awaitable[T]) -> T:
    """What `work` returns; it is cancelled when the client goes away or time is up.

    Args:
        arrived: when it came, on the event loop's clock.

    Raises:
        ClientDisconnect: the client went away.
        ApiError: time is up.
    """

    async def client_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.create_task(client_left())
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(arrived + seconds):
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect if gone.done() else timed_out(seconds)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone})


async def give_up(error: ApiError, begun: bool, send: Send) -> None:
    """Send an error as the last event of a stream that has begun; else raise it, which whoever stands above answers."""
    if not begun:
        raise error
    with contextlib.suppress(TimeoutError):  # the client may have stopped reading
        async with asyncio.timeout(1):
            await send({"type": "http.response.body", "body": sent_event(error.body)})


@dataclass(eq=False)
class Responder:
    """The response of one submitted request; owns its stream from now on.

    Whatever ends it early (the client went away, time is up, the server gave it up) cancels what still runs: the
    rows are free by the engine's next block.

    Args:
        events: whether each delta is sent as it comes.
        gaps: seconds between two deltas of a choice are added to it.
        slowly: where answers with log-probabilities are written down.
        arrived: when the request came, on the event loop's clock.
    """

    stream: Stream
    response: OpenAIResponse
    events: bool
    span: Span
    gaps: Histogram
    slowly: RestingThread
    arrived: float
    seconds: float
    last: dict[int, float] = field(default_factory=dict)  # when each choice had its last delta
    begun: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem: str | None = None
        try:
            work = self._events(send) if self.events else self._whole(send)
            await cancel_on_disconnect(receive, self.arrived, self.seconds, work)
        except ClientDisconnect:
            problem = "the client went away"
        except Exception as error:
            shown = api_error(error, self.response.renamed)
            problem = shown.message
            await give_up(shown, self.begun, send)
        finally:
            self.stream.cancel()
            end_span(self.span, self.response.statistics, problem)

    async def _whole(self, send: Send) -> None:
        while taken := await self.stream.take():
            for delta in taken:
                if delta.finish_reason == "cancelled":
                    raise cancelled()
                self._clock(delta)
        whole = self.stream.whole()
        long = self.response.has_logprobs
        data = await self.slowly.run(self.response.whole, whole) if long else self.response.whole(whole)
        await self._begin(send, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))])
        await send({"type": "http.response.body", "body": data})

    async def _events(self, send: Send) -> None:
        await self._begin(send, _EVENTS)
        while not self.stream.ended:
            taken, data = await self.stream.take(), b""
            for delta in taken:
                if delta.finish_reason == "cancelled":
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    raise cancelled()
                self._clock(delta)
                event = self.response.event
                data += await self.slowly.run(event, delta) if self.response.long(delta) else event(delta)
            ended = self.stream.ended
            data += self.response.last_events() if ended else b""
            await send({"type": "http.response.body", "body": data, "more_body": not ended})

    async def _begin(self, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        lossless = b"x-mtad-lossless", b"true" if self.response.lossless else b"false"
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, lossless]})
        self.begun = True

    def _clock(self, delta: OutputDelta) -> None:
        now = time.perf_counter()
        if delta.index in self.last:
            self.gaps.add(now - self.last[delta.index])
        self.last[delta.index] = now
