"""The OpenAPI document: what the framework knows of its own routes, and the routes that make text."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from runtime.server.schema import Body, ChatCompletionRequest, CompletionRequest

TEXTS: dict[str, tuple[type[Body], str]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts."),
    "/v1/chat/completions": (ChatCompletionRequest, "Answer the last message of a chat."),
}
"""Routes that make text: their bodies, and what they do."""

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


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "content": {"application/json": {"schema": {"$ref": _ref("Error")}}}}
    for status, words in _STATUSES.items()
}
"""Responses by status."""


def document(app: FastAPI) -> None:
    """Put the routes that make text, and their bodies, into the OpenAPI document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            whole = plain()
            kinds = [kind for kind, _ in TEXTS.values()]
            bodies = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_ref("{model}"))[1]
            for path, (kind, words) in TEXTS.items():
                content = {"application/json": {"schema": {"$ref": _ref(kind.__name__)}}}
                whole["paths"][path] = {
                    "post": {
                        "summary": words,
                        "requestBody": {"required": True, "content": content},
                        "responses": {"200": {"description": "OpenAI's object, or server-sent events of its chunks."}}
                        | {str(status): answer for status, answer in ERRORS.items()},
                    }
                }
            detail = {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            }
            error = {"type": "object", "properties": detail, "required": list(detail)}
            schema = {"type": "object", "properties": {"error": error}, "required": ["error"]}
            components = whole.setdefault("components", {}).setdefault("schemas", {})
            components.update(bodies["$defs"], Error=schema)
        assert app.openapi_schema is not None
        return app.openapi_schema

    vars(app)["openapi"] = openapi
