"""The decoding loop over executors: no row waits for another. Not executed with the library."""

from __future__ import annotations

import time
from typing import NamedTuple

from tokenizers import Tokenizer

from runtime.constraints.constraint import Constrainer
from runtime.decoder.batch import Batch
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import Block, Ran
from runtime.decoder.kv_cache import KvCaches
from runtime.loop import DecodingLoop
from runtime.output.processor import OutputProcessor
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.tensorrt_llm import drafting as courses
from runtime.tensorrt_llm.exchange import Course
from runtime.tensorrt_llm.roles import ExecutorAuxiliary, ExecutorTarget

WAIT = 0.05
"""Seconds a turn waits for some block to end; then requests that have come meanwhile are taken in."""


class Outcome(NamedTuple):
    """One row's block, and `time.perf_counter()` when it began."""

    ran: Ran
    began: float


class ExecutorLoop(DecodingLoop):
    """Runs requests to their end, each at its own pace.

    A `DecodingLoop` whose blocks are one row each: while one is drafted for, another is scored, and what is asked of
    either executor at a time is batched there. A block begins as soon as the row's last one has ended. Tokens are those
    of a loop in step, for a request's depend on nothing but itself.

    Args:
        auxiliary, target: the roles; of one exchange.
        scheduler, tokenizer, vocab_size, eos, constrainer: see `DecodingLoop`.
    """

    def __init__(
        self,
        auxiliary: ExecutorAuxiliary,
        target: ExecutorTarget,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos: tuple[int, ...],
        constrainer: Constrainer,
    ) -> None:
        # prompts are stored by the executors, in pieces of their own choice
        caches, most = KvCaches(auxiliary, target), scheduler.rows * scheduler.capacity
        output = OutputProcessor(tokenizer, eos, constrainer)
        super().__init__(scheduler, caches, BatchBuilder(vocab_size, eos), _none, output, most)
        self._auxiliary, self._target, self._exchange = auxiliary, target, target.exchange
        self._sizes = vocab_size, eos
        self._layouts: dict[Request, BatchBuilder] = {}
        self._spare: list[BatchBuilder] = []

    def _run(self, requests: list[Request], budget: int) -> None:
        """Begin a block of every row that has none, and end those that are done."""
        failures: dict[Request, Exception] = {}
        for request in requests:
            if request not in self._exchange.keys:
                try:
                    self._exchange.start(request, self._course(request))
                except Exception as error:
                    failures[request] = error
        try:
            ended = self._exchange.step(0.0 if failures else WAIT)
        except Exception as error:  # an executor is gone: nothing in flight comes back
            ended = []
            failures |= dict.fromkeys(requests, error)
        for key, outcome in ended:
            assert isinstance(key, Request)
            problem = outcome if isinstance(outcome, Exception) else self._end(key, outcome)
            if problem:
                failures[key] = problem
        self._fail(failures)
        self._release(*(request for request in requests if request.finish_reason in ("stop", "length")))

    def _course(self, request: Request) -> Course[Outcome]:
        """One block: draft, score, accept."""
        began = drafted = time.perf_counter()
        batch, sequence = self._alone(request), [[*request.prompt, *request.tokens]]
        draft = None
        if batch.shape.draft_len:
            draft = yield from courses.draft(
                batch, sequence, self._auxiliary.client, self._target.client, self._auxiliary.drafting
            )
            drafted = time.perf_counter()
        logits = yield from courses.score(batch, sequence, draft.tree if draft else None, self._target.client)
        scored = time.perf_counter()
        return Outcome(Ran(draft, logits, courses.decide(batch, draft, logits), drafted, scored), began)

    def _alone(self, request: Request) -> Batch:
        """A batch of one row, in memory of its own for as long as the request runs."""
        batches = self._layouts.get(request)
        if batches is None:
            batches = self._layouts[request] = self._spare.pop() if self._spare else BatchBuilder(*self._sizes)
        return batches.build(
            [request.params],
            [request.last_two],
            [request.committed],
            [(request.seed, request.blocks)],
            [self.output.constraint(request)],
            [request.beams],
        )

    def _end(self, request: Request, outcome: Outcome) -> Exception | None:
        """Append a block's tokens; returns what broke."""
        held = request.committed - 1
        try:
            block = outcome.ran.to_host(bool(request.params.confidence))
            failures = self.output.process([request], [request.params], block, outcome.began, [request])
        except Exception as error:
            return error
        if not failures:
            row = self.scheduler.running.index(request)
            self._target.prefill(row, [*request.prompt, *request.tokens][held:-1], held)
        return failures.get(request)

    def _release(self, *requests: Request) -> None:
        """As the loop's; what is in flight for the requests is given up."""
        self._exchange.cancel(requests)
        for request in requests:
            batches = self._layouts.pop(request, None)
            if batches is not None:
                self._spare.append(batches)
        super()._release(*requests)

    def check_integrity(self) -> None:
        """Invariants between turns; raises AssertionError."""
        super().check_integrity()
        self._exchange.check_integrity()
        running = set(self.scheduler.running)
        assert self._exchange.keys <= running, "a block of a request that does not run"
        assert self._layouts.keys() <= running, "memory of a request that does not run"


def _none(batch: Batch) -> Block:
    """No block is run of all rows at once."""
    raise NotImplementedError
