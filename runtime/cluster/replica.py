"""One replica: an engine and the server's application, called through Ray instead of a socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.types import Message

from runtime.async_llm import AsyncLLM
from runtime.cluster.board import ReplicaReport
from runtime.config import RuntimeConfig, use_torch
from runtime.server.app import application
from runtime.server.options import ServerOptions
from runtime.server.service import Service
from runtime.server.uvicorn_server import freeze

Head = dict[str, Any]
"""The part of an ASGI scope that says what is asked: method, path, query and headers."""

REPORT_SECONDS = 1.0


class Replica:
    """An engine of its own behind the application of `runtime.server.app`.

    Args:
        options: of the server; keys are the gateway's business.
    """

    async def __init__(  # type: ignore[misc]
        self, pair: str, config: RuntimeConfig, options: ServerOptions, board: Any, generation: int
    ) -> None:
        logging.basicConfig(level=logging.INFO)
        use_torch()
        self._engine = await asyncio.to_thread(AsyncLLM, pair, config)
        service = Service(self._engine, options)
        self._app, self._metrics = application(service), service.metrics
        freeze()
        self._engine.start()
        while self._engine.state == "open" and not self._engine.ready:
            await asyncio.sleep(0.01)
        self._board, self._generation = board, generation
        self._id = serve.get_replica_context().replica_id.unique_id
        self._reporting = asyncio.create_task(self._report())

    async def http(self, head: Head, body: bytes, keys: list[bytes]) -> AsyncIterator[Message]:
        """Serve one HTTP request: the ASGI messages of its response. Closing the iterator is the client going away."""
        asked, messages = asyncio.Queue[Message](), asyncio.Queue[Message | None]()
        asked.put_nowait({"type": "http.request", "body": body})

        async def answer() -> None:
            try:
                await self._app({"type": "http", "asgi": {"version": "3.0"}, **head}, asked.get, messages.put)
            finally:
                messages.put_nowait(None)

        serving = asyncio.create_task(answer())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await serving
        finally:
            asked.put_nowait({"type": "http.disconnect"})
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await serving

    def check_health(self) -> None:
        """Raise if the process is to be replaced; Ray Serve asks."""
        if self._engine.cause is not None:
            raise RuntimeError("the engine broke down") from self._engine.cause

    async def _report(self) -> None:
        while True:
            text, _ = self._metrics.render("")
            where = socket.gethostname(), os.getpid()
            report = ReplicaReport(self._id, *where, self._generation, self._engine.ready, text.decode())
            with contextlib.suppress(Exception):  # the board may be starting again
                await self._board.put.remote(report)
            await asyncio.sleep(REPORT_SECONDS)
