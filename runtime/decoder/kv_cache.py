"""What each row of the two KV caches holds, and how it gets there other than by decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engines import Engine
from engines.prefix_cache import PrefixCache, common_prefix
from runtime.decoder.engine_role import EngineRole
from runtime.scheduler.request import Request

SHARED = 16
"""Fewest tokens for which a prompt takes over the columns of a running one that begins alike: fewer are computed."""


class KvCaches:
    """The two caches, row by row; row r of both always carries the same request.

    A request's `target_held` and `auxiliary_held` say how many leading columns of its row are right. The auxiliary's
    may lag behind where nothing is drafted: it is brought up to date when a draft is due.

    Args:
        prefixes: kept prompts of the auxiliary and of the target; None for roles that keep their own.
        engines: those of the roles, the auxiliary's first.
    """

    def __init__(
        self,
        auxiliary: EngineRole,
        target: EngineRole,
        prefixes: tuple[PrefixCache, PrefixCache] | None = None,
        engines: Sequence[Engine] = (),
    ) -> None:
        self.auxiliary, self.target, self.prefixes = auxiliary, target, prefixes
        each = zip(engines, ("auxiliary_held", "target_held"), strict=False)
        self._engines = engines
        self._paged = [(engine, held) for engine, held in each if engine.pages]

    def fits(self, requests: Sequence[Request], ahead: int) -> bool:
        """Whether there is memory for all tokens of requests, by row, and for `ahead` columns behind those of each."""
        return all(engine.fits(_spans(requests, held, ahead)) for engine, held in self._paged)

    def reserve(self, requests: Sequence[Request], ahead: int) -> None:
        """Take the memory that `fits` speaks of, for a block of these requests."""
        for engine, held in self._paged:
            engine.reserve(_spans(requests, held, ahead))

    @property
    def postponed(self) -> int:
        """Rows with tokens that are to be computed beside a later block, in either cache."""
        return sum(engine.postponed for engine, _ in self._paged)

    def finish(self) -> None:
        """Compute what was postponed."""
        for engine, _ in self._paged:
            engine.finish()

    def free(self, row: int) -> None:
        """A row is nobody's now."""
        for engine in self._engines:
            engine.free_row(row)

    def prefill(self, request: Request, both: bool, row: int, budget: int, running: Sequence[Request]) -> int:
        """Prefill up to `budget` more tokens of a prompt in `row`; returns how many.

        Of a request that was preempted, the tokens that it has decoded are part of it. A request with `prompt_logprobs`
        prefills its whole prompt, unless another choice of the prompt has done so.

        Args:
            both: in the auxiliary's cache as well, not in the target's only.
            budget: at least 1.
            running: requests whose rows may be copied from, by row.
        """
        tokens, end, last = request.prompt + request.tokens, request.committed - 1, len(request.prompt) - 1
        at, scores = request.target_held, request.prompt_scores
        count = request.params.prompt_logprobs if len(scores) < last else None
        if not at and count is None:
            request.target_held = self._reuse(self.target, request, row, running)
            request.statistics.reused_tokens = request.target_held
        if both and not request.auxiliary_held:
            request.auxiliary_held = self._reuse(self.auxiliary, request, row, running)
        held = min(request.target_held, request.auxiliary_held) if both else request.target_held
        upto = min(end, held + budget)
        if request.target_held < upto:
            if count is None:
                self.target.prefill(row, tokens[request.target_held : upto], request.target_held)
            else:
                scores[at:] = self.target.score_prompt(row, tokens[at : upto + 1], at, count)
            if request.target_held < last <= upto and self.prefixes:
                self.prefixes[1].store(row, tokens[:last], request.salt)
            request.target_held = upto
        if both:
            self._extend(request, row, upto)
        return upto - held

    def catch_up(self, requests: Sequence[Request], drafted: Sequence[bool], budget: int) -> bool:
        """Bring the auxiliary's cache up to date where a running request is drafted for, by `budget` tokens at most.

        Args:
            budget: tokens, shared by all rows.

        Returns:
            whether all of those caches are up to date now.
        """
        behind = [row for row, request in enumerate(requests) if drafted[row] and self._lags(request)]
        for row in behind if budget > 0 else ():
            request, began = requests[row], time.perf_counter()
            if not request.auxiliary_held:
                request.auxiliary_held = self._reuse(self.auxiliary, request, row, requests)
            held = request.auxiliary_held
            self._extend(request, row, min(request.committed - 2, held + budget))
            budget -= request.auxiliary_held - held
            request.statistics.prefill_seconds += time.perf_counter() - began
            if budget <= 0:
                break
        return not any(self._lags(requests[row]) for row in behind)

    @staticmethod
    def _lags(request: Request) -> bool:
        return request.auxiliary_held < request.committed - 2

    def _extend(self, request: Request, row: int, upto: int) -> None:
        """Store the sequence in the auxiliary's cache, from what it holds to column `upto`."""
        held, end = request.auxiliary_held, len(request.prompt) - 1
        if held < upto:
            tokens = (request.prompt + request.tokens)[held:upto] if upto > end else request.prompt[held:upto]
            self.auxiliary.prefill(row, tokens, held)
            request.auxiliary_held = upto
            if held < end <= upto and self.prefixes:
                self.prefixes[0].store(row, request.prompt[:end], request.salt)

    def _reuse(self, role: EngineRole, request: Request, row: int, running: Sequence[Request]) -> int:
        """Copy what a running request's row or the kept prefixes hold of a prompt; returns the columns."""
        if self.prefixes is None:
            return 0
        tokens, best, source = request.prompt[:-1], 0, -1
        for at, other in enumerate(running):
            held = other.target_held if role is self.target else other.auxiliary_held
            if held > best and other is not request and other.salt == request.salt:
                shared = min(common_prefix(tokens, other.prompt[:-1]), held)
                if shared > best:
                    best, source = shared, at
        if best < SHARED:
            best = 0
        else:
            role.move_row(source, row, best)
        return self.prefixes[role is self.target].restore(row, tokens, best, request.salt)

    def move(self, request: Request, source: int, to: int) -> None:
        self.target.move_row(source, to, request.target_held)
        self.auxiliary.move_row(source, to, request.auxiliary_held)

    def clear(self, row: int) -> None:
        self.target.clear_row(row)
        self.auxiliary.clear_row(row)

    def restore(self, requests: Sequence[Request]) -> None:
        """A block of these requests, by row, broke off: zero whatever it left behind the columns that they hold.

        A draft begins by running the last two committed tokens again, so it may have spoilt their columns as well. Its
        next one writes them anew.
        """
        for row, request in enumerate(requests):
            drafted = max(0, request.committed - 2)
            request.auxiliary_held = min(request.auxiliary_held, drafted)
            self.target.clear_row(row, request.target_held)
            self.auxiliary.clear_row(row, request.auxiliary_held)

    def check_integrity(self) -> None:
        """Invariants of the kept prefixes; raises AssertionError."""
        for prefixes in self.prefixes or ():
            prefixes.check_integrity()


def _spans(requests: Sequence[Request], held: str, ahead: int) -> list[tuple[int, int]]:
    """Columns that an engine lacks or a block may write, from and to, of each request; `held` of it are right."""
    return [(max(0, min(getattr(one, held), one.committed - 2)), one.committed + ahead) for one in requests]
