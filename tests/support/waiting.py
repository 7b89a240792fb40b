"""Waiting for engines in other threads and processes, and making them wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import DEFAULT, Mock

from mtad import LLM, RuntimeConfig

PATIENCE = 120.0
"""Seconds after which what should have happened is taken to never happen; nothing is expected to need them."""
STARTING = 1200.0
"""The same for processes that have to start: where cores are short, imports alone take minutes."""


def own(plain: LLM, **options: Any) -> LLM:
    """An LLM of a test's own on the engines they share."""
    return LLM(plain.pair, RuntimeConfig(**options))


class Gate:
    """Keeps an LLM's thread before each pass of its target until a test lets it go on, so that no request ends early.

    Args:
        llm: a test's own, not started yet.

    Attributes:
        holds: whether the thread is kept now.
    """

    def __init__(self, llm: LLM) -> None:
        self._left, self._changed, self.holds = 0.0, threading.Condition(), False
        run = llm.loop.caches.target.run

        def kept(*args: Any) -> Any:
            with self._changed:
                self.holds = self._left <= 0
                assert self._changed.wait_for(lambda: self._left > 0, PATIENCE), "the test has not opened its gate"
                self._left, self.holds = self._left - 1, False
            return run(*args)

        vars(llm.loop.caches.target)["run"] = kept

    def let(self, passes: float) -> None:
        """So many passes more."""
        with self._changed:
            self._left += passes
            self._changed.notify_all()

    def open(self) -> None:
        """Any number of them."""
        self.let(math.inf)


def break_steps(llm: LLM, problem: str) -> None:
    """The next two steps of the target fail: a request is tried again alone."""
    target = llm.loop.caches.target
    faults = itertools.chain([OSError(problem)] * 2, itertools.repeat(DEFAULT))
    vars(target)["run"] = Mock(wraps=target.run, side_effect=faults)


class Deadlines:
    """Stands for `asyncio` in a module: what its timeouts limit ends when a test says so, not when time is up.

    Attributes:
        at: the times that `timeout_at` was given.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[float | None, asyncio.Timeout, asyncio.AbstractEventLoop]] = []
        self.at: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def timeout_at(self, when: float) -> asyncio.Timeout:
        self.at.append(when)
        return self.timeout(None)

    def timeout(self, seconds: float | None) -> asyncio.Timeout:
        limit = asyncio.timeout(None)
        self._begun.append((seconds, limit, asyncio.get_running_loop()))
        return limit

    def end(self, seconds: float | None = None) -> None:
        """Now the seconds of one that was given so many, or a time, are over; waits for it to begin."""

        def expire(limit: asyncio.Timeout, now: float) -> None:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                limit.reschedule(now)

        def ended() -> bool:
            for given, limit, loop in self._begun:
                if given == seconds and "[active]" in repr(limit):
                    loop.call_soon_threadsafe(expire, limit, loop.time())
                    time.sleep(0.01)
                    return limit.expired()
            return False

        until(ended)


def until(what: Callable[[], bool], seconds: float = PATIENCE) -> None:
    pause = 0.002 if seconds < STARTING else 0.1  # what is asked all the time is itself kept from starting
    end = time.perf_counter() + seconds
    while not what():
        assert time.perf_counter() < end, "it did not happen"
        time.sleep(pause)
