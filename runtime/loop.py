"""The decoding loop.

Each step admits waiting requests, prefills their prompts, and runs one block of every running request: draft, score,
accept, commit (`runtime.decoder.host_runner`, or on a GPU one CUDA graph). The output processor then turns
the block's tokens into text and says which requests have ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from mtad.errors import Failed
from mtad.params import DecodingParams
from runtime.decoder.block import BlockInput, BlockRunner
from runtime.decoder.kv_cache import KvCaches
from runtime.output.processor import OutputProcessor
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.speculation.planner import Planner

CATCH_UP = 4
"""Of the tokens that are prefilled per step, one in so many is for adaptive drafts, however many prompts there are."""

_IDLE = DecodingParams(method="sample", temperature=0.0)
"""Parameters of rows whose block is not kept."""


class DecodingLoop:
    """Runs requests to their end, with in-flight batching: they join and leave between any two blocks.

    A request's tokens depend on its prompt, parameters and seed only, and not on the rest of the batch. Where it asks
    for adaptive drafts, they also depend on how long things take.

    Args:
        scheduler: owns the rows.
        caches: the KV caches of both engines.
        runner: runs blocks.
        output: owns the requests' texts, constraints and figures.
        max_prefill_tokens: Chunked prefill: each step prefills at most so many prompt tokens. What adaptive drafts have
            to catch up on counts as well; where prompts leave nothing, a `CATCH_UP`th more is for it.

    Attributes:
        planner: decides adaptive drafts; None until there is a request that asks for them.
        totals: running totals over all requests.
        prompts_apart: compute prompts before the next block rather than beside it, on engines that would do that; the
            time of blocks is then that of decoding alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        caches: KvCaches,
        runner: BlockRunner,
        output: OutputProcessor,
        max_prefill_tokens: int = 256,
    ) -> None:
        self.scheduler, self.caches, self.output = scheduler, caches, output
        self.totals = output.totals
        self._runner, self._max_prefill_tokens = runner, max_prefill_tokens
        self.planner: Planner | None = None
        self.prompts_apart = False
        self._ended: list[Request] = []

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit and prefill waiting requests, then run one block of every running one.

        Returns:
            the requests that have ended. An error ends only the requests that it concerns, with the reason `error`.
        """
        budget = max(self._prefill(self._max_prefill_tokens), self._max_prefill_tokens // CATCH_UP)
        self._make_room()
        if requests := list(self.scheduler.running):
            self._run(requests, budget)
        ended, self._ended = self._ended, []
        return ended

    def _prefill(self, budget: int) -> int:
        """Admit requests and prefill their prompts while `budget` tokens last; returns what is left of it."""
        while budget > 0 and (request := self.scheduler.next(self._has_room)) is not None:
            began = time.perf_counter()
            try:
                self.output.begin(request)
                both, running = self._is_drafted(request), self.scheduler.running
                budget -= self.caches.prefill(request, both, len(running), budget, running)
                if self.prompts_apart:
                    self.caches.finish()
            except Exception as error:
                self._fail({request: error})
                continue
            self.output.record_prefill(request, began)
            if min(request.target_held, request.auxiliary_held if both else math.inf) == request.committed - 1:
                if request.params.max_tokens:
                    self.scheduler.join()
                else:
                    request.finish_reason = "length"
                    self._release(request)
        return budget

    def _has_room(self, request: Request) -> bool:
        """Whether the caches have memory for a request beside those that run."""
        return self.caches.fits([*self.scheduler.running, request], self.scheduler.ahead)

    def _make_room(self) -> None:
        """Preempt requests until the others' block fits the caches' memory. Those compute their caches anew, later.

        One request alone always fits.
        """
        while len(self.scheduler.holders) > 1 and not self.caches.fits(self.scheduler.running, self.scheduler.ahead):
            request, places = self.scheduler.last, self.scheduler.holders
            self._move_rows(places, self.scheduler.preempt(request))
            request.target_held = request.auxiliary_held = 0
            request.statistics.preemptions += 1
            self.totals.preemptions += 1

    def _run(self, requests: list[Request], budget: int) -> None:
        """Run one block of every request, and end those that break it.

        They are found by halving: each half has a block of its own, from the caches as they were, so one request among
        R costs the others the time of 2 log2 R blocks. Nobody is looked for where the engine itself is broken: the
        error says so (`Failed`), or a block of nobody breaks as well.
        """
        failures: dict[Request, Exception] = {}
        groups = [requests]
        while groups:
            group = groups.pop()
            try:
                failures |= self._block(requests, group, budget)
                if group is not requests:  # what it left in the others' rows may not be numbers, and nobody looked
                    self.caches.restore(requests)
            except Exception as error:
                if not group or isinstance(error, Failed):
                    failures |= {request: error for request in requests if request.finish_reason is None}
                    break
                self.caches.restore(requests)
                middle = len(group) // 2
                if middle:
                    groups += [group[middle:], group[:middle], *([[]] if group is requests else [])]
                else:
                    failures[group[0]] = error
        # rows move only now, when each request knows again how much of its row is right
        self._fail(failures)
        self._release(*(request for request in requests if request.finish_reason in ("stop", "length")))

    def _block(self, requests: list[Request], group: list[Request], budget: int) -> dict[Request, Exception]:
        """Draft, score, accept, commit, output: one block of all rows, of which only `group`'s is kept.

        If `budget` does not last to bring the auxiliary's caches up to date, adaptive rows wait for each other: a block
        costs what its largest row's draft costs, be it for that row alone.

        Returns:
            what broke, by request; the others' is as it should be.
        """
        params = [request.params for request in requests] if self.planner is None else self.planner.plan(requests)
        members, whole = set(group), group is requests
        if not whole:
            params = [p if request in members else _IDLE for p, request in zip(params, requests, strict=True)]
        if self.planner:
            began = time.perf_counter()
            current = self.caches.catch_up(requests, [p.drafts for p in params], budget)
            self.output.totals.prefill_seconds += time.perf_counter() - began
            if not current:
                params = [replace(p, method="sample") if p.adaptive and p.drafts else p for p in params]
        began, postponed = time.perf_counter(), self.caches.postponed
        given = BlockInput(
            params,
            [request.last_two if request in members else (0, 0) for request in requests],
            [request.committed for request in requests],
            [(request.seed, request.blocks) for request in requests],
            [self.output.constraint(request) if request in members else None for request in requests],
        )
        self.caches.reserve(requests, self.scheduler.ahead)
        block = self._runner.run(given)
        failures = self.output.process(requests, params, block, began, members)
        if self.planner and whole:
            alone = self.caches.postponed >= postponed
            self.planner.observe(
                requests, params, [len(tokens) - 1 for tokens in block.tokens], time.perf_counter() - began, alone
            )
        return failures

    def _is_drafted(self, request: Request) -> bool:
        """Whether a request that joins is going to be drafted for at once."""
        adaptive = request.params.adaptive and self.planner is not None
        drafted = request.params.drafts and request.params.max_tokens > 0
        return drafted and (not adaptive or self.planner.drafting)  # type: ignore[union-attr]

    def cancel(self, requests: Sequence[Request], report: bool = True) -> None:
        """Cancel requests, wherever they are; their rows are free at once.

        Args:
            requests: those that have ended or were never queued stay as they are.
            report: whether the next step returns them; else nobody asks for them any more.
        """
        queued = self.scheduler.requests
        for request in requests:
            if request in queued and request.finish_reason is None:
                request.finish_reason = "cancelled"
                self._release(request)
        if not report:
            gone = set(requests)
            self._ended = [request for request in self._ended if request not in gone]

    def _fail(self, failures: dict[Request, Exception]) -> None:
        """End requests by an error. Their rows are cleared, since what is in them may not be numbers."""
        places = self.scheduler.holders
        for request, error in failures.items():
            request.finish_reason, request.error = "error", error
            self.caches.clear(places.index(request))
        self._release(*failures)

    def _release(self, *requests: Request) -> None:
        """Requests have ended: each one's row, if it has one, goes to the next."""
        for request in requests:
            if self.planner:
                self.planner.forget(request)
            places = self.scheduler.holders
            self._move_rows(places, self.scheduler.retire(request))
            self.output.end(request)
            self._ended.append(request)

    def _move_rows(self, places: Sequence[Request], moves: Sequence[tuple[int, int]]) -> None:
        """A request has left the rows `places`: move others as the scheduler says, and free the row behind the last."""
        for source, to in moves:
            self.caches.move(places[source], source, to)
        for row in range(len(self.scheduler.holders), len(places)):
            self.caches.free(row)

    def check_integrity(self) -> None:
        """Invariants between steps; raises AssertionError."""
        self.scheduler.check_integrity()
        begun = {one for one in self.scheduler.waiting if one.statistics.preemptions} | {self.scheduler.joining}
        self.output.check_integrity(self.scheduler.running, begun)
        self.caches.check_integrity()
