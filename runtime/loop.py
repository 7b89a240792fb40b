"""The decoding loop.

Each step admits waiting requests, prefills their prompts, and runs one block of every running request: draft, score,
accept, commit (`runtime.decoder.block.run_block`, which a GPU runs as one CUDA graph). The output processor then turns
the block's tokens into text and says which requests have ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mtad.params import DecodingParams
from runtime.decoder.batch import Batch
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import Block
from runtime.decoder.kv_cache import KvCaches, RowFailed
from runtime.output.processor import OutputProcessor
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.speculation.planner import Planner

RunBlock = Callable[[Batch], Block]
"""Runs a block: draft, score, accept, commit. The caches then hold what it accepted."""


class DecodingLoop:
    """Runs requests to their end, with in-flight batching: they join and leave between any two blocks.

    A request's tokens depend on its prompt, parameters and seed only, and not on the rest of the batch. Where it asks
    for adaptive drafts, they also depend on how long things take.

    Args:
        scheduler: owns the rows.
        caches: the KV caches of both engines.
        batches: makes a block's input.
        run_block: runs a block and commits what it accepts.
        output: owns the requests' texts, constraints and figures.
        max_prefill_tokens: Chunked prefill: each step prefills at most so many prompt tokens. What adaptive drafts have
            to catch up on counts as well.

    Attributes:
        planner: decides adaptive drafts; None until there is a request that asks for them.
        totals: running totals over all requests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        caches: KvCaches,
        batches: BatchBuilder,
        run_block: RunBlock,
        output: OutputProcessor,
        max_prefill_tokens: int = 256,
    ) -> None:
        self.scheduler, self.caches, self.output = scheduler, caches, output
        self.totals = output.totals
        self._batches, self._run_block, self._max_prefill_tokens = batches, run_block, max_prefill_tokens
        self.planner: Planner | None = None
        self._ended: list[Request] = []

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Admit and prefill waiting requests, then run one block of every running one.

        Returns:
            the requests that have ended. An error ends only the requests that it concerns, with the reason `error`.
        """
        budget = self._prefill(self._max_prefill_tokens)
        if requests := list(self.scheduler.running):
            self._run(requests, budget)
        ended, self._ended = self._ended, []
        return ended

    def _prefill(self, budget: int) -> int:
        """Admit requests and prefill their prompts while `budget` tokens last; returns what is left of it."""
        while budget > 0 and (request := self.scheduler.next()) is not None:
            began = time.perf_counter()
            try:
                self.output.begin(request)
                both, running = self._is_drafted(request), self.scheduler.running
                budget -= self.caches.prefill(request, both, len(running), budget, running)
            except Exception as error:
                self._fail({request: error})
                continue
            self.output.record_prefill(request, began)
            if min(request.target_held, request.auxiliary_held if both else math.inf) == len(request.prompt) - 1:
                self.scheduler.join()
        return budget

    def _run(self, requests: list[Request], budget: int) -> None:
        """Run one block: draft, score, accept, commit, output."""
        try:
            params = self._plan(requests, budget)
            began = time.perf_counter()
            block = self._run_block(self._batch(requests, params))
            failures = self.output.process(requests, params, block, began)
        except RowFailed as failure:  # the others' block has not happened; it runs in the next step
            self._fail({failure.request: failure.cause})
            return
        except Exception as error:
            self._fail(dict.fromkeys(requests, error))
            return
        if self.planner:
            self.planner.observe(requests, params, block.lengths, time.perf_counter() - began)
        # rows move only now, when each request knows again how much of its row is right
        self._fail(failures)
        self._release(*(request for request in requests if request.finish_reason in ("stop", "length")))

    def _plan(self, requests: Sequence[Request], budget: int) -> list[DecodingParams]:
        """Parameters of the next block, whose auxiliary caches are then up to date.

        If `budget` does not last for that, adaptive rows wait for each other: a block costs what its largest row's
        draft costs, be it for that row alone.
        """
        if self.planner is None:
            return [request.params for request in requests]
        params = self.planner.plan(requests)
        began = time.perf_counter()
        current = self.caches.catch_up(requests, [p.assisted for p in params], budget)
        self.output.totals.prefill_seconds += time.perf_counter() - began
        return params if current else [replace(p, method="sample") if p.adaptive and p.assisted else p for p in params]

    def _batch(self, requests: Sequence[Request], params: Sequence[DecodingParams]) -> Batch:
        return self._batches.build(
            params,
            [request.last_two for request in requests],
            [request.committed for request in requests],
            [(request.seed, request.blocks) for request in requests],
            [self.output.constraint(request) for request in requests],
            [request.beams for request in requests],
        )

    def _is_drafted(self, request: Request) -> bool:
        """Whether a request that joins is going to be drafted for at once."""
        adaptive = request.params.adaptive and self.planner is not None
        return request.params.assisted and (not adaptive or self.planner.drafting)  # type: ignore[union-attr]

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none.

        Raises:
            InvalidInput, CapacityExceeded, QueueFull: as `Scheduler.submit` does.
        """
        self.scheduler.submit(*requests)

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
            for source, to in self.scheduler.retire(request):
                self.caches.move(places[source], source, to)
            self.output.end(request)
            self._ended.append(request)

    def check_integrity(self) -> None:
        """Invariants between steps; raises AssertionError."""
        self.scheduler.check_integrity()
        self.output.check_integrity(self.scheduler.running, self.scheduler.joining)
        self.caches.check_integrity()
