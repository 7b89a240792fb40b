"""How long automatic drafts are: the length with the most expected tokens per second. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from mtad.params import LONGEST, DecodingParams
from runtime.scheduler.request import Acceptance, Request
from runtime.speculation.block_times import BlockTimes, bucket
from runtime.speculation.lengths import DraftCosts, draft_lengths, with_length

FIRST = 4
"""The length that is tried first."""

INTERVAL = 4
"""Blocks from one choice to the next, and of a probe."""

PROBE_SHARE = 0.01
"""Probes lose about this share of the time."""

DEAR = 0.1
"""The part of a block's time from which on texts are not stored to see what drafts take at a new number of rows."""

JOINING_BLOCKS = 64
"""For so many blocks in a row it is believed that requests are about to join."""

GAIN = 1.03
"""The choice is changed for a length that promises this much more; drafts are charged it too, for probes and plans."""


class Planner:
    """Chooses how long the drafts of each block's automatic requests are.

    A draft gives as many tokens as the text's acceptance so far promises (`Acceptance`). Where a request
    `follows_load`, one length holds for the batch, since a block takes what its longest draft takes: the one with the
    most expected tokens of all requests per second, by the measured seconds of blocks of about so many rows. A length
    that was not measured yet takes what those beside it say, and a machine that slows down does so for all alike, so
    seconds are kept relative to its recent speed. Drafting also means storing texts in the auxiliary's cache, which is
    charged per token that follows. Now and then a probe runs another length.

    A choice depends on past blocks and on how many requests wait, and never on the random numbers of the block that it
    is for; so a lossless method stays lossless.

    The others are drafted for by their own text and `costs` alone, at least one token: their tokens depend on neither
    clock nor batch.

    Args:
        longest: longest draft, in tokens.
        costs: of drafts that follow their own text alone.

    Attributes:
        length: of the next block's drafts that follow the load; 0 for none.
        adapts: whether some request that `plan` was given last follows it.
    """

    def __init__(self, longest: int = LONGEST, costs: DraftCosts | None = None) -> None:
        self._lengths = draft_lengths(min(longest, LONGEST))
        self._costs = costs or DraftCosts()
        self.length = self._choice = max(length for length in self._lengths if length <= FIRST)
        self.adapts = False
        self._longest, self._times = longest, BlockTimes()
        self._typical = defaultdict[str, Acceptance](Acceptance)
        self._blocks_left, self._bucket, self._ahead = 0.0, 0, 0
        self._clock, self._next_probe, self._probes = 0.0, 0.0, 0
        self._lost, self._worth = 0.0, 0.0  # seconds: by a probe; those that its block would be worth
        self._ended = [0.0] * 4  # of requests: tokens of prompts and of answers; seconds and tokens of storing texts
        self._variants: dict[tuple[int, int, bool, bool], DecodingParams] = {}
        self._planned: list[DecodingParams] = []

    @property
    def drafts(self) -> bool:
        """Whether the choice, not a passing probe, is to draft: prompts that join are then stored for it at once."""
        return self._choice > 0

    def choose_own(self, requests: Sequence[Request]) -> None:
        """Set what automatic drafts begin with, and the lengths that depend on their request's text alone.

        Before look-ups, which are weighed against these drafts, and before `plan`. Twice is as good as once.
        """
        for request in requests:
            params, new = request.part_params, not request.acceptance.tried  # of this part, nothing was seen
            if params.automatic and new:
                request.acceptance.usual = self._typical[params.method] if request.params.follows_load else None
            if params.automatic and not request.params.follows_load and (new or request.blocks % INTERVAL == 0):
                request.draft_len = self._own_length(request)

    def plan(self, requests: Sequence[Request], found: Sequence[bool] = (), joining: int = 0) -> list[DecodingParams]:
        """Parameters of each running request for the next block.

        Those that stay the same are the same objects, and so is the list where all do.

        Args:
            found: whether a draft was looked up for each request; by default for none.
            joining: requests that are about to run as well. The choice is for the batch with them, in which most of the
                tokens will be decoded; unless they do not come (`JOINING_BLOCKS`).
        """
        followers = [request for request in requests if request.params.follows_load]
        self.adapts = bool(followers)
        self._ahead = self._ahead + 1 if joining else 0
        rows = len(requests) + (joining if self._ahead <= JOINING_BLOCKS else 0)
        if followers and (self._blocks_left <= 0 or bucket(rows) != self._bucket):
            self._choose(requests, rows)
            self._bucket = bucket(rows)
        for request in followers:
            request.draft_len = self.length
        both = zip(requests, found or [False] * len(requests), strict=True)
        keys = [(one.id, one.draft_len, one.thinking, own or not one.part_params.uses_model) for one, own in both]
        if keys != list(self._variants):
            known, each = self._variants, zip(keys, requests, strict=True)
            self._variants = {key: known.get(key) or self._variant(request, key[3]) for key, request in each}
            self._planned = list(self._variants.values())
        return self._planned

    def observe(
        self,
        requests: Sequence[Request],
        used: Sequence[DecodingParams],
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
        catch_up: float,
        alone: bool,
    ) -> None:
        """Learn from a block.

        Args:
            used: what `plan` returned, or what was run instead: while auxiliary caches were brought up to date, or
                because another request had failed.
            drafted, accepted: tokens of each row's longest path that the auxiliary drafted, and how many of its path
                the target accepted, whether or not the text ended among them.
            seconds: of the whole block.
            catch_up: seconds that bringing auxiliary caches up to date took before it.
            alone: whether nothing else was computed beside the block; nothing is learnt from its seconds otherwise.
        """
        for request, params, length, count in zip(requests, used, drafted, accepted, strict=True):
            if length:
                request.acceptance.add(count, length)
                self._typical[params.method].add(count, length)
        if not self.adapts:
            return
        # others count a little, so that a probe for which the auxiliary's caches never catch up is given up
        self._blocks_left -= 1 if used is self._planned else 1 / INTERVAL
        self._clock += seconds + catch_up
        self._lost += seconds - self._worth if used is self._planned else 0.0
        self._next_probe += catch_up / PROBE_SHARE if self.length != self._choice else 0.0
        self._times.add(len(used), max(p.drafted if p.uses_model else 0 for p in used), seconds, alone)

    def record_end(self, request: Request) -> None:
        """Learn from a request that has ended what storing a prompt for the auxiliary takes per token of text."""
        if request.params.follows_load and request.tokens:
            texts = len(request.prompt) - request.statistics.reused_tokens, len(request.tokens)
            own = *texts, request.auxiliary_seconds, request.auxiliary_stored
            self._ended = [0.9 * mean + new for mean, new in zip(self._ended, own, strict=True)]

    def _variant(self, request: Request, looked_up: bool) -> DecodingParams:
        params = request.part_params
        if params.looks_up and looked_up:
            length = LONGEST if params.draft_len == "auto" else params.draft_len
            return replace(params, draft="lookup", draft_len=min(length, self._longest))
        return with_length(params, request.draft_len) if params.automatic else params

    @staticmethod
    def _length(request: Request, followed: int) -> int:
        """Length of a request's draft where those that follow the load have `followed` tokens."""
        return followed if request.params.follows_load else auxiliary_length(request)

    def _own_length(self, request: Request) -> int:
        tokens = request.acceptance.tokens(self._lengths[-1])
        return max(self._lengths[1:], key=lambda n: tokens[n] / self._costs.block(request.part_params, n))

    def _storing(self, requests: Sequence[Request]) -> float:
        """Seconds that each token that follows pays for storing texts for the auxiliary, where it drafts.

        They are those of a usual prompt, spread over the usual answer; or, where it is more, of what the auxiliary
        lacks of these texts, spread over the tokens that they have left.
        """
        prompts, answers, seconds, stored = self._ended
        if not stored:
            return 0.0
        texts = [request for request in requests if request.params.follows_load]
        held = [request.auxiliary_cached or request.statistics.reused_tokens for request in texts]
        lacking = sum(request.committed - count for request, count in zip(texts, held, strict=True))
        left = sum(request.tokens_left for request in texts)
        return seconds / stored * max(prompts / answers, lacking / max(1, left))

    def _choose(self, requests: Sequence[Request], rows: int) -> None:
        lengths, probed = self._lengths, self.length != self._choice
        self._blocks_left = INTERVAL
        fixed = max(self._length(request, 0) for request in requests)
        measured, storing = self._times.measured(rows), self._storing(requests)
        if len(measured) < 2:  # a line needs two lengths: one like the choice so far, and none, at a new number of rows
            first = min(self._choice, FIRST)
            dear = bool(measured) and storing * rows > DEAR * self._times.expected(rows, [fixed])[0]
            untried = [n for n in (first, int(not (first or dear))) if max(n, fixed) not in measured]
            if untried:
                self.length = self._choice = untried[0]
                return
        tokens, stored = dict.fromkeys(lengths, 0.0), dict.fromkeys(lengths, 0.0)
        for request in requests:
            expected = request.acceptance.tokens(max(lengths[-1], self._length(request, 0)))
            for n in lengths:
                own = min(expected[self._length(request, n)], request.tokens_left) * rows / len(requests)
                tokens[n] += own
                stored[n] += own * storing if n and request.params.follows_load else 0.0
        taken = dict(zip(lengths, self._times.expected(rows, [max(n, fixed) for n in lengths]), strict=True))
        speeds = {n: tokens[n] / (taken[n] + stored[n]) / (GAIN if n else 1) for n in lengths}
        # a line says little of what lies far behind the last length that was measured
        near = [n for n in lengths if n <= max(1, 2 * self._times.longest(rows))]
        best = max(near, key=speeds.__getitem__)
        if self._choice not in near or speeds[best] > GAIN * speeds[self._choice]:
            self._probes = int(best < self._choice)  # the first one goes back to where the choice came from
            self._choice, self._next_probe = best, self._clock + taken[best]
        self.length = self._choice
        if probed:  # what gained is probed again at once; one that lost more than all of its time was disturbed
            lost = max(0.0, min(self._lost, INTERVAL * taken[self._choice]))
            self._next_probe = max(self._clock, self._next_probe) + lost / PROBE_SHARE
            self._probes += lost > 0
        elif self._clock >= self._next_probe and rows == len(requests):
            at = lengths.index(self._choice)
            beside = lengths[max(0, at - 1) : at] + lengths[at + 1 : at + 2]
            if promising := [n for n in beside if n < self._choice or tokens[n] > tokens[self._choice]]:
                self.length = promising[self._probes % len(promising)]
                self._next_probe, self._lost = self._clock, 0.0
                seconds = taken[self._choice] + stored[self._choice]
                self._worth = tokens[self.length] / tokens[self._choice] * seconds - stored[self.length]


def auxiliary_length(request: Request) -> int:
    """Tokens that the auxiliary drafts for a request for which nothing is looked up."""
    params = request.part_params
    return request.draft_len if params.automatic else params.drafted if params.uses_model else 0
