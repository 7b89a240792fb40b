"""How often drafts are accepted. No torch."""

from __future__ import annotations

from itertools import accumulate
from operator import mul


class Acceptance:
    """How often drafted tokens are accepted, given that all before were: by method and width, over all requests."""

    PRIOR, WEIGHT, FADING, LEFT = 0.8, 4.0, 1 / 16, 16.0
    """What is expected of a pair; observations that an expectation counts for; share that fades; what never fades."""

    def __init__(self, deepest: int) -> None:
        self._deepest = deepest
        self._counts: dict[tuple[str, int], list[list[float]]] = {}

    def add(self, method: str, width: int, drafted: int, accepted: int) -> None:
        """One row's block. A draft accepted in full says nothing of greater depths."""
        counts = self._counts.setdefault((method, width), [[0.0, 0.0] for _ in range(self._deepest)])
        for depth in range(min(accepted + 1, drafted)):
            counts[depth][0] += 1
            counts[depth][1] += depth < accepted

    def fade(self) -> None:
        for counts in self._counts.values():
            if counts[0][0] > self.LEFT:
                counts[:] = [[(1 - self.FADING) * number for number in count] for count in counts]

    def rates(self, method: str, width: int) -> list[float]:
        """Acceptance at each depth. What was not tried is taken to be as good as the next wider, or shallower, is."""
        wider = min((w for m, w in self._counts if m == method and w > width), default=None)
        prior = self.rates(method, wider) if wider else []
        rates = [self.PRIOR]
        for depth, (tried, accepted) in enumerate(self._counts.get((method, width), [[0.0, 0.0]] * self._deepest)):
            expected = prior[depth] if prior else rates[-1]
            rates.append((accepted + self.WEIGHT * expected) / (tried + self.WEIGHT))
        return rates[1:]

    def gains(self, method: str, width: int) -> list[float]:
        """Expected accepted tokens of drafts of 0, 1, .. tokens."""
        return [0.0, *accumulate(accumulate(self.rates(method, width), mul))]
