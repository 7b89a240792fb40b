"""What a block costs: seconds of one step by rows and tokens. `runtime.speculation.profiler` makes the table."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from mtad.errors import InvalidInput


class BlockShape(NamedTuple):
    """What decides a block's cost, the largest row of the batch.

    Attributes:
        draft_len: levels of the tree; 0 drafts nothing.
        width: beams a level that the auxiliary runs.
        score_width: nodes a level that the target scores.
    """

    draft_len: int
    width: int
    score_width: int


@dataclass(frozen=True)
class StepTable:
    """Seconds of one engine's step. Monotone in rows and in tokens.

    Attributes:
        rows, tokens: measured points, ascending.
        seconds: by rows, then by tokens, for masks of up to `columns` columns.
        columns: length of the mask that was measured; a short one.
        per_column: further seconds for each row and column beyond `columns`.
        per_token_column: the same for each row, token and column.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    columns: int
    per_column: float = 0.0
    per_token_column: float = 0.0

    def at(self, rows: int, tokens: int, columns: int) -> float:
        """Seconds of a step, linear between measured points.

        Beyond the largest point the last segment goes on, but not below proportionality to what it measured last
        divided by two: a flat segment (a device that is not full yet) does not stay flat for ever.
        """
        base = _along(self.rows, [_along(self.tokens, line, tokens) for line in self.seconds], rows)
        return base + rows * max(0, columns - self.columns) * (self.per_column + self.per_token_column * tokens)


@dataclass(frozen=True)
class Outside:
    """Seconds of a block that are spent outside the engines' steps, at a number of rows.

    Attributes:
        rows: measured points, ascending.
        plain: of any block, by rows.
        draft: further, of a block that drafts.
        level: further, for each level of the draft.
        beams: further, for each level of a draft of more than one beam.
    """

    rows: tuple[int, ...]
    plain: tuple[float, ...]
    draft: tuple[float, ...]
    level: tuple[float, ...]
    beams: tuple[float, ...]

    def at(self, rows: int, shape: BlockShape) -> float:
        """Seconds."""
        seconds = _along(self.rows, self.plain, rows)
        if shape.draft_len:
            seconds += _along(self.rows, self.draft, rows) + shape.draft_len * _along(self.rows, self.level, rows)
        if shape.width > 1:
            seconds += shape.draft_len * _along(self.rows, self.beams, rows)
        return seconds


@dataclass(frozen=True)
class StepCosts:
    """What the steps of a pair cost, in seconds; plain numbers; `runtime.speculation.cost_cache` keeps them.

    Attributes:
        target, auxiliary: of the engines' steps.
        outside: of the loop around them.
    """

    target: StepTable
    auxiliary: StepTable
    outside: Outside = Outside((1,), (0.0,), (0.0,), (0.0,), (0.0,))

    def block(self, rows: int, shape: BlockShape, columns: int) -> float:
        """Seconds of one block of `rows` rows whose longest has `columns` committed tokens."""
        seconds = self.target.at(rows, 1 + shape.draft_len * shape.score_width, columns)
        if shape.draft_len:  # the first level runs the last two tokens, see `EngineAuxiliary`
            seconds += self.auxiliary.at(rows, 2, columns)
            seconds += (shape.draft_len - 1) * self.auxiliary.at(rows, shape.width, columns)
        return seconds + self.outside.at(rows, shape)

    def catch_up(self, missed: int, columns: int) -> float:
        """Seconds to store `missed` tokens of one row in the auxiliary's cache."""
        return self.auxiliary.at(1, missed, columns) if missed > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepCosts:
        """The inverse of `to_dict`.

        Raises:
            InvalidInput: fields are missing, unknown, or not what `to_dict` writes.
        """
        try:
            parts = {name: dict(values[name]) for name in ("target", "auxiliary", "outside")}
            for name in ("target", "auxiliary"):
                parts[name]["seconds"] = tuple(tuple(map(_seconds, line)) for line in parts[name]["seconds"])
                parts[name]["tokens"] = _points(parts[name]["tokens"])
                if not isinstance(parts[name]["columns"], int) or parts[name]["columns"] < 1:
                    raise ValueError("columns")
                for field in ("per_column", "per_token_column"):
                    parts[name][field] = _seconds(parts[name][field])
                size = len(parts[name]["rows"]), len(parts[name]["tokens"])
                if (len(parts[name]["seconds"]), *{len(line) for line in parts[name]["seconds"]}) != size:
                    raise ValueError("seconds")
            for name in parts:
                parts[name]["rows"] = _points(parts[name]["rows"])
            for field in ("plain", "draft", "level", "beams"):
                parts["outside"][field] = tuple(map(_seconds, parts["outside"][field]))
                if len(parts["outside"][field]) != len(parts["outside"]["rows"]):
                    raise ValueError(field)
            if set(values) != set(parts):
                raise ValueError("unknown field")
            return cls(StepTable(**parts["target"]), StepTable(**parts["auxiliary"]), Outside(**parts["outside"]))
        except (KeyError, TypeError, ValueError) as error:
            problem = f"not a table of step costs ({error}); measure it again"
            raise InvalidInput("costs", type(values).__name__, problem) from None


def _along(points: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear between points; beyond the last, the last segment goes on, at half of proportional growth at least."""
    if len(points) == 1 or at <= points[0]:
        return values[0] if at <= points[0] else values[0] * max(1.0, at / points[0] / 2)
    right = min(bisect_right(points, at), len(points) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (points[right] - points[left])
    if at > points[-1]:
        slope = max(slope, values[-1] / points[-1] / 2)
        return values[-1] + slope * (at - points[-1])
    return values[left] + slope * (at - points[left])


def _points(values: Sequence[int]) -> tuple[int, ...]:
    points = tuple(values)
    if not points or any(isinstance(p, bool) or not isinstance(p, int) for p in points) or points[0] < 1:
        raise ValueError("points")
    if any(a >= b for a, b in pairwise(points)):
        raise ValueError("points are not ascending")
    return points


def _seconds(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a number of seconds")
    return float(value)
