"""One replica: an engine and the server's application, called through Ray instead of a socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.types import Message

from mtad.params import DecodingParams
from runtime.async_llm import AsyncLLM
from runtime.config import RuntimeConfig, use_torch
from runtime.server.app import create_app
from runtime.server.options import ServerOptions
from runtime.server.service import Service
from runtime.server.uvicorn_server import settle_process

log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0


class Replica:
    """An engine of its own behind the application of `runtime.server.app`. It is ready once it has answered a prompt.

    Args:
        options: of the server; keys are the gateway's business.
        board: where it reports.
        generation: of the pair folder, counted by the command.
        stall_after: seconds after which an engine with requests and without a step is broken; signs of life are faster.
    """

    async def __init__(  # type: ignore[misc]
        self, pair: str, config: RuntimeConfig, options: ServerOptions, stall_after: float, board: Any, generation: int
    ) -> None:
        logging.basicConfig(level=logging.INFO)
        use_torch()
        self._engine = await asyncio.to_thread(AsyncLLM, pair, config)
        service = Service(self._engine, options)
        self._app, self._service = create_app(service), service
        settle_process()
        self._engine.start()
        params = DecodingParams.from_dict({"max_tokens": 1, "min_tokens": 0, "n": 1}, self._engine.llm.pair.defaults)
        await (await self._engine.submit("Hello", params)).result()
        where = {"host": socket.gethostname(), "pid": str(os.getpid()), "generation": str(generation)}
        labels = {"replica": serve.get_replica_context().replica_id.unique_id, **where}
        self._reporting = asyncio.create_task(self._report(board, labels))
        self._stall_after, self._progress, self._since = stall_after, dict[str, Any](), 0.0

    async def http(self, head: dict[str, Any], body: bytes, keys: list[bytes]) -> AsyncIterator[list[Message]]:
        """Serve one HTTP request: the ASGI messages of its response. Closing the iterator is the client going away.

        All that has come since the last time are one list, since each one that is sent costs both processes time. An
        empty list is a sign of life: of a machine that is gone, the network may say nothing for minutes.

        Args:
            head: the part of an ASGI scope that says what is asked: method, path, query and headers.
            keys: for `runtime.cluster.router`.
        """
        asked, messages = asyncio.Queue[Message](), asyncio.Queue[Message | None]()
        asked.put_nowait({"type": "http.request", "body": body})
        scope = {"type": "http", "asgi": {"version": "3.0"}, **head}
        serving = asyncio.ensure_future(self._app(scope, asked.get, messages.put))
        serving.add_done_callback(lambda _: messages.put_nowait(None))
        found: list[Message | None] = []
        try:
            yield []  # it is taken: from now on the gateway waits for signs of life
            while None not in found:
                found = []
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._stall_after / 3):  # well within the gateway's limit
                        found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                self._leave_if_broken()  # before an error of the engine's is sent
                yield [message for message in found if message]
            await serving
        finally:
            asked.put_nowait({"type": "http.disconnect"})
            serving.cancel()
            await asyncio.wait({serving})

    def check_health(self) -> None:
        """Raise if the engine hangs, so that the process is replaced; Ray Serve asks."""
        now, progress = self._engine.statistics(), self._engine.llm.loop.totals.to_dict()
        if progress != self._progress or not now["running"] + now["waiting"]:
            self._progress, self._since = progress, time.monotonic()
        elif time.monotonic() - self._since > self._stall_after:
            raise RuntimeError(f"the engine has requests and has made no step for {self._stall_after:g} s")

    async def _report(self, board: Any, labels: dict[str, str]) -> None:
        while True:
            self._leave_if_broken()
            with contextlib.suppress(Exception):  # the board may be starting again
                await board.put.remote((labels, self._service.metrics.families(), self._service.entry))
            await asyncio.sleep(REPORT_SECONDS)

    def _leave_if_broken(self) -> None:
        """With a broken engine, end the process: its requests go elsewhere, and new ones do not find it idle."""
        if self._engine.cause is not None:
            log.critical("the process ends, because its engine broke down: %s", self._engine.cause)
            os._exit(1)
