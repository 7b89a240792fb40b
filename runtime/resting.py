"""Work of which strangers may ask for much, with pauses between its pieces for the requests that run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

REST_RATIO, LONGEST_REST = 3, 0.5
"""After each piece of work, the thread rests for so many times as long, but for so many seconds at most. Several in a
row would otherwise stop the engine for longer than any one of them does."""


class Turn:
    """What threads share that rest as if they were one."""

    def __init__(self) -> None:
        self.lock, self.rested = threading.Lock(), 0.0


class RestingThread:
    """Runs one kind of what takes long, one piece at a time, and rests after each.

    Args:
        turn: of all threads that rest together.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn, self._thread = turn, ThreadPoolExecutor(1, "mtad-resting")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, in turn."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._in_turn, function, *arguments)

    def _in_turn(self, function: Callable[..., T], *arguments: Any) -> T:
        with self._turn.lock:
            time.sleep(max(0.0, self._turn.rested - time.perf_counter()))
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                ended = time.perf_counter()
                self._turn.rested = ended + min(REST_RATIO * (ended - began), LONGEST_REST)
