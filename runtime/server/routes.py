"""Rows of a table of routes, for dispatch and the count of responses, and their OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from mtad import __version__

ERRORS = {
    400: "The request cannot be used; `param` names the field.",
    401: "Wrong or no API key.",
    403: "The name in the Host header is not known as one of this server.",
    404: "No such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "Something broke under the request.",
    503: "The server is shutting down, or its engine has stopped.",
    504: "Not finished in time; cancelled.",
}
"""What each error below `/v1/` means."""

_OPTIONAL = {"type": ["string", "null"]}
_DETAIL = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _OPTIONAL, "code": _OPTIONAL}
_ERROR = {"type": "object", "properties": _DETAIL, "required": list(_DETAIL)}


@dataclass(frozen=True)
class Endpoint:
    """One row.

    Attributes:
        path: in Starlette's notation. Requests below `/v1/`, and for tokens, need a key, also those for paths that are
            in no row.
        handler: makes the response to a request; a response is an ASGI application.
        summary: for the OpenAPI document, which leaves out rows without one.
        responses: the meaning of each status, for the document. Errors below `/v1/` have OpenAI's shape.
        methods: those that it answers.
        label: the name under which its responses are counted; None takes the path.
    """

    path: str
    handler: Callable[[Request], Awaitable[ASGIApp]]
    summary: str = ""
    responses: Mapping[int, str] = field(default_factory=dict)
    body: type[BaseModel] | None = None
    methods: tuple[str, ...] = ("GET",)
    label: str | None = None

    @cached_property
    def route(self) -> Route:
        """The row for Starlette's router, which answers HEAD where it answers GET."""
        return Route(self.path, self.handler, methods=self.methods)


def document(rows: Sequence[Endpoint]) -> dict[str, Any]:
    """The document of those rows that have a summary."""
    paths: dict[str, Any] = {}
    for row in rows:
        if row.summary:
            path = re.sub(r":\w+}", "}", row.path)
            paths[path] = {method.lower(): _operation(row, path) for method in row.methods}
    bodies: Any = [(row.body, "validation") for row in rows if row.body]
    schemas = models_json_schema(bodies, ref_template=_ref("{model}"))[1]["$defs"]
    schemas["Error"] = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}
    info = {"title": "MTAD", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(row: Endpoint, path: str) -> dict[str, Any]:
    in_path = {"in": "path", "required": True, "schema": {"type": "string"}}
    responses: dict[str, dict[str, Any]] = {}
    for status, meaning in {200: "Success.", **row.responses}.items():
        schema = {"content": _json("Error")} if status >= 400 and path.startswith("/v1/") else {}
        responses[str(status)] = {"description": meaning, **schema}
    found: dict[str, Any] = {"summary": row.summary, "responses": responses}
    if row.body:
        found["requestBody"] = {"required": True, "content": _json(row.body.__name__)}
    return found | {"parameters": [{"name": name, **in_path} for name in re.findall(r"{(\w+)", path)]}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _ref(schema)}}}


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"
