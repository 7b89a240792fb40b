"""What steps of an engine take, measured before it holds anything; its cache is zero afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from engines.base import Engine, Step

LEVELS, BEAMS = 4, 4
"""Of the draft that is measured."""
ENOUGH = 1.0
"""Seconds after which no repetition begins: steps of large models take so long that what disturbs one hardly counts."""


def step_seconds(engine: Engine, tokens: int) -> float:
    """Seconds of a step of one row over so many tokens behind a prompt, the least of a few."""
    start = min(96, engine.spec.capacity - tokens)
    _store(engine, 1, start)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return _least(engine, [Step.causal(ids, start, engine.spec.capacity, torch.arange(tokens))])


def draft_seconds(engine: Engine, rows: int) -> float:
    """Seconds of the steps of a draft of `LEVELS` x `BEAMS` behind a prompt, the least of a few."""
    spec = engine.spec
    length = min(128, spec.capacity)
    start, columns = length - (LEVELS - 1) * BEAMS, torch.arange(length)
    _store(engine, rows, start)
    steps = [Step.causal(torch.zeros(rows, 2, dtype=torch.int64), start - 2, spec.capacity, columns[1:2])]
    for level in range(LEVELS - 1):
        first = torch.full((rows,), start + level * BEAMS)
        behind = columns - start  # each beam sees the slots of its own above it
        sees = (behind < 0) | ((behind % BEAMS == columns[:BEAMS, None]) & (behind < (level + 1) * BEAMS))
        mask = sees.expand(rows, 1, BEAMS, length)
        tokens = torch.zeros(rows, BEAMS, dtype=torch.int64)
        out = torch.empty(rows, BEAMS, spec.vocab_size, dtype=spec.torch_dtype)
        own = tokens, tokens + start + level, first, mask.contiguous(), columns[:BEAMS]
        steps.append(Step(*own, out=out, drafted=level * BEAMS))
    return _least(engine, steps)


def _store(engine: Engine, rows: int, tokens: int) -> None:
    prompt = torch.zeros(rows, tokens, dtype=torch.int64)
    engine.step(Step.causal(prompt, 0, engine.spec.capacity, torch.arange(0)))


def _least(engine: Engine, steps: Sequence[Step]) -> float:
    least, end = math.inf, time.perf_counter() + ENOUGH
    for _ in range(8):
        began = time.perf_counter()
        for step in steps:
            engine.step(step)
        least = min(least, time.perf_counter() - began)
        if time.perf_counter() > end:
            break
    engine.cache.reset()
    return least
