"""Large bodies leave the interpreter to others."""

from __future__ import annotations

import asyncio
import time

from runtime.resting import REST_RATIO, RestingThread, Turn
from runtime.server.bodies import INLINE_BYTES, BodyReader


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
