"""What the routes share, one engine under one name, and their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from opentelemetry.trace import Span
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from mtad import __version__
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.async_llm import AsyncLLM
from runtime.constraints.grammar import REMEDY
from runtime.pair import ROLES
from runtime.prompts import Prompt
from runtime.resting import RestingThread, Turn
from runtime.scheduler.request import Request as EngineRequest
from runtime.server.bodies import BodyReader, check_body
from runtime.server.calling import Calling
from runtime.server.chat import ChatTemplate, prompt_text
from runtime.server.errors import ApiError, api_error
from runtime.server.logprobs import MAX_PROMPT_LOGPROBS, Echo, TokenNames
from runtime.server.metrics import Metrics, Scrapes
from runtime.server.middleware import CLIENT, Client
from runtime.server.options import ServerOptions
from runtime.server.responses import OpenAIResponse
from runtime.server.schema import PARAMETERS, Body, ChatCompletionRequest, CompletionRequest, advertised
from runtime.server.streaming import Responder, cancel_on_disconnect
from runtime.server.tracing import begin_span, describe_request, end_span


class Service:
    """One engine, not started yet, under one name. Each public coroutine answers a route with an ASGI application."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        pair = engine.llm.pair
        self._names = TokenNames(pair.tokenizer.backend_tokenizer, engine.llm.grammars)
        self._template = ChatTemplate(pair.tokenizer, options.chat_template, options.model)
        self.metrics = Metrics(engine, options.model)
        self._bodies, self._scrapes = BodyReader(engine.turn), Scrapes(engine.turn)
        self._answers = RestingThread(Turn())  # streams do not wait for what others send
        parts = [__version__, *(getattr(pair, role).spec.checkpoint_hash for role in ROLES)]
        self._fingerprint = f"mtad-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"

    async def complete(self, kind: type[Body], request: Request) -> ASGIApp:
        """Check a request for text and queue it; a request that cannot be used is answered with an error."""
        span, names = begin_span(request.scope["path"], request.headers), dict[str, str]()
        arrived = asyncio.get_running_loop().time()
        try:
            body = await self._read(request, kind)
            names = body.renamed
            submitted = self._submit(body, request, span, arrived)  # a grammar may take its time to be compiled
            return await cancel_on_disconnect(request.receive, arrived, self.options.request_seconds, submitted)
        except ClientDisconnect:
            end_span(span, {}, "the client went away")
            raise
        except Exception as error:
            shown = api_error(error, names)
            end_span(span, {}, shown.message)
            return shown.response

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """A body of JSON for this server's model, checked off the event loop where it is large."""
        declared = request.headers.get("content-type", "").partition(";")[0]
        if declared.strip().lower() != "application/json":
            raise ApiError(415, "send JSON, with `Content-Type: application/json`", code="unsupported_media_type")
        data = await request.body()
        check_body(data)
        body = await self._bodies.read(data, kind.model_validate_json, data)
        if body.model != self.options.model:
            raise _no_model(body.model, f"; this server has {self.options.model!r}")
        return body

    async def close(self) -> None:
        self._template.pool.close()
        await self.engine.close(drain=False)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.entry]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self.options.model:
            raise _no_model(name)
        return JSONResponse(self.entry)

    async def live(self, _: Request) -> Response:
        if self.engine.cause is not None:
            return JSONResponse({"status": "broken", "cause": str(self.engine.cause)}, 503)
        return JSONResponse({"status": "live"})

    async def ready(self, _: Request) -> Response:
        if self.engine.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "starting" if self.engine.state == "open" else self.engine.state}, 503)

    async def scrape(self, _: Request) -> Response:
        return await self._scrapes.answer(self.metrics.families)

    def _parse(self, body: Body) -> tuple[DecodingParams, Calling | None]:
        pair, calling = self.engine.llm.pair, None
        params = body.parameters(pair.defaults)
        if isinstance(body, ChatCompletionRequest):
            tags = () if "thinking_tags" in body.model_fields_set else self.engine.llm.tags or ()
            params = replace(params, thinking_tags=params.thinking_tags or tags)  # a thought may come before a grammar
            calling = Calling.of(body, self._template.source(body.tools))
        if calling:
            params = calling.constrain(params, pair.tokenizer.backend_tokenizer, pair.eos)
        return params, calling

    async def _submit(self, body: Body, request: Request, span: Span, arrived: float) -> Responder:
        params, calling = await self._bodies.read(await request.body(), self._parse, body)
        client: Client = request.scope[CLIENT]
        if body.priority and not self.options.allow_priority:
            problem = "clients may not choose it here; leave it out, or start the server with --allow-priority"
            raise InvalidInput("priority", body.priority, problem)
        count = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        if count * params.n > self.options.max_choices:  # before anything is done with each of them
            name, value = ("n", params.n) if params.n > 1 else ("prompt", f"{count} prompts")
            problem = f"at most {self.options.max_choices} choices per request here, of all prompts together"
            raise InvalidInput(name, value, f"{problem} (--max-choices)")
        prompts = await self._prompts(request, body)
        if body.alternatives is not None or params.prompt_logprobs is not None or params.draft_details:
            await asyncio.to_thread(self.engine.llm.grammars.prepare)
        if params.prompt_logprobs is not None:
            prompts = [await self._tokenized(prompt) for prompt in prompts]
            if (values := sum(map(len, prompts)) * params.n * (1 + params.prompt_logprobs)) > MAX_PROMPT_LOGPROBS:
                problem = f"at most {MAX_PROMPT_LOGPROBS} log-probabilities of prompts per request; send fewer prompts"
                raise InvalidInput("prompt_logprobs", f"{values} log-probabilities", problem)
        salt = json.dumps([client.key, body.cache_salt]) if client.key or body.cache_salt else ""
        unlimited = body.model_fields_set.isdisjoint(("max_tokens", "max_completion_tokens"))  # gets what fits
        others = {"client": client.name, "cache_salt": salt, "fit": unlimited}
        try:
            stream = await self.engine.submit_many(prompts, params, body.priority, **others)
        except InvalidInput as error:
            if calling is None or error.field != "grammar":
                raise
            told = error.problem.removesuffix(f"; {REMEDY['grammar']}")  # of a grammar that no client has written
            names = [function.name for function in calling.functions]
            raise InvalidInput("tools", names, f"calls cannot be kept to their parameters: {told}") from None
        try:
            echoes: list[Echo] = []
            if isinstance(body, CompletionRequest) and body.echo:
                echoes = await asyncio.to_thread(self._echoes, body.prompts, stream.requests[:: params.n])
            response = OpenAIResponse(body, stream.requests, params.n, echoes, self._names, self._fingerprint, calling)
            describe_request(span, body, stream.requests, params)
        except BaseException:  # also when the client goes away
            stream.cancel()
            raise
        times = arrived, self.options.request_seconds
        return Responder(stream, response, body.stream, span, self.metrics.gaps, self._answers, *times)

    async def _prompts(self, request: Request, body: Body) -> list[Prompt]:
        """What a request continues, made elsewhere than in the event loop."""
        if isinstance(body, ChatCompletionRequest):
            told = await self._bodies.read(await request.body(), body.plain)
            text = await self._template.render(*told, body.chat_template_kwargs, body.reasoning_effort)
            return [await self._tokenized(text, special_tokens=False)]
        assert isinstance(body, CompletionRequest)
        return list(body.prompts)

    async def _tokenized(self, prompt: Prompt, special_tokens: bool = True) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self.engine.in_thread(len(prompt), self.engine.llm.tokenize, prompt, special_tokens)

    def _echoes(self, prompts: Sequence[Prompt], requests: Sequence[EngineRequest]) -> list[Echo]:
        tokenizer = self.engine.llm.pair.tokenizer
        each = zip(prompts, requests, strict=True)
        return [Echo.of(prompt_text(tokenizer, one), r.prompt, tokenizer.backend_tokenizer) for one, r in each]

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The model's entry of `/v1/models`; what is ours is under `mtad`."""
        llm = self.engine.llm
        scheduler = llm.loop.scheduler
        methods = {name: asdict(one) | {"uses": [*filter(one.uses, PARAMETERS)]} for name, one in METHODS.items()}
        return {
            "id": self.options.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "mtad",
            "mtad": {
                "fingerprint": self._fingerprint,
                "vocab_size": llm.pair.vocab_size,
                "rows": scheduler.rows,
                "max_prompt_and_new_tokens": scheduler.room_for_tokens,
                "max_draft_len": scheduler.max_draft_len,
                "max_beam_width": scheduler.max_beam_width,
                "chat": self._template.available,
                "methods": methods,
                "parameters": advertised(llm.pair.defaults),
            },
        }


def _no_model(name: str, hint: str = "") -> ApiError:
    return ApiError(404, f"there is no model {name[:100]!r} here{hint}", "model", "model_not_found")
