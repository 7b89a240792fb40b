"""The ASGI application: the table of its routes, behind the checks that every request passes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp

from runtime.async_llm import AsyncLLM
from runtime.server.middleware import Guard
from runtime.server.options import ServerOptions
from runtime.server.response_request import ResponseRequest
from runtime.server.routes import ERRORS, Endpoint, document
from runtime.server.schema import Body, ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from runtime.server.service import Service

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}


def create_app(engine: AsyncLLM, options: ServerOptions) -> ASGIApp:
    """The ASGI application. It starts the engine, and stops it in the end.

    Args:
        engine: an engine that has not been started, for this application alone.

    Raises:
        InvalidInput: an option cannot be honoured.
    """
    return application(Service(engine, options))


def application(service: Service) -> ASGIApp:
    """The ASGI application of a service that was made before."""
    rows = table(service)

    @asynccontextmanager
    async def lifespan(_: ASGIApp) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            await service.engine.close(drain=False)

    def responded(path: str, status: int) -> None:
        row = next((row for row in rows if row.route.path_regex.match(path)), None)
        service.metrics.responded(row.label or row.path if row else "other", status)

    return Guard(Router([row.route for row in rows], lifespan=lifespan), service.options, responded)


def table(service: Service) -> list[Endpoint]:
    """Every route of the server; the router takes the first row that fits."""

    def text(path: str, body: type[Body], summary: str) -> Endpoint:
        responses = {200: "OpenAI's object, or server-sent events of its chunks."} | ERRORS
        return Endpoint(path, partial(service.complete, body), summary, responses, body, methods=("POST",))

    def fixed(path: str, content: bytes | str, media_type: str, label: str) -> Endpoint:
        async def read(_: Request) -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        return Endpoint(path, read, label=label)

    models = "The model that is served, its limits, and every parameter with its type and default."
    live, broken = "Whether the process should be left running.", {503: "The engine broke down; restart the server."}
    ready, unready = "Whether requests should be sent here.", {503: "Starting, draining or stopped."}
    keys, names = {401: ERRORS[401]}, {401: ERRORS[401], 404: ERRORS[404]}
    rows = [
        text("/v1/completions", CompletionRequest, "Continue prompts."),
        text("/v1/chat/completions", ChatCompletionRequest, "Answer the last message of a chat."),
        text("/v1/responses", ResponseRequest, "Answer the last item of an input."),
        Endpoint("/v1/models", service.models, models, keys),
        Endpoint("/v1/models/{model:path}", service.model, "One model.", names, label="/v1/models"),
        Endpoint("/tokenize", service.tokenize, "Token ids of a text or a chat.", ERRORS, TokenizeRequest, ("POST",)),
        Endpoint("/detokenize", service.detokenize, "The text of token ids.", ERRORS, DetokenizeRequest, ("POST",)),
        Endpoint("/version", service.version, "The toolkit's version."),
        Endpoint("/ping", service.live, live, broken, methods=("GET", "POST")),
        Endpoint("/health/live", service.live, live, broken),
        Endpoint("/health/ready", service.ready, ready, unready),
        Endpoint("/health", service.ready, ready, unready),
        Endpoint("/metrics", service.scrape, "What Prometheus scrapes."),
    ]
    described, pages = document(rows), resources.files("runtime.server").joinpath("page")
    template = Environment(autoescape=True).from_string(pages.joinpath("docs.html").read_text("utf-8"))
    return [
        *rows,
        fixed("/openapi.json", json.dumps(described), "application/json", "other"),
        fixed("/docs", template.render(described), "text/html", "/docs"),
        fixed("/", pages.joinpath("page.html").read_bytes(), "text/html", "/"),
        fixed("/page.js", pages.joinpath("page.js").read_bytes(), "text/javascript", "other"),
        fixed("/page.css", pages.joinpath("page.css").read_bytes(), "text/css", "other"),
    ]
