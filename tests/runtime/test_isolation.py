"""What one request breaks ends that request, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mtad import LLM, DecodingParams
from mtad.errors import Failed
from mtad.methods import METHODS
from runtime.decoder.block import Block, BlockInput
from runtime.loop import DecodingLoop
from runtime.scheduler.request import Request
from tests.runtime.test_schedules import make_mock
from tests.support.integrity import check_loop
from tests.support.mock_engine import spoiled
from tests.support.steps import change

POISON = 0.77
"""A temperature at which blocks break, once they have run and their caches have changed."""
DRAFTED = [name for name in METHODS if name != "sample"]


def make(count: int, bad: Sequence[int] = ()) -> list[Request]:
    """Requests of all methods, with drafts that no clock decides; those of `bad` have the poison."""
    base = DecodingParams(draft_len=3, beam_width=3, max_tokens=20, ignore_eos=True)
    each = [
        replace(base, method=DRAFTED[i % len(DRAFTED)], temperature=POISON if i in bad else 1.0) for i in range(count)
    ]
    return [Request(i, [1 + i % 7, 2, 3 + i % 5], params, seed=i) for i, params in enumerate(each)]


def run(loop: DecodingLoop, requests: list[Request]) -> list[Request]:
    loop.scheduler.submit(*requests)
    while not loop.scheduler.idle:
        loop.step()
        check_loop(loop)
    return requests


def poison(loop: DecodingLoop, monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    """Break the blocks of poisoned rows; returns how many rows each block that broke had."""
    broken: list[int] = []
    run_block = loop._runner.run

    def breaking(given: BlockInput) -> Block:
        block, roles = run_block(given), (loop.caches.target, loop.caches.auxiliary)
        if any(params.temperature == POISON for params in given.params):
            for row, committed in enumerate(given.committed):
                for role in roles:
                    change(role.engine, row, slice(committed, None), spoiled)
            broken.append(len(given.committed))
            raise error
        return block

    monkeypatch.setattr(loop._runner, "run", breaking)
    return broken


@pytest.mark.usefixtures("idle_afterwards")
def test_on_a_real_engine_the_others_have_the_bits_they_would_have_had(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(llm.loop, make(7))
    broken = poison(llm.loop, monkeypatch, ArithmeticError("poisoned"))
    found = run(llm.loop, make(7, bad=(1, 5)))
    assert [request.finish_reason for request in found] == ["error" if i in (1, 5) else "length" for i in range(7)]
    assert str(found[1].error) == "poisoned"
    for one, other in zip(expected, found, strict=True):
        if other.error is None:
            assert one.tokens == other.tokens
            # PyTorch's products round differently by the rows of a batch
            exact = llm.pair.target.spec.format == "onnx"
            assert other.log_probs == (one.log_probs if exact else pytest.approx(one.log_probs, abs=1e-5))
    assert 3 <= len(broken) <= 4
    assert not any(role.engine.cache.kv.isnan().any() for role in (llm.loop.caches.target, llm.loop.caches.auxiliary))


@pytest.mark.slow
def test_those_that_break_a_block_are_found_by_running_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_mock(rows=16).loop, make(16))
    for bad in ((0,), (11,), (15,), (0, 15), (3, 4, 9)):
        loop = make_mock(rows=16).loop
        broken = poison(loop, monkeypatch, ArithmeticError("poisoned"))
        found = run(loop, make(16, bad))
        assert [i for i, request in enumerate(found) if request.error] == list(bad)
        assert all(a.tokens == b.tokens for a, b in zip(expected, found, strict=True) if b.error is None), bad
        assert len(broken) <= 2 * len(bad), "once in a block of all, and once alone"
        assert not any(role.engine.cache.kv.isnan().any() for role in (loop.caches.target, loop.caches.auxiliary)), bad


def test_a_broken_engine_ends_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, breaks in ((Failed("a rank is gone"), 1), (OSError("no device"), 17)):
        loop, tries = make_mock(rows=16).loop, list[BlockInput]()

        def breaking(given: BlockInput, tries: list[BlockInput] = tries, error: Exception = error) -> Block:
            tries.append(given)
            raise error

        monkeypatch.setattr(loop._runner, "run", breaking)
        if isinstance(error, Failed):  # whatever is asked of the caches of an engine that is gone fails as well
            monkeypatch.setattr(loop.caches, "discard_block", lambda requests, error=error: breaking(requests))
        found = run(loop, make(16))
        assert {request.error for request in found} == {error}
        assert len(tries) <= 2 * breaks, "they join in two steps"


def test_an_error_that_does_not_come_again_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_mock(rows=4).loop, make(4))
    mock = make_mock(rows=4)
    run_block, faults = mock.loop._runner.run, [OSError("once")]

    def breaking(given: BlockInput) -> Block:
        block = run_block(given)
        if faults and len(given.committed) == 4:
            raise faults.pop()
        return block

    monkeypatch.setattr(mock.loop._runner, "run", breaking)
    found = run(mock.loop, make(4))
    assert [request.tokens for request in found] == [request.tokens for request in expected]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-37, 1e37])
@pytest.mark.slow
def test_every_number_that_is_accepted_ends_nobody(size: float, method: str) -> None:
    least: dict[str, Any] = (
        {"temperature": 0.01, "repetition_penalty": 1e-6} if size < 1 else {"top_p": 1.0, "draft_confidence": 1.0}
    )
    most: dict[str, Any] = {"logit_bias": {3: -1e9, 4: 1e9}, "repetition_penalty": 1e6, "presence_penalty": -2.0}
    base = DecodingParams(method=method, max_tokens=12, ignore_eos=True, draft_len=3, beam_width=3)
    names = ["accept_threshold", "top_p", "draft_confidence"] if size < 1 else ["accept_threshold", "temperature"]
    if size > 1 and method == "ensemble":  # its threshold is a weight
        names.remove("accept_threshold")
    asked: list[dict[str, Any]] = [{name: size} for name in names]
    asked += [least, most, {**most, **dict.fromkeys(names, size)}]
    each = [replace(base, **values) for values in asked]
    requests = run(make_mock(rows=8).loop, [Request(i, [1, 2, 3], params, seed=i) for i, params in enumerate(each)])
    assert [request.error for request in requests] == [None] * len(each)
