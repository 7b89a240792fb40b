"""The routes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib import resources
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from mtad.params import METHODS
from runtime.async_llm import AsyncLLM
from runtime.llm import Prompt
from runtime.pair import ROLES
from runtime.server.answers import Answer, wants_echo
from runtime.server.bodies import Body, ChatBody, ChatCompletionRequest, CompletionBody, CompletionRequest, advertised
from runtime.server.chat import ChatTemplate
from runtime.server.energy import EnergyMeter
from runtime.server.errors import ApiError, api_error
from runtime.server.guard import Guard
from runtime.server.metrics import Metrics
from runtime.server.options import ServerOptions
from runtime.server.respond import Responder
from runtime.server.tokens import TokenNames
from runtime.server.tracing import Span, Tracing

log = logging.getLogger(__name__)

_PAGE = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
_NO_TELEMETRY = dict.fromkeys(("tracing", "metrics", "logs", "auto_configure"), False)
_STATUSES = {
    400: "The request cannot be used; `param` names the field.",
    401: "Wrong or no API key.",
    404: "No such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "Something broke under the request.",
    503: "The server is shutting down, or its engine has stopped.",
    504: "Not finished in time; cancelled.",
}


class Service:
    """What the routes share: one engine under one name.

    Args:
        engine: not started yet.
        options: of the server.
    """

    def __init__(self, engine: AsyncLLM, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        pair = engine.llm.pair
        self.names = TokenNames(pair.tokenizer.backend_tokenizer, pair.eos)
        self.template = ChatTemplate(pair.tokenizer, options.chat_template, options.model)
        self.metrics = Metrics(engine, options.model, EnergyMeter())
        self.tracing = Tracing(options.trace)
        self.created = int(time.time())
        parts = [version("mtad"), *(getattr(pair, role).spec.checkpoint_hash for role in ROLES)]
        self.fingerprint = f"mtad-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"

    async def complete(self, request: Request, kind: type[Body]) -> Response:
        """Check a request, queue it, and answer."""
        span, names = self.tracing.begin(request.url.path, request.headers), dict[str, str]()
        try:
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, "send JSON, with `Content-Type: application/json`", code="unsupported_media_type")
            body = kind.model_validate_json(await request.body())
            names = body.renamed
            span.read(body)
            if body.model != self.options.model:
                problem = f"there is no model {body.model[:100]!r} here; this server has {self.options.model!r}"
                raise ApiError(404, problem, "model", "model_not_found")
            return await self._submit(body, span)
        except ClientDisconnect as error:
            span.end({}, "the client went away")
            raise error
        except Exception as error:
            shown = api_error(error, names)
            span.end({}, shown.message)
            return shown.response

    async def _submit(self, body: Body, span: Span) -> Response:
        params = body.parameters(self.engine.llm.pair.defaults)
        prompts = await self._prompts(body)
        if body.alternatives is not None:  # log-probabilities are wanted
            await asyncio.to_thread(self.names.prepare)
        stream = await self.engine.submit_many(prompts, params, body.priority)
        echoes = [self._text(prompt) for prompt in prompts] if wants_echo(body) else []  # their ids are known to exist
        answer = Answer(body, stream.prompts, stream.seeds, params.n, echoes, self.names, self.fingerprint)
        span.submitted(sum(map(len, stream.prompts[:: params.n])), params)
        return Responder(stream, answer, body, span, self.metrics.blocks.choices(), self.options)

    async def _prompts(self, body: Body) -> list[Prompt]:
        if isinstance(body, ChatBody):
            text = self.template.render([message.plain() for message in body.messages])
            return [await self.engine.tokenize(text, special_tokens=False)]
        assert isinstance(body, CompletionBody)
        return list(body.prompts)

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(self.engine.llm.pair.tokenizer.backend_tokenizer.decode(list(prompt), skip_special_tokens=True))

    def model(self) -> dict[str, Any]:
        """The model's entry of `/v1/models`; what is ours is under `mtad`."""
        llm = self.engine.llm
        spec, scheduler, defaults = llm.pair.target.spec, llm.loop.scheduler, llm.pair.defaults
        return {
            "id": self.options.model,
            "object": "model",
            "created": self.created,
            "owned_by": "mtad",
            "mtad": {
                "fingerprint": self.fingerprint,
                "vocab_size": llm.pair.vocab_size,
                "rows": spec.rows,
                "max_prompt_and_new_tokens": spec.capacity - scheduler.max_draft_len * scheduler.max_beam_width,
                "max_draft_len": scheduler.max_draft_len,
                "max_beam_width": scheduler.max_beam_width,
                "chat": self.template.available,
                "methods": {name: asdict(method) for name, method in METHODS.items()},
                "parameters": advertised(defaults),
            },
        }


def create_app(engine: AsyncLLM, options: ServerOptions) -> FastAPI:
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
    app.add_middleware(Guard, options=options, responded=service.metrics.responded)
    app.state.service = service
    for kind in (HTTPException, ApiError):
        app.add_exception_handler(kind, _explain)
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": words, "content": {"application/json": {"schema": {"$ref": _ref("Error")}}}}
        for status, words in _STATUSES.items()
    }

    def takes(name: str) -> dict[str, Any]:
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": _ref(name)}}}}}

    @app.post("/v1/completions", responses=errors, openapi_extra=takes("CompletionRequest"))
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await service.complete(request, CompletionRequest)

    @app.post("/v1/chat/completions", responses=errors, openapi_extra=takes("ChatCompletionRequest"))
    async def chat_completions(request: Request) -> Response:
        """Answer the last message of a chat."""
        return await service.complete(request, ChatCompletionRequest)

    @app.get("/v1/models", responses={401: errors[401]})
    async def models() -> dict[str, Any]:
        """The model that is served, its limits, and every parameter with its type and default."""
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{model:path}", responses={status: errors[status] for status in (401, 404)})
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

    _document(app)
    return app


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"


async def _explain(_: Request, error: Exception) -> Response:
    return api_error(error).response


def _page(app: FastAPI, path: str, name: str, media_type: str) -> None:
    content = resources.files("runtime.server").joinpath("page", name).read_bytes()

    @app.get(path, include_in_schema=False)
    async def page() -> Response:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
        return Response(content, media_type=media_type, headers=headers)


def _document(app: FastAPI) -> None:
    """Put the bodies, which the routes read themselves, into the OpenAPI document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = plain()
            bodies = models_json_schema(
                [(CompletionRequest, "validation"), (ChatCompletionRequest, "validation")],
                ref_template=_ref("{model}"),
            )[1]["$defs"]
            detail = {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            }
            error = {"type": "object", "properties": detail, "required": list(detail)}
            schema = {"type": "object", "properties": {"error": error}, "required": ["error"]}
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(bodies, Error=schema)
        assert app.openapi_schema is not None
        return app.openapi_schema

    vars(app)["openapi"] = openapi
