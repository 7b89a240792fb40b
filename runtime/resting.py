"""Work of which strangers may ask for much, without a pause that running requests would notice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

REST_RATIO = 3
"""After each piece of work, the thread rests for so many times as long. Several in a row would otherwise stop the
engine for longer than any one of them does."""


class RestingThread:
    """Runs one kind of what takes long, one piece at a time.

    All of them together run for a quarter of the time at most: they take turns, so no kind waits for all of another.
    """

    _turn, _rested = threading.Lock(), 0.0

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "mtad-resting")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, in turn."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._in_turn, function, *arguments)

    def _in_turn(self, function: Callable[..., T], *arguments: Any) -> T:
        with self._turn:
            time.sleep(max(0.0, self._rested - time.perf_counter()))
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                ended = time.perf_counter()
                RestingThread._rested = ended + REST_RATIO * (ended - began)
