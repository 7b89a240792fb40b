"""Which request sits in which row. No torch."""

from __future__ import annotations

from collections import deque

from mtad.errors import CapacityExceeded, InvalidInput
from runtime.request import Request


class Scheduler:
    """Admits waiting requests, first in first out, to rows of the KV caches.

    Running requests are always rows 0 .. R-1: when one leaves, the last row takes its place.

    Args:
        rows: rows of the caches.
        capacity: KV columns a row.
        max_draft_len, max_beam_width: largest draft a request may ask for. The batch's draft tree is as deep as its
            deepest and as wide as its widest row, and every row must have room for it, so `max_draft_len x
            max_beam_width` columns of each row are kept free.
        max_waiting: requests that may wait.
    """

    def __init__(
        self, rows: int, capacity: int, max_draft_len: int = 8, max_beam_width: int = 8, max_waiting: int = 100_000
    ) -> None:
        self.rows, self.capacity = rows, capacity
        self.max_draft_len, self.max_beam_width, self.max_waiting = max_draft_len, max_beam_width, max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def check(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            InvalidInput: its draft is larger than this scheduler allows.
            CapacityExceeded: prompt, new tokens and draft tree do not fit a row.
        """
        p = request.params
        if p.drafted > self.max_draft_len:
            raise InvalidInput("draft_len", p.draft_len, f"at most {self.max_draft_len} here (max_draft_len)")
        if p.draft_width > self.max_beam_width:
            raise InvalidInput("beam_width", p.beam_width, f"at most {self.max_beam_width} here (max_beam_width)")
        room = self.capacity - self.max_draft_len * self.max_beam_width
        if len(request.prompt) >= room:
            raise CapacityExceeded("prompt", f"{len(request.prompt)} tokens", f"give fewer than {room} tokens")
        if len(request.prompt) + p.max_tokens > room:
            problem = f"prompt ({len(request.prompt)}) and new tokens must fit {room}; give at most"
            raise CapacityExceeded("max_tokens", p.max_tokens, f"{problem} {room - len(request.prompt)}")

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none of them.

        Raises:
            InvalidInput: one of them is refused by `check`, or the queue has no room for them all.
        """
        for request in requests:
            self.check(request)
        if len(self.waiting) + len(requests) > self.max_waiting:
            problem = f"{len(self.waiting)} of {self.max_waiting} places of the queue are taken; wait, or give fewer"
            raise InvalidInput("requests", len(requests), problem)
        self.waiting.extend(requests)

    def admit(self) -> list[tuple[int, Request]]:
        """Give free rows to waiting requests: (row, request) of each that joined."""
        joined = []
        while self.waiting and len(self.running) < self.rows:
            request = self.waiting.popleft()
            joined.append((len(self.running), request))
            self.running.append(request)
        return joined

    def withdraw(self, ids: set[int]) -> None:
        """Take requests out of the queue."""
        self.waiting = deque(request for request in self.waiting if request.id not in ids)

    def retire(self, row: int) -> int | None:
        """Free a row. Returns the row whose cache must be copied into it, or None if it was the last one."""
        last = self.running.pop()
        if row == len(self.running):
            return None
        self.running[row] = last
        return len(self.running)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    def check_integrity(self) -> None:
        """Invariants of the bookkeeping; raises AssertionError."""
        assert len(self.running) <= self.rows
        known = [request.id for request in (*self.running, *self.waiting)]
        assert len(set(known)) == len(known), "a request is in two places"
        for request in self.running:
            assert request.finish_reason is None, "a finished request holds a row"
            assert request.committed <= self.capacity - self.max_draft_len * self.max_beam_width
