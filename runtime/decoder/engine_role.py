"""What both roles share over an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines import Engine, Step
from engines.base import mask_length
from engines.buffers import Slab
from engines.kv import index_columns
from mtad.block import Context, Inputs
from runtime.decoder.batch import Batch
from runtime.decoder.eager import Functions, TorchFunctions

STEPS = 64
"""Steps kept for inputs that come again in the same memory."""


class EngineRole:
    """What both roles share: prefill and the cache bookkeeping.

    Args:
        engine: the model.
        vocab_size: ids the pair shares; logits of padded embedding rows beyond it are cut off.
        functions: what runs between steps.
        device: where the tensors of batches are, which may not be where the engine runs; default: the CPU.

    Attributes:
        device: of the tensors.
    """

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        functions: Functions | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.engine, self.vocab_size, self.functions = engine, vocab_size, functions or TorchFunctions()
        self._contexts: dict[int, Context] = {}
        self._steps: dict[int, tuple[Inputs, Step, Tensor]] = {}
        self.device = torch.device("cpu") if device is None else device
        self._slabs = {what: Slab(self.device) for what in ("engine", "plain", "adjusted", "mixed")}
        self._logits: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._columns = torch.arange(engine.spec.capacity, device=self.device)

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Store the keys and values of `tokens` in columns start .. start + len - 1 of `row`, in one step.

        Columns 0 .. start - 1 must hold what precedes them.
        """
        end = start + len(tokens)
        positions = self._columns[None, start:end]
        mask = (self._columns[: mask_length(end, self.engine.spec.capacity)] <= positions[0, :, None])[None, None]
        given = torch.tensor([tokens], device=self.device)
        self.engine.step(Step(given, positions, positions[:, 0], mask, self._nothing, first_row=row))

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Copy the first `columns` columns of row `source` over row `to`."""
        self.engine.copy_row(source, to, columns)

    def clear_row(self, row: int, start: int = 0) -> None:
        """Zero a row's columns from `start` on: after a failure they may hold what is not a number, and poison it."""
        self.engine.clear_row(row, start)

    def _move(self, batch: Batch, source: Tensor, to: Tensor) -> None:
        """Move columns within the rows of a batch, see `engines.kv.move_columns`."""
        if batch.padded:
            source = torch.where(batch.padded.real[:, None], source, to)
        if batch.static and self.engine.capturable:
            index_columns(self.engine.kv, source, to)
        else:
            self.engine.move_columns(source, to)

    def _context(self, batch: Batch, nodes: int) -> Context:
        """Where the rows stand, for a mask that reaches `nodes` columns beyond the longest row."""
        padded, capacity = batch.padded, self.engine.spec.capacity
        length = padded.length if padded else mask_length(batch.longest + nodes, capacity)
        context = self._contexts.get(length)
        if context is None or context.committed is not batch.committed or context.last_two is not batch.last_two:
            context = Context(batch.last_two, batch.committed, self._columns[:length])
            self._contexts[length] = context
        return context

    def _step(self, batch: Batch, inputs: Inputs, first: int, end: int, keep: bool = False) -> Tensor:
        """Run a step; float32 logits [R, end - first, V] after its positions first .. end - 1.

        Args:
            batch: whose step it is.
            inputs: of the step.
            first, end: which of its positions.
            keep: in memory that every block of a device uses, rather than some of a graph's own.
        """
        if batch.padded:
            # whatever lies in the columns of a padded row belongs to a request that is being stored
            behind = torch.where(batch.padded.real, inputs.write_at, self.engine.spec.capacity)
            inputs = inputs._replace(write_at=behind)
        if batch.static and self.engine.capturable:
            logits = self.engine.step(Step(*inputs, self._columns[first:end]))
            shape = *logits.shape[:2], self.vocab_size
            if not keep and (logits.shape, logits.dtype) == (shape, torch.float32):
                return logits
            return self._memory("plain", shape).copy_(logits[..., : self.vocab_size])
        known = self._steps.get(id(inputs))
        if known is None or known[0] is not inputs:
            spec, shape = self.engine.spec, (inputs.tokens.shape[0], end - first)
            out = plain = self._memory("engine", (*shape, spec.vocab_size), spec.torch_dtype)
            if (spec.vocab_size, spec.torch_dtype) != (self.vocab_size, torch.float32):
                plain = self._memory("plain", (*shape, self.vocab_size))
            if len(self._steps) >= STEPS:
                self._steps.clear()
            known = self._steps[id(inputs)] = inputs, Step(*inputs, self._columns[first:end], out=out), plain
        _, step, plain = known
        logits = self.engine.step(step)
        return (
            logits
            if logits.shape == plain.shape and logits.dtype == plain.dtype
            else plain.copy_(logits[..., : self.vocab_size])
        )

    def _memory(self, what: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for logits, one for each `what`; the same tensor for the same shape.

        What a compiled function is given its bindings keep alive, so it must not be new each time.
        """
        found = self._logits.get((what, shape))
        if found is None:
            found = self._slabs[what].like(torch.empty(shape, dtype=dtype, device="meta"))
            self._logits[what, shape] = found
        return found
