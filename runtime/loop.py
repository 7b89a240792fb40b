"""The decoding loop.

Each step admits waiting requests, prefills their prompts, and runs one block of every running request: draft, score,
accept, commit (`runtime.decoder.host_runner`, or on a GPU one CUDA graph). The output processor then turns
the block's tokens into text and says which requests have ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mtad.errors import Failed, InvalidInput
from mtad.params import DecodingParams
from runtime.decoder.block import Block, BlockInput, BlockRunner
from runtime.decoder.kv_cache import KvCaches
from runtime.output.processor import OutputProcessor
from runtime.scheduler.plan import Plan
from runtime.scheduler.prefill_budget import PrefillBudget
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.speculation.lengths import DraftCosts, with_length
from runtime.speculation.lookup import Lookups
from runtime.speculation.planner import Planner

CATCH_UP = 4
"""Of the tokens that are prefilled per step, one in so many is for drafts that follow the load, however many prompts
there are."""

_IDLE = DecodingParams(method="sample", temperature=0.0)
"""Parameters of rows whose block is not kept."""


class DecodingLoop:
    """Runs requests to their end, with in-flight batching: they join and leave between any two blocks.

    A request's tokens depend on its prompt, parameters and seed only, and not on the rest of the batch. Where its
    drafts follow the load (`DecodingParams.follows_load`), they also depend on how long things take.

    Args:
        scheduler: owns the rows.
        caches: the KV caches of both engines.
        runner: runs blocks.
        output: turns tokens into the requests' texts and figures.
        max_prefill_tokens: Chunked prefill: each step prefills at most so many prompt tokens, and fewer beside requests
            that run (`PrefillBudget`). What drafts that follow the load have to catch up on counts as well; where
            prompts leave nothing, a `CATCH_UP`th more is for it.
        costs: of automatic drafts that do not follow the load.
        lookup_tokens: of ended requests' texts, kept to look drafts up in.

    Attributes:
        ended: requests that have, and that the next step returns.
        planner, lookups: decide how long automatic drafts are, the auxiliary's and those that are looked up.
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
        costs: DraftCosts | None = None,
        lookup_tokens: int = 0,
    ) -> None:
        self.scheduler, self.caches, self.output = scheduler, caches, output
        self.totals = output.totals
        self._runner, self._budget = runner, PrefillBudget(max_prefill_tokens)
        self.planner = Planner(scheduler.max_draft_len, costs)
        self.lookups = Lookups(scheduler.max_draft_len, costs, lookup_tokens)
        self.prompts_apart = False
        self.ended: list[Request] = []
        self._catch_up_seconds = 0.0
        self._waited = True  # for all that was computed before this step

    def step(self) -> list[Request]:
        """Prefill the prompts of requests that join, then run one block of every running one.

        Returns:
            the requests that have ended. An error ends only the requests that it concerns, with the reason `error`.
        """
        began, rows = time.perf_counter(), len(self.scheduler.running)
        if self.scheduler.holders and not self.caches.ours:
            problem = "another one of this pair ran before this request had ended; they take turns"
            for request in self.scheduler.holders:
                request.fail(InvalidInput("llm", None, problem))
            self._end()
        if not self.scheduler.idle:
            self.caches.claim()
        tokens = self._budget.tokens(rows, self._about_to_run)
        plan = self.scheduler.schedule(tokens, self.caches, self._is_drafted, self._budget.piece_floor)
        used, waited = tokens - plan.spare_tokens, self._waited and not self.caches.deferred_rows
        self._prefill(plan)
        if requests := self.scheduler.make_room(self.caches):
            try:
                block = self._run(requests, requests, plan.spare_tokens)
                self.output.process(requests, block)
                seconds = time.perf_counter() - began - self._catch_up_seconds
                plain = waited and not self.caches.deferred_rows
                pieces = [one.tokens for one in plan.pieces if one.tokens and not one.scored] if plain else []
                self._budget.observe(used, len(requests), seconds, pieces)
                self._waited = True
            except Exception as error:
                self._run_each_alone(requests, error)
            self._end()
        elif plan.pieces:
            self._budget.observe(used, 0, time.perf_counter() - began)
            self._waited = False
        ended, self.ended = self.ended, []
        return ended

    @property
    def _about_to_run(self) -> int:
        """Requests that are going to run beside those that do, as soon as their prompts are stored."""
        return min(self.scheduler.rows, sum(self.scheduler.counts)) - len(self.scheduler.running)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing and return nothing."""
        return self.scheduler.idle and not self.ended

    def _prefill(self, plan: Plan) -> None:
        for piece in plan.pieces:
            request, began = piece.request, time.perf_counter()
            try:
                self.output.begin(request)
                self.caches.prefill(piece, self.scheduler.running)
                if self.prompts_apart:
                    self.caches.run_deferred()
            except Exception as error:
                request.fail(error)
                continue
            seconds = time.perf_counter() - began
            request.statistics.prefill_seconds += seconds
            self.totals.prefill_seconds += seconds
            if not request.max_tokens and request.target_cached == request.committed - 1:
                request.finish_reason = "length"
        self._end()

    def _run(self, requests: Sequence[Request], members: Sequence[Request], spare_tokens: int = 0) -> Block:
        """Draft, score, accept, commit: one block of all rows, of which those of `members` are kept.

        If tokens do not last to bring the auxiliary's caches up to date, rows whose drafts follow the load wait for
        each other: a block costs what its largest row's draft costs, be it for that row alone.

        Args:
            spare_tokens: that may be prefilled besides; more than the rows decode meanwhile are in any case.
        """
        is_kept = [request in members for request in requests]
        self.planner.choose_own(requests)
        drafts = self.lookups.find(requests)
        params = self.planner.plan(requests, list(map(bool, drafts)), self._about_to_run)
        if not all(is_kept):
            params = [p if own else _IDLE for p, own in zip(params, is_kept, strict=True)]
        began = time.perf_counter()
        budget = max(spare_tokens, self._budget.most // CATCH_UP, 2 * len(requests))
        current = self.caches.catch_up(requests, [p.uses_model for p in params], budget)
        self._catch_up_seconds = time.perf_counter() - began
        self.totals.draft_seconds += self._catch_up_seconds
        if not current:
            own = zip(params, requests, strict=True)
            params = [with_length(p, 0) if one.params.follows_load and p.uses_model else p for p, one in own]
        began, deferred = time.perf_counter(), self.caches.deferred_rows
        self.caches.reserve(requests, self.scheduler.lookahead)
        last_two = [request.last_two for request in requests]
        committed = [request.committed for request in requests]
        keys = [(request.seed, request.blocks) for request in requests]
        constraints = [one.constraint if own else None for one, own in zip(requests, is_kept, strict=True)]
        block = self._runner.run(BlockInput(params, last_two, committed, keys, constraints, is_kept, drafts))
        seconds, alone = time.perf_counter() - began, all(is_kept) and self.caches.deferred_rows >= deferred
        accepted = [len(tokens) - 1 for tokens in block.tokens]
        judged = zip(block.drafted_levels, block.finite, params, strict=True)
        drafted = [count if ok and p.uses_model else 0 for count, ok, p in judged]
        catch_up, auxiliary_ran = self._catch_up_seconds, any(p.uses_model for p in params)
        plain = alone and (auxiliary_ran or not any(drafts))  # a block of nothing but look-ups is no planner's
        self.planner.observe(requests, params, drafted, accepted, seconds, catch_up, plain)
        tokens = [own if kept else [] for own, kept in zip(block.tokens, is_kept, strict=True)]
        self.lookups.observe(requests, drafts, tokens, seconds, alone, auxiliary_ran)
        return block

    def _run_each_alone(self, requests: Sequence[Request], error: Exception) -> None:
        """A block broke: find out by whom, from the caches as they were.

        Where an engine is gone (`Failed`), all end.
        """
        for request in requests:
            if not isinstance(error, Failed):
                self.caches.discard_block(requests)
                try:
                    self.output.process(requests, self._run(requests, [request]))
                    continue
                except Exception as own:
                    error = own
            request.fail(error)
        if not isinstance(error, Failed):
            self.caches.discard_block(requests)

    def _is_drafted(self, request: Request) -> bool:
        """Whether a request that joins is going to be drafted for at once."""
        drafted = request.part_params.uses_model and request.max_tokens > 0
        return drafted and (not request.params.follows_load or self.planner.drafts)

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
            self.ended = [request for request in self.ended if request not in requests]

    def _end(self) -> None:
        """Release the rows of requests that have ended; a failed one's may hold what is not a number."""
        ended = [(row, request) for row, request in enumerate(self.scheduler.holders) if request.finish_reason]
        for row, request in ended:
            if request.finish_reason == "error":
                self.caches.clear(row)
        for _, request in ended:
            self._release(request)

    def _release(self, request: Request) -> None:
        """A request has ended: its row, if it has one, goes to the next."""
        self.ended.append(request)  # first: of an engine that breaks down here, it is told as well
        self.planner.record_end(request)
        self.lookups.record_end(request)
        self.scheduler.retire(request, self.caches)
        self.output.end(request)
