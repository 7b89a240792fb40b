"""Rows of a table of routes: dispatch, the count of responses and the OpenAPI document read the same ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True)
class Endpoint:
    """One row, and the ASGI application that answers its requests.

    Attributes:
        path: in Starlette's notation. Requests below `/v1/`, and for tokens, need a key, also those for paths that are
            in no row.
        handler: makes the response to a request; a response is an ASGI application.
        summary: for the OpenAPI document, which leaves out rows without one.
        responses: the meaning of each status, for the document. Errors below `/v1/` have OpenAI's shape.
        methods: those that it answers; none means all.
        label: the name under which its responses are counted; None takes the path.
    """

    path: str
    handler: Callable[[Request], Awaitable[ASGIApp]]
    summary: str = ""
    responses: Mapping[int, str] = field(default_factory=dict)
    body: type[BaseModel] | None = None
    methods: tuple[str, ...] = ("GET",)
    label: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.handler(Request(scope, receive))
        await response(scope, receive, send)

    @cached_property
    def route(self) -> Route:
        """The row for Starlette's router."""
        route = Route(self.path, self)
        route.methods = set(self.methods)  # Starlette adds HEAD to GET
        return route
