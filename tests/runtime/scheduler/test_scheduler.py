"""The row table: pure Python, first in first out, every request ends exactly once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from mtad.errors import CapacityExceeded, InvalidInput
from mtad.params import DecodingParams
from runtime.scheduler.plan import PromptPiece
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import QueueFull, Scheduler
from tests.support.integrity import check_scheduler


def make_request(id: int, prompt: int = 3, **values: int | str) -> Request:
    return Request(
        id, list(range(prompt)), DecodingParams.from_dict({"method": "mtad", "max_tokens": 5, **values}), seed=0
    )


class Memory:
    """Rows of two caches that always have room: a `KvCaches`, as far as it is asked."""

    def fits(self, requests: Sequence[Request], lookahead: int) -> bool:
        return True

    def stored(self, request: Request, both: bool, running: Sequence[Request], pieces: Sequence[PromptPiece]) -> int:
        return request.target_cached

    def move(self, request: Request, source: int, to: int) -> None:
        pass

    def release(self, row: int) -> None:
        pass


def ids(requests: list[Request]) -> list[int]:
    return [request.id for request in requests]


def admit(scheduler: Scheduler) -> list[int]:
    """Let all that can join do so, at once; their ids."""
    joined = []
    while (request := scheduler.next()) is not None:
        request.target_cached = request.committed - 1
        request.auxiliary_cached = request.committed - 1
        scheduler.join()
        joined.append(request.id)
    return joined


def test_a_larger_priority_goes_first_and_equal_ones_keep_their_order() -> None:
    scheduler = Scheduler(rows=6, capacity=256)
    for id, priority in enumerate([0, 5, 0, -1, 5, 9]):
        request = make_request(id)
        request.priority = priority
        scheduler.submit(request)
    assert ids(scheduler.waiting) == [5, 1, 4, 0, 2, 3]
    assert admit(scheduler) == [5, 1, 4, 0, 2, 3]


def of(client: str, id: int, **values: int) -> Request:
    request = make_request(id, **values)
    request.client = client
    return request


def served(scheduler: Scheduler, tokens: int) -> str:
    """Admit the next request, let it have so many tokens and end; its client."""
    request = scheduler.next()
    assert request is not None
    request.target_cached = request.auxiliary_cached = request.committed - 1
    scheduler.join()
    request.tokens = [0] * tokens
    scheduler.retire(request, cast(Any, Memory()))
    return request.client


def test_a_client_who_asks_for_much_does_not_keep_others_waiting() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    scheduler.submit(*(of("many", id) for id in range(100)))
    assert [served(scheduler, 5) for _ in range(3)] == ["many"] * 3
    scheduler.submit(of("one", 100))
    assert served(scheduler, 5) == "one"
    scheduler.submit(*(of("one", id) for id in range(101, 110)))
    assert [served(scheduler, 5) for _ in range(10)].count("many") == 5, "what it had before is no credit for others"


def test_rows_are_shared_out_by_tokens_and_not_by_requests() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    scheduler.submit(*(of("long", id) for id in range(40)))
    scheduler.submit(*(of("short", id) for id in range(40, 80)))
    tokens = {"long": 97, "short": 7}  # beside 3 of the prompt
    totals = {"long": 0, "short": 0}
    for _ in range(33):
        request = scheduler.next()
        assert request is not None
        totals[served(scheduler, tokens[request.client])] += 3 + tokens[request.client]
    assert abs(totals["long"] - totals["short"]) <= 100


def test_a_client_saves_up_no_rows_while_away() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    scheduler.submit(*(of("a", id) for id in range(20)))
    for _ in range(10):
        served(scheduler, 50)
    scheduler.submit(*(of("b", id) for id in range(20, 40)))
    assert [served(scheduler, 50) for _ in range(8)].count("a") == 4


def test_clients_that_come_once_do_not_keep_one_who_was_served_waiting_for_ever() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    scheduler.submit(of("again", 0))
    assert served(scheduler, 200) == "again"
    scheduler.submit(of("again", 1), of("other", 2))
    order = list[str]()
    for id in range(3, 40):
        scheduler.submit(of(f"new {id}", id))
        order.append(served(scheduler, 50))
    assert "again" not in order[:4], "it had more than they have"
    assert "again" in order


def test_tokens_count_while_they_are_made() -> None:
    scheduler = Scheduler(rows=2, capacity=256)
    scheduler.submit(of("a", 0), of("a", 1), of("a", 2))
    scheduler.submit(of("b", 3), of("b", 4), of("b", 5))
    first = scheduler.next()
    assert first is not None
    scheduler.join()
    first.tokens = [0] * 90
    other = "b" if first.client == "a" else "a"
    assert [served(scheduler, 1) for _ in range(3)] == [other] * 3


def test_a_full_queue_still_takes_the_first_request_of_another_client() -> None:
    scheduler = Scheduler(rows=1, capacity=256, max_waiting=4)
    scheduler.submit(*(of("a", id) for id in range(4)))
    with pytest.raises(QueueFull):
        scheduler.submit(of("a", 4))
    scheduler.submit(of("b", 5))
    with pytest.raises(QueueFull):
        scheduler.submit(of("b", 6))
    with pytest.raises(QueueFull):
        scheduler.submit(*(of("c", id) for id in range(7, 11)))
    scheduler.submit(*(of("c", id) for id in range(7, 10)))
    with pytest.raises(QueueFull):
        scheduler.submit(of("d", 11))
    check_scheduler(scheduler)


def test_clients_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.scheduler.scheduler.MAX_ACCOUNTS", 50)
    scheduler = Scheduler(rows=2, capacity=256)
    scheduler.submit(of("stays", 0))
    admit(scheduler)
    for id in range(1, 500):
        scheduler.submit(of(f"client {id}", id))
        served(scheduler, id % 7)
        assert len(scheduler._accounts) <= 51
    assert "stays" in scheduler._accounts


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
def test_a_request_that_cannot_fit_is_refused_by_field(field: str, prompt: int, values: dict[str, int]) -> None:
    with pytest.raises(InvalidInput) as caught:
        Scheduler(rows=2, capacity=256).check(make_request(0, prompt, **values))
    assert caught.value.field == field
    assert isinstance(caught.value, CapacityExceeded) == (field in ("prompt", "max_tokens"))


def test_the_largest_request_that_fits_leaves_room_for_the_largest_draft() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    request = make_request(0, prompt=92, max_tokens=100, draft_len=8, beam_width=8)
    scheduler.check(request)
    longest = len(request.prompt) + request.max_tokens
    assert longest + sum(request.params.widths) == scheduler.capacity


def test_methods_without_a_draft_ignore_its_limits() -> None:
    scheduler = Scheduler(rows=1, capacity=256)
    scheduler.check(make_request(0, method="sample", draft_len=64, beam_width=64))
    scheduler.check(make_request(1, method="speculative", beam_width=64))
    with pytest.raises(InvalidInput, match="draft_len"):
        scheduler.check(make_request(2, method="speculative", draft_len=64))


def test_a_full_queue_says_when_to_try_again_and_queues_nothing() -> None:
    scheduler = Scheduler(rows=1, capacity=256, max_waiting=2)
    with pytest.raises(InvalidInput, match="max_waiting"):
        scheduler.submit(make_request(0), make_request(1), make_request(2))
    assert scheduler.idle
    scheduler.submit(make_request(0))
    scheduler.pace = 3.0
    with pytest.raises(QueueFull, match="try again in 3") as caught:
        scheduler.submit(make_request(1), make_request(2))
    assert caught.value.retry_after == 3.0
    assert ids(scheduler.waiting) == [0]
    assert scheduler.counts == (0, 1)


def test_requests_of_several_threads_are_queued_once_each_while_others_join_and_leave() -> None:
    scheduler, ended = Scheduler(rows=2, capacity=256, max_waiting=1000), list[int]()

    def client(number: int) -> None:
        for id in range(number * 100, number * 100 + 100):
            scheduler.submit(of(f"client {id % 7}", id))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    while len(ended) < 600:
        running, waiting = scheduler.counts
        assert running + waiting <= 600 - len(ended)
        admit(scheduler)
        for request in list(scheduler.running):
            scheduler.retire(request, cast(Any, Memory()))
            ended.append(request.id)
        check_scheduler(scheduler)
    assert sorted(ended) == list(range(600))


def test_a_step_prefills_prompts_while_its_tokens_last_and_runs_those_that_are_complete() -> None:
    scheduler, memory = Scheduler(rows=4, capacity=256), cast(Any, Memory())
    requests = [make_request(0, prompt=11), make_request(1, prompt=21), make_request(2, prompt=31)]
    scheduler.submit(*requests)
    plan = scheduler.schedule(45, memory, lambda one: True, 0)
    assert [(piece.request.id, piece.row, piece.end) for piece in plan.pieces] == [(0, 0, 10), (1, 1, 20), (2, 2, 15)]
    assert (ids(scheduler.running), plan.spare_tokens) == ([0, 1], 0)
    for piece in plan.pieces:
        piece.request.target_cached = piece.end
    plan = scheduler.schedule(45, memory, lambda one: True, 0)
    assert [(piece.request.id, piece.end) for piece in plan.pieces] == [(2, 30)]
    assert (ids(scheduler.running), plan.spare_tokens) == ([0, 1, 2], 30)


def test_a_prompt_whose_step_was_interrupted_is_prefilled_by_the_next() -> None:
    scheduler, memory = Scheduler(rows=4, capacity=256), cast(Any, Memory())
    scheduler.submit(make_request(0, prompt=11), make_request(1, prompt=21))
    first, again = (scheduler.schedule(100, memory, lambda one: True, 0) for _ in range(2))
    assert again.pieces == first.pieces


def test_requests_give_up_their_rows_until_a_block_fits_and_wait_where_they_were() -> None:
    class Small(Memory):
        """A memory that one request's block fits."""

        def fits(self, requests: Sequence[Request], lookahead: int) -> bool:
            return len(requests) < 2

    scheduler = Scheduler(rows=4, capacity=256)
    scheduler.submit(make_request(0, prompt=11), make_request(1, prompt=21))
    scheduler.schedule(100, cast(Any, Memory()), lambda one: True, 0)
    assert ids(scheduler.make_room(cast(Any, Small()))) == [0]
    assert [(one.id, one.statistics.preemptions) for one in scheduler.waiting] == [(1, 1)]
    (preempted,), before = scheduler.waiting, dict(scheduler._accounts)
    scheduler.retire(preempted, cast(Any, Small()))
    assert scheduler._accounts == {"": before[""] + preempted.cost}, "its client had what was computed for it"


def test_a_request_whose_row_cannot_be_given_away_is_still_known() -> None:
    """Else nobody would tell it that the engine broke down."""

    class Broken(Memory):
        def fits(self, requests: Sequence[Request], lookahead: int) -> bool:
            return len(requests) < 2

        def release(self, row: int) -> None:
            raise AssertionError("rows are lost")

    scheduler = Scheduler(rows=2, capacity=256)
    scheduler.submit(make_request(0), make_request(1))
    admit(scheduler)
    with pytest.raises(AssertionError, match="rows are lost"):
        scheduler.make_room(cast(Any, Broken()))
    assert sorted(request.id for request in scheduler.requests) == [0, 1]


def test_the_tests_own_check_notices_what_must_not_be() -> None:
    def running() -> Scheduler:
        scheduler = Scheduler(rows=2, capacity=256)
        scheduler.submit(make_request(0), make_request(1))
        admit(scheduler)
        scheduler.submit(make_request(2))
        check_scheduler(scheduler)
        return scheduler

    broken = [running() for _ in range(5)]
    broken[0].running[1] = broken[0].running[0]
    broken[1].running.append(broken[1].waiting[0])
    broken[2].running[0].finish_reason = "stop"
    broken[3].running[0].target_cached -= 1
    broken[4].running[0].auxiliary_cached -= 2
    for scheduler in broken:
        with pytest.raises(AssertionError):
            check_scheduler(scheduler)
