"""Large bodies leave the interpreter to others."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Message, Receive, Scope, Send

from runtime.resting import REST_RATIO, RestingThread, Turn
from runtime.server.bodies import INLINE_BYTES, BodyReader
from runtime.server.middleware import Guard
from runtime.server.options import ServerOptions


async def test_work_that_takes_long_takes_turns_and_leaves_most_of_the_time_to_others() -> None:
    """Bodies as well as any other kind of it."""
    turn, seconds, large = Turn(), 0.01, b" " * (INLINE_BYTES + 1)
    reader, other = BodyReader(turn), RestingThread(turn)
    began = time.perf_counter()
    await asyncio.gather(
        *(reader.read(large, time.sleep, seconds) for _ in range(2)),
        *(other.run(time.sleep, seconds) for _ in range(2)),
    )
    assert time.perf_counter() - began >= seconds * (4 + REST_RATIO * 3)


async def test_small_bodies_do_not_wait_for_large_ones() -> None:
    reader = BodyReader(Turn())
    large = asyncio.create_task(reader.read(b" " * (INLINE_BYTES + 1), time.sleep, 0.05))
    await asyncio.sleep(0)
    await reader.read(b"{}", int)
    assert not large.done()
    await large


async def test_bodies_that_are_complete_at_once_are_taken_by_as_many_turns_of_the_event_loop() -> None:
    turn, taken, complete = 0, list[int](), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        taken.append(turn)

    async def receive() -> Message:
        await complete.wait()
        return {"type": "http.request", "body": b"{}"}

    async def count() -> None:
        nonlocal turn
        while len(taken) < 20:
            turn += 1
            await asyncio.sleep(0)

    guard = Guard(app, ServerOptions("m"), lambda path, status: None)
    scope = {
        "type": "http",
        "path": "/v1/completions",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
    }
    requests = [asyncio.create_task(guard(dict(scope), receive, send=None)) for _ in range(20)]  # type: ignore[arg-type]
    for _ in range(100):
        await asyncio.sleep(0)
    complete.set()
    await asyncio.gather(count(), *requests)
    assert len(set(taken)) == 20
