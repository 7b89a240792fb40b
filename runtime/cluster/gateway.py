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
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from runtime.async_llm import EngineStopped
from runtime.cluster.board import Report
from runtime.cluster.router import prefix_keys
from runtime.scheduler.scheduler import QueueFull
from runtime.server.bodies import BodyReader
from runtime.server.errors import ApiError, api_error, cancelled
from runtime.server.metrics import exposition
from runtime.server.middleware import CLIENT
from runtime.server.responses import sent_event
from runtime.server.streaming import cancel_on_disconnect

log = logging.getLogger(__name__)

_HEAD = ("method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "client", CLIENT)
_UNREACHABLE = (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)


class Gateway:
    """Routes requests to replicas.

    Args:
        replicas: Ray Serve's handle of the deployment.
        seconds: after which a request is given up, > 0; replicas have the same limit, but it may not reach one.
        reports: of all replicas that take requests.

    Attributes:
        update_refused: why the replicas are not those of the pair folder as it is now; empty if they are.
    """

    def __init__(self, replicas: Any, seconds: float, reports: Callable[[], Awaitable[list[Report]]]) -> None:
        self._replicas, self._reports, self.update_refused = replicas, reports, ""
        self._seconds = seconds + 1.0  # the replica, which knows more, comes first
        self._serving: set[asyncio.Task[Any]] = set()
        self._bodies = BodyReader()
        self._draining, self._retries, self._broken = False, 0, 0
        routes = [Route(path, self._live, methods=()) for path in ("/health/live", "/ping")]
        routes += [Route(path, self._ready, methods=()) for path in ("/health/ready", "/health")]
        routes += [Route("/metrics", self._scrape, methods=())]
        self._router = Router(routes, default=self._forward)

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

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, _: Request) -> Response:
        if self._draining:
            return JSONResponse({"status": "draining"}, 503)
        ready = len(await self._reports())
        update = {"update_refused": self.update_refused} if self.update_refused else {}
        status = {"status": "ready" if ready else "starting", "replicas": ready}
        return JSONResponse(status | update, 200 if ready else 503)

    async def _scrape(self, request: Request) -> Response:
        own: list[Metric] = [
            GaugeMetricFamily("mtad_gateway_requests", "requests on their way", value=len(self._serving)),
            CounterMetricFamily("mtad_gateway_retries", "tried again on another replica", value=self._retries),
            CounterMetricFamily("mtad_gateway_broken_streams", "ended by a replica's death", value=self._broken),
        ]
        return exposition(request, own + merged(await self._reports()))

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

    async def _answer(self, head: dict[str, Any], body: bytes, send: Send) -> None:
        keys = await self._bodies.run(body, prefix_keys, body, head[CLIENT].key) if head["method"] == "POST" else []
        for last in (False, True):
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
            except BackPressureError as full:
                raise QueueFull(full.args[0], 1.0) from None  # it keeps the number of waiting requests there
            except (RayError, *_UNREACHABLE) as error:
                if sent:
                    self._broken += 1
                    log.error("a replica died under a stream", exc_info=error)
                    problem = "the replica died after part of the answer was sent; ask again"
                    event = sent_event(ApiError(503, problem, code="replica_died").body)
                    await send({"type": "http.response.body", "body": event})
                    return
                if not isinstance(error, _UNREACHABLE):
                    raise api_error(error) from error
                if last and not isinstance(error, RayActorError):
                    raise ApiError(503, "no replica can be reached", code="unavailable") from error
                if last:
                    again = {"x-should-retry": "false"}  # OpenAI's client follows it
                    problem = "two replicas died under this request; change it"
                    raise ApiError(500, problem, None, "replica_died", again) from error
                log.warning("tried again on another replica: %s", type(error).__name__)
                self._retries += 1

    async def _messages(self, head: dict[str, Any], body: bytes, keys: list[bytes]) -> AsyncGenerator[Message]:
        """The messages of one replica's answer; closing it cancels the request there."""
        coming = self._replicas.options(stream=True).http.remote(head, body, keys=keys)
        try:
            async for message in coming:
                yield message
        finally:
            coming.cancel()


def merged(reports: list[Report]) -> list[Metric]:
    """All replicas' metrics under one roof, each sample with a label `replica`."""
    known = GaugeMetricFamily("mtad_replica", "1; a replica", labels=("replica", "host", "pid", "generation"))
    families: dict[str, Metric] = {}
    for labels, own in reports:
        known.add_metric(list(labels.values()), 1)
        for family in own:
            together = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                together.add_sample(sample.name, {"replica": labels["replica"], **sample.labels}, sample.value)
    return [known, *families.values()]
