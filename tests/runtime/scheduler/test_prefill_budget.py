"""Prompts that join cost the requests that run a bounded part of a block's time."""

from __future__ import annotations

import pytest

from runtime.scheduler.prefill_budget import MIN_TOKENS, SHARE, PrefillBudget


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
