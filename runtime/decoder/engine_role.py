"""One engine of a pair, as the loop uses it: its cache rows, its prompts, and steps over NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.base import Engine, Step, mask_length
from engines.buffers import Arena, LruCache, to_device
from runtime.scheduler.request import TokenScore

PROMPT_SCORE_CHUNK = 64
"""Tokens of a prompt that are scored at once: their logits take no more memory than those of a wide tree."""

MAX_KEPT_STEPS = 64
"""Steps whose memory is kept as it is: an engine need not prepare itself for it again."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class StepInputs(NamedTuple):
    """What a step over R rows of S tokens is given, to be written to; see `engines.base.Step`.

    Attributes:
        arrays: tokens and positions, int64 [R, S]; write_at, int64 [R]; mask, bool [R, 1, S, L].
        step: of these arrays.
        logits: float32 [R, N, V] on the host, what `step.out` holds; None where that has another type or width.
    """

    arrays: tuple[Ints, Ints, Ints, npt.NDArray[np.bool_]]
    step: Step
    logits: Floats | None


class EngineRole:
    """An engine with the memory of its steps, which blocks of all shapes share.

    Args:
        vocab_size: ids the pair shares; logits of padded embedding rows beyond it are cut off.
    """

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine, self.vocab_size = engine, vocab_size
        self._on_cpu = engine.device.type == "cpu"
        self._inputs, self._logits, self._plain = Arena(), Arena(), Arena()
        self._kept: LruCache[tuple[int, ...], StepInputs] = LruCache(MAX_KEPT_STEPS)
        self._columns = torch.arange(engine.spec.capacity, device=engine.device)

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Store the keys and values of `tokens` in columns start .. start + len - 1 of `row`, in one step.

        Columns 0 .. start - 1 must hold what precedes them.
        """
        self._store(row, tokens, start, self._columns[:0])

    def score_prompt(self, row: int, tokens: Sequence[int], start: int, count: int) -> list[TokenScore]:
        """Store all of `tokens` but the last, as `prefill` does; returns the score of each but the first.

        Args:
            count: likeliest alternatives that are reported at each.

        Raises:
            ArithmeticError: a log-probability is not a finite number.
        """
        found: list[TokenScore] = []
        for logits in self.logits(row, tokens[:-1], start):
            log_p, following = logits.log_softmax(-1), tokens[1 + len(found) :][: len(logits)]
            own = log_p.gather(1, torch.tensor(following, device=log_p.device)[:, None])
            likely, ids = log_p.topk(min(count, self.vocab_size))
            columns = own[:, 0], (log_p > own).sum(1) + 1, ids, likely
            for value, rank, top, values in zip(*map(Tensor.tolist, columns), strict=True):
                found.append(TokenScore(value, rank, list(zip(top, values, strict=True))))
        if not all(math.isfinite(score.logprob) for score in found):
            raise ArithmeticError("logits of the target are not finite numbers")
        return found

    def logits(self, row: int, tokens: Sequence[int], start: int) -> Iterator[Tensor]:
        """Store `tokens`, as `prefill` does; the logits after each, some tokens at a time, float32 [n, vocab_size]."""
        for at in range(0, len(tokens), PROMPT_SCORE_CHUNK):
            piece = tokens[at : at + PROMPT_SCORE_CHUNK]
            yield self._store(row, piece, start + at, self._columns[: len(piece)])[0, :, : self.vocab_size].float()

    def _store(self, row: int, tokens: Sequence[int], start: int, keep: Tensor) -> Tensor:
        """The step of `prefill`; its logits [1, N, V] after the tokens `keep`, V the engine's."""
        end = start + len(tokens)
        positions = self._columns[None, start:end]
        mask = (self._columns[: mask_length(end, self.engine.spec.capacity)] <= positions[0, :, None])[None, None]
        given = to_device([tokens], self.engine.device)
        self.engine.cache.reserve([(start, end)], row)
        return self.engine.enqueue(Step(given, positions, positions[:, 0], mask, keep, first_row=row))

    def keep(self, source: Tensor, to: Tensor) -> None:
        """Commit accepted nodes of rows 0 .. R - 1, see `engines.cache.base.KvCache.keep`; given on the host."""
        if not self._on_cpu:
            source, to = source.to(self.engine.device), to.to(self.engine.device)
        self.engine.cache.keep(source, to)

    def inputs(self, rows: int, tokens: int, longest: int, first: int = 0) -> StepInputs:
        """Memory for the inputs of a step over rows 0 .. rows - 1 that keeps the logits from its token `first` on.

        Args:
            longest: columns that the mask has to reach.
        """
        length = mask_length(longest, self.engine.spec.capacity)
        return self._kept.find((rows, tokens, length, first), lambda: self._new_inputs(rows, tokens, length, first))

    def _new_inputs(self, rows: int, tokens: int, length: int, first: int) -> StepInputs:
        def like(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device="meta")

        spec = self.engine.spec
        mask, logits = like(rows, 1, tokens, length, dtype=torch.bool), (rows, tokens - first, spec.vocab_size)
        sizes = like(rows, tokens), like(rows, tokens), like(rows), mask
        given: tuple[Tensor, Tensor, Tensor, Tensor] = self._inputs.view_like(sizes)
        out = self._logits.view_like(like(*logits, dtype=spec.torch_dtype)) if self._on_cpu else None
        step = Step(*given, torch.arange(first, tokens), out=out)
        plain = out is not None and out.dtype == torch.float32 and spec.vocab_size == self.vocab_size
        arrays = tuple(x.numpy() for x in given)
        return StepInputs(arrays, step, out.numpy() if out is not None and plain else None)  # type: ignore[arg-type]

    def run(self, inputs: StepInputs, drafted: int = 0) -> Floats:
        """Run a step; the logits, float32 [R, N, vocab_size] on the host, until the next one.

        Args:
            drafted: nodes of the same draft in the columns right before, see `engines.base.Step`.
        """
        step = replace(inputs.step, drafted=drafted) if drafted else inputs.step
        if not self._on_cpu:
            parts = (step.tokens, step.positions, step.write_at, step.mask, step.keep)
            placed = Step(*(x.to(self.engine.device) for x in parts))  # type: ignore[arg-type]
            step = replace(placed, drafted=drafted)
        logits = self.engine.enqueue(step)
        if logits is step.out and inputs.logits is not None:
            return inputs.logits
        logits = logits.to("cpu").contiguous()
        if logits.shape[2] != self.vocab_size or logits.dtype != torch.float32:
            shape = (*logits.shape[:2], self.vocab_size)
            plain: Tensor = self._plain.view_like(torch.empty(shape, dtype=torch.float32, device="meta"))
            logits = plain.copy_(logits[..., : self.vocab_size])
        return logits.numpy()
