"""A server's memory goes back to the system and is soon freed; its event loop has short turns."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import unittest.mock
import weakref
from pathlib import Path

import pytest
from starlette import applications
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from runtime.resting import REST_RATIO
from runtime.server import uvicorn_server
from runtime.server.middleware import Guard
from runtime.server.options import ServerOptions
from tests.support.waiting import until


class Transport(asyncio.Transport):
    """Says whether it reads."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False


class Circular:
    def __init__(self) -> None:
        self.own = self


def resident() -> int:
    """MiB of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_memory_that_was_freed_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "TRIM_SECONDS", 0.05)
    uvicorn_server.settle_process()
    held = [bytearray(20_000) for _ in range(20_000)]  # each is smaller than what malloc maps by itself
    most = resident()
    del held[::2], held[::3]
    until(lambda: resident() < most - 150)


def test_a_circle_is_collected_however_much_was_there_before() -> None:
    before = [[number] for number in range(600_000)]
    uvicorn_server.settle_process()
    circle = weakref.ref(Circular())
    others = [[number] for number in range(100_000)]
    assert circle() is None
    assert len(before) > len(others)


def test_connections_that_come_at_once_all_get_in_and_a_turn_of_the_event_loop_takes_few_of_them() -> None:
    async def taken() -> list[int]:
        turns, made = list[int](), 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            raise AssertionError("nobody asks for anything")

        class Counted(uvicorn_server.ShortReads):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                nonlocal made
                made += 1
                super().connection_made(transport)

        config = uvicorn_server.configure(app, lifespan="off")
        config.http = Counted
        server = uvicorn_server.DrainingServer(config, unittest.mock.AsyncMock(), 1.0)
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        with contextlib.ExitStack() as stack:
            for _ in range(300):  # this thread is the event loop's: nothing is taken meanwhile
                stack.enter_context(socket.create_connection(address, timeout=0.5))
            while made < 300:
                before = made
                await asyncio.sleep(0)
                turns.append(made - before)
        server.drain()
        await serving
        return turns

    assert 0 < max(asyncio.run(taken())) <= uvicorn_server.CONNECTIONS_AT_ONCE


def test_connections_that_take_long_to_read_rest_one_after_the_other() -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

    async def seconds_of_rest() -> list[float]:
        app = applications.Starlette(routes=[])
        config = uvicorn_server.configure(app, lifespan="off")
        config.load()
        transports, loop = [Transport() for _ in range(3)], asyncio.get_running_loop()
        began = loop.time()
        for transport in transports:
            protocol = uvicorn_server.ShortReads(config, ServerState(), {})
            protocol.connection_made(transport)
            protocol.data_received(head)
            assert transport.reading
            protocol.data_received(b"1\r\na\r\n" * 680)
            assert not transport.reading
        rests = []
        for transport in transports:
            while not transport.reading:
                await asyncio.sleep(0.001)
            rests.append(loop.time() - began)
        return rests

    first, second, third = asyncio.run(seconds_of_rest())
    assert first < second < third
    assert third > 3 * REST_RATIO * uvicorn_server.LONG_READ


async def test_each_turn_of_the_event_loop_begins_one_request() -> None:
    turn, begun = 0, list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(turn)

    async def count() -> None:
        nonlocal turn
        while len(begun) < 20:
            turn += 1
            await asyncio.sleep(0)

    guard, scope = Guard(app, ServerOptions("m"), lambda *_: None), {"type": "http", "path": "/metrics", "headers": []}
    requests = (guard(dict(scope), unittest.mock.AsyncMock(), unittest.mock.AsyncMock()) for _ in range(20))
    await asyncio.gather(count(), *requests)
    assert len(set(begun)) == 20
