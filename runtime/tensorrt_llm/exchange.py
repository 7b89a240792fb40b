"""Courses of requests and answers, many at once: what a row asks next depends on what it was answered."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from runtime.tensorrt_llm.executor import Answer, Ask, Client

T = TypeVar("T")
Course = Generator[list[tuple[Client, Ask]], list[Answer], T]
"""Yields what it asks of executors, is sent the answers in the same order, returns its result."""

POLL = 0.001
"""Seconds to wait for one executor while another has work too."""
PATIENCE = 1.0
"""Seconds to wait for a single one, before looking again."""


@dataclass
class _Flight:
    """A course that waits."""

    course: Course[Any]
    asked: list[tuple[Client, int]] = field(default_factory=list)
    answers: dict[tuple[Client, int], Answer] = field(default_factory=dict)


class Exchange:
    """Runs courses side by side; none waits for another. Owns which request is whose."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight] = {}
        self._whose: dict[tuple[Client, int], Hashable] = {}
        self._ended: list[tuple[Hashable, Any]] = []

    @property
    def keys(self) -> set[Hashable]:
        """Courses that have begun, and whose result was not returned."""
        return set(self._flights).union(key for key, _ in self._ended)

    def start(self, key: Hashable, course: Course[Any]) -> None:
        """Begin a course, up to what it asks first."""
        assert key not in self._flights, "a course of this name runs already"
        self._flights[key] = _Flight(course)
        self._advance(key, None)

    def step(self, seconds: float) -> list[tuple[Hashable, Any]]:
        """Wait until a course ends, `seconds` at most.

        Returns:
            those that ended, each with its result, or the exception that ended it.
        """
        until = time.monotonic() + seconds
        while not self._ended and self._whose:
            left = until - time.monotonic()
            busy = {client for client, _ in self._whose}
            for client in busy:
                wait = POLL if len(busy) > 1 else max(0.0, min(left, PATIENCE))
                for number, answer in client.take(wait):
                    self._receive((client, number), answer)
            if left <= 0:
                break
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, keys: Iterable[Hashable]) -> None:
        """Give up on courses, wherever they are."""
        gone = set(keys)
        self._ended = [(key, outcome) for key, outcome in self._ended if key not in gone]
        for key in gone & self._flights.keys():
            self._drop(key)

    def run(self, course: Course[T]) -> T:
        """A course to its end, alone.

        Raises:
            Exception: whatever ended it.
        """
        key = object()
        self.start(key, course)
        try:
            while True:
                for ended, outcome in self.step(PATIENCE):
                    assert ended is key, "courses that others began are theirs to step"
                    if isinstance(outcome, Exception):
                        raise outcome
                    return cast(T, outcome)
        finally:
            self.cancel([key])

    def _receive(self, number: tuple[Client, int], answer: Answer | Exception) -> None:
        key = self._whose.pop(number, None)
        if key is None:
            return
        flight = self._flights[key]
        if isinstance(answer, Exception):
            self._drop(key)
            self._ended.append((key, answer))
            return
        flight.answers[number] = answer
        if len(flight.answers) == len(flight.asked):
            answers = [flight.answers[each] for each in flight.asked]
            self._advance(key, answers)

    def _advance(self, key: Hashable, answers: list[Answer] | None) -> None:
        """Send a course its answers, and the executors what it asks next."""
        flight = self._flights[key]
        try:
            asks = flight.course.send(cast(Any, answers))
            while not asks:
                asks = flight.course.send([])
            flight.asked, flight.answers = [], {}
            for client in {client for client, _ in asks}:
                for number in client.submit([ask for owner, ask in asks if owner is client]):
                    flight.asked.append((client, number))
                    self._whose[client, number] = key
            numbers = {client: iter([n for owner, n in flight.asked if owner is client]) for client, _ in asks}
            flight.asked = [(client, next(numbers[client])) for client, _ in asks]
        except StopIteration as stop:
            del self._flights[key]
            self._ended.append((key, stop.value))
        except Exception as error:
            self._drop(key)
            self._ended.append((key, error))

    def _drop(self, key: Hashable) -> None:
        flight = self._flights.pop(key)
        for client, number in flight.asked:
            self._whose.pop((client, number), None)
            client.cancel([number])
        flight.course.close()

    def check_integrity(self) -> None:
        """Invariants of the bookkeeping; raises AssertionError."""
        assert set(self._whose.values()) <= self._flights.keys(), "a request that no course waits for"
        for flight in self._flights.values():
            assert len(flight.answers) < len(flight.asked), "a course that could go on"
            for client, number in set(flight.asked) - flight.answers.keys():
                assert (client, number) in self._whose
