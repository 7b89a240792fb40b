"""Which request sits in which row. No torch."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING

from mtad.errors import CapacityExceeded, InvalidInput
from runtime.scheduler.plan import Plan, PromptPiece
from runtime.scheduler.request import Place, Request

if TYPE_CHECKING:
    from runtime.decoder.kv_cache import KvCaches

MAX_ACCOUNTS = 4096
"""Clients whose tokens are remembered."""

SCORED = 2
"""Tokens that one of a prompt whose log-probabilities are asked for counts as, when a step is filled."""


class QueueFull(RuntimeError):
    """The waiting queue is full; try again.

    Attributes:
        retry_after: seconds after which a place is likely to be free.
    """

    def __init__(self, waiting: int, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after:.1f} s")


class Scheduler:
    """Admits waiting requests to rows of the KV caches: larger priority first, then the client who was served least.

    A client's account holds the tokens of its requests so far, and the next row goes to the smallest account, within a
    client to the request that came first (the virtual token counter of arXiv 2401.00588). A client that comes, or comes
    back, begins with the account of the client that was admitted last, or with somewhat less than clients were served
    on average, whichever is larger: waiting saves up nothing, and a stream of new clients starves nobody.

    Running requests are always rows 0 .. R-1, and the one whose prompt is being stored, if any, is row R. When a row
    becomes free the last running request takes its place, and the joining one the last's: `retire` copies them.

    Any thread may submit requests and count them; all else belongs to the thread of the loop.

    Args:
        max_draft_len, max_beam_width: largest draft a request may ask for. The batch's draft tree is as deep as its
            deepest and as wide as its widest row, and every row must have room for it, so `max_draft_len x
            max_beam_width` columns of each row are kept free.
        max_waiting: requests that may wait. As many again may wait of clients who have none waiting yet, so that a
            client who fills the queue does not close it to others.

    Attributes:
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
        # of each client who has some that wait, a heap of their places and themselves
        self._queues: dict[str, list[tuple[Place, Request]]] = {}
        self._accounts: dict[str, int] = {}  # tokens of requests that have ended; without an entry, `_clock`
        self._clock = 0
        self._arrivals = itertools.count()
        self._lock = RLock()  # for the queues, and for who holds a row

    def check(self, request: Request) -> None:
        """Refuse a request that could never run; to be called before it is submitted.

        Raises:
            InvalidInput: its draft is larger than this scheduler allows.
            CapacityExceeded: prompt, new tokens and draft tree do not fit a row.
        """
        room = self.room_for_tokens
        for p in (request.params.thinking, request.params):
            if p.drafted > self.max_draft_len and (p.draft_len != "auto" or (p.form == "branches" and p.uses_model)):
                raise InvalidInput("draft_len", p.draft_len, f"give at most {self.max_draft_len} (max_draft_len)")
            if p.draft_width > self.max_beam_width:
                field = "branching" if p.form == "branches" else "beam_width"
                problem = f"give at most {self.max_beam_width} nodes per level (max_beam_width)"
                raise InvalidInput(field, getattr(p, field), problem)
        if len(request.prompt) + min(1, request.max_tokens) > room:
            raise CapacityExceeded("prompt", f"{len(request.prompt)} tokens", f"give fewer than {room} tokens")
        if len(request.prompt) + request.max_tokens > room:
            problem = f"prompt ({len(request.prompt)}) and new tokens must fit in {room}; give at most"
            raise CapacityExceeded("max_tokens", request.max_tokens, f"{problem} {room - len(request.prompt)}")

    @property
    def room_for_tokens(self) -> int:
        """Tokens that prompt and text of a request may have together."""
        return self.capacity - max(2, self.max_draft_len * self.max_beam_width)  # at least what `first_inputs` runs

    @property
    def lookahead(self) -> int:
        """Columns behind its tokens that a row has room for: the largest draft."""
        return self.capacity - self.room_for_tokens

    def submit(self, *requests: Request) -> None:
        """Queue requests of one client that `check` lets pass, all or none of them.

        Raises:
            InvalidInput: they are more than the queue ever holds.
            QueueFull: the queue has no room for them all just now, or only this client's places are full.
        """
        if len(requests) > self.max_waiting:
            n = requests[0].params.n
            field, value = ("n", n) if n == len(requests) else ("prompt", f"{len(requests) // n} prompts")
            raise InvalidInput(field, value, f"at most {self.max_waiting} requests, prompts times n, fit (max_waiting)")
        with self._lock:
            places = self.max_waiting * (1 if requests[0].client in self._queues else 2)
            waiting = self._count()
            if (missing := waiting + len(requests) - places) > 0:
                raise QueueFull(waiting, self.pace * min(missing, len(requests)))
            if self.idle:
                self._admitted_at = time.perf_counter()
            for request in requests:
                request.place = -request.priority, next(self._arrivals)
                self._queue(request)

    def _queue(self, request: Request) -> None:
        if request.client not in self._queues:
            self._open_account(request.client)
        heapq.heappush(self._queues.setdefault(request.client, []), (request.place, request))

    def _open_account(self, client: str) -> None:
        if len(self._accounts) >= MAX_ACCOUNTS:
            kept = self._queues.keys() | {request.client for request in self.holders}
            known = sorted(self._accounts.items(), key=lambda account: account[1])[-MAX_ACCOUNTS // 2 :]
            known = [(name, tokens) for name, tokens in known if tokens > self._clock]
            self._accounts = dict(known) | {name: self._accounts[name] for name in kept if name in self._accounts}
        self._accounts[client] = max(self._accounts.get(client, 0), self._clock - self._unsettled()[client])

    def _unsettled(self) -> Counter[str]:
        """Tokens of each client's requests that hold a row, which its account does not have yet."""
        tokens = Counter[str]()
        for request in self.holders:
            tokens[request.client] += request.cost
        return tokens

    def _count(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that hold a row, and requests that wait."""
        with self._lock:
            return len(self.running) + (self.joining is not None), self._count()

    @property
    def waiting(self) -> list[Request]:
        """Waiting requests in the order of their priority, then of their arrival."""
        with self._lock:
            return [request for _, request in sorted(entry for queue in self._queues.values() for entry in queue)]

    @property
    def requests(self) -> set[Request]:
        return {*self.waiting, *self.holders}

    @property
    def holders(self) -> list[Request]:
        """Requests that hold a row, by row: those that decode, and the one whose prompt is being stored."""
        return [*self.running, *filter(None, [self.joining])]

    def schedule(
        self, prompt_tokens: int, caches: KvCaches, is_drafted: Callable[[Request], bool], piece_floor: int
    ) -> Plan:
        """Admit requests while rows, memory and tokens last; says which prompts the step prefills.

        A request whose prompt is complete then runs, in the block of the same step.

        Args:
            prompt_tokens: tokens of prompts that the step prefills at most.
            is_drafted: whether a request's prompt is prefilled in the auxiliary's cache as well.
            piece_floor: tokens that a piece counts as, if it has fewer.
        """
        pieces: list[PromptPiece] = []
        left = prompt_tokens
        for row, one in enumerate(self.running):
            if one.target_cached < one.committed - 1:  # a step was interrupted before it had prefilled it
                end = one.committed - 1
                pieces.append(PromptPiece(one, row, end - one.target_cached, end, is_drafted(one)))
        while left > 0 and (self._queues or self.joining):
            request = self.next(lambda one: caches.fits([*self.running, one], self.lookahead))
            if request is None:
                break
            both = is_drafted(request)
            start = caches.stored(request, both, self.running, pieces)
            cost = 1 if request.params.prompt_logprobs is None else SCORED
            end = max(start, min(request.committed - 1, start + math.ceil(left / cost)))
            left -= max(cost * (end - start), piece_floor * (end > start))
            pieces.append(PromptPiece(request, len(self.running), end - start, end, both))
            if end < request.committed - 1 or not request.max_tokens:
                break
            self.join()
        return Plan(pieces, left)

    def make_room(self, caches: KvCaches) -> list[Request]:
        """The running requests, by row, once enough of them were preempted for a block of the others to fit.

        One request alone always fits.
        """
        while not caches.fits(self.running, self.lookahead) and len(self.holders) > 1:
            last = max(self.holders, key=lambda request: request.place)  # of the least priority, back to its place
            try:
                self._leave(last, caches)
            finally:
                with self._lock:
                    self._queue(last)
            last.target_cached = last.auxiliary_cached = 0  # are computed anew, later
            last.statistics.preemptions += 1
        return list(self.running)

    def next(self, fits: Callable[[Request], bool] = lambda request: True) -> Request | None:
        """The request whose prompt is to be stored now, in row `len(running)`; None if none waits or no row is free.

        Args:
            fits: whether the caches have room for a request now; the one whose turn it is waits until they have.
        """
        with self._lock:
            if self.joining is not None:
                return self.joining if fits(self.joining) else None
            if not self._queues or len(self.running) == self.rows:
                return None
            unsettled = self._unsettled()
            accounts = {client: self._accounts[client] + unsettled[client] for client in self._queues}
            first = {client: queue[0][0] for client, queue in self._queues.items()}
            client = min(first, key=lambda one: (first[one][0], accounts[one], first[one][1]))
            if not fits(self._queues[client][0][1]):
                return None
            self._clock = max(self._clock, accounts[client])
            _, self.joining = heapq.heappop(self._queues[client])
            if not self._queues[client]:
                del self._queues[client]
            now = time.perf_counter()
            self.pace += 0.2 * (now - self._admitted_at - self.pace)
            self._admitted_at = now
            return self.joining

    def join(self) -> None:
        """The joining request's prompt is stored: it decodes from now on, where it is."""
        assert self.joining is not None
        with self._lock:
            self.running.append(self.joining)
            self.joining = None

    def retire(self, request: Request, caches: KvCaches) -> None:
        """Take a request out, wherever it is; requests behind its row move up."""
        with self._lock:
            waits = request not in self.holders
            if not waits or request.statistics.preemptions:  # also what it was given before it had to wait again
                self._accounts[request.client] = self._accounts.get(request.client, 0) + request.cost
            if waits:
                queue = self._queues[request.client]
                queue[:] = [entry for entry in queue if entry[1] is not request]
                heapq.heapify(queue)
                if not queue:
                    del self._queues[request.client]
                return
            served = self._queues.keys() | {one.client for one in self.holders}
            self._clock += request.cost // (1 + len(served))  # else new ones could pass the others for ever
        self._leave(request, caches)

    def _leave(self, request: Request, caches: KvCaches) -> None:
        moves = list[tuple[Request, int, int]]()
        with self._lock:  # for the bookkeeping only: copies take time, in which other threads submit requests
            if request is self.joining:
                self.joining = None
            else:
                row, last = self.running.index(request), self.running.pop()
                if last is not request:
                    self.running[row] = last
                    moves.append((last, len(self.running), row))
                if self.joining is not None:
                    moves.append((self.joining, len(self.running) + 1, len(self.running)))
        for moved, source, to in moves:
            caches.move(moved, source, to)
        caches.release(len(self.holders))

    @property
    def idle(self) -> bool:
        return not self.holders and not self._queues
