"""Large bodies leave the interpreter to others."""

from __future__ import annotations

import asyncio
import time

from runtime.server.bodies import INLINE_BYTES, REST_RATIO, BodyReader


def test_large_bodies_one_after_another_leave_most_of_the_time_to_others() -> None:
    reader, seconds, count = BodyReader(), 0.01, 4

    async def read() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(reader.run(b" " * (INLINE_BYTES + 1), time.sleep, seconds) for _ in range(count)))
        return time.perf_counter() - began

    assert asyncio.run(read()) >= seconds * (count + REST_RATIO * (count - 1))


def test_small_bodies_do_not_wait_for_large_ones() -> None:
    reader = BodyReader()

    async def read() -> bool:
        large = asyncio.create_task(reader.run(b" " * (INLINE_BYTES + 1), time.sleep, 0.05))
        await asyncio.sleep(0)
        await reader.run(b"{}", int)
        first = not large.done()
        await large
        return first

    assert asyncio.run(read())
