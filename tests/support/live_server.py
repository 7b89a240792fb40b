"""A real server on a free port of this host, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from typing import Any, Protocol

import uvicorn
from openai import OpenAI

from mtad import LLM, AsyncLLM
from runtime.server.app import create_app
from runtime.server.options import ServerOptions
from runtime.server.service import Service
from runtime.server.uvicorn_server import DrainingServer, configure
from tests.support.integrity import check_engine
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, STARTING, Gate, until

MODEL = "small"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


class LiveServer:
    """One server. Attributes: its engine, its address, an OpenAI client of its own."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.engine = AsyncLLM(llm)
        self.options = ServerOptions(**{"model": MODEL, "chat_template": TEMPLATE, "drain_seconds": 5.0, **options})
        config = configure(create_app(Service(self.engine, self.options)))
        self.server = DrainingServer(config, self.engine, self.options.drain_seconds)
        self._thread = threading.Thread(target=self._run, args=(config,))

    def _run(self, config: uvicorn.Config) -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
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
        self.loop.call_soon_threadsafe(self.server.drain)

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
        return len(self.engine._cancelled)


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
        check_engine(server.engine)


@contextmanager
def gated(llm: LLM, **options: Any) -> Iterator[tuple[LiveServer, Gate]]:
    """A running server, whose engine waits before each pass until a test lets it go on."""
    gate = Gate(llm)
    with live(llm, **options) as server:
        yield server, gate


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


class Listening(Protocol):
    """Whatever has a port on this host."""

    port: int


def call(
    server: Listening, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    """One request with a client that adds nothing of its own: status, headers, body (JSON, or bytes)."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=2 * PATIENCE)
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


@contextmanager
def connected(server: Listening, data: bytes = b"") -> Iterator[socket.socket]:
    """A connection on which something was sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        yield connection


def received(connection: socket.socket, upto: bytes | None = None) -> bytes:
    """What comes until the server closes the connection, or until some of it is there."""
    data = b""
    with suppress(ConnectionError):
        while (upto is None or upto not in data) and (part := connection.recv(65536)):
            data += part
    return data


def ask(server: LiveServer, **body: Any) -> tuple[int, Any]:
    status, _, answer = call(server, "POST", "/v1/completions", {"model": MODEL, "prompt": "S", **body})
    return status, answer
