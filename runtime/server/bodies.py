"""Bodies of requests to objects, without a pause that other requests would notice.

Reading JSON holds the interpreter's lock until it is done, in whatever thread it happens. So what a body may hold is
bounded before it is read (`check_body`), and a large one is read by a `RestingThread`: the event loop and the engine
get the lock after at most one of them, and most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic_core import from_json

from runtime.resting import RestingThread
from runtime.server.errors import ApiError

T = TypeVar("T")

MAX_VALUES = 50_000
"""Most values of one body: reading so many takes 5 to 20 ms. Commas and brackets inside strings count as well."""

INLINE_BYTES = 32 * 1024
"""Largest body that is read in the event loop: at most 5 ms, less than it would wait for another thread."""


def check_body(data: bytes) -> None:
    """Refuse a body that has too many values; takes 1 ms per MiB.

    Raises:
        ApiError: 413.
    """
    values = len(data) - len(data.translate(None, b",[{"))
    if values > MAX_VALUES:
        problem = f"the body has {values} commas and opening brackets, and the server reads at most {MAX_VALUES}"
        raise ApiError(413, f"{problem}; send fewer values per request", code="body_too_large")


def read_object(data: bytes) -> dict[str, Any]:
    """A body as a JSON object, to look at before `Body` checks it; empty if it is something else, or too much."""
    try:
        check_body(data)
        values = from_json(data)
    except (ApiError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


class BodyReader(RestingThread):
    """Reads bodies."""

    async def read(self, data: bytes, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, which reads a body or what came of it; at once where it is small."""
        return await self.run(function, *arguments) if len(data) > INLINE_BYTES else function(*arguments)
