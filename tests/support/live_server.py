"""A real server on a free port of this host, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import uvicorn
from openai import OpenAI

from runtime import LLM, AsyncLLM, RuntimeConfig
from runtime.server.app import create_app
from runtime.server.options import ServerOptions
from runtime.server.uvicorn_server import DrainingServer, configure
from runtime.speculation.step_costs import StepCosts, StepTable
from scripts.paths import ROOT

MODEL = "small"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
COSTS = StepCosts(StepTable((1,), (1,), ((1e-3,),), 64), StepTable((1,), (1,), ((1e-4,),), 64))
"""Known, so that nothing has to be measured."""
PATIENCE = 120.0
"""Seconds after which what should have happened is taken to never happen; nothing is expected to need them."""
STARTING = 1200.0
"""The same for processes that have to start: where cores are short, imports alone take minutes."""


class LiveServer:
    """One server. Attributes: its engine, its address, an OpenAI client of its own."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.engine = AsyncLLM(llm)
        self.options = ServerOptions(**{"model": MODEL, "chat_template": TEMPLATE, "drain_seconds": 5.0, **options})
        config = configure(create_app(self.engine, self.options), self.options)
        self.server = DrainingServer(config, self.engine, self.options.drain_seconds)
        self._thread = threading.Thread(target=self._run, args=(config,))

    def _run(self, config: uvicorn.Config) -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(self.server.serve())

    def start(self) -> None:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            self._thread.join(0.005)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        key = self.options.api_keys[0] if self.options.api_keys else "none"
        self.client: Any = OpenAI(  # its overloads reject what servers have to refuse
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE
        )

    def drain(self) -> None:
        """What SIGTERM does."""
        assert self.server._loop is not None
        self.server._loop.call_soon_threadsafe(self.server.drain)

    def wait(self) -> None:
        """Until it has stopped."""
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive(), "the server does not stop"

    @property
    def statistics(self) -> dict[str, Any]:
        return self.engine.statistics()

    @property
    def leaving(self) -> int:
        """Requests that the engine was told to cancel and has not come to yet, because it is in a pass."""
        return len(self.engine._inbox.cancelled)


@contextmanager
def live(llm: LLM, **options: Any) -> Iterator[LiveServer]:
    """A running server that must drain, and leave its engine sound."""
    server = LiveServer(llm, **options)
    server.start()
    try:
        yield server
    finally:
        server.client.close()
        if server._thread.is_alive():
            server.drain()
        server.wait()
    if server.engine.cause is None:
        server.engine.check_integrity()


def own(plain: LLM, **options: Any) -> LLM:
    """An LLM of a test's own on the engines they share."""
    return LLM(plain.pair, RuntimeConfig(**options), costs=COSTS)


class Gate:
    """Keeps an LLM's thread before each pass of its target until a test lets it go on, so that no request ends early.

    Args:
        llm: a test's own, not started yet.
    """

    def __init__(self, llm: LLM) -> None:
        self._left, self._changed = 0.0, threading.Condition()
        score = llm.loop.caches.target.score

        def kept(*args: Any) -> Any:
            with self._changed:
                assert self._changed.wait_for(lambda: self._left > 0, PATIENCE), "the test has not opened its gate"
                self._left -= 1
            return score(*args)

        vars(llm.loop.caches.target)["score"] = kept

    def let(self, passes: float) -> None:
        """So many passes more."""
        with self._changed:
            self._left += passes
            self._changed.notify_all()

    def open(self) -> None:
        """Any number of them."""
        self.let(math.inf)


class Deadlines:
    """Stands for `asyncio` in a module: what its `timeout` limits ends when a test says so, not after its seconds."""

    def __init__(self) -> None:
        self._begun: list[tuple[float, asyncio.Timeout, asyncio.AbstractEventLoop]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def timeout(self, seconds: float) -> asyncio.Timeout:
        limit = asyncio.timeout(None)
        self._begun.append((seconds, limit, asyncio.get_running_loop()))
        return limit

    def end(self, seconds: float) -> None:
        """Now the seconds of one that was given so many are over; waits for it to begin."""
        until(lambda: any(one[0] == seconds for one in self._begun))
        found = next(one for one in self._begun if one[0] == seconds)
        self._begun.remove(found)
        _, limit, loop = found
        loop.call_soon_threadsafe(lambda: limit.reschedule(loop.time()))


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from runtime.commands.serve import main; main()", *arguments, "--port", "0"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def url(self, seconds: float = STARTING) -> str:
        found: list[str] = []

        def listening() -> bool:
            assert self.process.poll() is None, self.log
            found[:] = re.findall(r"listening on (http://127\.0\.0\.1:\d+)", self.log)
            return bool(found)

        until(listening, seconds)
        return found[0]


def call(
    server: LiveServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    """One request with a client that adds nothing of its own: status, headers, body (JSON, or bytes)."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = ({"content-type": "application/json"} if data is not None else {}) | headers
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in given.items()})
        response = connection.getresponse()
        raw = response.read()
        known = {name.lower(): value for name, value in response.getheaders()}
        return response.status, known, json.loads(raw) if "json" in known.get("content-type", "") else raw
    finally:
        connection.close()


def ask(server: LiveServer, **body: Any) -> tuple[int, Any]:
    status, _, answer = call(server, "POST", "/v1/completions", {"model": MODEL, "prompt": "S", **body})
    return status, answer


def until(what: Callable[[], bool], seconds: float = PATIENCE) -> None:
    pause = 0.002 if seconds < STARTING else 0.1  # what is asked all the time is itself kept from starting
    end = time.perf_counter() + seconds
    while not what():
        assert time.perf_counter() < end, "it did not happen"
        time.sleep(pause)
