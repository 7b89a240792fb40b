"""One engine of a pair, as the loop uses it: its cache rows, its prompts, and steps over NumPy arrays."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from engines.base import Engine, Step, mask_length
from engines.buffers import Arena, LruCache, size_of, to_device, views
from engines.capture import Recorder, Uncapturable, Work
from mtad.constrain import Floats, Ints
from runtime.decoder.buckets import Buckets
from runtime.scheduler.request import TokenScore

PROMPT_SCORE_CHUNK = 64
"""Tokens of a prompt that are scored at once: their logits take no more memory than those of a wide tree."""

MAX_KEPT_STEPS, MAX_CAPTURED_STEPS = 256, 64
"""Steps whose memory is kept as it is: an engine need not prepare itself for it again. On a device each has graphs."""

log = logging.getLogger(__name__)


class DeviceStep(NamedTuple):
    """The memory of a step on a device, and its graphs.

    Attributes:
        given, placed: all inputs as bytes, the host's and the device's.
        logits, read: float32 [R, N, V], the device's and the host's.
        graphs: what launches the step, by its number of drafted columns.
    """

    given: Tensor
    placed: Tensor
    logits: Tensor
    read: Tensor
    graphs: dict[int, Work]


class StepInputs(NamedTuple):
    """What a step over R rows of S tokens is given, to be written to; see `engines.base.Step`.

    Attributes:
        arrays: tokens and positions, int64 [R, S]; write_at, int64 [R]; mask, bool [R, 1, S, L]; on the host.
        step: of these arrays, or of what they are copied to.
        device: where it runs on one.
    """

    arrays: tuple[npt.NDArray[Any], ...]
    step: Step
    device: DeviceStep | None = None


class EngineRole:
    """An engine with the memory of its steps, which blocks of all shapes share.

    On a device, each step is a CUDA graph of its own, where the engine's steps can be captured: its rows and its mask
    are padded as those of captured blocks are.

    Args:
        vocab_size: ids the pair shares; logits of padded embedding rows beyond it are cut off.
        recorder: what captures steps; by default nothing does. With one, steps run as on a device, wherever they run.
    """

    def __init__(self, engine: Engine, vocab_size: int, recorder: Recorder | None = None) -> None:
        self.engine, self.vocab_size = engine, vocab_size
        spec, pinned = engine.spec, engine.device.type == "cuda"
        self._on_device = recorder is not None or engine.device.type != "cpu"
        self._recorder = recorder or Recorder(str(engine.device))
        self._buckets = Buckets(spec.rows, spec.capacity) if self._recorder.captures and engine.capturable else None
        self._inputs, self._read = Arena(pinned=pinned), Arena(pinned=pinned)
        self._placed, self._logits = Arena(engine.device), Arena(engine.device)
        most = MAX_CAPTURED_STEPS if self._on_device else MAX_KEPT_STEPS
        self._kept: LruCache[tuple[int, ...], StepInputs] = LruCache(most)
        self._kept_on: object = None
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
        with self._recorder.ordered():
            return self.engine.enqueue(Step(given, positions, positions[:, 0], mask, keep, row, is_prompt=True))

    def keep(self, source: Ints, to: Ints) -> None:
        """Commit accepted nodes of rows 0 .. R - 1, see `engines.cache.base.KvCache.keep`."""
        self.engine.cache.keep(*(torch.from_numpy(columns).to(self.engine.device) for columns in (source, to)))

    def inputs(self, rows: int, tokens: int, longest: int, first: int = 0) -> StepInputs:
        """Memory for the inputs of a step over rows 0 .. rows - 1 that keeps the logits from its token `first` on.

        Args:
            longest: columns that the mask has to reach.
        """
        padded, length = rows, mask_length(longest, self.engine.spec.capacity)
        if self._buckets:
            padded, length = self._buckets.padded(rows, tokens), self._buckets.length(longest)
            if self._kept_on is not (now := self.engine.captured_on):
                self._kept.clear()
                self._kept_on = now
        sizes = padded, tokens, length, first
        found = self._kept.find(sizes, lambda: self._new_inputs(*sizes))
        if padded == rows:
            return found
        for values, idle in zip(found.arrays, (0, 0, self.engine.spec.capacity, False), strict=True):
            values[rows:] = idle  # they write behind the capacity
        return found._replace(arrays=tuple(values[:rows] for values in found.arrays))

    def _new_inputs(self, rows: int, tokens: int, length: int, first: int) -> StepInputs:
        def like(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device="meta")

        spec, device = self.engine.spec, self.engine.device
        sizes = like(rows, tokens), like(rows, tokens), like(rows), like(rows, 1, tokens, length, dtype=torch.bool)
        memory, keep = self._inputs.bytes(size_of(sizes)), torch.arange(first, tokens, device=device)
        given: tuple[Tensor, Tensor, Tensor, Tensor] = views(sizes, memory)
        arrays = tuple(x.numpy() for x in given)
        if not self._on_device:
            out = self._logits.view_like(like(rows, len(keep), spec.vocab_size, dtype=spec.torch_dtype))
            return StepInputs(arrays, Step(*given, keep, out=out))
        placed, logits = self._placed.bytes(len(memory)), like(rows, len(keep), self.vocab_size, dtype=torch.float32)
        given, read = views(sizes, placed), self._read.view_like(logits)
        on_device = DeviceStep(memory, placed, self._logits.view_like(logits), read, {})
        return StepInputs(arrays, Step(*given, keep), on_device)

    def run(self, inputs: StepInputs, drafted: int = 0) -> Floats:
        """Run a step; the logits, float32 [R, N, vocab_size] on the host, until the next one.

        Args:
            drafted: nodes of the same draft in the columns right before, see `engines.base.Step`.
        """
        if self.engine.max_tokens is None:
            drafted = 0  # such engines' steps are the same, so one graph serves all levels
        step = replace(inputs.step, drafted=drafted) if drafted else inputs.step
        if inputs.device:
            self._run_on_device(step, inputs.device)
            return inputs.device.read.numpy()[: len(inputs.arrays[0])]
        logits = self.engine.enqueue(step)
        if logits.shape[2] != self.vocab_size or logits.dtype != torch.float32:
            shape = (*logits.shape[:2], self.vocab_size)
            plain: Tensor = self._read.view_like(torch.empty(shape, dtype=torch.float32, device="meta"))
            logits = plain.copy_(logits[..., : self.vocab_size])
        return logits.contiguous().numpy()

    def _run_on_device(self, step: Step, on: DeviceStep) -> None:
        """Send a step's inputs, run it, by its graph if it can be captured, and wait for its logits."""
        logits = on.logits

        def work() -> None:  # without `on`, which refers to it
            logits.copy_(self.engine.enqueue(step)[..., : self.vocab_size])

        with self._recorder.ordered():
            try:
                on.placed.copy_(on.given, non_blocking=True)
                if (launch := on.graphs.get(step.drafted)) is None:
                    try:
                        launch = self._recorder.record(work) if self._buckets else work
                    except Uncapturable as problem:
                        log.warning("a step of %s is launched anew each time: %s", self.engine.name, problem)
                        launch = work
                    on.graphs[step.drafted] = launch
                launch()
                on.read.copy_(on.logits, non_blocking=True)
            finally:
                self._recorder.wait()  # also if it broke: the next step may not overwrite what is being copied
