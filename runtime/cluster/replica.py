"""One replica: an engine and the server's application, called through Ray instead of a socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client.core import Metric
from ray import serve
from starlette.types import Message

from mtad.params import DecodingParams
from runtime.async_llm import AsyncLLM
from runtime.config import RuntimeConfig, use_torch
from runtime.server.app import application
from runtime.server.options import ServerOptions
from runtime.server.service import Service
from runtime.server.uvicorn_server import freeze


class Replica:
    """An engine of its own behind the application of `runtime.server.app`. It is ready once it has answered a prompt.

    Args:
        options: of the server; keys are the gateway's business.
        generation: of the pair folder, counted by the command.
        stall_seconds: after which an engine with requests and without a step is broken.
    """

    async def __init__(  # type: ignore[misc]
        self, pair: str, config: RuntimeConfig, options: ServerOptions, generation: int, stall_seconds: float
    ) -> None:
        logging.basicConfig(level=logging.INFO)
        use_torch()
        self._engine = await asyncio.to_thread(AsyncLLM, pair, config)
        service = Service(self._engine, options)
        self._app, self._metrics = application(service), service.metrics
        freeze()
        self._engine.start()
        params = DecodingParams.from_dict({"max_tokens": 1, "min_tokens": 0, "n": 1}, self._engine.llm.pair.defaults)
        await (await self._engine.submit("Hello", params)).result()
        where = {"host": socket.gethostname(), "pid": str(os.getpid()), "generation": str(generation)}
        self._labels = {"replica": serve.get_replica_context().replica_id.unique_id, **where}
        self._stall_seconds, self._progress, self._since = stall_seconds, dict[str, Any](), 0.0

    async def http(self, head: dict[str, Any], body: bytes, keys: list[bytes]) -> AsyncIterator[Message]:
        """Serve one HTTP request: the ASGI messages of its response. Closing the iterator is the client going away.

        Args:
            head: the part of an ASGI scope that says what is asked: method, path, query and headers.
            keys: for `runtime.cluster.router`.
        """
        asked, messages = asyncio.Queue[Message](), asyncio.Queue[Message | None]()
        asked.put_nowait({"type": "http.request", "body": body})
        scope = {"type": "http", "asgi": {"version": "3.0"}, **head}
        serving = asyncio.ensure_future(self._app(scope, asked.get, messages.put))
        serving.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await serving
        finally:
            asked.put_nowait({"type": "http.disconnect"})
            serving.cancel()
            await asyncio.wait({serving})

    def figures(self) -> tuple[dict[str, str], list[Metric]]:
        """What tells this replica from others, as labels, and its metrics."""
        return self._labels, self._metrics.families()

    def check_health(self) -> None:
        """Raise if the process is to be replaced; Ray Serve asks."""
        if self._engine.cause is not None:
            raise RuntimeError("the engine broke down") from self._engine.cause
        now, progress = self._engine.statistics(), self._engine.llm.loop.totals.to_dict()
        if progress != self._progress or not now["running"] + now["waiting"]:
            self._progress, self._since = progress, time.monotonic()
        elif time.monotonic() - self._since > self._stall_seconds:
            raise RuntimeError(f"the engine has requests and has made no step for {self._stall_seconds:g} s")
