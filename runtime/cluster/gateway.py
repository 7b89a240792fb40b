"""The gateway: an ASGI application that sends each request to a replica, and to another if that one dies.

As long as no byte of its answer went out, a request is tried elsewhere; but once only, for it may be what the replica
died of. Once part of a stream was sent, a text cannot be begun again without the client noticing, so the stream ends
with an error.

Ray Serve's own HTTP proxy does not stand here because it cannot do this: it answers 500 when a replica dies, holds
bodies of any length in memory, and routes before it has read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from grpc.aio import AioRpcError
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.async_llm import EngineStopped
from runtime.cluster.board import STALE_SECONDS, Report
from runtime.cluster.router import prefix_keys
from runtime.resting import Turn
from runtime.scheduler.scheduler import QueueFull
from runtime.server.app import table
from runtime.server.bodies import BodyReader
from runtime.server.errors import ApiError, api_error, cancelled
from runtime.server.metrics import Scrapes
from runtime.server.middleware import CLIENT
from runtime.server.schema import Body
from runtime.server.streaming import cancel_on_disconnect, give_up

log = logging.getLogger(__name__)

FULL_SECONDS = 0.1  # when all replicas are full, a request is offered to them again after so long
BOARD_SECONDS = 0.2  # the board that does not answer in so long starts again, or hangs
FRESH_SECONDS = 0.5  # reports, which come once per second, are asked for again after so long
_SECRET = (b"authorization", b"cookie")  # what they say of the client is in `CLIENT`
_HEAD = ("method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "client", CLIENT)
_UNREACHABLE = (RayActorError, AioRpcError, RuntimeError, RayServeException, TimeoutError)


class Gateway:
    """Routes requests to replicas.

    Args:
        replicas: Ray Serve's handle of the deployment.
        seconds: after which a request is given up, > 0; replicas have the same limit, but it may not reach one.
        stall_seconds: after which a replica that has taken a request and gives no sign of life counts as dead, > 0.
        reports: of all replicas that take requests.

    Attributes:
        update_refused: why the replicas are not those of the pair folder as it is now; empty if they are.
    """

    def __init__(
        self, replicas: Any, seconds: float, stall_seconds: float, reports: Callable[[], Awaitable[list[Report]]]
    ) -> None:
        self._replicas = replicas.options(method_name="http", stream=True)
        self._reports, self.update_refused = reports, ""
        self._stall_seconds = stall_seconds
        self._seconds = seconds + 1.0  # the replica, which knows more, comes first
        self._serving: set[asyncio.Task[Any]] = set()
        turn = Turn()
        self._bodies, self._scrapes = BodyReader(turn), Scrapes(turn)
        self._draining, self._retries, self._broken, self._responses = False, 0, 0, Counter[int]()
        self._last: tuple[float, list[Report]] = 0.0, []
        self._ask_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._router = Router([row.route for row in table(self)])  # what is in no row, or fixed, needs no replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router(scope, receive, send)

    async def close(self, drain: bool = True) -> None:
        """Take no more requests; wait for those that run, or cancel them."""
        self._draining = True
        if not drain:
            for task in self._serving:
                task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    async def complete(self, _: type[Body], __: Request) -> ASGIApp:
        return self._forward

    async def models(self, _: Request) -> ASGIApp:
        """As a replica has reported it, since replicas may be full; if none has, one is asked."""
        known = await self._known()
        return JSONResponse({"object": "list", "data": [known[-1][2]]}) if known else self._forward

    async def model(self, _: Request) -> ASGIApp:
        return self._forward

    def responded(self, _: str, status: int) -> None:
        """Count a response, be it a replica's or not."""
        self._responses[status] += 1

    async def live(self, _: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, _: Request) -> Response:
        if self._draining:
            return JSONResponse({"status": "draining"}, 503)
        ready = len(await self._known())
        update = {"update_refused": self.update_refused} if self.update_refused else {}
        status = {"status": "ready" if ready else "starting", "replicas": ready}
        return JSONResponse(status | update, 200 if ready else 503)

    async def scrape(self, _: Request) -> Response:
        own: list[Metric] = [
            GaugeMetricFamily("mtad_gateway_requests", "requests on their way", value=len(self._serving)),
            CounterMetricFamily("mtad_gateway_retries", "tried again on another replica", value=self._retries),
            CounterMetricFamily("mtad_gateway_broken_streams", "ended by a replica's death", value=self._broken),
        ]
        responses = CounterMetricFamily("mtad_gateway_responses", "responses to clients", labels=["status"])
        for status, count in self._responses.items():
            responses.add_metric([str(status)], count)
        reports = await self._known()
        return await self._scrapes.answer(lambda: [*own, responses, *merged(reports)])

    async def _known(self) -> list[Report]:
        """The replicas' reports: those of before while the board cannot be asked, or has just started again.

        Reports younger than `STALE_SECONDS` are given at once while new ones are asked for; else the board is awaited.
        """
        now = time.monotonic()
        if now > self._ask_at:
            self._ask_at = now + FRESH_SECONDS
            self._asking = asyncio.create_task(self._ask(now))
        if self._asking and now - self._last[0] >= STALE_SECONDS:
            await asyncio.shield(self._asking)
        at, found = self._last
        return found if time.monotonic() - at < STALE_SECONDS else []

    async def _ask(self, now: float) -> None:
        try:
            async with asyncio.timeout(BOARD_SECONDS):
                found = await self._reports()
        except (RayError, TimeoutError):
            found = self._last[1]  # it is starting again, and the replicas serve meanwhile
        if found:
            self._last = now, found

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, and send what a replica answers; ended when the client goes away or time is up."""
        body = await Request(scope, receive).body()
        if self._draining:  # it may have begun while the body came
            raise EngineStopped("takes no requests: it is draining")
        head = {name: scope.get(name) for name in _HEAD}
        head["headers"] = [(name, value) for name, value in scope["headers"] if name not in _SECRET]
        sent = _Sent(send)
        work = asyncio.create_task(self._answer(head, body, sent))
        self._serving.add(work)
        try:
            await cancel_on_disconnect(receive, asyncio.get_running_loop().time(), self._seconds, work)
        except asyncio.CancelledError:
            if not work.cancelled():  # the request's own task was cancelled, rather than its work, by `close`
                raise
            await sent.give_up(cancelled())
        except ApiError as error:
            await sent.give_up(error)
        finally:
            self._serving.discard(work)

    async def _answer(self, head: dict[str, Any], body: bytes, sent: _Sent) -> None:
        keys = await self._bodies.read(body, prefix_keys, body, head[CLIENT].key) if head["method"] == "POST" else []
        again = False
        while True:
            try:
                async with contextlib.aclosing(self._messages(head, body, keys)) as messages:
                    async for message in messages:
                        await sent(message)
                return
            except BackPressureError as full:
                if not again:
                    raise QueueFull(full.args[0], 1.0) from None  # it keeps the number of waiting requests there
                await asyncio.sleep(FULL_SECONDS)  # what was taken is not refused for the sake of later ones
            except (RayError, *_UNREACHABLE) as error:
                if sent.begun:
                    self._broken += 1
                    log.error("a replica died under a stream", exc_info=error)
                    problem = "the replica died after part of the answer was sent; ask again"
                    raise ApiError(503, problem, code="replica_died") from error
                if not isinstance(error, _UNREACHABLE):
                    raise api_error(error) from error
                if again and not isinstance(error, RayActorError):
                    raise ApiError(503, "no replica can be reached", code="unavailable") from error
                if again:
                    problem, told = "two replicas died under this request; change it", {"x-should-retry": "false"}
                    raise ApiError(500, problem, None, "replica_died", told) from error  # OpenAI's client follows it
                log.warning("tried again on another replica: %s", type(error).__name__)
                self._retries += 1
                again = True

    async def _messages(self, head: dict[str, Any], body: bytes, keys: list[bytes]) -> AsyncGenerator[Message]:
        """The messages of one replica's answer; closing it cancels the request there."""
        coming, ended, limit = self._replicas.remote(head, body, keys=keys), False, None
        lists = aiter(coming)
        try:
            while True:
                async with asyncio.timeout(limit):
                    found = await anext(lists, None)
                if found is None:
                    break
                limit = self._stall_seconds  # not before: until a replica takes it, a request may queue for long
                for message in found:
                    ended = message["type"] == "http.response.body" and not message.get("more_body", False)
                    yield message
        finally:
            if not ended:
                with contextlib.suppress(RayServeException):  # it may just have been refused
                    coming.cancel()


@dataclass
class _Sent:
    """What is sent to a client. A start is held back: as long as nothing was sent, another replica may answer."""

    send: Send
    start: Message = field(default_factory=dict)
    begun: bool = False
    ended: bool = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        if not self.begun:
            self.begun = True
            await self.send(self.start)
        self.ended = not message.get("more_body", False)
        await self.send(message)

    async def give_up(self, error: ApiError) -> None:
        """Answer with an error, unless the answer has ended."""
        if not self.ended:
            await give_up(error, self.begun, self.send)


def merged(reports: list[Report]) -> list[Metric]:
    """All replicas' metrics under one roof, each sample with a label `replica`."""
    known = GaugeMetricFamily("mtad_replica", "1; a replica", labels=("replica", "host", "pid", "generation"))
    families: dict[str, Metric] = {}
    for labels, own, _ in reports:
        known.add_metric(list(labels.values()), 1)
        for family in own:
            together = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                together.add_sample(sample.name, {"replica": labels["replica"], **sample.labels}, sample.value)
    return [known, *families.values()]
