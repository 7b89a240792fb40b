"""Measuring what a pair's steps cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from engines import Engine, Step
from mtad.params import DecodingParams
from runtime.decoder.auxiliary import EngineAuxiliary
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import run_block_on_host
from runtime.decoder.cuda_graph.block_runner import DeviceBlocks
from runtime.decoder.target import EngineTarget
from runtime.speculation.step_costs import BlockShape, Outside, StepCosts, StepTable


def measure_costs(
    auxiliary: EngineAuxiliary,
    target: EngineTarget,
    max_draft_len: int,
    max_beam_width: int,
    budget: float = 1.6,
    blocks: DeviceBlocks | None = None,
) -> StepCosts:
    """Measure a pair. Only while it is idle: the caches are written, and zeroed at the end.

    Every point is run once to warm up; then all are run in turn, again and again, until `budget` is spent, and lower
    quartiles are taken: what else the machine does falls on all of them, and in few rounds it would move medians. Steps
    of many tokens are left out where warming them up would use up the budget; the table extrapolates them.

    Args:
        auxiliary, target: the roles, over opened engines of equal rows and capacity.
        max_draft_len, max_beam_width: largest draft of a block.
        budget: seconds to spend, about; two rounds are run in any case, so a pair whose steps take long takes longer.
        blocks: what runs blocks on a device: steps are then recorded one by one, as far as its blocks are.
    """
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
                    run = _step(engine, rows, tokens, columns, name == "auxiliary", blocks)
                    runs[name, rows, tokens, columns] = run
                    run()
        shapes = _block_shapes(max_draft_len, max_beam_width)
        for rows in {1, spec.rows}:
            for shape in shapes:
                if blocks:
                    run = _device_block(blocks, auxiliary.engine, target.engine, rows, shape, near)
                else:
                    run = _block(auxiliary, target, rows, shape, near)
                runs["outside", rows, shape.draft_len, shape.width] = run
                run()
        taken = _quartiles(runs, end)
        for row in range(spec.rows):
            auxiliary.clear_row(row)
            target.clear_row(row)
    costs = StepCosts(_table(taken, "target", near, spec.capacity), _table(taken, "auxiliary", near, spec.capacity))
    return replace(costs, outside=_outside(taken, shapes))


_Point = tuple[str, int, int, int]
"""What is measured: `target`, `auxiliary`, rows, tokens, columns; or `outside`, rows, draft_len, width."""


def _block_shapes(max_draft_len: int, max_beam_width: int) -> list[BlockShape]:
    """Nothing drafted, one token, a chain, a chain out of several beams."""
    long, wide = min(4, max_draft_len), min(4, max_beam_width)
    return [BlockShape(0, 0, 0), BlockShape(1, 1, 1), BlockShape(long, 1, 1), BlockShape(long, wide, 1)]


def _step(
    engine: Engine, rows: int, tokens: int, columns: int, again: bool, blocks: DeviceBlocks | None = None
) -> Callable[[], float]:
    """A step whose mask is `columns` long; gives the seconds until its logits are there.

    `again` times a second one behind it: a draft is steps in a row, which find the weights in the processor's caches.
    """
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
    if blocks:
        return blocks.timed(lambda: engine.step(step), again)

    def run() -> float:
        if again:
            engine.step(step)[0, 0, 0].item()
        started = time.perf_counter()
        engine.step(step)[0, 0, 0].item()
        return time.perf_counter() - started

    return run


class _Timed(Engine):
    """An engine whose steps' seconds are added up.

    Attributes:
        seconds: of its steps since it was set.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.spec, self.kv, self.seconds = engine, engine.spec, engine.kv, 0.0

    def step(self, step: Step) -> Tensor:
        """See `Engine.step`."""
        started = time.perf_counter()
        logits = self.engine.step(step)
        logits[0, 0, 0].item()
        self.seconds += time.perf_counter() - started
        return logits


def _block(
    auxiliary: EngineAuxiliary, target: EngineTarget, rows: int, shape: BlockShape, columns: int
) -> Callable[[], float]:
    """A block as the loop runs it, but for the text; gives the seconds it spends outside the steps."""
    engines = _Timed(auxiliary.engine), _Timed(target.engine)
    auxiliary = EngineAuxiliary(engines[0], auxiliary.vocab_size, auxiliary.functions)
    target = EngineTarget(engines[1], target.vocab_size, target.functions)
    batches = BatchBuilder(target.vocab_size, target.engine.spec.eos_token_ids)
    committed, blocks = _committed(shape, columns), count()
    asked = _asked(shape)

    def run() -> float:
        for engine in engines:
            engine.seconds = 0.0
        number, started = next(blocks), time.perf_counter()
        keys = [(row, number) for row in range(rows)]
        run_block_on_host(auxiliary, target, batches.build([asked] * rows, [(0, 0)] * rows, [committed] * rows, keys))
        return time.perf_counter() - started - sum(engine.seconds for engine in engines)

    return run


def _asked(shape: BlockShape) -> DecodingParams:
    """Parameters whose blocks have a shape."""
    method = "mtad" if shape.width > 1 else "speculative" if shape.draft_len else "sample"
    return DecodingParams(method=method, draft_len=max(1, shape.draft_len), beam_width=max(1, shape.width))


def _committed(shape: BlockShape, columns: int) -> int:
    """Committed tokens of rows whose blocks end in the last of `columns` columns."""
    return columns - shape.draft_len * max(1, shape.width) - 1


def _device_block(
    blocks: DeviceBlocks, auxiliary: Engine, target: Engine, rows: int, shape: BlockShape, columns: int
) -> Callable[[], float]:
    """A block on a device; gives the seconds it takes beyond its steps, each of them run alone right behind it."""
    asked, committed, numbers = _asked(shape), _committed(shape, columns), count()
    drafting = [2, *[shape.width] * (shape.draft_len - 1)] if shape.draft_len else []
    steps = [_step(auxiliary, rows, tokens, columns, False, blocks) for tokens in drafting]
    steps.append(_step(target, rows, 1 + shape.draft_len * shape.score_width, columns, False, blocks))

    def run() -> float:
        number, started = next(numbers), time.perf_counter()
        keys = [(row, number) for row in range(rows)]
        blocks.run_block(blocks.batches.build([asked] * rows, [(0, 0)] * rows, [committed] * rows, keys))
        return max(0.0, time.perf_counter() - started - sum(step() for step in steps))

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
