"""How much to draft: the most tokens per second, by measured step costs and pooled acceptance. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

from mtad.params import DecodingParams
from runtime.scheduler.request import Request
from runtime.speculation.acceptance import Acceptance
from runtime.speculation.cost_error import CostError
from runtime.speculation.step_costs import BlockShape, StepCosts

INTERVAL, PROBE_BLOCKS = 16, 4
"""Blocks from one decision to the next, and of a probe."""

SETTLING = 2
"""Blocks after a change of shape that take longer: tensors are made anew, caches are cold."""

GAIN = 1.02
"""The choice is changed for one that promises this much more."""

PROBE_SHARE = 0.01
"""A probe loses at most this share of the time since the last one, by what is known of costs and acceptance."""

LEAST = BlockShape(1, 1, 1)
"""The smallest draft: one token, in one beam."""


class DraftSize(NamedTuple):
    """Largest draft of a block's adaptive rows."""

    draft_len: int
    width: int


OFF = DraftSize(0, 0)


def variants(params: DecodingParams) -> list[DecodingParams]:
    """What blocks of a request may be, chosen among few: itself, and if it is adaptive, smaller drafts and none."""
    if not params.adaptive:
        return [params]
    lengths, widths = (powers(most) for most in (params.drafted, params.draft_width))
    drafts = [replace(params, draft_len=n, beam_width=w) for n, w in product(lengths, widths)]
    return [*drafts, replace(params, method="sample")]


def powers(most: int) -> list[int]:
    """1, 2, 4, .. and `most`."""
    return sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})


class Planner:
    """Chooses each block's drafts.

    The choice is by past blocks alone, their accepted lengths and seconds, never by the noise of the block it is for;
    so a lossless method stays lossless. One choice holds for the batch, since a block costs what its largest row
    costs; each row takes of it what its own parameters allow. The first choice is the largest draft; it is made anew
    every `INTERVAL` blocks.

    A block takes the seconds of the table times what the blocks that were run say of its error (`CostError`).

    Nothing is learnt of what is not run, so now and then a probe runs the best other choice of a width, or the next
    best where the width's last probe ran the best; each width in turn, and width 0 is no draft. `PROBE_SHARE` bounds
    what probes lose.

    Args:
        costs: of the pair's steps.
        max_draft_len: longest draft of any request.
        few: choose among drafts of 1, 2, 4, .. tokens and the longest only: each one more is another graph to record.
    """

    def __init__(self, costs: StepCosts, max_draft_len: int = 8, few: bool = False) -> None:
        self.costs, self._few = costs, few
        self._block_seconds = lru_cache(4096)(self._seconds)
        self._acceptance = Acceptance(max_draft_len)
        self._error = CostError(2)
        self._errors: dict[tuple[tuple[int, BlockShape], tuple[float, float]], list[float]] = {}
        self._rows: dict[int, tuple[int, dict[DraftSize, DecodingParams]]] = {}
        self._text_tokens = 64.0
        self._ids: list[int] = []
        self._used: list[DecodingParams] = []
        self._run: Sequence[DecodingParams] = []
        self._drafts: list[tuple[str, int, int]] = []
        self._block = 0, BlockShape(1, 1, 1)
        self._blocks_alike = 0
        self._choice: DraftSize | None = None
        self._now = DraftSize(max_draft_len, 1)
        self._rate = 0.0
        self._countdown = 0
        self._probes, self._probed = 0, dict[int, DraftSize]()
        self._since_probe = math.inf

    def plan(self, requests: Sequence[Request]) -> list[DecodingParams]:
        """Parameters of each running request for the next block.

        A fixed request's are its own, the same object. The list is the same object as long as nothing changes.
        """
        ids = [request.id for request in requests]
        due = self._countdown <= 0 and any(request.params.adaptive for request in requests)
        if due:
            self._decide(requests)
        if due or ids != self._ids:
            self._ids, used = ids, [self._variant(request) for request in requests]
            if [*map(id, used)] != [*map(id, self._used)]:
                self._used = used
        return self._used

    @property
    def drafting(self) -> bool:
        """Whether adaptive requests are being drafted for, so that a new one's prompt had better be in both caches."""
        return self._now.draft_len > 0

    def observe(
        self,
        requests: Sequence[Request],
        used: Sequence[DecodingParams],
        accepted: Sequence[int],
        seconds: float,
        alone: bool = True,
    ) -> None:
        """Learn from a block.

        Args:
            requests: as given to `plan`.
            used: what it returned, or what was run instead.
            accepted: drafted tokens the target accepted in each row, whether or not the text ended among them.
            seconds: of the whole block; without prefill, and without what brought an auxiliary cache up to date.
            alone: whether that is so. On engines that compute such tokens beside the block's own (OpenVINO) it is not
                always, and nothing is learnt from the seconds then.
        """
        self._since_probe += seconds
        self._countdown -= used is self._used  # else caches are being brought up to date first
        before = self._block
        self._blocks_alike += 1
        if used is not self._run:
            self._run, self._block = used, (len(used), BlockShape.of(used))
            self._drafts = [(p.method, p.draft_width, p.drafted) for p in used]
        if self._block != before:
            self._blocks_alike = 0
        for (method, width, drafted), count in zip(self._drafts, accepted, strict=True):
            if drafted:
                self._acceptance.add(method, width, drafted, count)
        if alone and self._blocks_alike >= SETTLING:
            columns = max(request.committed for request in requests)
            expected, shares = self._table(*self._block, columns)
            errors = self._errors.setdefault((_kind(*self._block), shares), [])
            errors.append(math.log(max(seconds, 1e-9) / expected))
            if len(errors) == INTERVAL:
                self._learn()

    def _learn(self) -> None:
        """Blocks teach their costs some at a time: a filter's step takes as long as a tenth of a small pair's block."""
        for (kind, shares), errors in self._errors.items():
            self._error.observe(kind, shares, errors)
        self._errors.clear()

    def forget(self, request: Request) -> None:
        if row := self._rows.pop(request.id, None):
            self._text_tokens += 0.1 * (request.committed - row[0] - self._text_tokens)

    def _variant(self, request: Request) -> DecodingParams:
        """The request's parameters under the present choice; no draft where catching up costs more than it gains."""
        p = request.params
        start, variants = self._rows.setdefault(request.id, (request.committed, {}))
        if not p.adaptive:
            return p
        own = DraftSize(self._at_most(p.drafted, self._now.draft_len), self._at_most(p.draft_width, self._now.width))
        if own.draft_len:
            left = min(p.max_tokens - (request.committed - start), self._text_tokens)
            gain = self._acceptance.gains(p.method, own.width)[own.draft_len]
            if self._catch_up(request) * self._rate > left * gain / (1 + gain):
                own = OFF
        if own == (p.drafted, p.draft_width):
            return p
        if own not in variants:
            width = own.width if p.spec.form == "beams" else p.beam_width
            drafts = replace(p, draft_len=own.draft_len, beam_width=width) if own.draft_len else None
            variants[own] = drafts or replace(p, method="sample")
        return variants[own]

    def _at_most(self, asked: int, most: int) -> int:
        """How much of what a request asks for it gets."""
        return max((n for n in powers(asked) if n <= most), default=0) if self._few else min(asked, most)

    def _decide(self, requests: Sequence[Request]) -> None:
        """Make the choice anew, or begin a probe."""
        self._acceptance.fade()
        self._learn()
        outcomes = self._outcomes(requests)
        rates = {choice: tokens / seconds for choice, (tokens, seconds) in outcomes.items()}
        best = max(rates, key=lambda choice: rates[choice])
        if self._choice is None:
            self._choice = list(rates)[-1]
        elif self._choice not in rates or rates[best] > GAIN * rates[self._choice]:
            self._choice = best
        self._now, self._countdown = self._choice, INTERVAL
        widths = sorted({width for _, width in rates})
        width = widths[self._probes % len(widths)]
        others = [choice for choice in rates if choice.width == width and choice != self._choice]
        if not others:
            self._probes += 1
        elif self._run:
            probe = max(others, key=lambda choice: (choice != self._probed.get(width), rates[choice]))
            tokens, seconds = outcomes[probe]
            loss = PROBE_BLOCKS * max(0.0, seconds - tokens / rates[self._choice]) + seconds
            loss += sum(self._catch_up(r, 0 if width else PROBE_BLOCKS) for r in requests if r.params.adaptive)
            if loss <= PROBE_SHARE * self._since_probe:
                self._now, self._countdown, self._probed[width] = probe, PROBE_BLOCKS, probe
                self._probes, self._since_probe = self._probes + 1, 0.0
        self._rate = rates[self._now]

    def _outcomes(self, requests: Sequence[Request]) -> dict[DraftSize, tuple[float, float]]:
        """Tokens and seconds of a block of every choice, smaller drafts first."""
        gains = cache(self._acceptance.gains)
        columns, rows = max(request.committed for request in requests), len(requests)
        fixed = [r.params for r in requests if not r.params.adaptive]
        adaptive = [r.params for r in requests if r.params.adaptive]
        asked = Counter((p.method, p.drafted, p.draft_width, p.score_width) for p in adaptive)
        certain = rows + sum(gains(p.method, p.draft_width)[p.drafted] for p in fixed if p.drafted)
        least = BlockShape.of(fixed)
        outcomes = {OFF: (certain, self._expect(rows, least, columns))}
        prompt = sum(self._rows[id][0] for id in self._ids if id in self._rows) // max(1, len(self._ids))
        stored = self._error.speed * self.costs.catch_up(prompt, prompt) / self._text_tokens
        most, longest_draft = max(widest for _, _, widest, _ in asked), max(longest for _, longest, _, _ in asked)
        lengths = powers(longest_draft) if self._few else range(1, longest_draft + 1)
        for width in powers(most):
            scored = max(min(width, score_width) for *_, score_width in asked)
            for length in lengths:
                shape = BlockShape(*map(max, least, (length, width, scored)))
                tokens = sum(
                    count * gains(method, min(width, widest))[min(length, longest)]
                    for (method, longest, widest, _), count in asked.items()
                )
                # whoever drafts for a text stores its prompt in the auxiliary's cache, too
                seconds = self._expect(rows, shape, columns) + stored * (len(adaptive) + tokens)
                outcomes[DraftSize(length, width)] = certain + tokens, seconds
        return outcomes

    def _seconds(self, rows: int, shape: BlockShape, columns: int) -> tuple[float, float]:
        return max(1e-9, self.costs.block(rows, shape, columns)), self.costs.draft(rows, shape, columns)

    def _table(self, rows: int, shape: BlockShape, columns: int) -> tuple[float, tuple[float, float]]:
        """Seconds of a block by the table, and the shares of what any draft takes and of what this one takes."""
        columns = -(-columns // 64) * 64
        seconds, draft = self._block_seconds(rows, shape, columns)
        return seconds, (self._block_seconds(rows, LEAST, columns)[1] / seconds if draft else 0.0, draft / seconds)

    def _expect(self, rows: int, shape: BlockShape, columns: int) -> float:
        """Seconds of a block."""
        seconds, shares = self._table(rows, shape, columns)
        return seconds * math.exp(self._error.of(_kind(rows, shape), shares))

    def _catch_up(self, request: Request, more: int = 0) -> float:
        """Seconds to store what the auxiliary's cache lacks of a row, and `more` tokens."""
        missed = request.committed - 2 - request.auxiliary_held + more
        return self._error.speed * self.costs.catch_up(missed, request.committed)


def _kind(rows: int, shape: BlockShape) -> tuple[int, BlockShape]:
    """Blocks that are taken to share an error: few, however many rows there are."""
    return rows.bit_length(), shape
