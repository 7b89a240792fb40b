"""The decoding loop: schedule, draft, score, accept, commit, over all rows at once."""

from __future__ import annotations

import time

import torch
from tokenizers import Tokenizer

from mtad.accept import Accepted, accept
from mtad.draft import Level, root
from mtad.noise import draw_noise
from mtad.rows import Rows, Shape, block_shape, stack_rows
from runtime.request import Request
from runtime.roles import Auxiliary, Batch, Target
from runtime.scheduler import Scheduler
from runtime.text import TextStream


class DecodingLoop:
    """Runs requests to their end, in-flight: they join and leave between any two blocks.

    A request's tokens depend on its prompt, parameters and seed only, not on the rest of the batch.

    Args:
        auxiliary, target: the roles; row r of both always carries the same request.
        scheduler: owns the rows.
        tokenizer: for stop strings and text.
        vocab_size: token ids the pair shares.
        eos: tokens that end a text.
    """

    def __init__(
        self,
        auxiliary: Auxiliary,
        target: Target,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos: tuple[int, ...],
    ) -> None:
        self.auxiliary, self.target, self.scheduler = auxiliary, target, scheduler
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, eos
        self._texts: dict[int, TextStream] = {}
        self._parameters: tuple[list[int], Shape, Rows, Level] | None = None

    @torch.inference_mode()
    def turn(self) -> list[Request]:
        """One block of every running request; returns those that finished with it."""
        self._join()
        requests = self.scheduler.running
        if not requests:
            return []
        batch = self._batch(requests)
        started = time.perf_counter()
        draft = self.auxiliary.draft(batch) if batch.shape.draft_len else None
        drafted = time.perf_counter()
        tree, q = (draft.tree, draft.q) if draft else (None, None)
        logits = self.target.score(batch, tree)
        scored = time.perf_counter()
        accepted = accept(tree, logits, q, batch.noise, batch.rows, batch.shape)
        if draft:
            self.target.commit(batch, accepted)
            self.auxiliary.commit(batch, draft, accepted)
        return self._commit(requests, accepted, drafted - started, scored - drafted)

    def _join(self) -> None:
        """Prefill what the scheduler admits: every prompt token but the last."""
        for row, request in self.scheduler.admit():
            started = time.perf_counter()
            for start in range(0, len(request.prompt) - 1, 128):
                tokens = request.prompt[start : min(start + 128, len(request.prompt) - 1)]
                self.target.prefill(row, tokens, start)
                if request.params.drafted:
                    self.auxiliary.prefill(row, tokens, start)
            request.statistics.prefill_seconds = time.perf_counter() - started
            self._texts[request.id] = TextStream(self._tokenizer, frozenset(self._eos))

    def _batch(self, requests: list[Request]) -> Batch:
        params = [request.params for request in requests]
        ids = [request.id for request in requests]
        if self._parameters is None or self._parameters[0] != ids:
            shape = block_shape(params, self._vocab_size)
            rows = stack_rows(params, shape, self._vocab_size, self._eos)
            self._parameters = ids, shape, rows, root(rows, shape)
        _, shape, rows, level = self._parameters
        committed = [request.committed for request in requests]
        keys = [(request.seed, request.blocks) for request in requests]
        return Batch(
            last_two=torch.tensor([request.last_two for request in requests]),
            committed=torch.tensor(committed),
            longest=max(committed),
            rows=rows,
            root=level,
            shape=shape,
            noise=draw_noise(params, keys, shape, self._vocab_size),
        )

    def _commit(
        self, requests: list[Request], accepted: Accepted, draft_seconds: float, score_seconds: float
    ) -> list[Request]:
        """Append each row's tokens up to its stop condition; free the rows that ended."""
        tokens, log_probs, lengths = accepted.tokens.tolist(), accepted.log_probs.tolist(), accepted.length.tolist()
        for row, request in enumerate(requests):
            text, before = self._texts[request.id], len(request.tokens)
            for index in range(lengths[row] + 1):
                request.finish_reason = text.append(request, tokens[row][index], log_probs[row][index])
                if request.finish_reason:
                    break
            statistics = request.statistics
            statistics.target_passes += 1
            statistics.drafted += request.params.drafted
            statistics.accepted += min(lengths[row], len(request.tokens) - before)
            statistics.tokens = len(request.tokens)
            statistics.draft_seconds += draft_seconds if request.params.drafted else 0.0
            statistics.score_seconds += score_seconds
            request.blocks += 1
        finished = [row for row, request in enumerate(requests) if request.finish_reason]
        done = [requests[row] for row in finished]
        for row in reversed(finished):
            self._release(row)
        return done

    def drop(self, requests: list[Request]) -> None:
        """Forget requests, finished or not: they leave the queue, and their rows are free at once."""
        ids = {request.id for request in requests}
        self.scheduler.withdraw(ids)
        for row in reversed(range(len(self.scheduler.running))):
            if self.scheduler.running[row].id in ids:
                self._release(row)

    def _release(self, row: int) -> None:
        self._texts.pop(self.scheduler.running[row].id, None)  # none yet if its prefill failed
        moved = self.scheduler.retire(row)
        if moved is not None:
            columns = self.scheduler.running[row].committed
            self.auxiliary.move_row(moved, row, columns)
            self.target.move_row(moved, row, columns)

    def check_integrity(self) -> None:
        """Invariants between blocks; raises AssertionError."""
        self.scheduler.check_integrity()
        assert self._texts.keys() == {request.id for request in self.scheduler.running}
