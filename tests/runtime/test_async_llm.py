"""The engine in a thread of its own: streams, cancellation, refusal, failure, drain."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput
from runtime.async_llm import AsyncLLM, EngineStopped
from runtime.scheduler.request import RequestFailed
from tests.runtime.test_llm import BASE, PROMPTS
from tests.support.integrity import check_engine
from tests.support.waiting import PATIENCE, Gate, own, until

LONG = replace(BASE, max_tokens=120)


@pytest.fixture
def llm(plain: LLM) -> LLM:
    return own(plain, max_waiting=8)


@asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[AsyncLLM]:
    """A running engine that must be sound and idle in the end."""
    async with AsyncLLM(llm) as engine:
        yield engine
    check_engine(engine)


async def test_choices_are_the_same_as_their_seeds_alone(plain: LLM, llm: LLM) -> None:
    async with serving(llm) as engine:
        stream = await engine.submit(PROMPTS[4], replace(BASE, n=3, temperature=1.5, top_p=1.0, top_k=0))
        results = await stream.results()
    assert [result.index for result in results] == [0, 1, 2]
    assert len({tuple(result.token_ids) for result in results}) == 3
    assert results[0].seed == 5
    for result in results:
        alone = plain.generate(PROMPTS[4], replace(BASE, seed=result.seed, temperature=1.5, top_p=1.0, top_k=0))
        assert result.token_ids == alone[0].token_ids
    length = len(results[0].prompt_token_ids)
    assert [r.statistics.reused_tokens for r in results] == [0, length - 1, length - 1], "they share the prompt"


async def test_a_stream_that_is_dropped_unread_frees_its_row_and_one_that_is_read_goes_on(llm: LLM) -> None:
    gate = Gate(llm)
    async with serving(llm) as engine:
        await engine.submit(PROMPTS[0], LONG)
        reading = asyncio.create_task((await engine.submit(PROMPTS[1], LONG)).result())
        gate.let(2)
        await asyncio.to_thread(until, lambda: gate.holds)
        gc.collect()
        gate.open()
        assert (await reading).finish_reason == "length"
        assert llm.loop.totals.requests["cancelled"] == 1


async def test_a_stream_is_dropped_without_waiting_for_what_the_engine_holds(llm: LLM) -> None:
    """Garbage is collected in any thread, in the middle of anything."""
    held, dropped = threading.Event(), threading.Event()

    async with serving(llm) as engine:

        def hold() -> bool:
            with engine._changed:
                held.set()
                return dropped.wait(PATIENCE)

        stream = await engine.submit(PROMPTS[0], LONG)
        holding = asyncio.create_task(asyncio.to_thread(hold))
        await asyncio.to_thread(held.wait)
        del stream
        gc.collect()
        dropped.set()
        assert await holding, "it waited until the lock was free"
    assert llm.loop.totals.requests["cancelled"] == 1


async def test_a_waiting_or_joining_request_can_be_cancelled(llm: LLM) -> None:
    gate = Gate(llm)
    async with serving(llm) as engine:
        streams = [await engine.submit(PROMPTS[0], LONG) for _ in range(8)]
        for stream in reversed(streams):
            stream.cancel()
        gate.open()
        results = [await stream.result() for stream in streams]
        assert {result.finish_reason for result in results} == {"cancelled"}


async def test_a_stream_that_is_cancelled_or_left_early_keeps_what_it_had_and_ends_no_other(llm: LLM) -> None:
    gate = Gate(llm)
    async with serving(llm) as engine:
        streams = [await engine.submit(prompt, LONG) for prompt in PROMPTS]
        left, other = (asyncio.create_task(stream.result()) for stream in streams[2:4])
        gate.let(3)  # the first may be alone in one of them
        first = aiter(streams[0])
        await anext(first)
        streams[0].cancel()
        async for _ in streams[1]:
            break
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        gate.open()
        *_, last = [piece async for piece in first]
        assert last.statistics is not None
        assert (last.finish_reason, last.statistics.tokens < 120) == ("cancelled", True)
        assert len((await other).token_ids) == 120
        streams[0].cancel()  # has ended: nothing happens
    assert llm.loop.totals.requests["cancelled"] == 3


async def test_bad_input_is_refused_at_once_by_field(llm: LLM) -> None:
    async with serving(llm) as engine:
        with pytest.raises(InvalidInput, match=r"^params[ :]"):
            await engine.submit("S", {"max_tokens": 3})  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=r"^n[ :]"):
            await engine.submit("S", replace(BASE, n=9))
        with pytest.raises(InvalidInput, match="priority"):
            await engine.submit("S", BASE, priority="high")  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="prompts"):
            await engine.submit_many((word for word in "ab"), BASE)  # type: ignore[arg-type]
        one = await (await engine.submit_many("a text", BASE)).results()
        assert len(one) == 1, "a text is one prompt, and not its letters"
        assert (await (await engine.submit("S", BASE)).result()).finish_reason == "length", "still serving"


def test_options_of_what_is_made_already_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidInput, match="config"):
        AsyncLLM(llm, RuntimeConfig(rows=2))
    for name, value in {"rows": 2, "memory": "1GiB", "threads": 1}.items():
        with pytest.raises(InvalidInput, match=f"^{name}[ :]"):
            LLM(llm.pair, RuntimeConfig(**{name: value}))  # type: ignore[arg-type]


def test_a_request_whose_prompt_is_being_stored_runs_and_the_queue_is_never_longer_than_its_limit(llm: LLM) -> None:
    engine, scheduler = AsyncLLM(llm), llm.loop.scheduler
    scheduler.submit(*(llm.requests(PROMPTS[0], BASE)[0] for _ in range(8)))
    assert scheduler.next() is scheduler.joining is not None
    scheduler.submit(*llm.requests(PROMPTS[0], BASE))
    now = engine.statistics()
    assert (now["running"], now["waiting"]) == (1, 8)
    scheduler.join()
    now = engine.statistics()
    assert (now["running"], now["waiting"]) == (1, 8)


async def test_a_larger_priority_overtakes_those_that_wait(llm: LLM) -> None:
    gate, rows = Gate(llm), llm.pair.target.spec.rows
    priorities = [-1, 0, 0, 3]
    async with serving(llm) as engine:
        fill = await engine.submit_many([PROMPTS[0]] * rows, LONG)
        await asyncio.to_thread(until, lambda: engine.statistics()["running"] == rows)
        streams = [await engine.submit("S", BASE, priority) for priority in priorities]
        gate.open()
        await asyncio.gather(*(stream.results() for stream in [fill, *streams]))
    requests = [stream.requests[0] for stream in streams]
    admitted = [request.arrived + request.statistics.queue_seconds for request in requests]
    assert admitted[3] < admitted[1] < admitted[2] < admitted[0]


async def test_a_broken_invariant_stops_the_engine_and_fails_everyone_with_the_cause(llm: LLM) -> None:
    gate = Gate(llm)

    def broken() -> Any:
        raise AssertionError("rows are lost")

    async with AsyncLLM(llm) as engine:
        streams = [await engine.submit(PROMPTS[0], LONG)]
        await asyncio.to_thread(until, lambda: engine.statistics()["running"] == 1)
        streams.append(await engine.submit(PROMPTS[1], LONG))
        vars(llm.loop)["step"] = broken
        gate.open()
        for stream in streams:
            with pytest.raises(RequestFailed, match="rows are lost"):
                await stream.result()
        with pytest.raises(EngineStopped) as caught:
            await engine.submit(PROMPTS[0], BASE)
        assert isinstance(caught.value.__cause__, AssertionError)


async def test_an_engine_that_breaks_between_two_requests_leaves_no_stream_waiting(llm: LLM) -> None:
    gate = Gate(llm)

    def broken(*_: int) -> None:
        raise AssertionError("the row cannot be moved")

    async with AsyncLLM(llm) as engine:
        ends = await engine.submit(PROMPTS[0], replace(LONG, max_tokens=40))
        await asyncio.to_thread(until, lambda: gate.holds)
        goes_on = await engine.submit(PROMPTS[1], LONG)
        gate.let(1)
        await asyncio.to_thread(until, lambda: engine.statistics()["running"] == 2)
        vars(llm.loop.caches)["move"] = broken
        gate.open()
        async with asyncio.timeout(PATIENCE):
            assert (await ends.result()).finish_reason == "length"
            with pytest.raises(RequestFailed, match="cannot be moved"):
                await goes_on.result()


async def test_an_engine_that_hangs_keeps_no_process_from_ending(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.async_llm.STOP_SECONDS", 0.1)
    gate, engine = Gate(llm), AsyncLLM(llm)
    engine.start()
    stream = await engine.submit(PROMPTS[0], LONG)
    await asyncio.to_thread(until, lambda: gate.holds)
    async with asyncio.timeout(PATIENCE):
        await engine.close(drain=False)
        await engine.close()  # does not wait once more
    gate.open()
    assert (await stream.result()).finish_reason == "cancelled"
    await engine.close()


async def test_closing_drains_and_then_refuses(llm: LLM) -> None:
    engine = AsyncLLM(llm)
    with pytest.raises(EngineStopped, match="new"):
        await engine.submit(PROMPTS[0], BASE)
    engine.start()
    streams = [await engine.submit(prompt, BASE) for prompt in PROMPTS]
    await engine.close()
    for stream in streams:
        assert len((await stream.result()).token_ids) == 24
    with pytest.raises(EngineStopped, match="stopped"):
        await engine.submit(PROMPTS[0], BASE)
    with pytest.raises(EngineStopped):
        engine.start()
    await engine.close()
    check_engine(engine)


async def test_the_event_loop_is_not_blocked_while_the_engine_works(llm: LLM) -> None:
    gate = Gate(llm)
    async with serving(llm) as engine:
        first = aiter(await engine.submit(PROMPTS[0], BASE))
        gate.let(1)
        await anext(first)  # the engine goes on to its second pass, which ends when this event loop says so
        second = await engine.submit(PROMPTS[1], BASE)
        assert await asyncio.to_thread(engine.llm.tokenize, "S")
        now = engine.statistics()
        assert now["running"] + now["waiting"] == 2
        gate.open()
        assert (await second.result()).finish_reason == "length"
        assert [piece async for piece in first][-1].finish_reason == "length"


async def test_long_texts_wait_for_each_other_and_short_ones_do_not(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.async_llm.LONG_TEXT", 100)
    tokenize, begun, go = llm.tokenize, list[str](), threading.Event()

    def slowly(text: str) -> list[int]:
        if len(text) > 100:
            begun.append(text)
            assert go.wait(PATIENCE)
        return tokenize(text)

    monkeypatch.setattr(llm, "tokenize", slowly)
    async with serving(llm) as engine:
        long = [asyncio.create_task(engine.submit("S " * 60, BASE)) for _ in range(6)]
        short = await (await engine.submit("S", BASE)).result()
        assert short.token_ids
        assert len(begun) == 1
        go.set()
        for stream in await asyncio.gather(*long):
            stream.cancel()


def test_several_event_loops_share_an_engine(plain: LLM, llm: LLM) -> None:
    expected = [result.token_ids for result in plain.generate(PROMPTS, BASE)]
    engine = AsyncLLM(llm)
    engine.start()
    found: dict[int, list[int]] = {}

    def client(number: int) -> None:
        async def ask() -> None:
            found[number] = (await (await engine.submit(PROMPTS[number], BASE)).result()).token_ids

        asyncio.run(ask())

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(engine.close())
    check_engine(engine)
    assert [found[number] for number in range(len(PROMPTS))] == expected
