"""What becomes of a block's tokens: text, stop conditions, constraints and figures, request by request."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from runtime.constraints.constraint import Constrainer
from runtime.decoder.block import Block
from runtime.decoder.draft_details import TokenDetails
from runtime.output.detokenizer import Detokenizer
from runtime.scheduler.request import Acceptance, Request
from runtime.scheduler.statistics import Totals
from runtime.scheduler.thoughts import Thoughts


class OutputProcessor:
    """Gives every request that begins its detokenizer and its constraint, and keeps the figures of all.

    Args:
        unrecorded: counts the blocks that a device ran without a CUDA graph, by reason; part of the totals.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos: Sequence[int], constrainer: Constrainer, unrecorded: dict[str, int] | None
    ) -> None:
        self._tokenizer, self._eos, self._constrainer = tokenizer, frozenset(eos), constrainer
        self.totals = Totals(unrecorded={} if unrecorded is None else unrecorded)

    def begin(self, request: Request) -> None:
        """Make a request's detokenizer and constraint, unless they are there."""
        if request.detokenizer:
            return
        request.statistics.queue_seconds = time.perf_counter() - request.arrived
        request.constraint = self._constrainer.constraint(request.params, request.prompt, request.grammar)
        if request.constraint and (own := request.thoughts):
            own.opens_once = request.constraint.begin(own.inside, own.opening, own.may_open)
        request.detokenizer = Detokenizer(self._tokenizer, self._eos, request.params)  # last: it says that all is there

    def process(self, requests: Sequence[Request], block: Block) -> None:
        """Append a block's tokens to those of its requests whose part of it is kept, up to each one's stop condition.

        A request that has ended, be it by an error, has its `finish_reason`. It still holds its row, until the loop
        releases it.
        """
        given, grown = block.given, []
        for row, request in enumerate(requests):
            if given.is_kept[row]:
                before, thinking = len(request.tokens), request.thinking
                try:
                    accepted = self._append(request, row, block)
                except Exception as error:
                    request.fail(error)
                    continue
                if given.params[row].uses_model:
                    request.auxiliary_cached = max(0, request.committed - 2)
                grown.append((row, request, before, thinking, accepted))
        now = time.perf_counter()
        seconds = block.drafted - block.began, block.scored - block.drafted, now - block.scored
        self.totals.turns += 1
        self.totals.add_seconds(*seconds)
        for row, request, before, thinking, kept in grown:
            count = len(request.tokens) - before
            drafted, accepted = block.drafted_levels[row], min(kept, count)
            spent = sum(block.spent[row][:count]) if given.params[row].spec.bounded else 0.0
            for counts in (request.statistics, self.totals):
                counts.add(drafted, accepted, count, spent, thinking)
            request.statistics.add_seconds(seconds[0] if drafted else 0.0, *seconds[1:])
            if count and request.statistics.first_token_seconds is None:
                request.statistics.first_token_seconds = now - request.arrived

    def end(self, request: Request) -> None:
        """A request has ended, begun or not: forget it, and count it."""
        request.detokenizer = request.constraint = None
        if request.grammar:
            self._constrainer.grammars.forget()
        request.statistics.total_seconds = time.perf_counter() - request.arrived
        assert request.finish_reason is not None
        self.totals.ended(request.finish_reason, request.statistics)

    def _append(self, request: Request, row: int, block: Block) -> int:
        """Append a block's tokens to a request; how many of them were accepted drafts."""
        if not block.finite[row]:
            raise ArithmeticError("logits of the auxiliary or the target are not finite numbers")
        accepted = len(block.tokens[row]) - 1
        if request.thoughts:
            forced = self._read_thoughts(request, request.thoughts, row, block)
            accepted = min(accepted, len(block.tokens[row]) - forced)
        before, wanted = len(request.tokens), request.params.top_logprobs
        top = _top_tokens(block.logits_of(row), wanted) if wanted else []
        assert request.detokenizer is not None
        request.finish_reason = request.detokenizer.append(request, block.tokens[row])
        count = len(request.tokens) - before
        request.log_probs += block.log_probs[row][:count]
        request.top_log_probs += top[:count]
        request.details += block.details[row][:count]
        request.target_cached = request.committed - 1
        request.blocks += 1
        if request.constraint:
            request.constraint.advance(request.tokens[before:])
            request.constraint.thinking = request.thinking
        if request.thoughts and (begun := request.thoughts.begun(request.tokens)):
            request.stable = min(request.stable, request.offsets[-begun])  # a tag is no text
        return accepted

    def _read_thoughts(self, request: Request, thoughts: Thoughts, row: int, block: Block) -> bool:
        """Drop what a block has behind a tag, where the other part has a rule or a grammar of its own.

        The target's own token goes as well: it may come from what a rejected draft has left of the target's law.

        Returns:
            whether the last token that is kept is of a tag that stands in the place of another token.
        """
        cut = request.params.thinking is not request.params or request.params.constrained
        was_inside = thoughts.inside
        tokens, forced = thoughts.read(request.tokens, block.tokens[row], cut)
        if forced:
            own = block.logits_of(row)[len(tokens) - 1].astype(np.float64)
            block.log_probs[row][len(tokens) - 1] = float(own[tokens[-1]] - np.logaddexp.reduce(own))
            block.details[row][len(tokens) - 1 : len(tokens)] = [TokenDetails()] * bool(block.details[row])
        block.tokens[row], block.log_probs[row] = tokens, block.log_probs[row][: len(tokens)]
        if cut and thoughts.inside is not was_inside:
            request.acceptance = Acceptance()  # the parts' rates differ
            if request.looked_up:
                request.looked_up.acceptance = Acceptance()
        return forced


def _top_tokens(logits: npt.NDArray[np.float32], count: int) -> list[list[tuple[int, float]]]:
    """The target's likeliest tokens and their log-probabilities at each emitted position, at temperature 1, unfiltered.

    Args:
        logits: float32 [N, V].
    """
    found = []
    for own in logits.astype(np.float64):
        log_total = np.logaddexp.reduce(own)
        likely = np.argpartition(-own, min(count, len(own) - 1))[:count]
        likely = likely[np.lexsort((likely, -own[likely]))]
        found.append([(int(token), float(own[token] - log_total)) for token in likely])
    return found
