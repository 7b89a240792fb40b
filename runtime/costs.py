"""What a block costs: seconds of one step by rows and tokens, measured once. The table itself needs no torch."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from mtad.errors import InvalidInput

if TYPE_CHECKING:
    from engines import Engine
    from runtime.roles import EngineAuxiliary, EngineTarget


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
    """What the steps of a pair cost, in seconds; plain numbers, kept in `pair.json`.

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


def measure_costs(
    auxiliary: EngineAuxiliary, target: EngineTarget, max_draft_len: int, max_beam_width: int, budget: float = 1.6
) -> StepCosts:
    """Measure a pair. Only while it is idle: the caches are written, and zeroed at the end.

    Every point is run once to warm up; then all are run in turn, again and again, until `budget` is spent, and lower
    quartiles are taken: what else the machine does falls on all of them, and in few rounds it would move medians. Steps
    of many tokens are left out where warming them up would use up the budget; the table extrapolates them.

    Args:
        auxiliary, target: the roles, over opened engines of equal rows and capacity.
        max_draft_len, max_beam_width: largest draft of a block.
        budget: seconds to spend, about; two rounds are run in any case, so a pair whose steps take long takes longer.
    """
    import torch

    spec = target.engine.spec
    near = min(128, spec.capacity)
    lines = [*_doubling(1, spec.rows - 1), spec.rows]
    sizes = {
        "target": [1, *(1 + nodes for nodes in _doubling(1, min(max_draft_len * max_beam_width, near // 2)))],
        "auxiliary": [*_doubling(1, max(2, max_beam_width)), 64],
    }
    runs: dict[_Point, Callable[[], float]] = {}
    end = time.perf_counter() + budget
    with torch.inference_mode():
        for name, engine in (("target", target.engine), ("auxiliary", auxiliary.engine)):
            started = time.perf_counter()
            for tokens in sizes[name]:
                if time.perf_counter() - started > budget / 8 and tokens > 2:
                    break
                for rows, columns in [(rows, near) for rows in lines] + [(spec.rows, spec.capacity)]:
                    run = runs[name, rows, tokens, columns] = _step(engine, rows, tokens, columns, name == "auxiliary")
                    run()
        shapes = _block_shapes(max_draft_len, max_beam_width)
        for rows in {1, spec.rows}:
            for shape in shapes:
                run = runs["outside", rows, shape.draft_len, shape.width] = _block(auxiliary, target, rows, shape, near)
                run()
        taken = _quartiles(runs, end)
        auxiliary.engine.kv.zero_()
        target.engine.kv.zero_()
    costs = StepCosts(_table(taken, "target", near, spec.capacity), _table(taken, "auxiliary", near, spec.capacity))
    return replace(costs, outside=_outside(taken, shapes))


_Point = tuple[str, int, int, int]
"""What is measured: `target`, `auxiliary`, rows, tokens, columns; or `outside`, rows, draft_len, width."""


def _block_shapes(max_draft_len: int, max_beam_width: int) -> list[BlockShape]:
    """Nothing drafted, one token, a chain, a chain out of several beams."""
    long, wide = min(4, max_draft_len), min(4, max_beam_width)
    return [BlockShape(0, 0, 0), BlockShape(1, 1, 1), BlockShape(long, 1, 1), BlockShape(long, wide, 1)]


def _step(engine: Engine, rows: int, tokens: int, columns: int, again: bool) -> Callable[[], float]:
    """A step whose mask is `columns` long; gives the seconds until its logits are there.

    `again` times a second one behind it: a draft is steps in a row, which find the weights in the processor's caches.
    """
    import torch

    from engines import Step

    device = engine.kv.device
    at = torch.arange(columns - tokens, columns, device=device)
    mask = torch.arange(columns, device=device) <= at[:, None]
    step = Step(
        tokens=torch.zeros(rows, tokens, dtype=torch.int64, device=device),
        positions=at.repeat(rows, 1),
        write_at=at[:1].repeat(rows),
        mask=mask.repeat(rows, 1, 1, 1),
        keep=torch.arange(tokens, device=device),
    )

    def run() -> float:
        if again:
            engine.step(step)[0, 0, 0].item()
        started = time.perf_counter()
        engine.step(step)[0, 0, 0].item()
        return time.perf_counter() - started

    return run


def _block(
    auxiliary: EngineAuxiliary, target: EngineTarget, rows: int, shape: BlockShape, columns: int
) -> Callable[[], float]:
    """A block as the loop runs it, but for the text; gives the seconds it spends outside the steps."""
    import torch

    from engines import Engine, Step
    from mtad.draft import root
    from mtad.noise import draw_noise
    from mtad.params import DecodingParams
    from mtad.rows import block_shape, places, stack_rows
    from runtime.batch import Batch
    from runtime.roles import EngineAuxiliary, EngineTarget

    inside = 0.0

    class Timed(Engine):
        """An engine whose steps' seconds are added up."""

        def __init__(self, engine: Engine) -> None:
            self.engine, self.spec, self.kv = engine, engine.spec, engine.kv

        def step(self, step: Step) -> torch.Tensor:
            nonlocal inside
            started = time.perf_counter()
            logits = self.engine.step(step)
            logits[0, 0, 0].item()
            inside += time.perf_counter() - started
            return logits

    auxiliary = EngineAuxiliary(Timed(auxiliary.engine), auxiliary.vocab_size, auxiliary.functions)
    target = EngineTarget(Timed(target.engine), target.vocab_size, target.functions)
    method = "mtad" if shape.width > 1 else "speculative" if shape.draft_len else "sample"
    asked = DecodingParams(method=method, draft_len=max(1, shape.draft_len), beam_width=max(1, shape.width))
    params, vocab = [asked] * rows, target.vocab_size
    whole = block_shape(params, vocab)
    stacked = stack_rows(params, whole, vocab, (), target.engine.kv.device)
    level, levels = root(stacked, whole), places(stacked, whole)
    committed = columns - shape.draft_len * max(1, shape.width) - 1

    def run() -> float:
        nonlocal inside
        inside, started = 0.0, time.perf_counter()
        device = target.engine.kv.device
        batch = Batch(
            last_two=torch.zeros(rows, 2, dtype=torch.int64, device=device),
            committed=torch.tensor([committed] * rows, device=device),
            longest=committed,
            rows=stacked,
            root=level,
            places=levels,
            shape=whole,
            noise=draw_noise(params, [(row, 0) for row in range(rows)], whole, vocab, device),
        )
        draft = auxiliary.draft(batch) if whole.draft_len else None
        logits = target.score(batch, draft.tree if draft else None)
        accepted = target.accept(batch, draft, logits)
        if draft:
            target.commit(batch, accepted)
            auxiliary.commit(batch, draft, accepted)
        accepted.tokens.tolist(), accepted.log_probs.tolist(), accepted.length.tolist()
        return time.perf_counter() - started - inside

    return run


def _quartiles(runs: Mapping[_Point, Callable[[], float]], end: float) -> dict[_Point, float]:
    """Lower quartile of each one's seconds, run in turn until the clock shows `end`: what disturbs only ever adds."""
    taken: dict[_Point, list[float]] = {point: [] for point in runs}
    rounds = 0
    while rounds < 2 or time.perf_counter() < end:
        for point, run in runs.items():
            taken[point].append(run())
        rounds += 1
    return {point: sorted(seconds)[len(seconds) // 4] for point, seconds in taken.items()}


def _table(taken: Mapping[_Point, float], name: str, near: int, far: int) -> StepTable:
    """Made monotone: along tokens, then along rows; the second leaves the first as it is."""
    points = [(rows, tokens) for which, rows, tokens, columns in taken if (which, columns) == (name, near)]
    rows, tokens = (sorted({point[axis] for point in points}) for axis in (0, 1))
    by_rows = [_isotonic([taken[name, r, t, near] for t in tokens]) for r in rows]
    by_tokens = [_isotonic(column) for column in zip(*by_rows, strict=True)]
    seconds = tuple(zip(*by_tokens, strict=True))
    per_column = per_token_column = 0.0
    if far > near:  # one straight line through what each token's share of the attention grew by
        grown = [
            (taken[name, rows[-1], t, far] - seconds[-1][at]) / (far - near) / rows[-1] for at, t in enumerate(tokens)
        ]
        mean = statistics.fmean(tokens)
        spread = sum((t - mean) ** 2 for t in tokens)
        per_token_column = max(0.0, sum((t - mean) * g for t, g in zip(tokens, grown, strict=True)) / max(spread, 1))
        per_column = max(0.0, statistics.fmean(grown) - per_token_column * mean)
    return StepTable(tuple(rows), tuple(tokens), seconds, near, per_column, per_token_column)


def _outside(taken: Mapping[_Point, float], shapes: Sequence[BlockShape]) -> Outside:
    """What blocks took beyond their steps, shared out over no draft, one level, more levels, more beams."""
    rows = sorted({rows for which, rows, _, _ in taken if which == "outside"})
    found = []
    for r in rows:
        plain, one, chain, beams = (taken["outside", r, shape.draft_len, shape.width] for shape in shapes)
        levels = shapes[2].draft_len
        level = max(0.0, (chain - one) / (levels - 1) if levels > 1 else (one - plain) / 2)
        found.append((plain, max(0.0, one - plain - level), level, max(0.0, (beams - chain) / levels)))
    return Outside(tuple(rows), *zip(*found, strict=True))


def _isotonic(values: Sequence[float]) -> list[float]:
    """The ascending sequence nearest to `values` (least squares): neighbours in the wrong order share their mean."""
    groups: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while groups and groups[-1][0] * count > total * groups[-1][1]:
            before = groups.pop()
            total, count = total + before[0], count + before[1]
        groups.append((total, count))
    return [total / count for total, count in groups for _ in range(count)]


def _doubling(first: int, last: int) -> list[int]:
    """first, 2 first, .. up to `last`."""
    return [first << n for n in range(last.bit_length()) if first << n <= last]


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
