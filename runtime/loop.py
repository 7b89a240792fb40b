"""The decoding loop: schedule, draft, score, accept, commit, over all rows at once."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mtad.distribution import alternatives
from mtad.params import DecodingParams
from runtime.constraints.constraint import Constrainer, Constraint
from runtime.decoder.batch import Batch
from runtime.decoder.batch_builder import Batches
from runtime.decoder.block import decode_block
from runtime.decoder.cuda_graph.block_runner import DeviceBlocks
from runtime.decoder.kv_cache import Caches
from runtime.output.detokenizer import TextStream
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.statistics import Totals
from runtime.speculation.planner import Planner


class RowFailed(Exception):
    """Something broke that concerns one request of a batch only."""

    def __init__(self, request: Request, cause: Exception) -> None:
        self.request, self.cause = request, cause


class DecodingLoop:
    """Runs requests to their end, in-flight: they join and leave between any two blocks.

    A request's tokens depend on its prompt, parameters and seed only, not on the rest of the batch (nor, unless it asks
    for adaptive drafts, on the time anything takes).

    Args:
        caches: the two roles and what their rows hold.
        scheduler: owns the rows.
        tokenizer: for stop strings and text.
        vocab_size: token ids the pair shares.
        eos: tokens that end a text.
        constrainer: makes the requests' constraints.
        max_prefill_tokens: prompt tokens stored a turn at most, so that a long prompt delays those that run by a
            bounded time; what adaptive drafts have to catch up on counts as well.
        blocks: runs blocks on a device; None where the roles' tensors are on the host.

    Attributes:
        planner: decides adaptive drafts; None until there is a request that asks for them.
        totals: running totals since the loop began.
        blocks: as given.
    """

    def __init__(
        self,
        caches: Caches,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos: tuple[int, ...],
        constrainer: Constrainer,
        max_prefill_tokens: int = 256,
        blocks: DeviceBlocks | None = None,
    ) -> None:
        self.caches, self.scheduler, self.blocks = caches, scheduler, blocks
        self._tokenizer, self._eos = tokenizer, eos
        self._batches = blocks.batches if blocks else Batches(vocab_size, eos)
        self._decode = blocks.decode if blocks else partial(decode_block, caches.auxiliary, caches.target)
        self._constrainer, self._max_prefill_tokens = constrainer, max_prefill_tokens
        self.planner: Planner | None = None
        self._texts: dict[int, TextStream] = {}
        self._constraints: dict[int, Constraint] = {}
        self._ended: list[Request] = []
        self._admitted_at = time.perf_counter()
        self.totals = Totals(unrecorded=blocks.unrecorded if blocks else {})

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none; see `Scheduler.submit` for what is refused."""
        if self.scheduler.idle:
            self._admitted_at = time.perf_counter()
        self.scheduler.submit(*requests)

    @torch.inference_mode()
    def turn(self) -> list[Request]:
        """Store waiting prompts, as far as `max_prefill_tokens` goes, and run one block of every running request.

        Returns:
            the requests that ended, those that failed included: whatever breaks under some requests ends these with
            the reason `error` and leaves the others as they were.
        """
        budget = self._prefill(self._max_prefill_tokens)
        if self.scheduler.running:
            self._block(list(self.scheduler.running), budget)
        ended, self._ended = self._ended, []
        return ended

    def _prefill(self, budget: int) -> int:
        """Store prompts while `budget` tokens last; returns what is left of them."""
        while budget > 0 and (request := self.scheduler.next()) is not None:
            started = time.perf_counter()
            try:
                if request.id not in self._texts:
                    self._begin(request)
                both, running = self._drafts(request), self.scheduler.running
                budget -= self.caches.store(request, both, len(running), budget, running)
            except Exception as error:
                self._fail({request: error})
                continue
            self._stored(request, started)
            if min(request.target_held, request.auxiliary_held if both else math.inf) == len(request.prompt) - 1:
                self.scheduler.join()
        return budget

    def _drafts(self, request: Request) -> bool:
        """Whether a request that joins is going to be drafted for at once."""
        if not request.params.assisted:
            return False
        return not request.params.adaptive or self.planner is None or self.planner.drafting

    def _stored(self, request: Request, started: float) -> None:
        seconds = time.perf_counter() - started
        request.statistics.prefill_seconds += seconds
        self.totals.prefill_seconds += seconds

    def _plan(self, requests: list[Request], budget: int) -> list[DecodingParams]:
        """Parameters of the next block.

        Auxiliary caches that lag are brought up to date first. If `budget` does not last for all of them, adaptive rows
        wait for each other: a block costs what its largest row's draft costs, be it for that row alone.
        """
        if self.planner is None:
            return [request.params for request in requests]
        used = self.planner.plan(requests)
        behind = [row for row, request in enumerate(requests) if used[row].assisted and self.caches.lags(request)]
        for row in behind:
            started = time.perf_counter()
            if budget > 0:
                try:
                    budget -= self.caches.catch_up(requests[row], row, budget, requests)
                except Exception as error:
                    raise RowFailed(requests[row], error) from error
            self._stored(requests[row], started)
        if any(self.caches.lags(requests[row]) for row in behind):
            return [replace(p, method="sample") if p.adaptive and p.assisted else p for p in used]
        return used

    def _begin(self, request: Request) -> None:
        now = time.perf_counter()
        self.scheduler.pace += 0.2 * (now - self._admitted_at - self.scheduler.pace)
        self._admitted_at = now
        request.statistics.queue_seconds = now - request.arrived
        self._texts[request.id] = TextStream(self._tokenizer, frozenset(self._eos))
        constraint = self._constrainer.constraint(request.id, request.params, request.prompt)
        if constraint:
            self._constraints[request.id] = constraint

    def _block(self, requests: list[Request], budget: int) -> None:
        """Draft, score, accept, commit: one block of every running request."""
        try:
            used = self._plan(requests, budget)
            started = time.perf_counter()
            block = self._decode(self._batch(requests, used))
            lengths, top = block.lengths, self._alternatives(requests, block.logits, block.path)
        except RowFailed as failure:  # the others' block has not happened; it runs in the next turn
            self._fail({failure.request: failure.cause})
            return
        except Exception as error:
            self._fail(dict.fromkeys(requests, error))
            return
        gained, failures = [], {}
        for row, request in enumerate(requests):
            count, before = lengths[row] + 1, len(request.tokens)
            try:
                if not block.finite[row] or not all(map(math.isfinite, block.log_probs[row][:count])):
                    raise ArithmeticError("logits of the auxiliary or the target are not finite numbers")
                self._append(
                    request, block.tokens[row][:count], block.log_probs[row][:count], top[row] if top else None
                )
                request.auxiliary_held = request.committed - 2 if used[row].assisted else request.auxiliary_held
                request.beams = block.beams[row] if block.beams and used[row].spec.live else []
            except Exception as error:
                failures[request] = error
            gained.append(len(request.tokens) - before)
        ended = time.perf_counter()
        seconds = block.drafted - started, block.scored - block.drafted, ended - block.scored
        self.totals.turn(*seconds)
        for row, request in enumerate(requests):
            if request not in failures:
                drafted = block.levels[row] if block.levels else used[row].drafted
                self._account(request, used[row], drafted, lengths[row], gained[row], seconds, ended)
        if self.planner:
            self.planner.observe(requests, used, lengths, ended - started)
        # rows move only now, when each request knows again how much of its row is right
        self._fail(failures)
        for request in requests:
            if request.finish_reason in ("stop", "length"):
                self._release(request)

    def _batch(self, requests: list[Request], used: list[DecodingParams]) -> Batch:
        return self._batches.batch(
            used,
            [request.last_two for request in requests],
            [request.committed for request in requests],
            [(request.seed, request.blocks) for request in requests],
            [self._constraints.get(request.id) for request in requests],
            [request.beams for request in requests],
        )

    @staticmethod
    def _alternatives(requests: list[Request], logits: Tensor, path: Tensor) -> list[list[list[tuple[int, float]]]]:
        """The target's likeliest tokens at each emitted position, by row; empty where nobody asks."""
        count = max(request.params.top_logprobs for request in requests)
        if not count:
            return []
        ids, values = alternatives(logits, path, count)
        return [
            [list(zip(*pair, strict=True)) for pair in zip(*row, strict=True)]
            for row in zip(ids.tolist(), values.tolist(), strict=True)
        ]

    def _append(
        self,
        request: Request,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        top: list[list[tuple[int, float]]] | None,
    ) -> None:
        """Append one row's tokens up to its stop condition."""
        text, wanted, before = self._texts[request.id], request.params.top_logprobs, len(request.tokens)
        for index, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
            request.finish_reason = text.append(request, token, log_prob)
            if top and wanted:
                request.top_log_probs.append(top[index][:wanted])
            if request.finish_reason:
                break
        request.target_held = request.committed - 1
        request.blocks += 1
        if request.id in self._constraints:
            self._constraints[request.id].advance(request.tokens[before:])

    def _account(
        self,
        request: Request,
        used: DecodingParams,
        drafted: int,
        length: int,
        gained: int,
        seconds: tuple[float, float, float],
        now: float,
    ) -> None:
        """Statistics of one row's block. What the target drafts itself costs a pass a level, and is not judged."""
        passes, accepted = 1, max(0, min(length, gained))
        if not used.assisted:
            passes, drafted, accepted = 1 + drafted, 0, 0
        alarm = request.statistics.block(drafted, accepted, gained, seconds, passes)
        if alarm:
            self.totals.alarm(request.id, alarm)
        if gained and request.statistics.first_token_seconds is None:
            request.statistics.first_token_seconds = now - request.arrived
        self.totals.block(drafted, accepted, gained, passes)

    def _fail(self, failures: dict[Request, Exception]) -> None:
        """End requests that something broke under; their rows are cleared, for what is in them may not be numbers."""
        places = self.scheduler.holders
        for request, error in failures.items():
            request.finish_reason, request.error = "error", error
            self.caches.clear(places.index(request))
        for request in failures:
            self._release(request)

    def drop(self, requests: Sequence[Request], report: bool = True) -> None:
        """Cancel requests, wherever they are; their rows are free at once.

        Args:
            requests: those that have ended or were never queued stay as they are.
            report: whether the next turn returns them; else nobody asks for them any more.
        """
        queued = self.scheduler.requests
        for request in requests:
            if request in queued and request.finish_reason is None:
                request.finish_reason = "cancelled"
                self._release(request)
        if not report:
            gone = set(requests)
            self._ended = [request for request in self._ended if request not in gone]

    def _release(self, request: Request) -> None:
        """A request has ended: its row, if it has one, goes to the next."""
        self._texts.pop(request.id, None)
        self._constraints.pop(request.id, None)
        if self.planner:
            self.planner.forget(request)
        places = self.scheduler.holders
        for source, to in self.scheduler.retire(request):
            self.caches.move(places[source], source, to)
        request.statistics.total_seconds = time.perf_counter() - request.arrived
        assert request.finish_reason is not None
        self.totals.ended(request.finish_reason, request.statistics)
        self._ended.append(request)

    def check_integrity(self) -> None:
        """Invariants between turns; raises AssertionError."""
        self.scheduler.check_integrity()
        joining = self.scheduler.joining
        begun = {request.id for request in self.scheduler.running}
        assert self._texts.keys() - begun <= ({joining.id} if joining else set()), "a text without a request"
        assert begun <= self._texts.keys()
        assert self._constraints.keys() <= self._texts.keys(), "a constraint without a request"
        self.caches.check_integrity()
