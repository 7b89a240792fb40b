"""The soak run itself: a short one passes, and each thing it looks for is found when it is there."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtad.methods import METHODS
from runtime import LLM, AsyncLLM, RuntimeConfig
from scripts.soak.__main__ import CLIENTS_EXTRA, WAITING, check_ends, compare, soak
from scripts.soak.figures import Seen, trend
from scripts.soak.jobs import Job, make_job
from tests.support.checkpoints import TEXT
from tests.support.waiting import PATIENCE

COUNT, SEED = 100, 3
Ran = tuple[Seen, dict[str, Any], list[Job], LLM]


@pytest.fixture(scope="module")
def ran(pair_folders: Callable[[str], Path]) -> Ran:
    """A short soak on the random pair, and another LLM to compare with."""
    folder = pair_folders("onnx")
    llm, seen, engines = LLM(folder, RuntimeConfig(threads=1, rows=4, max_waiting=WAITING)), Seen(), list[AsyncLLM]()
    prompts = [list(llm.pair.tokenizer(text).input_ids) for text in TEXT]
    score, end = llm.loop.caches.target.run, time.monotonic() + PATIENCE

    def engine(llm: LLM) -> AsyncLLM:
        engines.append(AsyncLLM(llm))
        return engines[-1]

    def met(*args: Any) -> Any:
        """The first pass lasts until a request was turned away and another one is cancelled."""
        while not (seen.turned_away and cancelled()) and time.monotonic() < end:
            time.sleep(0.002)
        return score(*args)

    def cancelled() -> bool:
        return bool(engines[0]._cancelled or llm.loop.totals.requests["cancelled"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.soak.__main__.Seen", lambda: seen)
        patch.setattr("scripts.soak.__main__.AsyncLLM", engine)
        patch.setitem(vars(llm.loop.caches.target), "run", met)
        _, totals = asyncio.run(soak(llm, prompts, COUNT, SEED, sample=30))
    scheduler = llm.loop.scheduler
    room = scheduler.capacity - scheduler.max_draft_len * scheduler.max_beam_width
    jobs = [make_job(number, SEED, prompts, room) for number in range(COUNT)]
    return seen, totals, jobs, LLM(folder, RuntimeConfig(threads=1, rows=1, prefix_tokens=0))


@pytest.mark.slow
def test_a_short_soak_loses_nothing_and_gives_everyone_what_they_get_alone(ran: Ran) -> None:
    seen, totals, jobs, alone = ran
    check_ends(seen, totals, jobs)
    assert compare(alone, jobs, seen) >= 20
    assert seen.problems == []
    assert len(seen.wholes) == sum(job.cancel is None for job in jobs)
    assert all(first <= whole for first, whole in zip(seen.firsts, seen.wholes, strict=True))


@pytest.mark.slow
def test_a_short_soak_meets_what_it_is_for(ran: Ran) -> None:
    seen, totals, jobs, _ = ran
    assert WAITING < CLIENTS_EXTRA
    assert seen.turned_away > 0
    assert totals["reused_tokens"] > 0
    assert {job.params.method for job in jobs} == set(METHODS)
    assert {job.cancel for job in jobs} == {None, "seconds", "pieces", "leave"}
    assert {job.priority for job in jobs} == {0, 1, 5}
    assert any(job.params.n > 1 for job in jobs)
    assert totals["requests"]["cancelled"] > 0


@pytest.mark.slow
def test_a_job_is_the_same_every_time_and_fits(ran: Ran) -> None:
    _, _, jobs, alone = ran
    prompts = [list(alone.pair.tokenizer(text).input_ids) for text in TEXT]
    for number in (0, 17):
        assert make_job(number, SEED, prompts, 192) == jobs[number]
        assert make_job(number, SEED + 1, prompts, 192) != jobs[number]
    for number in range(2000):
        job = make_job(number, SEED, prompts, 192)
        assert len(job.prompt) + job.params.max_tokens <= 192
        assert job.prompt


@pytest.mark.slow
def test_other_tokens_than_alone_are_found(ran: Ran) -> None:
    seen, _, jobs, alone = ran
    number, choices = next(iter(seen.kept.items()))
    tokens, text = choices[0]
    wrong = Seen(kept={number: [(array("q", [*tokens[:-1], tokens[-1] ^ 1]), text), *choices[1:]]})
    compare(alone, jobs, wrong)
    assert wrong.problems == [f"request {number} ({jobs[number].params.method}): other tokens or text than alone"]


@pytest.mark.slow
def test_a_lost_or_doubled_end_is_found(ran: Ran) -> None:
    seen, totals, jobs, _ = ran
    for change in (-1, 1):
        wrong = Seen(ends=seen.ends.copy(), wholes=seen.wholes)
        wrong.ends["length"] += change
        check_ends(wrong, totals, jobs)
        assert f"the clients saw {seen.ends.total() + change} choices end" in wrong.problems[0]
    broken = {**totals, "requests": {**totals["requests"], "error": 1}}
    wrong = Seen(ends=seen.ends.copy(), wholes=seen.wholes)
    check_ends(wrong, broken, jobs)
    assert "the engine ended" in wrong.problems[0]


@pytest.mark.parametrize("leak", [0.0, 5.0])
def test_the_trend_of_memory_is_the_leak_within_its_error(leak: float) -> None:
    rng, memory, wander = random.Random(0), [], 0.0
    for at in range(0, 2400, 12):
        wander = 0.8 * wander + rng.gauss(0, 0.3)  # neighbouring readings are alike
        start = 40 * min(1.0, at / 500)  # warm-up
        memory.append((at, 600 + start + leak * at / 1000 + wander))
    slope, error = trend(memory)
    assert abs(slope - leak) < 3 * error
    assert 0 < error < 1.5
