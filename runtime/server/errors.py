"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from mtad.errors import CapacityExceeded, InvalidInput, shown
from runtime.async_llm import EngineStopped
from runtime.scheduler.request import RequestFailed
from runtime.scheduler.scheduler import QueueFull

log = logging.getLogger(__name__)

_INVALID = "invalid_request_error"
_MEMBER = re.compile(r"str|int|float|bool|[A-Z].*|.*\W.*")  # of a union, in the place of an error
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


@dataclass(eq=False)
class ApiError(Exception):
    """An error as the client gets it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, Any]:
        kind = "timeout_error" if self.status in (408, 504) else _TYPES.get(self.status, _INVALID)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def timed_out(seconds: float) -> ApiError:
    """A request took longer than the server allows."""
    problem, told = f"not finished after {seconds:g} s, the server's limit; cancelled", {"x-should-retry": "false"}
    return ApiError(504, problem, None, "timeout", told)  # OpenAI's client follows it


def cancelled() -> ApiError:
    """The server gave a request up."""
    return ApiError(503, "the server is shutting down and gave this request up", code="cancelled")


def api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """An exception as the client gets it.

    Args:
        error: whatever was raised while a request was served.
        names: what fields of `DecodingParams` are called in the request, where it differs.
    """
    match error:
        case ApiError():
            return error
        case InvalidInput():
            param = (names or {}).get(error.field, error.field)
            code = "context_length_exceeded" if isinstance(error, CapacityExceeded) else "invalid_value"
            return ApiError(400, f"{param} = {shown(error.value)}: {error.problem}", param, code)
        case ValidationError():
            return _invalid(error)
        case QueueFull():
            seconds = max(error.retry_after, 0.001)
            headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
            return ApiError(429, str(error), code="queue_full", headers=headers)
        case EngineStopped():
            return ApiError(503, f"the engine {error}", code="unavailable", headers={"connection": "close"})
        case RequestFailed(__cause__=InvalidInput() as cause):
            return api_error(cause, names)
        case RequestFailed():
            log.error("%s", error, exc_info=error)
            return ApiError(500, str(error), code="request_failed")
        case HTTPException(status_code=404):
            return ApiError(404, "nothing is at this path; texts come from /v1/chat/completions and /v1/completions")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "an error of the server's own; its log says more", code="internal_error")


def _invalid(error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False)
    alike = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    first = max(alike, key=lambda one: (one["type"] == "unknown_field", len(one["loc"])))  # of unions, what is nearer
    context = first.get("ctx", {})
    if isinstance(context.get("error"), InvalidInput):
        return api_error(context["error"])
    param = _path(first)
    remedy = {"": "; GET /v1/models lists the parameters", "model": "; GET /v1/models lists it"}.get(param, "")
    if first["type"] == "unknown_field":
        name = f"{param}.{context['name'][:100]}".lstrip(".")
        return ApiError(400, f"{name}: {first['msg']}{remedy}", name, "unknown_parameter")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: required{remedy}", param, "missing_required_parameter")
    said = sorted({one["msg"] for one in alike if _path(one) == param})
    given = f" = {shown(first['input'])}" if param else ""
    return ApiError(400, f"{param or 'body'}{given}: {'; or '.join(said)}", param or None, "invalid_type")


def _path(error: Any) -> str:
    """The field that pydantic's error is about."""
    path = [part for part in error["loc"] if isinstance(part, int) or not _MEMBER.fullmatch(part)]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
