"""Random schedules: whatever arrives, is cancelled or breaks, nothing is lost or mixed up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from mtad.params import DecodingParams
from runtime.loop import DecodingLoop
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import QueueFull
from tests.support.integrity import check_loop

Entry = tuple[list[int], DecodingParams, list[int] | None, str]
"""A prompt with its parameters, and the tokens and the text it gets alone; None where they depend on the batch."""


def run_schedule(
    seed: int, loop: DecodingLoop, entries: Sequence[Entry], break_something: Callable[[random.Random], None]
) -> Counter[str]:
    """One random schedule of a loop that is idle, and idle again in the end; how its requests ended."""
    chance = random.Random(f"schedule {seed}")
    faulty, cancelling = chance.random() < 0.4, chance.random() < 0.5
    todo = [chance.randrange(len(entries)) for _ in range(chance.randint(1, 9))]
    entry: dict[int, int] = {}
    live: dict[int, Request] = {}
    reasons = Counter({"stop": 0, "length": 0, "cancelled": 0, "error": 0})
    while todo or not loop.scheduler.idle:
        for _ in range(min(chance.choice([0, 1, 1, 3]), len(todo))):
            prompt, params, _, _ = entries[todo[-1]]
            request = Request(len(entry), prompt, params, params.seed or 0, priority=chance.choice([0, 0, 1]))
            try:
                loop.scheduler.submit(request)
            except QueueFull:
                break
            entry[request.id] = todo.pop()
            live[request.id] = request
        if cancelling and live and chance.random() < 0.1:
            victims = chance.sample(list(live.values()), chance.randint(1, min(2, len(live))))
            loop.cancel(victims)
            assert all(victim.finish_reason == "cancelled" for victim in victims)
            check_loop(loop)
        if faulty and chance.random() < 0.15:
            break_something(chance)
        for request in loop.step():
            assert live.pop(request.id) is request, "ended twice, or never began"
            _, _, tokens, text = entries[entry[request.id]]
            whole = request.finish_reason in ("stop", "length")
            if tokens is not None:
                expected = tokens if whole else tokens[: len(request.tokens)]
                assert request.tokens == expected, f"request {request.id} of schedule {seed}: other tokens than alone"
                assert not whole or request.text == text
            assert (request.error is not None) == (request.finish_reason == "error")
            assert len(request.log_probs) == len(request.tokens)
            reasons[str(request.finish_reason)] += 1
        check_loop(loop)
    assert not live, "lost"
    assert loop.totals.requests == reasons
    return reasons
