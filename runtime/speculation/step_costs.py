"""What a block costs: seconds of one step by rows and tokens. `runtime.speculation.profiler` makes the table."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mtad.errors import InvalidInput
from mtad.params import DecodingParams


class BlockShape(NamedTuple):
    """What decides a block's cost: the largest row of the batch.

    Attributes:
        draft_len: levels of the tree; 0 drafts nothing.
        width: beams per level that the auxiliary runs.
        score_width: nodes per level that the target scores.
    """

    draft_len: int
    width: int
    score_width: int

    @classmethod
    def of(cls, params: Sequence[DecodingParams]) -> BlockShape:
        sizes = [(p.drafted, p.draft_width, p.score_width) for p in params]
        return cls(*map(max, zip(*sizes, strict=True))) if sizes else cls(0, 0, 0)


def _check(points: Sequence[Any], *lines: Sequence[Any]) -> None:
    """Points are ascending positive integers, and each line has a number of seconds for each of them."""
    if not points or any(type(p) is not int or p < 1 for p in points) or list(points) != sorted(set(points)):
        raise ValueError(f"{points} are not ascending positive integers")
    for line in lines:
        if len(line) != len(points) or any(type(s) is not float or not 0 <= s < math.inf for s in line):
            raise ValueError(f"{line} are not seconds at {points}")


@dataclass(frozen=True)
class StepTable:
    """Seconds of one engine's step.

    Attributes:
        rows, tokens: measured points, ascending.
        seconds: by rows, then by tokens, for masks of up to `columns` columns.
        columns: length of the mask that was measured.
        growth: further seconds per row and per column beyond `columns`, by tokens; () for none.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    columns: int
    growth: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self.tokens, *self.seconds, self.growth or self.seconds[0])
        _check(self.rows, [line[0] for line in self.seconds])
        _check((self.columns,))

    def at(self, rows: int, tokens: int, columns: int) -> float:
        """Seconds of a step, linear between measured points; see `_along` for what lies beyond them."""
        seconds = _along(self.rows, [_along(self.tokens, line, tokens) for line in self.seconds], rows)
        if self.growth and columns > self.columns:
            seconds += rows * (columns - self.columns) * _along(self.tokens, self.growth, tokens)
        return seconds


@dataclass(frozen=True)
class HostOverhead:
    """Seconds of a block that are spent outside the engines' steps.

    Attributes:
        rows: measured points, ascending.
        block: of any block, by rows.
        level: further, per level of the draft, by rows.
    """

    rows: tuple[int, ...]
    block: tuple[float, ...]
    level: tuple[float, ...]

    def __post_init__(self) -> None:
        _check(self.rows, self.block, self.level)


@dataclass(frozen=True)
class StepCosts:
    """What a pair's blocks cost, in seconds.

    Attributes:
        target, auxiliary: of the engines' steps.
        host: of the loop around them.
    """

    target: StepTable
    auxiliary: StepTable
    host: HostOverhead = HostOverhead((1,), (0.0,), (0.0,))

    def block(self, rows: int, shape: BlockShape, columns: int) -> float:
        """Seconds of one block of `rows` rows whose longest has `columns` committed tokens."""
        seconds = self.target.at(rows, 1 + shape.draft_len * shape.score_width, columns)
        return seconds + _along(self.host.rows, self.host.block, rows) + self.draft(rows, shape, columns)

    def draft(self, rows: int, shape: BlockShape, columns: int) -> float:
        """The part of a block's seconds in which the auxiliary drafts."""
        if not shape.draft_len:
            return 0.0
        seconds = self.auxiliary.at(rows, 2, columns)  # the last two tokens, see `EngineAuxiliary`
        seconds += (shape.draft_len - 1) * self.auxiliary.at(rows, shape.width, columns)
        return seconds + shape.draft_len * _along(self.host.rows, self.host.level, rows)

    def catch_up(self, missed: int, columns: int) -> float:
        """Seconds to store `missed` tokens of one row in the auxiliary's cache."""
        return self.auxiliary.at(1, missed, columns) if missed > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepCosts:
        """The inverse of `to_dict`.

        Raises:
            InvalidInput: fields are missing, unknown, or not what `to_dict` writes.
        """
        try:
            parts = {name: {field: _tuples(value) for field, value in values[name].items()} for name in values}
            host = HostOverhead(**parts.pop("host"))
            return cls(**{name: StepTable(**part) for name, part in parts.items()}, host=host)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"not a table of step costs ({error}); measure it again"
            raise InvalidInput("costs", type(values).__name__, problem) from None


def _along(points: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear between points, constant below the first.

    Beyond the last, the last segment goes on, at half of proportional growth at least: a flat segment (a device that is
    not full yet) does not stay flat for ever.
    """
    if at <= points[0]:
        return values[0]
    if at >= points[-1]:
        slope = values[-1] / points[-1] / 2
        if len(points) > 1:
            slope = max(slope, (values[-1] - values[-2]) / (points[-1] - points[-2]))
        return values[-1] + slope * (at - points[-1])
    right = bisect_right(points, at)
    share = (at - points[right - 1]) / (points[right] - points[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
