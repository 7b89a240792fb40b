"""Rows of a table of routes, for dispatch and the count of responses, and their OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from mtad import __version__

_OPTIONAL = {"type": ["string", "null"]}
_DETAIL = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _OPTIONAL, "code": _OPTIONAL}
_ERROR = {"type": "object", "properties": _DETAIL, "required": list(_DETAIL)}


@dataclass(frozen=True)
class Endpoint:
    """One row.

    Attributes:
        path: in Starlette's notation. Requests below `/v1/` need a key, also those for paths that are in no row.
        handler: makes the response to a request; a response is an ASGI application.
        summary: for the OpenAPI document, which leaves out rows without one.
        methods: those that it answers.
    """

    path: str
    handler: Callable[[Request], Awaitable[ASGIApp]]
    summary: str = ""
    body: type[BaseModel] | None = None
    methods: tuple[str, ...] = ("GET",)

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
    others: dict[str, Any] = {"description": "An error; its message says what to do."}
    if path.startswith("/v1/"):
        others["content"] = _json("Error")
    responses = {"200": {"description": "Success."}, "default": others}
    found: dict[str, Any] = {"summary": row.summary, "responses": responses}
    if row.body:
        found["requestBody"] = {"required": True, "content": _json(row.body.__name__)}
    return found | {"parameters": [{"name": name, **in_path} for name in re.findall(r"{(\w+)", path)]}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _ref(schema)}}}


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"
