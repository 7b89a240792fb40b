"""Prompts that join cost the requests that run a bounded part of a block's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtad.params import DecodingParams
from runtime.scheduler.prefill_budget import BESIDE_SECONDS, MIN_TOKENS, SHARE, PrefillBudget
from runtime.scheduler.request import Request
from tests.runtime.test_schedules import make_mock


@pytest.mark.parametrize(("block", "token"), [(0.080, 0.0001), (0.080, 0.0004)])
def test_a_step_with_prompts_takes_as_much_longer_as_is_allowed(block: float, token: float) -> None:
    budget = PrefillBudget(256)
    assert budget.tokens(8) == 256, "nothing is known yet"
    for _ in range(40):
        budget.observe(0, 8, block)
        tokens = budget.tokens(8)
        budget.observe(tokens, 8, block + tokens * token)
    assert tokens * token == pytest.approx(SHARE * block, rel=0.05)
    assert budget.tokens(0) == 256, "nobody waits"


def test_a_slow_machine_prefills_its_least_and_a_fast_one_its_most() -> None:
    for token, expected in ((0.01, MIN_TOKENS), (1e-9, 256)):
        budget = PrefillBudget(256)
        budget.observe(0, 1, 0.003)
        budget.observe(100, 0, 100 * token)
        assert budget.tokens(1) == expected


def test_prompts_are_told_from_the_block_beside_them() -> None:
    budget = PrefillBudget(1000)
    budget.observe(100, 4, 1.0)  # how long such a block takes alone is not known
    budget.observe(0, 4, 0.2)
    assert budget.tokens(4) == 1000
    budget.observe(100, 4, 0.3)
    assert budget.tokens(4) == int(SHARE * 0.2 / 0.001)


def test_beside_a_number_of_rows_that_was_not_seen_a_step_does_not_prefill_its_most() -> None:
    budget = PrefillBudget(256)
    budget.observe(0, 2, 0.01)
    budget.observe(0, 8, 0.08)
    budget.observe(100, 0, 0.1)
    assert [budget.tokens(rows) for rows in (1, 2, 6, 13)] == [MIN_TOKENS, MIN_TOKENS, 20, 20]
    assert budget.tokens(0) == 256


def test_every_row_that_stands_empty_is_worth_as_many_tokens() -> None:
    budget = PrefillBudget(100)
    budget.observe(0, 4, 0.02)
    budget.observe(100, 0, 0.025)
    one = budget.tokens(4)
    assert [budget.tokens(4, empty) for empty in (0, 1, 2, 3)] == [one, one, min(100, 2 * one), min(100, 3 * one)]
    assert MIN_TOKENS < one < 50


@pytest.mark.parametrize(("block", "longest"), [(0.02, BESIDE_SECONDS), (0.4, 0.4)])
def test_prompts_take_no_longer_than_their_bound_or_than_the_block_however_many_wait(
    block: float, longest: float
) -> None:
    budget = PrefillBudget(1000)
    budget.observe(0, 4, block)
    budget.observe(100, 0, 0.1)
    assert budget.tokens(4, 12) == 1000 * longest
    budget.observe(10_000, 0, 100_000.0)
    assert budget.tokens(4, 12) == MIN_TOKENS
    assert budget.tokens(0, 12) == 1000, "nobody waits"


@pytest.mark.parametrize("first", [20, 100])
@pytest.mark.parametrize("empty", [1, 4])
@pytest.mark.parametrize(("fixed", "token", "floor"), [(0.018, 0.000005, 512), (0.02, 0.001, 0), (0.0, 0.001, 0)])
def test_pieces_of_prompts_grow_while_they_take_no_longer_than_short_ones(
    fixed: float, token: float, floor: int, empty: int, first: int
) -> None:
    budget, tokens = PrefillBudget(512), first
    for _ in range(40):
        budget.observe(0, 8, 0.006)
        budget.observe(tokens, 8, 0.006 + fixed + tokens * token, [tokens])
        tokens = budget.tokens(8, empty)
    assert budget.piece_floor == floor
    assert max(floor, MIN_TOKENS) <= tokens <= max(floor, BESIDE_SECONDS / token)


@pytest.mark.parametrize("slow", [16, 64])
def test_one_slow_step_or_one_that_was_quicker_than_its_block_lets_no_piece_grow(slow: int) -> None:
    budget = PrefillBudget(512)
    budget.observe(0, 8, 0.01)
    for tokens in (16, 32, 64):
        budget.observe(tokens, 8, 0.01 + 0.001 * tokens, [tokens])
    budget.observe(slow, 8, 5.0, [slow])
    budget.observe(128, 8, 0.01, [128])
    assert budget.piece_floor == 0


def test_what_is_computed_later_tells_nothing_of_a_pieces_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's piece alone is only sent to a device, and the next block waits for it."""
    loop, seen = make_mock(rows=2, max_prefill_tokens=32).loop, list[tuple[int, list[int]]]()
    monkeypatch.setattr(loop._budget, "observe", lambda tokens, rows, _, pieces=(): seen.append((tokens, [*pieces])))
    params = DecodingParams(method="sample", max_tokens=8, ignore_eos=True)
    loop.scheduler.submit(Request(0, [1] * 81, params, 0))
    for _ in range(4):
        loop.step()
    loop.scheduler.submit(Request(1, [2] * 11, params, 0), Request(2, [3] * 5, replace(params, prompt_logprobs=0), 0))
    loop.step()
    assert seen == [(32, []), (32, []), (16, []), (0, []), (10, [10])]


def test_a_short_piece_counts_as_a_longer_one() -> None:
    loop = make_mock(rows=4).loop
    loop.scheduler.submit(*[Request(i, [1 + i] * 11, DecodingParams(max_tokens=4), i) for i in range(4)])
    plan = loop.scheduler.schedule(40, loop.caches, lambda one: True, 20)
    assert ([piece.tokens for piece in plan.pieces], plan.spare_tokens) == ([10, 10], 0)


def test_empty_rows_are_those_that_requests_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, asked = make_mock(rows=4).loop, list[tuple[int, int]]()

    def tokens(rows: int, empty: int) -> int:
        asked.append((rows, empty))
        return 10

    monkeypatch.setattr(loop._budget, "tokens", tokens)
    params = DecodingParams(method="sample", max_tokens=8, ignore_eos=True)
    loop.scheduler.submit(*[Request(i, [1 + i] * 11, params, i) for i in range(6)])
    while not loop.idle:
        loop.step()
    assert asked[:5] == [(0, 4), (1, 3), (2, 2), (3, 1), (4, 0)]
    assert (0, 0) not in asked


@pytest.mark.parametrize(("asked", "tokens"), [(None, 40), (3, 20)])
def test_a_token_of_a_prompt_that_is_scored_counts_twice(asked: int | None, tokens: int) -> None:
    loop = make_mock(rows=2).loop
    params = DecodingParams(max_tokens=4, prompt_logprobs=asked)
    loop.scheduler.submit(Request(0, [1] * 70, params, 0))
    plan = loop.scheduler.schedule(40, loop.caches, lambda one: True, 0)
    assert [piece.end for piece in plan.pieces] == [tokens]
    assert plan.spare_tokens == 0
