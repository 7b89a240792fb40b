"""What blocks are going to take: the table of step costs, corrected by the blocks that have run. No torch."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque

from runtime.speculation.step_costs import BlockShape, StepCosts

TYPICAL_ERROR = 0.05
"""Standard deviation of what the table is taken to be wrong by for one shape of block against others of its kind."""


class BlockTimes:
    """Expected seconds of a block: the table, corrected by the blocks that have run.

    log(measured / table) is taken as g + kind + own: g, common to everything (the machine is slower now than when the
    table was measured), follows within some blocks and is a median; kind, the constant error of blocks with a draft or
    without, at about so many rows; own, a shape's error beyond its kind's. A shape is believed to differ from its kind
    as far as more blocks than chance would need say so: on a noisy machine the fastest of many shapes is else the
    luckiest, and one that was unlucky is never met again.

    Args:
        costs: the table.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._common: deque[float] = deque(maxlen=9)
        self._g = 0.0
        self._kind: dict[tuple[int, bool], _Error] = {}
        self._own: dict[tuple[int, BlockShape], _Error] = {}
        self._spread = 0.02
        self._count: Counter[tuple[int, bool]] = Counter()
        self._table: dict[tuple[int, BlockShape, int], float] = {}

    def expect(self, rows: int, shape: BlockShape, columns: int) -> float:
        """Seconds of the next block of this shape."""
        return self._base(rows, shape, columns) * math.exp(self._g + self._error(rows, shape))

    def scale(self) -> float:
        """What the machine's present speed makes of the table's seconds."""
        return math.exp(self._g)

    def hope(self, rows: int, drafts: bool) -> float:
        """Factor by which blocks of about so many rows, with a draft or without, may yet turn out faster."""
        return 1 - 0.3 / math.sqrt(1 + self.timed(rows, drafts))

    def timed(self, rows: int, drafts: bool) -> int:
        """Blocks of about so many rows that have been timed."""
        return self._count[rows.bit_length(), drafts]

    def observe(self, rows: int, shape: BlockShape, columns: int, seconds: float) -> None:
        """Learn from one block; not the first after a change of rows or shape, which rebuilds tensors."""
        self._count[rows.bit_length(), shape.draft_len > 0] += 1
        ratio = math.log(max(seconds, 1e-9) / self._base(rows, shape, columns))
        if len(self._common) < 5:  # the first blocks say how fast the machine is, nothing about shapes
            self._common.append(ratio)
            self._g = statistics.median(self._common)
            return
        known = self._error(rows, shape)
        kind = self._kind.setdefault((rows.bit_length(), shape.draft_len > 0), _Error())
        own = self._own.setdefault((rows.bit_length(), shape), _Error())
        if kind.count >= 5:
            self._common.append(ratio - known)
            self._g = statistics.median(self._common)
        off = abs(ratio - self._g - known)
        self._spread += 0.05 * (min(off, 3 * self._spread) / 0.8 - self._spread)  # 0.8: mean size of a normal number
        self._spread = max(self._spread, 0.005)
        limit = 3 * max(self._spread, TYPICAL_ERROR)
        kind.add(ratio - self._g - self._share(own) * own.value, limit)
        own.add(ratio - self._g - kind.value, limit)

    def _error(self, rows: int, shape: BlockShape) -> float:
        """Log-error of the table for a shape, apart from the machine's speed."""
        kind = self._kind.get((rows.bit_length(), shape.draft_len > 0))
        own = self._own.get((rows.bit_length(), shape))
        error = (kind.value if kind else 0.0) + (self._share(own) * own.value if own else 0.0)
        return max(-0.7, min(0.7, error))  # beyond that the machine was busy while the shape was new

    def _share(self, own: _Error) -> float:
        """How much of a shape's mean error is taken to be its own, rather than noise."""
        return own.count / (own.count + (self._spread / TYPICAL_ERROR) ** 2)

    def _base(self, rows: int, shape: BlockShape, columns: int) -> float:
        key = rows, shape, columns // 64
        if key not in self._table:
            self._table[key] = max(self.costs.block(rows, shape, columns // 64 * 64 + 64), 1e-9)
        return self._table[key]


class _Error:
    """A mean error that follows slowly: the mean of the first 40, then a moving one.

    Attributes:
        value: the mean.
        count: how many it is of.
    """

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, error: float, limit: float) -> None:
        """One more; what is further off than `limit` counts as that far off."""
        self.count = min(self.count + 1, 40)
        self.value += max(-limit, min(limit, error - self.value)) / self.count
