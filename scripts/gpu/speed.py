"""Stages that time memory and steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from engines.base import Step
from engines.pytorch.engine import TorchEngine
from scripts.gpu.correct import causal
from scripts.gpu.models import (
    bytes_read,
    cache_bytes,
    engine_of,
    random_model,
    shape,
)
from scripts.gpu.report import Found
from scripts.gpu.setup import Setup

LAUNCHES = 14
"""Kernels of a step of a Llama per layer at most: 12, and what is outside the layers."""


def bandwidth(setup: Setup) -> float:
    """Bytes read and written a second by a copy on the device; the median of 20."""
    source = torch.ones(setup.sizes.copied, dtype=torch.uint8, device=setup.device)
    to = torch.empty_like(source)
    median = setup.timer.measure(lambda: to.copy_(source), 20).median
    return 2 * setup.sizes.copied / (median / 1e3)


def memory(setup: Setup, found: Found) -> None:
    """What a copy moves a second: the yardstick of the floors."""
    found.row(what="copy, bytes read and written", terabytes_s=bandwidth(setup) / 1e12)


def steps(name: str, setup: Setup, found: Found) -> None:
    """A step's time and its floor: weights and keys and values read once, at the speed of a copy.

    Steps of 1 and of 5 tokens a row (decoding; scoring of four drafted tokens), launched and as CUDA graphs.
    """
    sizes, speed = setup.sizes, bandwidth(setup)
    model = random_model(shape(name), setup.device, setup.dtype)
    engine = engine_of(model, max(sizes.rows), max(sizes.contexts) + 64)
    found.note(parameters=sum(p.numel() for p in model.parameters()), bytes_read=bytes_read(model))
    for context, rows, tokens in itertools.product(sizes.contexts, sizes.rows, (1, 5)):
        step = random_step(engine, rows, tokens, context, setup.device)
        engine.cache.reserve(step.spans)
        work = partial(engine.enqueue, step)
        floor = (bytes_read(model) + cache_bytes(engine, rows, context)) / speed * 1e3
        if (context, rows, tokens) == (sizes.contexts[0], sizes.rows[0], 1):
            work()  # compiles
            launches = sum(event.count for event in launched(work, setup)) / model.config.num_hidden_layers
            allowed = LAUNCHES if setup.on_gpu else math.inf
            found.check("launches of a step, per layer", launches, allowed, "kernels")
        off = setup.timer.measure(work, 20, seconds=sizes.seconds / 4)
        recorder = setup.recorder()
        with recorder.ordered():
            on = setup.timer.measure(recorder.record(partial(_run, work)), 20, seconds=sizes.seconds / 4)
        found.row(
            rows=rows,
            context=context,
            tokens=tokens,
            floor_ms=floor,
            graph_ms=on.median,
            of_floor=on.median / floor,
            quartiles_ms=f"{on.low:.3f} .. {on.high:.3f}",
            launched_ms=off.median,
            launched_quartiles_ms=f"{off.low:.3f} .. {off.high:.3f}",
        )


def launched(work: Callable[[], object], setup: Setup) -> list[Any]:
    """What `work` launches, by kernel; on a CPU, torch's operators."""
    kind = torch.profiler.ProfilerActivity.CUDA if setup.on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as taken:
        work()
        setup.timer.wait()
    wanted = DeviceType.CUDA if setup.on_gpu else DeviceType.CPU
    return [event for event in taken.key_averages() if event.device_type == wanted]


def _run(work: Callable[[], Tensor]) -> None:
    work()


def random_step(engine: TorchEngine, rows: int, tokens: int, context: int, device: str) -> Step:
    """A step behind `context` columns, whose mask is as long as a recorded block's: the whole capacity."""
    ids = torch.randint(engine.spec.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(context))
    step = causal(ids, [context - tokens] * rows, device)
    return replace(step, mask=torch.nn.functional.pad(step.mask, (0, engine.spec.capacity - step.mask.shape[3])))
