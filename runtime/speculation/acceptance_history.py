"""One request as the planner of drafts knows it. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from mtad.params import DecodingParams
from runtime.acceptance import Lengths, shift, surprise


class Planned(Protocol):
    """What the planner looks at of a request."""

    @property
    def id(self) -> int:
        """Unique."""

    @property
    def params(self) -> DecodingParams:
        """As asked; never changed."""

    @property
    def committed(self) -> int:
        """Tokens of prompt and text."""

    @property
    def auxiliary_held(self) -> int:
        """Leading columns of the auxiliary's cache that are right; committed - 2 or more is all a draft needs."""


class Choice(NamedTuple):
    """Largest draft of a block's adaptive rows."""

    draft_len: int
    width: int


OFF = Choice(0, 0)


class Row:
    """What the planner knows of one request.

    Attributes:
        choice: largest draft its parameters allow.
        idle: blocks since it was last drafted for.
        joined: whether it takes part in drafts; None before that is decided.
        fresh: (drafted, width, accepted) of blocks that are not in the estimate over all requests yet.
    """

    def __init__(self, params: DecodingParams, start: int, deepest: int) -> None:
        self.params, self.start, self.method = params, start, params.method
        self.adaptive = params.adaptive
        self.choice = Choice(min(params.drafted, deepest), params.draft_width)
        self.idle = 0
        self.joined: bool | None = None
        self.fresh: list[tuple[int, int, int]] = []
        self._deepest = deepest
        self._seen: dict[int, Lengths] = {}
        self._variants: dict[Choice, DecodingParams] = {}

    def variant(self, choice: Choice, joined: bool) -> DecodingParams:
        """The request's parameters with a draft no larger than `choice`."""
        if not self.adaptive:
            return self.params
        length = min(choice.draft_len, self.choice.draft_len) if joined else 0
        own = Choice(length, min(choice.width, self.choice.width)) if length else OFF
        if own == self.choice:
            return self.params
        made = self._variants.get(own)
        if made is None:
            if not own.draft_len:
                made = replace(self.params, method="sample")
            elif self.params.spec.form == "beams":
                made = replace(self.params, draft_len=own.draft_len, beam_width=own.width)
            else:
                made = replace(self.params, draft_len=own.draft_len)
            self._variants[own] = made
        return made

    def learn(self, drafted: int, width: int, accepted: int) -> None:
        """One block of this row."""
        self.idle = 0
        self.fresh.append((drafted, width, accepted))
        if width not in self._seen:
            self._seen[width] = Lengths(self._deepest, memory=48)
        self._seen[width].add(drafted, accepted)

    def acceptance(self, width: int, pooled: Callable[[str, int], list[float]]) -> list[float]:
        """Acceptance at each depth the row may draft, given that all before were accepted.

        The pooled estimate for this width, its odds multiplied by how much better or worse this text goes: first over
        all depths, then at each. Blocks of every width count alike, so what another width does is learnt over requests.
        """
        deepest = self.choice.draft_len
        if not self._seen:
            return pooled(self.method, width)[:deepest]
        if len(self._seen) == 1 and width in self._seen:
            return self._seen[width].conditional(pooled(self.method, width))[:deepest]
        counts = [(*lengths.counts(), pooled(self.method, other)) for other, lengths in self._seen.items()]
        trials, successes, expected = ([x for count in counts for x in count[kind]] for kind in range(3))
        whole = surprise(trials, successes, expected)
        rates = []
        for depth, prior in enumerate(pooled(self.method, width)[:deepest]):
            here = [(tried[depth], passed[depth], shift(hoped[depth], whole)) for tried, passed, hoped in counts]
            rates.append(shift(prior, whole * surprise(*zip(*here, strict=True))))
        return rates

    def seen(self) -> float:
        """Blocks this row was drafted for, faded."""
        return sum(lengths.total() for lengths in self._seen.values())

    def stale(self) -> float:
        """Share of what was seen of this text that may be out of date."""
        return 0.6 * self.idle / (self.idle + 128)

    def doubt(self) -> None:
        """A probe begins: if the row was idle for long, what it says outweighs what was seen before."""
        if self.idle >= 32:
            for lengths in self._seen.values():
                lengths.fade(0.25)


def missing(request: Planned) -> int:
    """Tokens the auxiliary's cache lacks for a draft."""
    return request.committed - 2 - request.auxiliary_held
