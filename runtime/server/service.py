"""What the routes share: one engine under one name, and how a request for text is answered."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from mtad.params import METHODS
from runtime.async_llm import AsyncLLM
from runtime.llm import Prompt
from runtime.pair import ROLES
from runtime.server.chat import ChatTemplate
from runtime.server.energy import EnergyMeter
from runtime.server.errors import ApiError, api_error
from runtime.server.logprobs import TokenNames
from runtime.server.metrics import Metrics
from runtime.server.middleware import read_body
from runtime.server.options import ServerOptions
from runtime.server.responses import Answer, wants_echo
from runtime.server.schema import Body, ChatBody, CompletionBody, advertised
from runtime.server.streaming import Responder
from runtime.server.tracing import Span, Tracing


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

    async def complete(self, kind: type[Body], scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, queue it, and answer."""
        headers = Headers(scope=scope)
        span, names = self.tracing.begin(scope["path"], headers), dict[str, str]()
        respond: ASGIApp
        try:
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, "send JSON, with `Content-Type: application/json`", code="unsupported_media_type")
            body = kind.model_validate_json(await read_body(receive))
            names = body.renamed
            span.read(body)
            if body.model != self.options.model:
                problem = f"there is no model {body.model[:100]!r} here; this server has {self.options.model!r}"
                raise ApiError(404, problem, "model", "model_not_found")
            respond = await self._submit(body, span)
        except ClientDisconnect as error:
            span.end({}, "the client went away")
            raise error
        except Exception as error:
            shown = api_error(error, names)
            span.end({}, shown.message)
            respond = shown.response
        await respond(scope, receive, send)

    async def _submit(self, body: Body, span: Span) -> Responder:
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


class Generation:
    """One of the two routes that make text, as an ASGI application.

    Args:
        service: answers.
        kind: of its bodies.
    """

    def __init__(self, service: Service, kind: type[Body]) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._service.complete(self._kind, scope, receive, send)
