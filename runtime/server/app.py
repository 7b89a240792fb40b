"""The ASGI application: its routes, and what stands before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runtime.async_llm import AsyncLLM
from runtime.server.errors import ApiError, api_error
from runtime.server.middleware import Guard
from runtime.server.openapi import ERRORS, TEXTS, document
from runtime.server.options import ServerOptions
from runtime.server.service import Generation, Service

_PAGE = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
_NO_TELEMETRY = dict.fromkeys(("tracing", "metrics", "logs", "auto_configure"), False)


class Application:
    """The ASGI application: `Guard`, the two routes that make text, and the others behind the framework.

    What makes text is found here, before the framework's layers: each of them would cost every request, and every
    chunk of its answer, a call.

    Args:
        service: what the routes share.
        framework: all routes, these two included: it answers other methods, and documents them.
        texts: by path.

    Attributes:
        service: as given.
    """

    def __init__(self, service: Service, framework: FastAPI, texts: Mapping[str, Generation]) -> None:
        self.service, self._framework, self._texts = service, framework, texts
        self._guarded = Guard(self._route, service.options, service.metrics.responded)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        await self._guarded(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = self._texts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (text or self._framework)(scope, receive, send)


def create_app(engine: AsyncLLM, options: ServerOptions) -> Application:
    """The ASGI application. It starts the engine, and stops it in the end.

    Args:
        engine: an engine that has not been started; nobody else uses it.
        options: of the server.

    Raises:
        InvalidInput: an option cannot be honoured.
    """
    service = Service(engine, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.close(drain=False)

    # FastAPI's own documentation pages load scripts from elsewhere, and its own spans know nothing of tokens
    elsewhere: dict[str, Any] = {"docs_url": None, "redoc_url": None, "telemetry": _NO_TELEMETRY}
    app = FastAPI(title="MTAD", version=version("mtad"), lifespan=lifespan, **elsewhere)
    for kind in (HTTPException, ApiError, Exception):
        app.add_exception_handler(kind, _explain)

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> dict[str, Any]:
        """The model that is served, its limits, and every parameter with its type and default."""
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{model:path}", responses={status: ERRORS[status] for status in (401, 404)})
    async def model(model: str) -> dict[str, Any]:
        """One model."""
        if model != options.model:
            raise ApiError(404, f"there is no model {model[:100]!r} here", "model", "model_not_found")
        return service.model()

    @app.get("/health/live", responses={503: {"description": "The engine broke down; restart the server."}})
    async def live() -> Response:
        """Whether the process should be left running."""
        if engine.cause is not None:
            return JSONResponse({"status": "broken", "cause": str(engine.cause)}, 503)
        return JSONResponse({"status": "live"})

    unready: dict[int | str, dict[str, Any]] = {503: {"description": "Starting, draining or stopped."}}

    @app.get("/health/ready", responses=unready)
    @app.get("/health", responses=unready)
    async def ready() -> Response:
        """Whether requests should be sent here."""
        if engine.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "starting" if engine.state == "open" else engine.state}, 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """What Prometheus scrapes."""
        content, content_type = service.metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    for name, media_type in _PAGE.items():
        _page(app, "/" if name == "page.html" else f"/{name}", name, media_type)

    texts = {path: Generation(service, kind) for path, (kind, _) in TEXTS.items()}
    app.routes.extend(Route(path, text, methods=["POST"]) for path, text in texts.items())
    document(app)
    return Application(service, app, texts)


async def _explain(_: Request, error: Exception) -> Response:
    return api_error(error).response


def _page(app: FastAPI, path: str, name: str, media_type: str) -> None:
    content = resources.files("runtime.server").joinpath("page", name).read_bytes()

    @app.get(path, include_in_schema=False)
    async def page() -> Response:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        return Response(content, media_type=media_type, headers=headers)
