"""How much to draft: the largest number of tokens a second, from what blocks cost and what was accepted. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from mtad.params import DecodingParams
from runtime.acceptance import Lengths, shift
from runtime.speculation.acceptance_history import OFF, Choice, Planned, Row, missing
from runtime.speculation.step_costs import BlockShape, StepCosts
from runtime.speculation.step_times import BlockTimes

PRIOR = 0.7
"""Acceptance of a drafted token before anything is known of a pair."""

WIDER = 1.25
"""What twice the beams are taken to do to the odds of acceptance, where that width has not been tried."""

PROBE_SHARE = 0.0075
"""Of all decoding time may be lost on blocks whose only purpose is to learn."""


class Planner:
    """Chooses each block's drafts.

    The choice is by past blocks alone, their accepted lengths and seconds, never by the noise of the block it is for;
    so a lossless method stays lossless. One choice holds for the batch, since the block's cost is that of its largest
    row; each row takes of it what its own parameters allow. The choice is made again every few blocks and changes only
    for a gain that pays for the change.

    Learning what is not tried costs time. Blocks run for it (probes) are those that would be best if the unknown came
    out well, and their losses are kept below `PROBE_SHARE` of all time.

    Args:
        costs: of the pair's steps.
        max_draft_len: longest draft of any request.
    """

    def __init__(self, costs: StepCosts, max_draft_len: int = 8) -> None:
        self.times = BlockTimes(costs)
        self._deepest = max_draft_len
        self._rows: dict[int, Row] = {}
        self._pool: dict[tuple[str, int], Lengths] = {}
        self._pooled: dict[tuple[str, int], list[float]] = {}
        self._ids: list[int] = []
        self._batch: list[Row] = []
        self._used: list[DecodingParams] = []
        self._drafts: list[tuple[int, int]] = []
        self._shape = self._fixed = BlockShape(0, 0, 0)
        self._columns = 0
        self._timed: tuple[int, BlockShape] | None = None
        self._choice = OFF
        self._probe: Choice | None = None
        self._probe_left = 0
        self._countdown = 0
        self._decided = 0
        self._advantage = 0.0
        self._rate = 0.0
        self._bank = math.inf

    def plan(self, requests: Sequence[Planned]) -> list[DecodingParams]:
        """Parameters of each running request for the next block.

        A fixed request's are its own, the same object. The list is the same object as long as nothing changes.
        """
        ids = [request.id for request in requests]
        if ids != self._ids:
            self._enter(requests, ids)
        if self._countdown <= 0 and any(row.adaptive for row in self._batch):
            self._decide(requests)
        self._columns = max((request.committed for request in requests), default=0)
        return self._used

    @property
    def drafting(self) -> bool:
        """Whether adaptive requests are being drafted for, so that a new one's prompt had better be in both caches."""
        return (self._probe or self._choice).draft_len > 0

    def observe(
        self, requests: Sequence[Planned], used: Sequence[DecodingParams], accepted: Sequence[int], seconds: float
    ) -> None:
        """Learn from a block.

        Args:
            requests: as given to `plan`.
            used: what it returned.
            accepted: drafted tokens the target accepted in each row, whether or not the text ended among them.
            seconds: of the whole block; without prefill, and without what brought an auxiliary cache up to date.
        """
        batch = self._batch
        drafts = self._drafts if used is self._used else [(p.drafted, p.draft_width) for p in used]
        for row, (drafted, width), count in zip(batch, drafts, accepted, strict=True):
            if drafted:
                row.learn(drafted, width, count)
                if len(row.fresh) >= 16:
                    self._share(row)
            else:
                row.idle += 1
        now = len(batch), self._shape if used is self._used else _largest(used)
        if now == self._timed:
            self.times.observe(*now, self._columns, seconds)
        self._timed = now
        self._countdown -= 1
        if self._probe:
            usual = min(seconds, 1.5 * self.times.expect(len(batch), self._shape, self._columns))
            self._bank -= usual - (sum(accepted) + len(batch)) / self._rate
            self._probe_left -= 1
            if not self._probe_left:
                self._probe, self._countdown = None, 0
        elif self._bank < math.inf:  # no credit before there was a choice to make
            self._bank = min(self._bank + PROBE_SHARE * seconds, 40 * seconds)

    def forget(self, request: Planned) -> None:
        """A request has ended."""
        row = self._rows.pop(request.id, None)
        if row is not None:
            self._share(row)

    def predict(self, requests: Sequence[Planned], choice: Choice) -> tuple[float, float]:
        """Expected tokens, and seconds, of a block in which every adaptive row drafts as `choice` says."""
        rows = [self._row(request) for request in requests]
        self._pooled.clear()
        tokens = len(rows) + sum(self._gain(row, choice if row.adaptive else row.choice, False) for row in rows)
        shape = _largest([row.variant(choice, joined=True) for row in rows])
        return tokens, self.times.expect(len(rows), shape, max(request.committed for request in requests))

    def _enter(self, requests: Sequence[Planned], ids: list[int]) -> None:
        """The batch has changed: new rows take the present choice; it is made anew where the cost changed much."""
        before = len(self._ids)
        self._ids, self._batch = ids, [self._row(request) for request in requests]
        self._fixed = _largest([row.params for row in self._batch if not row.adaptive])
        for row, request in zip(self._batch, requests, strict=True):
            if row.joined is None:
                missed, choice = missing(request), self._probe or self._choice
                row.joined = missed <= 0 or self._pays(row, request, missed, choice, hopeful=False) > 0
        if len(ids) <= 2 or len(ids).bit_length() != before.bit_length():
            self._countdown, self._advantage = 0, 0.5  # no loyalty to a choice made for another batch
        self._apply(self._probe or self._choice)

    def _share(self, row: Row) -> None:
        """Add what was seen of a row to what is known of all.

        Late, because an estimate of the row from both would count it twice, and a few rejections would pass for many.
        """
        for drafted, width, accepted in row.fresh:
            if (row.method, width) not in self._pool:
                self._pool[row.method, width] = Lengths(self._deepest, memory=400)
            self._pool[row.method, width].add(drafted, accepted)
        row.fresh.clear()

    def _row(self, request: Planned) -> Row:
        row = self._rows.get(request.id)
        if row is None or row.params is not request.params:
            row = self._rows[request.id] = Row(request.params, request.committed, self._deepest)
        return row

    def _apply(self, choice: Choice) -> None:
        used = [row.variant(choice, bool(row.joined)) for row in self._batch]
        if len(used) != len(self._used) or any(a is not b for a, b in zip(used, self._used, strict=True)):
            self._used, self._drafts = used, [(p.drafted, p.draft_width) for p in used]
            self._shape = _largest(used)

    def _decide(self, requests: Sequence[Planned]) -> None:
        """Make the choice anew: keep it, change it, or learn about another."""
        self._decided += 1
        idle = self._choice == OFF and not self._fixed.draft_len  # nothing is learnt meanwhile
        interval = self._countdown = max(
            1, min(max(8, len(self._batch)) if idle else max(4, len(self._batch) // 2), self._decided // 4)
        )
        self._pooled.clear()
        self._probe = None
        rates = self._rates(requests, hopeful=False)
        best = OFF
        for choice, rate in rates.items():
            if rate > rates[best] * (1.002 if best.draft_len else 1.01):
                best = choice
        now = self._choice if self._choice in rates else best
        gain = rates[best] / rates[now] - 1
        self._advantage = self._advantage + gain * interval if best != now else 0.0
        price = 0.5  # blocks a change costs: tensors are made anew, and what goes off has to catch up when it returns
        if best == OFF and now != OFF:
            price += 0.5 + 0.5 * self._return(requests) * rates[OFF] / len(self._batch)
        elif gain > 0.1:
            price = 0.0
        if self._advantage > price:
            now, self._advantage = best, 0.0
        self._choice, self._rate = now, rates[now]
        for row, request in zip(self._batch, requests, strict=True):
            missed = missing(request)
            row.joined = missed <= 0 or self._pays(row, request, missed, now, hopeful=False) > 0
        if self._bank == math.inf:  # a first credit
            self._bank = (len(self._batch) + 3) / rates[OFF]
        searching = self._decided < 32 or self._decided % 4 == 0  # looking costs more than deciding
        if searching and (self._bank > 0 or self._unmeasured(requests)):
            self._look_for_probe(requests, rates)
        self._apply(self._probe or now)

    def _rates(self, requests: Sequence[Planned], hopeful: bool) -> dict[Choice, float]:
        """Tokens a second of every choice, smaller drafts first."""
        count, columns = len(self._batch), max(request.committed for request in requests)
        adaptive = [(row, request) for row, request in zip(self._batch, requests, strict=True) if row.adaptive]
        certain = count + sum(self._gain(row, row.choice, False) for row in self._batch if not row.adaptive)
        deepest = max(row.choice.draft_len for row, _ in adaptive)
        trees = any(row.params.spec.tree for row, _ in adaptive)
        beams = max(row.choice.width for row, _ in adaptive)
        hope = {drafts: self.times.hope(count, drafts) if hopeful else 1.0 for drafts in (False, True)}
        rates = {OFF: certain / self.times.expect(count, self._fixed, columns) / hope[self._fixed.draft_len > 0]}
        if not hopeful:
            self._rate = rates[OFF]
        for width in _widths(beams):
            catch_up, gains = 0.0, [0.0] * (deepest + 1)
            for row, request in adaptive:
                missed, own = missing(request), self._gains(row, min(width, row.choice.width), hopeful)
                if missed > 0:
                    if self._pays(row, request, missed, Choice(deepest, width), hopeful) <= 0:
                        continue
                    catch_up += self._catch_up(row, request, missed)
                gains = [a + b for a, b in zip(gains, own, strict=False)]
            for length, gain in enumerate(gains[1:], 1):
                shape = BlockShape(
                    max(length, self._fixed.draft_len),
                    max(width, self._fixed.width),
                    max(width if trees else 1, self._fixed.score_width),
                )
                seconds = self.times.expect(count, shape, columns) * hope[True] + catch_up
                rates[Choice(length, width)] = (certain + gain) / seconds
        return rates

    def _look_for_probe(self, requests: Sequence[Planned], rates: dict[Choice, float]) -> None:
        """Start a probe of what would be best if the unknown came out well, if its loss can be afforded."""
        now, affordable = self._choice, self._bank
        hopes = self._rates(requests, hopeful=True)
        block = len(self._batch) / rates[OFF]

        def promise(choice: Choice) -> float:
            """Hoped gain for each part of a block that is likely to be lost."""
            lost = max(0.0, 1 - rates[choice] / rates[now]) + (
                self._return(requests) / 4 / block if choice == OFF else 0
            )
            return (hopes[choice] / rates[now] - 1) / (0.05 + lost)

        probe = max((choice for choice in hopes if choice != now), key=promise, default=now)
        if now != OFF and self._unmeasured(requests) and hopes[OFF] > rates[now]:
            probe, affordable = OFF, math.inf  # what drafts are to be measured by has to be known
        if probe == now or hopes[probe] < 1.1 * rates[now]:
            return
        shape = _largest([row.variant(probe, joined=True) for row in self._batch])
        columns = max(request.committed for request in requests)
        seconds = self.times.expect(len(self._batch), shape, columns)
        blocks = 2 if probe.draft_len else 4  # the first is not timed
        loss = blocks * seconds * max(0.0, 1 - rates[probe] / rates[now])
        loss += 0.0 if probe.draft_len else self._return(requests)
        affordable -= loss
        behind = [(missing(request), row) for request, row in zip(requests, self._batch, strict=True) if row.adaptive]
        joining = []
        for missed, row in sorted(behind, key=lambda pair: pair[0]):
            cost = self.times.costs.catch_up(missed, columns) * self.times.scale() if probe.draft_len else 0.0
            if cost > affordable:
                break
            affordable -= cost
            joining.append(row)
        if not joining:
            return
        self._bank = min(self._bank, affordable + loss)  # the blocks' own loss is charged when it is known
        self._probe, self._probe_left = probe, blocks
        self._countdown = blocks
        for row in joining:
            row.joined = True
            row.doubt()

    def _pays(self, row: Row, request: Planned, missed: int, choice: Choice, hopeful: bool) -> float:
        """Tokens a block that drafting for a row brings beyond what bringing its cache up to date costs."""
        return self._gain(row, choice, hopeful) - self._catch_up(row, request, missed) * self._rate

    def _unmeasured(self, requests: Sequence[Planned]) -> bool:
        """Whether blocks of about so many rows have been timed with a draft, but hardly without."""
        count = len(self._batch)
        plain, drafting = self.times.timed(count, False), self.times.timed(count, True)
        if drafting < 5 * (1 + plain) or plain >= 9:
            return False
        return not plain or self._return(requests) < 0.5 * self.times.expect(count, self._shape, self._columns)

    def _return(self, requests: Sequence[Planned]) -> float:
        """Seconds to bring the rows' caches up to date that are so now, after some blocks without a draft."""
        current = [request for request, row in zip(requests, self._batch, strict=True) if row.adaptive and row.joined]
        return sum(self.times.costs.catch_up(4, request.committed) for request in current) * self.times.scale()

    def _catch_up(self, row: Row, request: Planned, missed: int) -> float:
        """Seconds a block to bring a row's cache up to date, over the blocks it will last."""
        left = row.params.max_tokens - (request.committed - row.start)
        blocks = max(1.0, min(64.0, left / 2))
        return self.times.costs.catch_up(missed, request.committed) * self.times.scale() / blocks

    def _gain(self, row: Row, choice: Choice, hopeful: bool) -> float:
        length, width = min(choice.draft_len, row.choice.draft_len), min(choice.width, row.choice.width)
        return self._gains(row, width, hopeful)[length] if length else 0.0

    def _gains(self, row: Row, width: int, hopeful: bool) -> list[float]:
        """Expected accepted tokens of drafts of 0, 1, .. tokens; constant beyond what the row asks for."""
        if not row.choice.draft_len:
            return [0.0] * (self._deepest + 1)
        rates = row.acceptance(width, self._prior)
        if hopeful:
            pool = self._pool.get((row.method, width))
            tried = pool.total() if pool else 0.0
            doubt = max(row.stale(), 0.5 / (1 + tried / 8))
            seen = min(row.seen(), tried / 2) if (row.params.spec.form == "beams") else row.seen()
            rates = [rate + math.sqrt(rate * (1 - rate) / (4 + seen)) for rate in rates]
            rates = [min(rate, 0.98) + max(0.0, 0.95 - rate) * doubt for rate in rates]
        gains = [0.0, *accumulate(accumulate(rates, mul))]
        return gains + gains[-1:] * (self._deepest + 1 - len(gains))

    def _prior(self, method: str, width: int) -> list[float]:
        """Acceptance of each token of a draft over all requests, given that those before were accepted."""
        key = method, width
        if key not in self._pooled:
            self._pooled[key] = self._estimate(method, width)
        return self._pooled[key]

    def _estimate(self, method: str, width: int) -> list[float]:
        tried = [w for m, w in self._pool if m == method and w != width]
        if tried:  # what is known of the nearest width, until this one has been tried
            near = min(tried, key=lambda w: (abs(math.log2(w / width)), w))
            odds = WIDER ** math.log2(width / near)
            other = self._pool[method, near].conditional([PRIOR] * self._deepest)
            prior = [shift(rate, odds) for rate in other]
        else:
            prior = [shift(PRIOR, WIDER ** math.log2(width / 4))] * self._deepest
        own = self._pool.get((method, width))
        return own.conditional(prior) if own else prior


def _widths(most: int) -> list[int]:
    """1, 2, 4, .. and `most`."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def _largest(params: Sequence[DecodingParams]) -> BlockShape:
    return BlockShape(
        max((p.drafted for p in params), default=0),
        max((p.draft_width for p in params), default=0),
        max((p.score_width for p in params), default=0),
    )
