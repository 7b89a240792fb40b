"""Which request sits in which row. No torch."""

from __future__ import annotations

import heapq
import itertools
import time

from mtad.errors import CapacityExceeded, InvalidInput
from runtime.scheduler.request import Request


class QueueFull(RuntimeError):
    """The waiting queue is full; try again.

    Attributes:
        retry_after: seconds after which a place is likely to be free.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after:.1f} s")


class Scheduler:
    """Admits waiting requests to rows of the KV caches: larger priority first, then first come, first served.

    Running requests are always rows 0 .. R-1, and the one whose prompt is being stored, if any, is row R. When a row
    becomes free the last running request takes its place, and the joining one the last's: `retire` says what to copy.

    Args:
        rows: rows of the caches.
        capacity: KV columns a row.
        max_draft_len, max_beam_width: largest draft a request may ask for. The batch's draft tree is as deep as its
            deepest and as wide as its widest row, and every row must have room for it, so `max_draft_len x
            max_beam_width` columns of each row are kept free.
        max_waiting: requests that may wait.

    Attributes:
        running: requests that decode, by row.
        joining: the request whose prompt is being stored, in row `len(running)`.
        pace: seconds between two admissions, a recent mean, for `QueueFull`'s hint.
    """

    def __init__(
        self, rows: int, capacity: int, max_draft_len: int = 8, max_beam_width: int = 8, max_waiting: int = 1024
    ) -> None:
        self.rows, self.capacity = rows, capacity
        self.max_draft_len, self.max_beam_width, self.max_waiting = max_draft_len, max_beam_width, max_waiting
        self.running: list[Request] = []
        self.joining: Request | None = None
        self.pace = 1.0
        self._admitted_at = time.perf_counter()
        self._waiting: list[tuple[int, int, Request]] = []  # heap of (-priority, order of arrival, request)
        self._arrivals = itertools.count()

    def check(self, *requests: Request) -> None:
        """Refuse requests that could never run, or never be queued together.

        Raises:
            InvalidInput: a draft is larger than this scheduler allows, or they are more than the queue ever holds.
            CapacityExceeded: prompt, new tokens and draft tree do not fit a row.
        """
        if len(requests) > self.max_waiting:
            raise InvalidInput("n", len(requests), f"give at most {self.max_waiting} (max_waiting)")
        for request in requests:
            self._check(request)

    def _check(self, request: Request) -> None:
        p = request.params
        if p.drafted > self.max_draft_len:
            raise InvalidInput("draft_len", p.draft_len, f"give at most {self.max_draft_len} (max_draft_len)")
        if p.draft_width > self.max_beam_width:
            field = "branching" if p.spec.form == "branches" else "beam_width"
            problem = f"give at most {self.max_beam_width} nodes per level (max_beam_width)"
            raise InvalidInput(field, getattr(p, field), problem)
        room = self.capacity - self.max_draft_len * self.max_beam_width
        if len(request.prompt) >= room:
            raise CapacityExceeded("prompt", f"{len(request.prompt)} tokens", f"give fewer than {room} tokens")
        if len(request.prompt) + p.max_tokens > room:
            problem = f"prompt ({len(request.prompt)}) and new tokens must fit in {room}; give at most"
            raise CapacityExceeded("max_tokens", p.max_tokens, f"{problem} {room - len(request.prompt)}")

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none of them.

        Raises:
            InvalidInput: `check` refuses them.
            QueueFull: the queue has no room for them all just now.
        """
        if self.idle:
            self._admitted_at = time.perf_counter()
        self.check(*requests)
        if len(requests) > self.room:
            raise QueueFull(len(self._waiting), self.pace * (len(requests) - self.room))
        for request in requests:
            heapq.heappush(self._waiting, (-request.priority, next(self._arrivals), request))

    @property
    def room(self) -> int:
        """Requests the queue still takes."""
        return self.max_waiting - len(self._waiting)

    @property
    def waiting(self) -> list[Request]:
        """Waiting requests, the next one first."""
        return [request for _, _, request in sorted(self._waiting, key=lambda entry: entry[:2])]

    @property
    def requests(self) -> set[Request]:
        """All that run, join or wait."""
        return {request for _, _, request in self._waiting}.union(self.holders)

    @property
    def holders(self) -> list[Request]:
        """Requests that hold a row, by row: those that decode, and the one whose prompt is being stored."""
        return [*self.running, *filter(None, [self.joining])]

    def next(self) -> Request | None:
        """The request whose prompt is to be stored now, in row `len(running)`; None if none waits or no row is free."""
        if self.joining is None and self._waiting and len(self.running) < self.rows:
            self.joining = heapq.heappop(self._waiting)[2]
            now = time.perf_counter()
            self.pace += 0.2 * (now - self._admitted_at - self.pace)
            self._admitted_at = now
        return self.joining

    def join(self) -> None:
        """The joining request's prompt is stored: it decodes from now on, where it is."""
        assert self.joining is not None
        joined, self.joining = self.joining, None  # another thread that counts never counts it twice
        self.running.append(joined)

    def retire(self, request: Request) -> list[tuple[int, int]]:
        """Take a request out, wherever it is; returns the rows to copy, (source, to), in this order."""
        if request is self.joining:
            self.joining = None
            return []
        if request not in self.running:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
            return []
        row, moves = self.running.index(request), []
        last = self.running.pop()
        if last is not request:
            self.running[row] = last
            moves.append((len(self.running), row))
        if self.joining is not None:
            moves.append((len(self.running) + 1, len(self.running)))
        return moves

    @property
    def idle(self) -> bool:
        """Nothing runs, joins or waits."""
        return not self.holders and not self._waiting

    def check_integrity(self) -> None:
        """Invariants of the bookkeeping; raises AssertionError."""
        assert len(self.holders) <= self.rows, "more requests than rows"
        assert len(self._waiting) <= self.max_waiting
        known = [request.id for request in (*self.holders, *self.waiting)]
        assert len(set(known)) == len(known), "a request is in two places"
        for request in self.holders:
            assert request.finish_reason is None, "a finished request holds a row"
            assert request.committed <= self.capacity - self.max_draft_len * self.max_beam_width
        for request in self.running:
            assert request.target_held == request.committed - 1, "the target's cache is not the request's"
            assert 0 <= request.auxiliary_held <= request.committed - 1
            if request.params.assisted and not request.params.adaptive:
                assert request.auxiliary_held >= request.committed - 2, "the auxiliary's cache lags"
