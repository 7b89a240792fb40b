"""The gateway: an ASGI application that sends each request to a replica, and to another if that one dies.

As long as no byte of its answer went out, a request is tried elsewhere; but once only, for it may be what the replica
died of. Once part of a stream was sent, a text cannot be begun again without the client noticing, so the stream ends
with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.async_llm import EngineStopped
from runtime.cluster.board import ClusterMetrics, ReplicaReport
from runtime.cluster.replica import Head
from runtime.cluster.router import prefix_keys
from runtime.server.bodies import BodyReader
from runtime.server.errors import ApiError, api_error, cancelled
from runtime.server.metrics import exposition
from runtime.server.middleware import CLIENT
from runtime.server.responses import sent_event
from runtime.server.routes import Endpoint
from runtime.server.streaming import cancel_on_disconnect

log = logging.getLogger(__name__)

_HEAD = ("method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "client", CLIENT)

ATTEMPTS = 3
"""Replicas that a request is tried on."""


class Gateway:
    """Routes requests to replicas.

    Args:
        seconds: after which a request is given up, > 0; replicas have the same limit, but it may not reach one.
        rollout: replaces all replicas by new ones, one after another; called on SIGHUP.
    """

    def __init__(
        self,
        handle: Any,
        reports: Callable[[], Awaitable[list[ReplicaReport]]],
        seconds: float,
        rollout: Callable[[], Awaitable[None]],
    ) -> None:
        self._handle, self._reports, self._rollout = handle, reports, rollout
        self._seconds = seconds + 1.0  # the replica, which knows more, comes first
        self._serving: set[asyncio.Task[Any]] = set()
        self._bodies = BodyReader()
        self._draining = False
        self._retries = self._broken = 0
        own = {
            "/health/live": self._live,
            "/ping": self._live,
            "/health/ready": self._ready,
            "/health": self._ready,
            "/metrics": self._scrape,
        }
        routes = [Endpoint(path, handler, methods=()).route for path, handler in own.items()]
        self._router = Router(routes, default=self._forward, lifespan=self._lifespan)

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

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: ASGIApp) -> AsyncIterator[None]:
        with contextlib.suppress(NotImplementedError, RuntimeError):  # not in the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._renew)
        yield

    def _renew(self) -> None:
        log.info("replacing the replicas, one after another")
        self._renewing = asyncio.ensure_future(self._rollout())

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, _: Request) -> Response:
        if self._draining:
            return JSONResponse({"status": "draining"}, 503)
        ready = sum(report.ready for report in await self._reports())
        return JSONResponse({"status": "ready" if ready else "starting", "replicas": ready}, 200 if ready else 503)

    async def _scrape(self, request: Request) -> Response:
        own = [
            GaugeMetricFamily("mtad_gateway_requests", "requests on their way", value=len(self._serving)),
            CounterMetricFamily("mtad_gateway_retries", "tried again on another replica", value=self._retries),
            CounterMetricFamily("mtad_gateway_broken_streams", "ended by a replica's death", value=self._broken),
        ]
        figures = ClusterMetrics(await self._reports(), own)
        content, content_type = exposition(request.headers.get("accept", ""), figures)
        return Response(content, headers={"content-type": content_type})

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, and send what a replica answers; ended when the client goes away or time is up."""
        if self._draining:
            raise EngineStopped("takes no requests: it is draining")
        body = await Request(scope, receive).body()
        head = {name: scope.get(name) for name in _HEAD}
        work = asyncio.create_task(self._answer(head, body, send))
        self._serving.add(work)
        try:
            await cancel_on_disconnect(receive, asyncio.get_running_loop().time(), self._seconds, work)
        except asyncio.CancelledError:
            if not work.cancelled():  # the request's own task was cancelled, rather than its work, by `close`
                raise
            raise cancelled() from None
        finally:
            self._serving.discard(work)

    async def _answer(self, head: Head, body: bytes, send: Send) -> None:
        keys = await self._bodies.run(body, prefix_keys, body, head[CLIENT].key) if head["method"] == "POST" else []
        deaths = 0
        for attempt in range(1, ATTEMPTS + 1):
            start: Message | None = None
            sent = False
            try:
                async with contextlib.aclosing(self._messages(head, body, keys)) as messages:
                    async for message in messages:
                        if message["type"] == "http.response.start":
                            start = message  # held back: as long as nothing was sent, another replica may answer
                            continue
                        if start is not None:
                            await send(start)
                            start, sent = None, True
                        await send(message)
                return
            except BackPressureError:
                seconds = {"retry-after": "1", "retry-after-ms": "1000"}
                raise ApiError(429, "all replicas and the queue are full", None, "queue_full", seconds) from None
            except (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError) as error:
                if sent:
                    self._broken += 1
                    log.error("a replica died under a stream", exc_info=error)
                    await _break(send)
                    return
                log.warning("attempt %d of %d: %s", attempt, ATTEMPTS, type(error).__name__)
                deaths += isinstance(error, RayActorError)
                if deaths == 2:
                    again = {"x-should-retry": "false"}  # OpenAI's client follows it
                    problem = "two replicas died under this request; change it"
                    raise ApiError(500, problem, None, "replica_died", again) from error
                if attempt == ATTEMPTS:
                    raise ApiError(503, f"{attempt} replicas cannot be reached", code="unavailable") from error
                self._retries += 1
            except RayError as error:
                if sent:
                    await _break(send)
                    return
                raise api_error(error) from error

    async def _messages(self, head: Head, body: bytes, keys: list[bytes]) -> AsyncGenerator[Message]:
        """The messages of one replica's answer; closing it cancels the request there."""
        coming = self._handle.options(stream=True).http.remote(head, body, keys=keys)
        try:
            async for message in coming:
                yield message
        finally:
            coming.cancel()


async def _break(send: Send) -> None:
    error = ApiError(503, "the replica died after part of the answer was sent; ask again", code="replica_died")
    await send({"type": "http.response.body", "body": sent_event(error.body)})
