"""How much adaptive requests draft: the length with the most expected tokens per second. No torch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtad.params import DecodingParams
from runtime.scheduler.request import Request

INTERVAL, PROBE_BLOCKS = 16, 4
"""Blocks from one choice to the next, and of a probe."""

PROBE_SHARE = 0.01
"""Probes lose at most this share of the time."""

GAIN = 1.03
"""The choice is changed for a length that promises this much more: times differ from block to block."""

KEPT_TIMES = 32
"""Blocks of a kind whose seconds are remembered."""


def draft_lengths(longest: int) -> list[int]:
    """0, 1, 2, 4, .. and `longest`: few, since each is another shape of a block, and another graph to capture."""
    return sorted({0, longest, *(1 << power for power in range(longest.bit_length()))})


def draft_length(params: DecodingParams, most: int) -> int:
    """How long the draft of a request is where adaptive ones have at most `most` tokens."""
    if not params.adaptive or params.drafted <= most:
        return params.drafted
    return max(length for length in draft_lengths(params.drafted) if length <= most)


def limit_draft(params: DecodingParams, most: int) -> DecodingParams:
    """A request's parameters where adaptive drafts have at most `most` tokens; the same object if that is no limit."""
    length = draft_length(params, most)
    if length == params.drafted:
        return params
    return replace(params, draft_len=length) if length else replace(params, method="sample")


def variants(params: DecodingParams) -> list[DecodingParams]:
    """What blocks of a request may be: itself, and if it is adaptive, shorter drafts and none."""
    return [limit_draft(params, length) for length in draft_lengths(params.drafted)] if params.adaptive else [params]


@dataclass
class RunningMean:
    """A mean that begins with an expectation."""

    value: float = 0.8
    count: float = 4

    def add(self, observed: float) -> None:
        self.count += 1
        self.value += (observed - self.value) / self.count

    def fade(self) -> None:
        """What was observed so far counts less than what will be."""
        self.count = max(min(self.count, 16), self.count * 15 / 16)


class Planner:
    """Chooses how long the drafts of each block's adaptive requests are.

    The choice depends on past blocks alone, on their accepted lengths and seconds, and never on the random numbers of
    the block that it is for; so a lossless method stays lossless. One length holds for the batch, since a block takes
    what its longest draft takes; each request drafts as much of it as it asks for.

    It is the length with the most expected tokens per second. Two tables say what is expected: the seconds of blocks,
    by number of rows and length of the draft, and how often a drafted token is accepted if those before it were, by
    method and place in the draft. A draft also costs its share of storing the prompts in the auxiliary's cache. A
    machine that slows down does so for all lengths alike, so seconds are kept relative to its recent speed.

    A length that was never run with about so many rows is run first, the longest one before the shorter ones. Later,
    now and then, a probe runs a length that is not the choice, each in turn.

    Attributes:
        length: the longest draft of the next block's adaptive requests, in tokens; 0 for none.
        adapts: whether some request that `plan` was given last is adaptive; there is nothing to learn for others.
    """

    def __init__(self) -> None:
        self.length, self.adapts = 1, False
        self._seconds = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=KEPT_TIMES))
        self._accepted = defaultdict[tuple[str, int], RunningMean](RunningMean)
        self._choice = 1
        self._blocks_left = 0
        self._clock, self._next_probe, self._probes, self._probing = 0.0, 0.0, 0, False
        self._spent, self._worth = 0.0, 0.0
        self._last_block, self._slowness = (0, 0), 1.0
        self._stored_seconds, self._stored_tokens = 0.0, 1.0
        self._ids: list[int] = []
        self._variants: dict[tuple[int, int], DecodingParams] = {}
        self._planned: list[DecodingParams] = []

    def plan(self, requests: Sequence[Request]) -> list[DecodingParams]:
        """Parameters of each running request for the next block.

        Those that stay the same are the same objects; so is the list until the choice or the requests change.
        """
        ids = [request.id for request in requests]
        self.adapts = any(request.params.adaptive for request in requests)
        due = self.adapts and self._blocks_left <= 0
        if due:
            self._choose(requests)
        if due or ids != self._ids:
            known = self._variants
            keys = [(request.id, self.length) for request in requests]
            each = zip(keys, requests, strict=True)
            self._variants = {key: known.get(key) or limit_draft(request.params, self.length) for key, request in each}
            self._ids, self._planned = ids, list(self._variants.values())
        return self._planned

    def observe(
        self, used: Sequence[DecodingParams], accepted: Sequence[int], seconds: float, catch_up: float, alone: bool
    ) -> None:
        """Learn from a block.

        Args:
            used: what `plan` returned, or what was run instead while auxiliary caches were brought up to date.
            accepted: drafted tokens that the target accepted in each row, whether or not the text ended among them.
            seconds: of the whole block.
            catch_up: seconds that bringing auxiliary caches up to date took before it.
            alone: whether no prompts were computed beside the block; nothing is learnt from its seconds otherwise.
        """
        planned = used is self._planned
        self._blocks_left -= planned
        self._clock += seconds + catch_up
        self._spent += catch_up + planned * seconds
        for params, count in zip(used, accepted, strict=True):
            for place in range(min(count + 1, params.drafted)):
                self._accepted[params.method, place].add(place < count)
        block = _bucket(len(used)), max(params.drafted for params in used)
        if alone and block == self._last_block:  # the first one of another shape takes longer
            if known := self._seconds.get(block):
                self._slowness *= min(2.0, seconds / (self._slowness * statistics.median(known))) ** 0.125
            self._seconds[block].append(seconds / self._slowness)
        self._last_block = block

    def record_end(self, request: Request) -> None:
        """Learn from a request that has ended what the auxiliary's cache takes, beside blocks, per token of text."""
        if request.auxiliary_seconds:
            self._stored_seconds += 0.1 * (request.auxiliary_seconds - self._stored_seconds)
            self._stored_tokens += 0.1 * (max(1, len(request.tokens)) - self._stored_tokens)

    def _choose(self, requests: Sequence[Request]) -> None:
        params = [request.params for request in requests]
        fixed = max((p.drafted for p in params if not p.adaptive), default=0)
        lengths = sorted({length for p in params if p.adaptive for length in draft_lengths(p.drafted)})
        blocks = {length: (_bucket(len(params)), max(length, fixed)) for length in lengths}
        for mean in self._accepted.values():
            mean.fade()
        probed, self._probing = self._probing, False
        if probed:
            self._next_probe = self._clock + max(0.0, self._spent - self._worth) / PROBE_SHARE
        untried = [length for length in lengths if blocks[length] not in self._seconds]
        if untried:
            self.length, self._blocks_left = untried[-1], PROBE_BLOCKS
            return
        tokens = {n: sum(self._expected_tokens(p.method, draft_length(p, n)) for p in params) for n in lengths}
        stored = {n: tokens[n] * self._stored_seconds / self._stored_tokens if n else 0.0 for n in lengths}
        seconds = {n: self._slowness * statistics.median(self._seconds[blocks[n]]) for n in lengths}
        speeds = {n: tokens[n] / (seconds[n] + stored[n]) for n in lengths}
        best = max(speeds, key=speeds.__getitem__)
        if self._choice not in speeds or speeds[best] > GAIN * speeds[self._choice]:
            self._choice = best
        self.length, self._blocks_left = self._choice, INTERVAL
        others = [length for length in lengths if length != self._choice]
        if others and not probed and self._clock >= self._next_probe:
            self.length, self._blocks_left = others[self._probes % len(others)], PROBE_BLOCKS
            self._probes, self._probing, self._spent = self._probes + 1, True, 0.0
            self._worth = PROBE_BLOCKS * (tokens[self.length] / speeds[self._choice] - stored[self.length])

    def _expected_tokens(self, method: str, length: int) -> float:
        """Of one row's block: the accepted ones, and the bonus token."""
        tokens, reached = 1.0, 1.0
        for place in range(length):
            reached *= self._accepted[method, place].value
            tokens += reached
        return tokens


def _bucket(rows: int) -> int:
    """Numbers of rows whose blocks take about as long: within a factor of the square root of two."""
    return round(2 * math.log2(rows))
