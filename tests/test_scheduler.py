"""The row table: pure Python, first in first out, every request ends exactly once."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from mtad.errors import CapacityExceeded, InvalidInput
from mtad.params import DecodingParams
from runtime.request import Request
from runtime.scheduler import Scheduler


def make_request(id: int, prompt: int = 3, **values: int | str) -> Request:
    return Request(id, list(range(prompt)), DecodingParams.from_dict({"max_tokens": 5, **values}), seed=0)


def ids(requests: list[Request]) -> list[int]:
    return [request.id for request in requests]


def test_scheduling_needs_no_torch() -> None:
    modules = "mtad, runtime, runtime.request, runtime.scheduler"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_requests_join_first_in_first_out_and_fill_rows_from_zero() -> None:
    scheduler = Scheduler(rows=3, capacity=256)
    for id in range(5):
        scheduler.submit(make_request(id))
    assert [(row, request.id) for row, request in scheduler.admit()] == [(0, 0), (1, 1), (2, 2)]
    assert scheduler.admit() == []
    assert ids(list(scheduler.waiting)) == [3, 4]
    scheduler.check_integrity()


def test_the_last_row_takes_a_freed_rows_place() -> None:
    scheduler = Scheduler(rows=3, capacity=256)
    for id in range(4):
        scheduler.submit(make_request(id))
    scheduler.admit()
    assert scheduler.retire(0) == 2
    assert ids(scheduler.running) == [2, 1]
    assert scheduler.retire(1) is None
    assert ids(scheduler.running) == [2]
    assert [(row, request.id) for row, request in scheduler.admit()] == [(1, 3)]
    assert [scheduler.retire(1), scheduler.retire(0)] == [None, None]
    assert scheduler.idle


@pytest.mark.parametrize("seed", range(40))
def test_every_request_of_a_random_schedule_ends_exactly_once_in_its_own_row(seed: int) -> None:
    chance = random.Random(seed)
    rows, total = chance.randint(1, 6), 60
    scheduler = Scheduler(rows, capacity=256)
    cache: list[int | None] = [None] * rows
    """What the caches would hold: written on admission, copied as `retire` says."""
    arrived = 0
    started: list[int] = []
    ended: list[int] = []
    while len(ended) < total:
        for _ in range(min(chance.choice([0, 0, 1, 2, 7]), total - arrived)):
            scheduler.submit(make_request(arrived, max_tokens=chance.randint(1, 100)))
            arrived += 1
        for row, request in scheduler.admit():
            cache[row] = request.id
            started.append(request.id)
        assert len(scheduler.running) == min(rows, arrived - len(ended)), "a row is free although a request waits"
        for row in sorted((r for r in range(len(scheduler.running)) if chance.random() < 0.3), reverse=True):
            ended.append(scheduler.running[row].id)
            scheduler.running[row].finish_reason = "length"
            moved = scheduler.retire(row)
            if moved is not None:
                cache[row] = cache[moved]
        scheduler.check_integrity()
        assert ids(scheduler.running) == cache[: len(scheduler.running)], "a request lost its row of the caches"
    assert started == list(range(total))
    assert sorted(ended) == list(range(total))
    assert scheduler.idle


@pytest.mark.parametrize(
    ("field", "prompt", "values"),
    [
        ("draft_len", 3, {"draft_len": 9}),
        ("beam_width", 3, {"beam_width": 9}),
        ("prompt", 192, {"max_tokens": 1}),
        ("prompt", 5000, {"max_tokens": 1}),
        ("max_tokens", 3, {"max_tokens": 190}),
        ("max_tokens", 191, {"max_tokens": 2}),
    ],
)
def test_a_request_that_cannot_fit_is_refused_by_field_and_not_queued(
    field: str, prompt: int, values: dict[str, int]
) -> None:
    scheduler = Scheduler(rows=2, capacity=256)
    with pytest.raises(InvalidInput) as caught:
        scheduler.submit(make_request(0, prompt, **values))
    assert caught.value.field == field
    assert isinstance(caught.value, CapacityExceeded) == (field in ("prompt", "max_tokens"))
    assert scheduler.idle


def test_the_largest_request_that_fits_leaves_room_for_the_largest_draft() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    request = make_request(0, prompt=92, max_tokens=100, draft_len=8, beam_width=8)
    scheduler.submit(request)
    longest = len(request.prompt) + request.params.max_tokens
    assert longest + request.params.longest_tree == scheduler.capacity


def test_methods_without_a_draft_ignore_its_limits() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    scheduler.submit(make_request(0, method="sample", draft_len=64, beam_width=64))
    scheduler.submit(make_request(1, method="speculative", beam_width=64))
    with pytest.raises(InvalidInput, match="draft_len"):
        scheduler.submit(make_request(2, method="speculative", draft_len=64))


def test_a_full_queue_refuses_and_a_batch_that_overflows_it_queues_nothing() -> None:
    scheduler = Scheduler(rows=1, capacity=256, max_waiting=2)
    with pytest.raises(InvalidInput, match="queue"):
        scheduler.submit(make_request(0), make_request(1), make_request(2))
    assert scheduler.idle
    scheduler.submit(make_request(0), make_request(1))
    with pytest.raises(InvalidInput, match="queue"):
        scheduler.submit(make_request(2))
    assert ids(list(scheduler.waiting)) == [0, 1]


def test_a_batch_with_one_bad_request_queues_nothing() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    with pytest.raises(InvalidInput, match="draft_len"):
        scheduler.submit(make_request(0), make_request(1, draft_len=9))
    assert scheduler.idle


def test_check_integrity_notices_what_must_not_be() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    scheduler.submit(make_request(0), make_request(1))
    scheduler.admit()
    scheduler.running.append(scheduler.waiting[0])
    with pytest.raises(AssertionError):
        scheduler.check_integrity()
    scheduler.running.pop()
    scheduler.running[0].finish_reason = "stop"
    with pytest.raises(AssertionError):
        scheduler.check_integrity()
