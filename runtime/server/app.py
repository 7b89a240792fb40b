"""The ASGI application: the table of its routes, behind the checks that every request passes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp

from runtime.server.middleware import Guard
from runtime.server.routes import Endpoint, document
from runtime.server.schema import Body, ChatCompletionRequest, CompletionRequest
from runtime.server.service import Service

if TYPE_CHECKING:
    from runtime.cluster.gateway import Gateway

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
_HEADERS = {"content-security-policy": f"{_POLICY}frame-ancestors 'none'", "x-content-type-options": "nosniff"}


def create_app(service: Service) -> ASGIApp:
    """The ASGI application. It starts the service's engine, and stops it in the end."""
    rows = table(service)

    @asynccontextmanager
    async def lifespan(_: ASGIApp) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            await service.close()

    def responded(path: str, status: int) -> None:
        row = next((row for row in rows if row.route.path_regex.match(path)), None)
        service.metrics.responded(row.path if row else "other", status)

    return Guard(Router([row.route for row in rows], lifespan=lifespan), service.options, responded)


def table(service: Service | Gateway) -> list[Endpoint]:
    """Every route of the server; the router takes the first row that fits."""

    def text(path: str, body: type[Body], summary: str) -> Endpoint:
        return Endpoint(path, partial(service.complete, body), f"{summary}, whole or in events", body, ("POST",))

    def fixed(path: str, content: bytes | str, media_type: str) -> Endpoint:
        async def read(_: Request) -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        return Endpoint(path, read)

    live = "Whether the process should be left running; 503 says that the engine broke down."
    ready = "Whether requests should be sent here; 503 says that it starts, drains or has stopped."
    rows = [
        text("/v1/completions", CompletionRequest, "Continue prompts"),
        text("/v1/chat/completions", ChatCompletionRequest, "Answer the last message of a chat"),
        Endpoint("/v1/models", service.models, "The model, its limits, and every parameter with its type and default."),
        Endpoint("/v1/models/{model:path}", service.model, "One model."),
        Endpoint("/ping", service.live, live, methods=("GET", "POST")),
        Endpoint("/health/live", service.live, live),
        Endpoint("/health/ready", service.ready, ready),
        Endpoint("/health", service.ready, ready),
        Endpoint("/metrics", service.scrape, "What Prometheus scrapes."),
    ]
    described, pages = document(rows), resources.files("runtime.server").joinpath("page")
    template = Environment(autoescape=True).from_string(pages.joinpath("docs.html").read_text("utf-8"))
    return [
        *rows,
        fixed("/openapi.json", json.dumps(described), "application/json"),
        fixed("/docs", template.render(described), "text/html"),
        fixed("/", pages.joinpath("page.html").read_bytes(), "text/html"),
        fixed("/page.js", pages.joinpath("page.js").read_bytes(), "text/javascript"),
        fixed("/page.css", pages.joinpath("page.css").read_bytes(), "text/css"),
    ]
