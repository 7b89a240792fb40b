"""CUDA graphs of TensorRT's steps, and the static memory they run in: one owner of both.

A graph is a step's kernels captured once, for one shape and one set of addresses, and launched as one. So inputs are
copied into memory that never moves, and what the graph wrote is read from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engines.base import KV_PAGE, EngineSpec, Step
from engines.buffers import LruCache
from engines.graphs.capture import Recorder, Uncapturable, Work

log = logging.getLogger(__name__)

MAX_GRAPHS = 64
"""Graphs that are kept; the least recently used one goes first."""


class StepShape(NamedTuple):
    """Sizes of a step.

    Attributes:
        rows: R, of the batch.
        steps: S, tokens per row.
        length: L, columns of the mask.
        kept: N, positions with logits.
    """

    rows: int
    steps: int
    length: int
    kept: int

    @classmethod
    def of(cls, step: Step) -> StepShape:
        """The shape of a step; a step that keeps nothing has the shape of one that keeps one position."""
        rows, steps = step.tokens.shape
        return cls(rows, steps, step.mask.shape[3], max(1, len(step.keep)))

    def bucket(self, capacity: int) -> StepShape:
        """The shape it is captured as: masks of a power of two pages, or of the whole capacity.

        Rows, tokens and kept positions stay: a row more would be written to, and it may belong to a request.
        """
        pages = -(-self.length // KV_PAGE)
        return self._replace(length=min(KV_PAGE << (pages - 1).bit_length(), capacity))


class GraphRunner:
    """Runs steps, captured or not, in static memory: the inputs and logits of one step, of which every shape is a view.

    Args:
        bind: gives the work of a step whose tensors stay where they are; called once for each graph.
        spec: of the engine.
        limits: the largest shapes, of which each is fully used.
        max_graphs: graphs kept; the least recently used one goes first.
    """

    def __init__(
        self,
        bind: Callable[[Step], Work],
        spec: EngineSpec,
        limits: Sequence[StepShape],
        recorder: Recorder,
        device: str,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        def flat(dtype: torch.dtype, count: Callable[[StepShape], int]) -> Tensor:
            return torch.zeros(max(map(count, limits)), dtype=dtype, device=device)

        self._bind, self._spec, self._limits, self._recorder = bind, spec, tuple(limits), recorder
        self._graphs: LruCache[StepShape, Work] = LruCache(max_graphs)
        self._tokens, self._positions = (flat(torch.int64, lambda s: s.rows * s.steps) for _ in range(2))
        self._write_at = flat(torch.int64, lambda s: s.rows)
        self._mask = flat(torch.bool, lambda s: s.rows * s.steps * s.length)
        self._keep = flat(torch.int64, lambda s: s.kept)
        self._logits = flat(spec.torch_dtype, lambda s: s.rows * s.kept * spec.vocab_size)

    @property
    def captured(self) -> tuple[StepShape, ...]:
        """Shapes with a graph, the one used last at the end."""
        return tuple(self._graphs)

    def replay(self, step: Step) -> Tensor:
        """Run a step that begins with row 0 as a graph, captured now if it is the first of its bucket.

        Returns:
            logits [R, N, V] in static memory: valid until the next step.
        """
        assert step.first_row == 0, "a graph has the addresses of the cache's first rows"
        bucket = StepShape.of(step).bucket(self._spec.capacity)
        with self._recorder.ordered():
            static = self._load(step, bucket)
            if bucket not in self._graphs and len(self._graphs) == self._graphs.max_size:
                self._recorder.wait()  # the graph that goes, and what it refers to, may still run
            self._graphs.find(bucket, lambda: self._capture(bucket, static))()
        return self._logits_of(step, static)

    def run(self, step: Step, run_eager: Callable[[Step], None]) -> Tensor:
        """Run a step of any rows by `run_eager`, without a graph; returns what `replay` does."""
        with self._recorder.ordered():
            static = self._load(step, StepShape.of(step))
            run_eager(static)
        return self._logits_of(step, static)

    def _capture(self, bucket: StepShape, static: Step) -> Work:
        log.info("capturing a graph of %s", bucket)
        work = self._bind(static)
        try:
            return self._recorder.record(work)
        except Uncapturable as problem:
            log.warning("%s is launched anew each time, not as a CUDA graph: %s", bucket, problem)
            return work

    def _load(self, step: Step, shape: StepShape) -> Step:
        """Copy a step's inputs into static memory of `shape`; columns that it lacks are masked, positions ignored."""
        static, length, kept = self._view(shape, step.first_row), step.mask.shape[3], step.keep.shape[0]
        static.tokens.copy_(step.tokens, non_blocking=True)
        static.positions.copy_(step.positions, non_blocking=True)
        static.write_at.copy_(step.write_at, non_blocking=True)
        static.mask[..., :length].copy_(step.mask, non_blocking=True)
        static.mask[..., length:] = False
        static.keep[:kept].copy_(step.keep, non_blocking=True)
        static.keep[kept:] = 0
        return static

    def _view(self, shape: StepShape, first_row: int) -> Step:
        assert any(all(ours <= most for ours, most in zip(shape, limit, strict=True)) for limit in self._limits), shape
        rows, steps, length, kept = shape

        def part(memory: Tensor, *sizes: int) -> Tensor:
            return memory[: torch.Size(sizes).numel()].view(sizes)

        return Step(
            tokens=part(self._tokens, rows, steps),
            positions=part(self._positions, rows, steps),
            write_at=part(self._write_at, rows),
            mask=part(self._mask, rows, 1, steps, length),
            keep=part(self._keep, kept),
            first_row=first_row,
            out=part(self._logits, rows, kept, self._spec.vocab_size),
        )

    def _logits_of(self, step: Step, static: Step) -> Tensor:
        assert static.out is not None
        return static.out[:, : step.keep.shape[0]]


def prefill_chunks(step: Step, tokens: int) -> Iterator[tuple[Step, int, Tensor]]:
    """A step as steps of one row and at most `tokens` tokens, in an order in which each finds what it attends to.

    Yields:
        the chunk, its row in the step, and which of the step's kept positions it has, int64 [n].
    """
    for row in range(step.tokens.shape[0]):
        for start in range(0, step.tokens.shape[1], tokens):
            part = slice(start, start + tokens)
            kept = step.keep  # of a prompt, that keeps nothing, it is not looked at: that would wait for a device
            if len(kept):
                kept = ((step.keep >= start) & (step.keep < start + tokens)).nonzero()[:, 0]
            chunk = Step(
                tokens=step.tokens[row : row + 1, part],
                positions=step.positions[row : row + 1, part],
                write_at=step.write_at[row : row + 1] + start,
                mask=step.mask[row : row + 1, :, part],
                keep=step.keep[kept] - start,
                first_row=step.first_row + row,
            )
            yield chunk, row, kept


def deliver_logits(logits: Tensor, step: Step) -> Tensor:
    """Logits in an engine's own memory, as `Engine.step` returns them: on the device of the step's tokens.

    Logits of a step with an `out` stay where they are if that is the same device: valid until the next step. All others
    are copied.
    """
    if step.out is None:
        return logits.to(step.tokens.device, copy=True)
    return logits if step.tokens.device == logits.device else step.out.copy_(logits)
