"""Drafts that are looked up in a request's own text, and how long they are. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mtad.lookup import look_up
from mtad.params import LONGEST
from runtime.scheduler.request import Acceptance, Request
from runtime.speculation.block_times import BlockTimes
from runtime.speculation.planner import FIRST, DraftCosts, draft_lengths

PROBE = 64
"""Of the blocks for which drafts were found that do not pay, one in so many has one token: seconds may have changed."""


@dataclass
class Text:
    """A request's tokens, prompt and answer, as `look_up` reads them.

    Attributes:
        tokens: int64 [prompt and `max_tokens`], of which the first `count` are known.
        acceptance: of drafts that were looked up in it.
        found: what was found before the block that runs, also where it is not drafted; [] for nothing.
    """

    tokens: npt.NDArray[np.int64]
    count: int
    acceptance: Acceptance = field(default_factory=Acceptance)
    found: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> Text:
        """The text of a request so far."""
        tokens = np.zeros(len(request.prompt) + request.params.max_tokens, np.int64)
        tokens[: len(request.prompt)] = request.prompt
        return cls(tokens, len(request.prompt))

    def look_up(self, request: Request, longest: int) -> None:
        """Find what followed in the text where its end stood before, `longest` tokens of it."""
        new = request.tokens[self.count - len(request.prompt) :]
        self.tokens[self.count : self.count + len(new)] = new
        self.count += len(new)
        draft = np.zeros(longest, np.int64)
        self.found = draft.tolist() if look_up(self.tokens, self.count, draft) else []


class Lookups:
    """Finds the drafts of requests that look them up, and cuts those that may follow the load to what pays.

    A draft of n tokens gives as many tokens as those looked up in the request's text so far promise. All that may
    follow the load (`DecodingParams.timed`) have one length, that of the most tokens of all requests per second, by the
    measured seconds of blocks in which the auxiliary did not run; the others go by their own text and `costs` alone.
    Either may draft nothing, so that looking up is not slower than `sample`.

    Args:
        longest: longest draft, in tokens.
        costs: of drafts that may not follow the load.
    """

    def __init__(self, longest: int, costs: DraftCosts | None = None) -> None:
        self._longest, self._lengths = longest, draft_lengths(min(longest, LONGEST))
        costs = costs or DraftCosts()
        self._costs = [1 + costs.node * length for length in self._lengths]
        self._times, self._usual, self._skipped = BlockTimes(), Acceptance(), 0

    def find(self, requests: Sequence[Request]) -> list[list[int]]:
        """What the next block drafts for each request without asking the auxiliary; [] for nothing."""
        timed, drafts = list[int](), list[list[int]]()
        for row, request in enumerate(requests):
            params, length = request.params, 0
            if params.looks_up:
                request.looked_up = text = request.looked_up or Text.of(request)
                automatic = params.draft_len == "auto"
                length = self._lengths[-1] if params.draft_len == "auto" else min(params.draft_len, self._longest)
                text.look_up(request, length)
                if automatic and params.timed and text.found:
                    timed.append(row)
                    text.acceptance.usual = self._usual
                elif automatic:
                    length = self._best([text.acceptance], 1, self._costs)
            drafts.append(request.looked_up.found[:length] if request.looked_up else [])
        if timed:
            length = self._common_length(requests, timed)
            for row in timed:
                drafts[row] = drafts[row][:length]
        return drafts

    def observe(
        self,
        requests: Sequence[Request],
        drafts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        seconds: float,
        alone: bool,
    ) -> None:
        """Learn from a block.

        Args:
            drafts: what `find` returned.
            tokens: that the block gave each row; [] where they are not kept.
            seconds: of the whole block.
            alone: whether nothing but the target's pass was computed; nothing is learnt from its seconds otherwise.
        """
        for request, draft, given in zip(requests, drafts, tokens, strict=True):
            text = request.looked_up
            if given and text and text.found:  # the first token of what was not drafted can be judged as well
                kept = len(given) - 1 if draft else int(given[0] == text.found[0])
                for own in (text.acceptance, self._usual) if request.params.timed else (text.acceptance,):
                    own.add(kept, len(draft) or 1)
        if any(request.looked_up for request in requests):
            self._times.add(len(requests), max(map(len, drafts)), seconds, alone)

    def _common_length(self, requests: Sequence[Request], timed: Sequence[int]) -> int:
        """The length of the drafts of the rows `timed`, for which something was found."""
        measured = self._times.measured(len(requests))
        if len(measured) < 2:  # a line needs two lengths, one of them what drafts are compared with
            return min(FIRST, self._lengths[-1]) if 0 in measured else 0
        texts = [text for row in timed if (text := requests[row].looked_up)]
        costs = self._times.expected(len(requests), self._lengths)
        length = self._best([text.acceptance for text in texts], len(requests), costs)
        self._skipped = 0 if length else self._skipped + 1
        return length or int(self._skipped % PROBE == 0)

    def _best(self, acceptances: Sequence[Acceptance], rows: int, costs: Sequence[float]) -> int:
        """The length with the most tokens of `rows` rows for its cost, of those that have drafts."""
        tokens = [own.tokens(self._lengths[-1]) for own in acceptances]
        gained = [sum(own[length] - 1 for own in tokens) for length in self._lengths]
        speeds = [(rows + gain) / cost for gain, cost in zip(gained, costs, strict=True)]
        return self._lengths[speeds.index(max(speeds))]
