"""The process around the application: listening, and draining on a signal to stop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtad.errors import InvalidInput
from runtime.resting import REST_RATIO

if TYPE_CHECKING:
    from runtime.async_llm import AsyncLLM
    from runtime.cluster.gateway import Gateway

log = logging.getLogger(__name__)

HEAD_BYTES = 64 * 1024
"""Largest request line and headers together; what is longer is a 400. A proxy in front may allow less."""
READ_BYTES = 1024
"""Read from a connection at a time. h11 takes 20 us for each chunk of a body, even if it holds a single byte: 4 ms for
each connection of a turn of the event loop. An honest body of 1 MiB takes 16 ms, with reads of 4 KiB 6 ms."""
CONNECTIONS_AT_ONCE, CONNECTIONS_WAITING = 16, 2048
"""Connections that a turn of the event loop takes, 0.1 ms each, and that the system keeps; asyncio has one number."""
LONG_READ = 0.002  # seconds of the processor from which on a connection rests after what it read
SWITCH_SECONDS = 0.0005
TRIM_SECONDS = 10.0  # how often freed memory goes back to the system
FLUSH_SECONDS = 5  # for clients to read the rest of their answers, when all are made, before the server ends


class DrainingServer(uvicorn.Server):
    """Listens on while it drains, so that new requests get 503 rather than a refused connection.

    The first signal (or `drain`) stops admission; when what was accepted has ended, the server stops. After
    `drain_seconds`, or on a second signal, what still runs is cancelled.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncLLM | Gateway, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine, self._drain_seconds = engine, drain_seconds
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in self.servers[0].sockets if self.servers else ():
            with listening.dup() as queue:
                queue.listen(CONNECTIONS_WAITING)
            host, port = listening.getsockname()[:2]
            log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived; runs between two bytecodes of the main thread."""
        asyncio.get_running_loop().call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Begin to drain; a second call cancels what still runs. In the event loop."""
        if self._draining is None:
            log.info("draining: no new requests, accepted ones may end (up to %g s)", self._drain_seconds)
            self._draining = asyncio.ensure_future(self._drain())
        else:
            log.info("cancelling what still runs")
            self._hurry = asyncio.ensure_future(self._engine.close(drain=False))

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._engine.close(drain=True)
        except TimeoutError:
            log.warning("cancelling what has not ended after %g s", self._drain_seconds)
            await self._engine.close(drain=False)
        finally:
            self.should_exit = True


class ShortReads(H11Protocol):
    """Reads `READ_BYTES` at a time: asyncio's 256 KiB may be 44,000 chunks, which hold the event loop for 0.6 s.

    After a read that took long of the processor (`LONG_READ`) it rests for `REST_RATIO` times as long, one connection
    after the other: however many send such chunks, after the first read of each they have a quarter of the event loop.
    """

    rested = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        began = time.thread_time()
        super().data_received(data)
        if (took := time.thread_time() - began) > LONG_READ:
            ShortReads.rested = max(self.loop.time(), self.rested) + REST_RATIO * took
            self.transport.pause_reading()
            self.loop.call_at(self.rested, self._read_on)

    def _read_on(self) -> None:
        if not self.flow.read_paused:
            self.transport.resume_reading()


def bind(host: str, port: int) -> socket.socket:
    """A socket with the address, not listening yet; port 0 takes a free one.

    Raises:
        InvalidInput: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        problem = f"cannot be used: {error.strerror}; give another --port or --host"
        raise InvalidInput("host and port", f"{host}:{port}", problem) from None
    return bound


def configure(app: Any, **others: Any) -> uvicorn.Config:
    """Uvicorn's configuration; without an address it takes a free port of this host."""
    return uvicorn.Config(
        app,
        http=ShortReads,  # h11 is the one of uvicorn's that limits heads and answers a connection's requests in turn
        h11_max_incomplete_event_size=HEAD_BYTES,
        loop="asyncio",  # whose transports have a `max_size`
        ws="none",
        log_config=None,
        server_header=False,
        forwarded_allow_ips=os.environ.get("FORWARDED_ALLOW_IPS", ""),  # a client's address from those proxies alone
        backlog=CONNECTIONS_AT_ONCE,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        **{"port": 0, **others},
    )


def settle_process() -> None:
    """What the engine and the event loop, which share a process, are better off with.

    * The garbage collector leaves what is there already: going through it holds everything up for 0.1 s.
    * A thread that waits for Python's interpreter asks for it ten times as often (`SWITCH_SECONDS`).
    * A thread gives back to the system what was freed, which glibc would keep: 10 ms for each 100 MiB.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.collect()  # the next one comes when there are a quarter more objects than the last one found, which now is none
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        threading.Thread(target=_trim, args=(libc.malloc_trim,), name="mtad-trim", daemon=True).start()


def _trim(malloc_trim: Callable[[int], int]) -> None:
    while True:
        time.sleep(TRIM_SECONDS)
        malloc_trim(0)


def serve(app: Any, engine: AsyncLLM | Gateway, bound: socket.socket, drain_seconds: float, **logs: Any) -> None:
    """Serve on a bound socket until drained; returns when the last response is out. `logs` are options of uvicorn."""
    config = configure(app, **logs)
    settle_process()
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(DrainingServer(config, engine, drain_seconds).serve(sockets=[bound]))
