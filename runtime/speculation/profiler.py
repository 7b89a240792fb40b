"""Measuring what a pair's steps cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from engines import Engine, Step
from engines.buffers import Slab
from mtad.params import DecodingParams
from runtime.decoder.block import BlockInput, BlockRunner
from runtime.speculation.step_costs import BlockShape, HostOverhead, StepCosts, StepTable

if TYPE_CHECKING:
    from runtime.decoder.cuda_graph.block_runner import CudaGraphRunner

TOKENS = (1, 5, 17, 65)
"""Tokens per row of the steps that are measured: a root alone, and above 4, 16 and 64 drafted tokens."""

_Point = tuple[str, int, int, int]
"""What is measured: a `target` or `auxiliary` step (rows, tokens, columns), or a `block` (rows, levels, columns)."""


def measure_costs(
    auxiliary: Engine,
    target: Engine,
    runner: BlockRunner,
    max_draft_len: int,
    max_beam_width: int,
    budget: float = 1.6,
    blocks: CudaGraphRunner | None = None,
) -> StepCosts:
    """Measure a pair, between two blocks. The columns of the caches that steps write are put back at the end.

    Every point is run twice to warm up, and recorded where blocks are. Then all are run in turn, again and again, for
    `budget` seconds, and the least of each one's seconds is taken: what else the machine does falls on all of them, and
    only ever adds. Steps of many tokens are left out where they would use up the budget; the table extrapolates them.

    Args:
        auxiliary, target: opened engines of equal rows and capacity.
        runner: runs blocks of both.
        max_draft_len, max_beam_width: largest draft of a block.
        budget: seconds to spend behind the warm-up, about; two rounds are run in any case, so a pair whose steps take
            long takes longer.
        blocks: what runs blocks on a device; steps are then recorded one by one, as far as its blocks are.
    """
    spec = target.spec
    near, levels = min(128, spec.capacity), min(4, max_draft_len)

    def block(rows: int, length: int) -> object:
        """Run a block of chains of that length, whose rows end in the last of the near columns."""
        asked = [DecodingParams(method="speculative" if length else "sample", draft_len=max(1, length))] * rows
        keys = [(row, 0) for row in range(rows)]
        given = BlockInput(asked, [(0, 0)] * rows, [near - length - 1] * rows, keys, [None] * rows)
        return runner.run(given)

    runs: dict[_Point, Callable[[], float]] = {}
    memory, written = Slab(), [slice(end - near // 2, end) for end in (near, spec.capacity)]
    with torch.inference_mode(), auxiliary.kept(*written), target.kept(*written):
        for name, engine, most in (
            ("target", target, 1 + max_draft_len * max_beam_width),
            ("auxiliary", auxiliary, near),
        ):
            for tokens in sorted({min(tokens, most, near // 2) for tokens in TOKENS}):
                spent = 0.0
                for rows, columns in [(rows, near) for rows in _points(spec.rows)] + [(spec.rows, spec.capacity)]:
                    work = _step(engine, rows, tokens, columns, memory)
                    run = blocks.timed(work) if blocks else partial(_seconds, work)
                    run()
                    spent += run()
                    runs[name, rows, tokens, columns] = run
                if tokens > 1 and spent > budget / 16:
                    break
        for rows in (1, spec.rows):
            for length in (0, levels):
                run = runs["block", rows, length, near] = partial(_seconds, partial(block, rows, length))
                run()
        taken = _least(runs, time.perf_counter() + budget)
    costs = StepCosts(_table(taken, "target", near, spec.capacity), _table(taken, "auxiliary", near, spec.capacity))
    overhead = []
    for rows in sorted({1, spec.rows}):
        plain, drafted = (
            max(0.0, taken["block", rows, n, near] - costs.block(rows, BlockShape(n, n and 1, n and 1), near))
            for n in (0, levels)
        )
        overhead.append((rows, plain, max(0.0, drafted - plain) / levels))
    return replace(costs, host=HostOverhead(*zip(*overhead, strict=True)))


def _step(engine: Engine, rows: int, tokens: int, columns: int, memory: Slab) -> Callable[[], object]:
    """A step whose mask is `columns` long, up to its first logit on the host."""
    device, spec = engine.device, engine.spec
    at = torch.arange(columns - tokens, columns, device=device)
    mask = torch.arange(columns, device=device) <= at[:, None]
    logits = torch.empty(rows, tokens, spec.vocab_size, dtype=spec.torch_dtype, device="meta")
    step = Step(
        tokens=torch.zeros(rows, tokens, dtype=torch.int64, device=device),
        positions=at.repeat(rows, 1),
        write_at=at[:1].repeat(rows),
        mask=mask.repeat(rows, 1, 1, 1),
        keep=torch.arange(tokens, device=device),
        out=memory.like(logits) if device.type == "cpu" else None,  # as the roles do
    )
    return lambda: engine.launch(step)[0, 0, 0]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _least(runs: Mapping[_Point, Callable[[], float]], end: float) -> dict[_Point, float]:
    """The least of each one's seconds, run in turn until the clock shows `end`, but for two turns at least.

    In a turn the short ones are run five times in a row: in a block, too, steps find their memory in the caches.
    """
    taken: dict[_Point, list[float]] = {point: [] for point in runs}
    while time.perf_counter() < end or min(map(len, taken.values())) < 4:
        for point, run in runs.items():
            turn = [run(), run()]
            while len(turn) < 5 and sum(turn) < 0.02:
                turn.append(run())
            taken[point] += turn
    return {point: min(seconds) for point, seconds in taken.items()}


def _table(taken: Mapping[_Point, float], name: str, near: int, far: int) -> StepTable:
    """The table of an engine, made monotone: a step takes no longer than any of more rows or tokens did."""
    points = [(rows, tokens) for which, rows, tokens, columns in taken if (which, columns) == (name, near)]
    rows, tokens = (sorted({point[axis] for point in points}) for axis in (0, 1))
    by_rows = [_monotone(taken[name, r, t, near] for t in tokens) for r in rows]
    seconds = tuple(zip(*map(_monotone, zip(*by_rows, strict=True)), strict=True))
    growth = [max(0.0, taken[name, rows[-1], t, far] - s) for t, s in zip(tokens, seconds[-1], strict=True)]
    return StepTable(
        tuple(rows), tuple(tokens), seconds, near, tuple(s / max(1, far - near) / rows[-1] for s in growth)
    )


def _monotone(values: Iterable[float]) -> list[float]:
    return list(accumulate(reversed(list(values)), min))[::-1]


def _points(last: int) -> list[int]:
    return sorted({min(4**n, last) for n in range(last.bit_length())})
