"""How long automatic drafts are: the length with the most expected tokens per second. No torch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtad.params import LONGEST, DecodingParams
from runtime.scheduler.request import Acceptance, Request

FIRST = 4
"""The length that is tried first."""

INTERVAL = 4
"""Blocks from one choice to the next, and of a probe."""

PROBE_SHARE = 0.01
"""Probes lose at most this share of the time."""

GAIN = 1.03
"""The choice is changed for a length that promises this much more: times differ from block to block."""

KEPT_TIMES, FEW = 32, 8
"""Seconds of so many blocks of a kind are kept; a line through all kinds weighs as much as `FEW` of them."""


def draft_lengths(longest: int) -> list[int]:
    """Few lengths, since each is another shape of a block, and another graph to capture."""
    return [0, *(1 << power for power in range(longest.bit_length()))]


def with_length(params: DecodingParams, length: int) -> DecodingParams:
    """A request's parameters where its drafts have `length` tokens."""
    return replace(params, draft_len=length) if length else replace(params, method="sample")


def variants(params: DecodingParams, longest: int = LONGEST) -> list[DecodingParams]:
    """What blocks of a request may be: itself, or if its drafts are automatic, each length up to `longest`."""
    if not params.automatic:
        return [params]
    lengths = draft_lengths(min(longest, LONGEST))
    return [with_length(params, length) for length in lengths if length or params.follows_load]


@dataclass(frozen=True)
class DraftCosts:
    """What drafts cost where no clock may decide, relative to a step of the target over one token.

    Attributes:
        level: seconds of a step of the auxiliary.
        node: seconds that the target takes longer for each further token it scores.
    """

    level: float = 0.15
    node: float = 0.01

    def block(self, params: DecodingParams, length: int) -> float:
        """A block with a draft of `length` tokens."""
        return 1 + length * (self.level + self.node * (params.beam_width if params.spec.tree else 1))


class Planner:
    """Chooses how long the drafts of each block's automatic requests are.

    A draft gives as many tokens as the text's acceptance so far promises (`Acceptance`). Where a request
    `follows_load`, one length holds for the batch, since a block takes what its longest draft takes: the one with the
    most expected tokens of all requests per second, by the measured seconds of blocks of about so many rows. A length
    that was not measured yet takes what those beside it say, and a machine that slows down does so for all alike, so
    seconds are kept relative to its recent speed. Drafting also means storing each prompt in the auxiliary's cache,
    which is charged per token of text, as a mean over ended requests. Now and then a probe runs a length next to the
    choice. A choice depends on past blocks alone, and never on the random numbers of the block that it is for; so a
    lossless method stays lossless.

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
        self._first = max(length for length in self._lengths if length <= FIRST)
        self.length = self._choice = self._first
        self.adapts = False
        self._seconds = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=KEPT_TIMES))
        self._typical = defaultdict[str, Acceptance](Acceptance)
        self._blocks_left = 0
        self._clock, self._next_probe, self._probes, self._probing = 0.0, 0.0, 0, False
        self._spent, self._worth = 0.0, 0.0  # seconds of a probe, and those in which the choice gives as many tokens
        self._last_block, self._slowness = (0, 0), 1.0
        self._stored_seconds, self._stored_tokens = 0.0, 1.0
        self._variants: dict[tuple[int, int], DecodingParams] = {}
        self._planned: list[DecodingParams] = []

    @property
    def drafts(self) -> bool:
        """Whether the choice, not a passing probe, is to draft: prompts that join are then stored for it at once."""
        return self._choice > 0

    def plan(self, requests: Sequence[Request]) -> list[DecodingParams]:
        """Parameters of each running request for the next block.

        Those that stay the same are the same objects, and so is the list where all do.
        """
        followers = [request for request in requests if request.params.follows_load]
        self.adapts = bool(followers)
        for request in requests:
            if request.params.automatic and not request.blocks:
                request.acceptance.usual = self._typical[request.params.method] if request.params.follows_load else None
            if request.params.automatic and not request.params.follows_load and request.blocks % INTERVAL == 0:
                request.draft_len = self._own_length(request)
        if followers and self._blocks_left <= 0:
            self._choose(requests)
        for request in followers:
            request.draft_len = self.length
        keys = [(request.id, request.draft_len) for request in requests]
        if keys != list(self._variants):
            known, each = self._variants, zip(keys, requests, strict=True)
            self._variants = {key: known.get(key) or self._variant(request) for key, request in each}
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
            drafted, accepted: tokens of each row's longest path, and how many of its path the target accepted, whether
                or not the text ended among them.
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
        planned = used is self._planned
        self._blocks_left -= planned
        self._clock += seconds + catch_up
        self._spent += catch_up + planned * seconds
        if self._probing and self._spent > 4 * self._worth:  # the auxiliary's caches do not catch up
            self._blocks_left = 0
        seconds, block = max(seconds, 1e-9), (_bucket(len(used)), max(params.drafted for params in used))
        if alone and block == self._last_block:  # the first one of another shape takes longer
            if known := self._seconds.get(block):
                self._slowness *= min(2.0, seconds / (self._slowness * statistics.median(known))) ** 0.125
            self._seconds[block].append(seconds / self._slowness)
        self._last_block = block

    def record_end(self, request: Request) -> None:
        """Learn from a request that has ended what the auxiliary's cache takes, beside blocks, per token of text."""
        if request.params.follows_load and request.auxiliary_cached:
            self._stored_seconds += 0.1 * (request.auxiliary_seconds - self._stored_seconds)
            self._stored_tokens += 0.1 * (max(1, len(request.tokens)) - self._stored_tokens)

    def _variant(self, request: Request) -> DecodingParams:
        return with_length(request.params, request.draft_len) if request.params.automatic else request.params

    @staticmethod
    def _length(request: Request, followed: int) -> int:
        """Length of a request's draft where those that follow the load have `followed` tokens."""
        p = request.params
        return followed if p.follows_load else request.draft_len if p.automatic else p.drafted

    def _own_length(self, request: Request) -> int:
        tokens = request.acceptance.tokens(self._lengths[-1])
        return max(self._lengths[1:], key=lambda n: tokens[n] / self._costs.block(request.params, n))

    def _choose(self, requests: Sequence[Request]) -> None:
        rows, lengths = _bucket(len(requests)), self._lengths
        probed, self._probing = self._probing, False
        if probed:
            self._next_probe = self._clock + max(0.0, self._spent - self._worth) / PROBE_SHARE
        self._blocks_left = INTERVAL
        fixed = max(self._length(request, 0) for request in requests)
        measured = {n: times for (count, n), times in self._seconds.items() if count == rows}
        # at a new number of rows two lengths are run, since a line needs two; one where a fixed row makes both the same
        untried = [n for n in (self._first, 0) if max(n, fixed) not in measured]
        if untried and len(measured) < 2:
            self.length = self._choice = untried[0]
            return
        seconds = _expected_seconds(measured, [max(n, fixed) for n in lengths])
        tokens, stored = dict.fromkeys(lengths, 0.0), dict.fromkeys(lengths, 0.0)
        for request in requests:
            expected = request.acceptance.tokens(max(lengths[-1], self._length(request, 0)))
            for n in lengths:
                own = expected[self._length(request, n)]
                tokens[n] += own
                if n and request.params.follows_load:
                    stored[n] += own * self._stored_seconds / self._stored_tokens
        taken = dict(zip(lengths, seconds, strict=True))
        speeds = {n: tokens[n] / (self._slowness * taken[n] + stored[n]) for n in lengths}
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] > GAIN * speeds[self._choice]:
            self._choice = best
        self.length = self._choice
        if not probed and self._clock >= self._next_probe:
            at = lengths.index(self._choice)
            beside = lengths[max(0, at - 1) : at] + lengths[at + 1 : at + 2]
            self.length = beside[self._probes % len(beside)]
            self._probes, self._probing, self._spent = self._probes + 1, True, 0.0
            self._worth = INTERVAL * (tokens[self.length] / speeds[self._choice] - stored[self.length])


def _expected_seconds(measured: Mapping[int, Sequence[float]], lengths: Sequence[int]) -> list[float]:
    """Seconds of blocks of some lengths, where few were measured drawn to the line through all of them.

    Lower quartiles, because whatever disturbs a block makes it longer.
    """
    points = [(length, sorted(times)[len(times) // 4], len(times)) for length, times in measured.items()]
    weight = sum(count for _, _, count in points)
    x, y = (sum(point[axis] * point[2] for point in points) / weight for axis in (0, 1))
    spread = sum(count * (length - x) ** 2 for length, _, count in points)
    slope = max(0.0, sum(count * (length - x) * (taken - y) for length, taken, count in points) / (spread or 1.0))
    known = {length: (taken, count) for length, taken, count in points}
    found = []
    for length in lengths:
        taken, count = known.get(length, (0.0, 0))
        found.append((count * taken + FEW * max(y + slope * (length - x), 0.1 * y)) / (count + FEW))
    return found


def _bucket(rows: int) -> int:
    """Numbers of rows whose blocks take about as long: within a factor of the square root of two."""
    return round(2 * math.log2(rows))
