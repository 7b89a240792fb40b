"""Bodies of requests to objects, without a pause that other requests would notice.

Reading JSON holds the interpreter's lock until it is done, in whatever thread it happens. So what a body may hold is
bounded before it is read (`check_body`), and a large one is read in a thread of its own, one at a time, with pauses:
the event loop and the engine get the lock after at most one of them, and most of the time. What else takes long, of
which strangers may ask for much, is done in such threads as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic_core import from_json

from runtime.server.errors import ApiError

T = TypeVar("T")

MAX_VALUES = 50_000
"""Most values of one body: reading so many takes 5 to 20 ms. Commas and brackets inside strings count as well."""

REST_RATIO = 3
"""After each piece of work, the thread rests for so many times as long. Several in a row would otherwise stop the
engine for longer than any one of them does."""

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


class RestingThread:
    """Runs what takes long, one piece at a time, for a quarter of the time at most."""

    def __init__(self) -> None:
        self._thread, self._rested = ThreadPoolExecutor(1, "mtad-resting"), 0.0

    async def read(self, data: bytes, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, which reads a body or what came of it; at once where it is small."""
        return await self.run(function, *arguments) if len(data) > INLINE_BYTES else function(*arguments)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, in turn."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._in_turn, function, *arguments)

    def _in_turn(self, function: Callable[..., T], *arguments: Any) -> T:
        time.sleep(max(0.0, self._rested - time.perf_counter()))
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            ended = time.perf_counter()
            self._rested = ended + REST_RATIO * (ended - began)
