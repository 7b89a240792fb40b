"""Drafts that are looked up in a request's text and in others' before it, and how long they are. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtad.lookup import MOST, look_up
from mtad.params import LONGEST
from runtime.scheduler.request import Acceptance, Request
from runtime.speculation.block_times import BlockTimes
from runtime.speculation.lengths import DraftCosts, draft_lengths
from runtime.speculation.planner import FIRST, INTERVAL, auxiliary_length

PROBE = 64
"""Of the blocks for which drafts were found that do not pay, one in so many has one token: seconds may have changed."""

SALTS = 64  # for which texts of ended requests are kept

Draft = list[list[int]]
"""The continuations of a looked-up draft, in ascending order and all of one length; [] for nothing."""


class RanBlock(NamedTuple):
    """A block of some rows with looked-up drafts of `length` at most, and whether the auxiliary ran in it."""

    rows: int
    length: int
    seconds: float
    alone: bool
    auxiliary_ran: bool


@dataclass
class Text:
    """What a request's drafts are looked up in: texts of ended requests, its prompt, its answer.

    Attributes:
        tokens: int64, with room for `max_tokens` of the answer.
        count: how many of them are known.
        acceptance: of drafts that were looked up in it.
        found: what was found before the block that runs, drafted or not.
    """

    tokens: npt.NDArray[np.int64]
    count: int
    acceptance: Acceptance = field(default_factory=Acceptance)
    found: Draft = field(default_factory=list)

    def look_up(self, request: Request, continuations: int, longest: int) -> None:
        """Find what followed in the text where its end stood before, `longest` tokens of it."""
        new = request.tokens[self.count + request.max_tokens - len(self.tokens) :]
        self.tokens[self.count : self.count + len(new)] = new
        self.count += len(new)
        drafts = np.zeros((continuations, longest), np.int64)
        self.found = sorted(drafts[: look_up(self.tokens, self.count, drafts)].tolist())


class Lookups:
    """Finds the drafts of requests that look them up, and cuts automatic ones to the length that pays, which may be 0.

    A draft gives as many tokens as those looked up in the request's text so far promise. All that may follow the load
    (`DecodingParams.timed`) have one length, that of the most tokens of all requests per second by the measured seconds
    of blocks; what is expected of a new text is what texts of greedy requests, or of the others, showed so far. It is
    chosen anew every `INTERVAL` blocks, since choosing takes time itself. All other requests' drafts go by their own
    text and `costs` alone. Where the length is 0, the auxiliary drafts instead, if the request uses it.

    Args:
        longest: longest draft, in tokens.
        kept_tokens: of ended requests' texts, for those with the same salt whose law no draft changes.
    """

    def __init__(self, longest: int, costs: DraftCosts | None = None, kept_tokens: int = 0) -> None:
        self._kept_tokens, self._kept = kept_tokens, dict[int, list[int]]()
        self._longest, self._lengths = longest, draft_lengths(min(longest, LONGEST))
        self._costs = costs or DraftCosts()
        self._times = {auxiliary_ran: BlockTimes() for auxiliary_ran in (False, True)}
        self._length, self._blocks_left, self._skipped = 0, 0, 0
        self._drafted: RanBlock | None = None  # with a draft, and not learnt yet
        self._usual = {greedy: Acceptance() for greedy in (False, True)}

    def find(self, requests: Sequence[Request]) -> list[Draft]:
        """What the next block drafts for each request without asking the auxiliary."""
        drafts: list[Draft] = [[] for _ in requests]
        timed: dict[int, Text] = {}
        for row, request in enumerate(requests):
            if (params := request.part_params).looks_up:
                text = request.looked_up = request.looked_up or self._text(request)
                longest = self._lengths[-1] if params.draft_len == "auto" else min(params.draft_len, self._longest)
                width = math.prod(params.branching[:longest]) if params.form == "branches" else params.draft_width
                text.look_up(request, min(width, MOST) if params.spec.tree else 1, longest)
                drafts[row] = draft = text.found
                if not draft or params.draft_len != "auto":
                    continue
                if request.params.timed:
                    text.acceptance.usual, timed[row] = self._usual[params.temperature == 0], text
                else:
                    costs = [1 + self._costs.node * length * len(draft) for length in self._lengths]
                    if length := auxiliary_length(request):
                        costs[0] = self._costs.block(params, length)
                    drafts[row] = _cut(draft, self._best([request], [text], costs))
            elif request.looked_up:
                request.looked_up.found = []
        if timed:
            length = self._common_length(requests, timed, drafts)
            drafts = [_cut(draft, length) if row in timed else draft for row, draft in enumerate(drafts)]
        return drafts

    def observe(
        self,
        requests: Sequence[Request],
        drafts: list[Draft],
        tokens: list[list[int]],
        seconds: float,
        alone: bool,
        auxiliary_ran: bool = False,
    ) -> None:
        """Learn from a block.

        Args:
            drafts: what `find` returned.
            tokens: that the block gave each row; [] where they are not kept.
            seconds: of the whole block.
            alone: whether nothing else was computed beside the block; nothing is learnt from its seconds otherwise.
        """
        for request, draft, given in zip(requests, drafts, tokens, strict=True):
            text = request.looked_up
            if given and text and text.found:  # the first token of what was not drafted can be judged as well
                kept = len(given) - 1 if draft else int(given[0] in [one[0] for one in text.found])
                usual = self._usual[request.params.temperature == 0]
                for own in (text.acceptance, usual) if request.params.timed else (text.acceptance,):
                    own.add(kept, len(draft[0]) if draft else 1)
        if any(request.looked_up for request in requests):
            longest = max(len(draft[0]) if draft else 0 for draft in drafts)
            self._learn(RanBlock(len(requests), longest, seconds, alone, auxiliary_ran))
        elif self._drafted:
            self._add(self._drafted)
            self._drafted = None

    def _learn(self, ran: RanBlock) -> None:
        """Learn what blocks take. What one after a draft takes longer, having another shape, is the draft's cost."""
        before, self._drafted = self._drafted, None
        if before:
            times = self._times[ran.auxiliary_ran]
            if ran.alone and not ran.length and ran.rows == before.rows and 0 in times.measured(ran.rows):
                longer = ran.seconds - times.expected(ran.rows, [0])[0]
                before = before._replace(seconds=before.seconds + max(0.0, longer))
            self._add(before)
        if ran.length:
            self._drafted = ran
        else:
            self._add(ran)

    def _add(self, ran: RanBlock) -> None:
        self._times[ran.auxiliary_ran].add(ran.rows, ran.length, ran.seconds, ran.alone, after_change=True)

    def record_end(self, request: Request) -> None:
        """Keep the text of a request that has ended, if drafts were looked up in it, for those that come."""
        if self._kept_tokens and request.looked_up:
            kept = self._kept.pop(request.salt, [])  # the salt that was used last stands at the end
            self._kept[request.salt] = [*kept, *request.prompt, *request.tokens][-self._kept_tokens :]
            if len(self._kept) > SALTS:
                del self._kept[next(iter(self._kept))]

    def _text(self, request: Request) -> Text:
        params = request.params
        # budgets move a law towards their draft, and details show it to whoever asks
        free = params.timed and (params.lossless or params.temperature == 0) and not params.draft_details
        known = np.array([*(self._kept.get(request.salt, []) if free else []), *request.prompt])
        return Text(np.append(known, np.zeros(request.max_tokens, np.int64)), len(known))

    def _common_length(self, requests: Sequence[Request], texts: Mapping[int, Text], found: Sequence[Draft]) -> int:
        """The length of the drafts of texts, by row, that may follow the load and for which something was found.

        Args:
            found: of each row; those of other rows keep their lengths, so that no block is shorter than the longest.
        """
        self._blocks_left -= 1
        if self._blocks_left <= 0:
            rows, others = len(requests), {row for row, draft in enumerate(found) if draft and row not in texts}
            fixed = max((len(found[row][0]) for row in others), default=0)
            by_auxiliary = {row for row, one in enumerate(requests) if auxiliary_length(one)} - others
            # blocks in which nothing is looked up for the texts; and others, in which the auxiliary may draft as well
            plain, looking_up = self._times[bool(by_auxiliary)], self._times[bool(by_auxiliary - texts.keys())]
            second = int(looking_up is not plain)  # a line needs two lengths, of which `plain` may have the one
            for times, length in ((plain, 0), (looking_up, min(FIRST, self._lengths[-1])), (looking_up, second)):
                if max(length, fixed) not in times.measured(rows):
                    return length
            costs = plain.expected(rows, [fixed])
            costs += looking_up.expected(rows, [max(length, fixed) for length in self._lengths[1:]])
            by_row = [texts.get(row) for row in range(rows)]
            self._length, self._blocks_left = self._best(requests, by_row, costs), INTERVAL
        self._skipped = 0 if self._length else self._skipped + 1
        return self._length or int(self._skipped % PROBE == 0)

    def _best(self, requests: Sequence[Request], texts: Sequence[Text | None], costs: Sequence[float]) -> int:
        """The length of drafts of these texts with which all requests give the most tokens for their block's cost."""
        speeds = [0.0] * len(costs)
        for request, text in zip(requests, texts, strict=True):
            length = auxiliary_length(request)
            plain = request.acceptance.tokens(length)[length]
            looked_up = text.acceptance.tokens(self._lengths[-1]) if text else []
            for at, cost in enumerate(costs):
                speeds[at] += (looked_up[self._lengths[at]] if text and at else plain) / cost
        return self._lengths[speeds.index(max(speeds))]


def _cut(draft: Draft, length: int) -> Draft:
    return [continuation[:length] for continuation in draft] if length else []
