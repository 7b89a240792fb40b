"""What blocks are going to take: the table of step costs, corrected by the blocks that have run. No torch."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque

from runtime.costs import BlockShape, StepCosts


class BlockTimes:
    """Expected seconds of a block: the table, corrected by the blocks that have run.

    log(measured / table) is taken as g + own: g, common to everything (the machine is slower now than when the table
    was measured), follows within some blocks; own, a shape's constant error, is learnt when the shape is new and
    hardly moves afterwards. Both are medians, so single slow blocks change neither.

    Args:
        costs: the table.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._common: deque[float] = deque(maxlen=9)
        self._g = 0.0
        self._own: dict[tuple[int, BlockShape], _Own] = {}
        self._kind: dict[tuple[int, bool], float] = {}
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
        kind, key = (rows.bit_length(), shape.draft_len > 0), (rows.bit_length(), shape)
        if len(self._common) < 5:  # the first blocks say how fast the machine is, nothing about shapes
            self._common.append(ratio)
            self._g = statistics.median(self._common)
            return
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = _Own(self._kind.get(kind, 0.0))
        if own.settled:
            self._common.append(ratio - own.value)
            self._g = statistics.median(self._common)
        own.add(ratio - self._g)
        self._kind[kind] = own.value

    def _error(self, rows: int, shape: BlockShape) -> float:
        own = self._own.get((rows.bit_length(), shape))
        return own.value if own else self._kind.get((rows.bit_length(), shape.draft_len > 0), 0.0)

    def _base(self, rows: int, shape: BlockShape, columns: int) -> float:
        key = rows, shape, columns // 64
        if key not in self._table:
            self._table[key] = max(self.costs.block(rows, shape, columns // 64 * 64 + 64), 1e-9)
        return self._table[key]


class _Own:
    """A shape's own log-error: the median of its first blocks and two guesses, then a slow, clipped average."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._first = [guess, guess]

    @property
    def settled(self) -> bool:
        return len(self._first) >= 7

    def add(self, error: float) -> None:
        if len(self._first) < 11:
            self._first.append(error)
            self.value = statistics.median(self._first[2:] if len(self._first) > 4 else self._first)
        else:
            self.value += 0.05 * max(-0.2, min(0.2, error - self.value))
        self.value = max(-0.7, min(0.7, self.value))  # beyond that the machine was busy while the shape was new
