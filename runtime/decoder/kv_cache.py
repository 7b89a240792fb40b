"""What each row of the two KV caches holds, and how it gets there other than by decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engines.cache.prefix import PrefixCache, common_prefix
from runtime.decoder.engine_role import EngineRole
from runtime.scheduler.plan import PromptPiece
from runtime.scheduler.request import Request

MIN_SHARED = 16
"""Fewest tokens for which a prompt takes over the columns of a running one that begins alike: fewer are computed."""
PIECE = 256
"""Tokens of a step at most that brings the auxiliary's cache up to date."""


class KvCaches:
    """The two caches, row by row; row r of both always carries the same request.

    A request's `target_cached` and `auxiliary_cached` say how many leading columns of its row are right. The
    auxiliary's may lag behind where nothing is drafted: it is brought up to date when a draft is due.

    Args:
        prefixes: kept prompts of the auxiliary and of the target.
    """

    def __init__(self, auxiliary: EngineRole, target: EngineRole, prefixes: tuple[PrefixCache, PrefixCache]) -> None:
        self.auxiliary, self.target, self.prefixes = auxiliary, target, prefixes
        self._engines = auxiliary.engine, target.engine
        each = zip((engine.cache for engine in self._engines), ("auxiliary_cached", "target_cached"), strict=True)
        self._paged = [(cache, held) for cache, held in each if cache.pages]
        self._token = object()  # in place of this object, which would keep the engines as long as they keep it

    @property
    def ours(self) -> bool:
        """Whether no other `LLM` of the pair has claimed the rows since `claim`."""
        return all(engine.cache.user is self._token for engine in self._engines)

    def claim(self) -> None:
        """Use the rows from now on; what requests of another `LLM` held in them goes."""
        for cache in (engine.cache for engine in self._engines if engine.cache.user is not self._token):
            for row in range(cache.rows):
                cache.release(row)
            cache.user = self._token

    def fits(self, requests: Sequence[Request], lookahead: int) -> bool:
        """Whether there is memory for the tokens of requests, by row, and for `lookahead` columns behind each."""
        return all(cache.fits(_spans(requests, held, lookahead)) for cache, held in self._paged)

    def reserve(self, requests: Sequence[Request], lookahead: int) -> None:
        """Take the memory that `fits` speaks of, for a block of these requests."""
        for cache, held in self._paged:
            cache.reserve(_spans(requests, held, lookahead))

    @property
    def deferred_rows(self) -> int:
        """Rows with tokens that are to be computed beside a later block, in either cache."""
        return sum(engine.deferred_rows for engine in self._engines)

    def run_deferred(self) -> None:
        for engine in self._engines:
            engine.run_deferred()

    def release(self, row: int) -> None:
        for engine in self._engines if self.ours else ():
            engine.cache.release(row)

    def stored(self, request: Request, both: bool, running: Sequence[Request], pieces: Sequence[PromptPiece]) -> int:
        """Leading tokens of a request that its row holds, or that `prefill` is going to copy."""
        held = []
        for role in (self.target, self.auxiliary) if both else (self.target,):
            own = request.target_cached if role is self.target else request.auxiliary_cached
            if not own and (role is self.auxiliary or self._is_reusable(request)):
                kept = self.prefixes[role is self.target].stored(request.prompt[:-1], request.salt)
                own = max(kept, self._find(role, request, running, pieces)[0])
            held.append(own)
        return min(held)

    def prefill(self, piece: PromptPiece, running: Sequence[Request]) -> None:
        """Prefill a piece of a prompt.

        Where a request was preempted, the tokens that it has decoded are part of it. A request with `prompt_logprobs`
        prefills its whole prompt, unless another choice of the prompt has done so.

        Args:
            running: requests whose rows may be copied from, by row.
        """
        request, row, end, both = piece.request, piece.row, piece.end, piece.both
        tokens, last = request.prompt + request.tokens, len(request.prompt) - 1
        at, scores = request.target_cached, request.prompt_scores
        if not at and self._is_reusable(request):
            request.target_cached = self._reuse(self.target, request, row, running)
            if not request.statistics.preemptions:  # else it finds the prompt that it has computed itself
                request.statistics.reused_tokens = request.target_cached
        if both and not request.auxiliary_cached:
            request.auxiliary_cached = self._reuse(self.auxiliary, request, row, running)
        if request.target_cached < end:
            if self._is_reusable(request):
                self.target.prefill(row, tokens[request.target_cached : end], request.target_cached)
            else:
                count = request.params.prompt_logprobs
                assert count is not None
                scores[at:] = self.target.score_prompt(row, tokens[at : end + 1], at, count)
            if request.target_cached < last <= end:
                self.prefixes[1].store(row, tokens[:last], request.salt)
            request.target_cached = end
        if both:
            self._extend(request, row, end)

    @staticmethod
    def _is_reusable(request: Request) -> bool:
        """Whether the target need not score the prompt."""
        return request.params.prompt_logprobs is None or len(request.prompt_scores) >= len(request.prompt) - 1

    def catch_up(self, requests: Sequence[Request], drafted: Sequence[bool], budget: int) -> bool:
        """Bring the auxiliary's cache up to date where a running request is drafted for.

        Args:
            budget: tokens at most, shared by the rows whose drafts follow the load; the others are brought up to date
                whatever it takes: all that was written since the auxiliary last drafted for them.

        Returns:
            whether all of those caches are up to date now.
        """
        behind = [row for row, request in enumerate(requests) if drafted[row] and self._lags(request)]
        for row in behind:
            request, began = requests[row], time.perf_counter()
            limit = budget if request.params.follows_load else request.committed
            if limit <= 0:
                continue
            if not request.auxiliary_cached:
                request.auxiliary_cached = self._reuse(self.auxiliary, request, row, requests)
            held = request.auxiliary_cached
            self._extend(request, row, min(request.committed - 2, held + limit))
            if request.params.follows_load:
                budget -= request.auxiliary_cached - held
            request.statistics.draft_seconds += time.perf_counter() - began
        return not any(self._lags(requests[row]) for row in behind)

    @staticmethod
    def _lags(request: Request) -> bool:
        return request.auxiliary_cached < request.committed - 2

    def _extend(self, request: Request, row: int, upto: int) -> None:
        held, end = request.auxiliary_cached, len(request.prompt) - 1
        if held < upto:
            tokens = (request.prompt + request.tokens)[held:upto] if upto > end else request.prompt[held:upto]
            began = time.perf_counter()
            for at in range(0, len(tokens), PIECE):
                self.auxiliary.prefill(row, tokens[at : at + PIECE], held + at)
            self.auxiliary.engine.run_deferred()  # so that what it takes is known
            request.auxiliary_seconds += time.perf_counter() - began
            request.auxiliary_stored += len(tokens)
            request.auxiliary_cached = upto
            if held < end <= upto:
                self.prefixes[0].store(row, request.prompt[:end], request.salt)

    def _find(
        self, role: EngineRole, request: Request, running: Sequence[Request], pieces: Sequence[PromptPiece] = ()
    ) -> tuple[int, int]:
        """How many leading columns of a prompt some running request's row holds, and which row; 0 and -1 if few.

        Args:
            pieces: what rows are going to hold besides.
        """
        tokens, best, source = request.prompt[:-1], MIN_SHARED - 1, -1
        ends = {piece.request: piece.end for piece in pieces if piece.both or role is self.target}
        for at, other in enumerate(running):
            held = ends.get(other, other.target_cached if role is self.target else other.auxiliary_cached)
            if other.error:
                continue  # what its row holds may not be numbers
            if best < len(tokens) and held > best and other is not request and other.salt == request.salt:
                shared = min(common_prefix(tokens, other.prompt[:-1]), held)
                if shared > best:
                    best, source = shared, at
        return (best, source) if source >= 0 else (0, -1)

    def _reuse(self, role: EngineRole, request: Request, row: int, running: Sequence[Request]) -> int:
        """Copy what a running request's row or the kept prefixes hold of a prompt; returns the columns."""
        best, source = self._find(role, request, running)
        if best:
            role.engine.cache.copy(source, row, best)
        return self.prefixes[role is self.target].restore(row, request.prompt[:-1], best, request.salt)

    def move(self, request: Request, source: int, to: int) -> None:
        if self.ours:
            self.target.engine.cache.copy(source, to, request.target_cached)
            self.auxiliary.engine.cache.copy(source, to, request.auxiliary_cached)

    def clear(self, row: int) -> None:
        """Zero a row of both caches: after a failure it may hold what is not a number, and poison others."""
        for engine in self._engines if self.ours else ():
            engine.cache.clear(row)

    def discard_block(self, requests: Sequence[Request]) -> None:
        """A block of these requests, by row, broke off: zero whatever it left behind the columns that they hold.

        A draft begins by running the last two committed tokens again, so it may have spoilt their columns as well. Its
        next one writes them anew.
        """
        for row, request in enumerate(requests):
            request.auxiliary_cached = min(request.auxiliary_cached, max(0, request.committed - 2))
            self.target.engine.cache.clear(row, request.target_cached)
            self.auxiliary.engine.cache.clear(row, request.auxiliary_cached)


def _spans(requests: Sequence[Request], held: str, ahead: int) -> list[tuple[int, int]]:
    """Columns that an engine lacks or a block may write, from and to, of each request; `held` of it are right."""
    return [(max(0, min(getattr(one, held), one.committed - 2)), one.committed + ahead) for one in requests]
