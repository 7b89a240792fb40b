"""CUDA graphs of an engine's steps, and the static memory they run in: one owner of both, for any engine.

A graph is a step's kernels recorded once, for one shape and one set of addresses, and launched as one. So inputs are
copied into memory that never moves, and what the graph wrote is read from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engines.base import KV_PAGE, Step
from engines.buffers import LruCache
from engines.graphs.capture import Recorder, Work

log = logging.getLogger(__name__)

MAX_GRAPHS = 64
"""Recorded blocks that are kept; the one that was not used for longest goes first."""


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
        """The shape of a step; of one that keeps nothing, that of one that keeps one position."""
        rows, steps = step.tokens.shape
        return cls(rows, steps, step.mask.shape[3], max(1, len(step.keep)))

    def bucket(self, capacity: int) -> StepShape:
        """The shape it is recorded as: masks of a power of two pages, or of the whole capacity.

        Rows, tokens and kept positions stay: a row more would be written to, and it may belong to a request.
        """
        pages = -(-self.length // KV_PAGE)
        return self._replace(length=min(KV_PAGE << (pages - 1).bit_length(), capacity))


class StaticMemory:
    """Inputs and logits of one step, in memory that never moves; every shape up to a limit is a view of it.

    Args:
        limits: the largest shapes, of which each is fully used.
    """

    def __init__(self, limits: Sequence[StepShape], vocab_size: int, dtype: torch.dtype, device: str) -> None:
        def flat(kind: torch.dtype, count: Callable[[StepShape], int]) -> Tensor:
            return torch.zeros(max(map(count, limits)), dtype=kind, device=device)

        self.limits, self._vocab_size = tuple(limits), vocab_size
        self._tokens, self._positions = (flat(torch.int64, lambda s: s.rows * s.steps) for _ in range(2))
        self._write_at = flat(torch.int64, lambda s: s.rows)
        self._mask = flat(torch.bool, lambda s: s.rows * s.steps * s.length)
        self._keep = flat(torch.int64, lambda s: s.kept)
        self._logits = flat(dtype, lambda s: s.rows * s.kept * vocab_size)

    def view(self, shape: StepShape, first_row: int = 0) -> Step:
        """A step of `shape` in this memory; its logits go to `out`."""
        assert any(all(ours <= most for ours, most in zip(shape, limit, strict=True)) for limit in self.limits), shape
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
            out=part(self._logits, rows, kept, self._vocab_size),
        )


class GraphRunner:
    """Runs steps, recorded or not, in static memory. The only owner of graphs and of that memory.

    Args:
        bind: gives the work of a step whose tensors stay where they are; called once for each graph.
        most: graphs kept; the one that was not used for longest goes first.
    """

    def __init__(
        self,
        bind: Callable[[Step], Work],
        memory: StaticMemory,
        recorder: Recorder,
        capacity: int,
        most: int = MAX_GRAPHS,
    ) -> None:
        self._bind, self._memory, self._recorder = bind, memory, recorder
        self._capacity = capacity
        self._graphs: LruCache[StepShape, Work] = LruCache(most)

    @property
    def recorded(self) -> tuple[StepShape, ...]:
        """Shapes with a graph, the one used last at the end."""
        return tuple(self._graphs)

    def replay(self, step: Step) -> Tensor:
        """Run a step that begins with row 0 as a graph, recorded now if it is the first of its bucket.

        Returns:
            logits [R, N, V] in static memory: valid until the next step.
        """
        assert step.first_row == 0, "a graph has the addresses of the cache's first rows"
        bucket = StepShape.of(step).bucket(self._capacity)
        with self._recorder.ordered():
            static = self._load(step, bucket)
            if bucket not in self._graphs and len(self._graphs) == self._graphs.max_size:
                self._recorder.wait()  # the graph that goes, and what it holds, may still run
            self._graphs.find(bucket, lambda: self._record(bucket, static))()
        return self._logits(step, static)

    def run(self, step: Step, once: Callable[[Step], None]) -> Tensor:
        """Run a step of any rows by `once`, unrecorded; returns what `replay` does."""
        with self._recorder.ordered():
            static = self._load(step, StepShape.of(step))
            once(static)
        return self._logits(step, static)

    def _record(self, bucket: StepShape, static: Step) -> Work:
        log.info("recording a graph of %s", bucket)
        return self._recorder.record(self._bind(static))

    def _load(self, step: Step, shape: StepShape) -> Step:
        """Copy a step's inputs into static memory of `shape`; what it lacks of it is masked, or read by nobody."""
        static, length, kept = self._memory.view(shape, step.first_row), step.mask.shape[3], step.keep.shape[0]
        static.tokens.copy_(step.tokens, non_blocking=True)
        static.positions.copy_(step.positions, non_blocking=True)
        static.write_at.copy_(step.write_at, non_blocking=True)
        static.mask[..., :length].copy_(step.mask, non_blocking=True)
        static.mask[..., length:] = False
        static.keep[:kept].copy_(step.keep, non_blocking=True)
        static.keep[kept:] = 0
        return static

    def _logits(self, step: Step, static: Step) -> Tensor:
        assert static.out is not None
        return static.out[:, : step.keep.shape[0]]


def pieces(step: Step, tokens: int) -> Iterator[tuple[Step, int, Tensor]]:
    """A step as steps of one row and at most `tokens` tokens, in an order in which each finds what it attends to.

    Yields:
        the piece, its row in the step, and which of the step's kept positions it has, int64 [n].
    """
    for row in range(step.tokens.shape[0]):
        for start in range(0, step.tokens.shape[1], tokens):
            part = slice(start, start + tokens)
            kept = ((step.keep >= start) & (step.keep < start + tokens)).nonzero()[:, 0]
            piece = Step(
                tokens=step.tokens[row : row + 1, part],
                positions=step.positions[row : row + 1, part],
                write_at=step.write_at[row : row + 1] + start,
                mask=step.mask[row : row + 1, :, part],
                keep=step.keep[kept] - start,
                first_row=step.first_row + row,
            )
            yield piece, row, kept


def handed_over(logits: Tensor, step: Step) -> Tensor:
    """Logits that lie in an engine's own memory, as the caller of `step` is to have them.

    Those of a step with an `out` stay where they are if the step's tokens are on the same device: valid until the next
    step. All others are copied, to where the tokens are.
    """
    if step.out is None:
        return logits.to(step.tokens.device, copy=True)
    return logits if step.tokens.device == logits.device else step.out.copy_(logits)
