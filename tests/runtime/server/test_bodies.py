"""Large bodies leave the interpreter to others."""

from __future__ import annotations

import asyncio
import time

from runtime.resting import REST_RATIO, RestingThread, Turn
from runtime.server.bodies import INLINE_BYTES, BodyReader


async def test_large_bodies_one_after_another_leave_most_of_the_time_to_others() -> None:
    reader, seconds, count = BodyReader(Turn()), 0.01, 4
    began = time.perf_counter()
    await asyncio.gather(*(reader.read(b" " * (INLINE_BYTES + 1), time.sleep, seconds) for _ in range(count)))
    assert time.perf_counter() - began >= seconds * (count + REST_RATIO * (count - 1))


async def test_kinds_of_work_that_takes_long_take_turns() -> None:
    turn, seconds = Turn(), 0.01
    kinds = [RestingThread(turn) for _ in range(3)]
    began = time.perf_counter()
    await asyncio.gather(*(kind.run(time.sleep, seconds) for kind in kinds))
    assert time.perf_counter() - began >= seconds * (len(kinds) + REST_RATIO * (len(kinds) - 1))


async def test_small_bodies_do_not_wait_for_large_ones() -> None:
    reader = BodyReader(Turn())
    large = asyncio.create_task(reader.read(b" " * (INLINE_BYTES + 1), time.sleep, 0.05))
    await asyncio.sleep(0)
    await reader.read(b"{}", int)
    assert not large.done()
    await large
