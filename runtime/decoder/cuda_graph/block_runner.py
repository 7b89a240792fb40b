"""Blocks on a device: one copy in, the whole block as one CUDA graph, one copy out.

What runs is `runtime.decoder.block.run_block`, on the batch's copy in the device's memory; there is no second block.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engines.buffers import Recent, Slab, views
from engines.graphs.capture import NoRecorder, Recorder, Uncapturable, Work
from engines.graphs.runner import MOST
from mtad.params import DecodingParams
from runtime.decoder.batch import Batch
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import Block, Results
from runtime.decoder.buckets import Buckets
from runtime.decoder.cuda_graph.captured_block import Key, RecordedBlock
from runtime.decoder.cuda_graph.device_roles import DeviceAuxiliary, DeviceTarget

log = logging.getLogger(__name__)


class DeviceBlocks:
    """Runs blocks on the device of two engines. The only owner of their graphs and of the memory those work on.

    A batch's bytes are copied into memory that a graph was recorded on, the graph is launched, and what the host needs
    comes back in one copy, which it waits for: once a block. A block that cannot be recorded runs the same work
    unrecorded, on memory of the same kind, and is counted.

    Padded rows have tokens, positions and masks like others; what they write goes behind the capacity, and nobody
    reads what they give. Every replay overwrites its whole input.

    CUDA itself: not executed. Tested on other memory with a recorder that replays operations.

    Args:
        auxiliary, target: the roles, whose tensors are on the engines' device.
        most: graphs kept, or as many as are prepared.

    Attributes:
        unrecorded: blocks that ran unrecorded, by reason.
    """

    def __init__(
        self,
        auxiliary: DeviceAuxiliary,
        target: DeviceTarget,
        batches: BatchBuilder,
        buckets: Buckets,
        recorder: Recorder,
        most: int = MOST,
    ) -> None:
        self._auxiliary, self._target, self.batches = auxiliary, target, batches
        self._buckets, self._recorder = buckets, recorder
        device = target.device
        self._in, self._out = Slab(device), Slab(device)
        self._read = Slab(pinned=device.type == "cuda")
        self._blocks: Recent[Key, tuple[RecordedBlock, Work]] = Recent(most)
        self._caches: list[Tensor] = []
        self._refused: dict[Key, str] = {}
        self.recorded = 0
        self.unrecorded: Counter[str] = Counter()

    @classmethod
    def of(
        cls, auxiliary: DeviceAuxiliary, target: DeviceTarget, eos: Sequence[int], recorder: Recorder
    ) -> DeviceBlocks:
        """Those of two roles, with batches padded to buckets if blocks can be recorded."""
        engines = target.engine, auxiliary.engine
        few = all(engine.capturable for engine in engines)
        spec = engines[0].spec
        masks = any(engine.reads_mask for engine in engines)
        buckets = Buckets(spec.rows, spec.capacity, few, target.device.type == "cuda", masks)
        batches = BatchBuilder(target.vocab_size, eos, buckets, draw=target.functions.draw_noise)
        return cls(auxiliary, target, batches, buckets, recorder)

    @property
    def records(self) -> bool:
        """Whether blocks are recorded, as far as engines and recorder go."""
        return self._never is None

    @property
    def _never(self) -> str | None:
        """Why no block is recorded."""
        if isinstance(self._recorder, NoRecorder):
            return "graphs are switched off"
        for engine in (self._target.engine, self._auxiliary.engine):
            if not engine.capturable:
                return f"steps of {type(engine).__name__} cannot be part of a recording"
        return None

    @property
    def keys(self) -> tuple[Key, ...]:
        """What there are graphs for, the one used last at the end."""
        return tuple(self._blocks)

    def capturable(self, batch: Batch) -> str | None:
        """Why a batch's block cannot be recorded; None if it can."""
        if batch.constraints:
            return "constraints are followed on the host"
        return self._never or self._refused.get(Key.of(batch))

    def run_block(self, batch: Batch) -> Block:
        """Run a block, and give what the host needs of it."""
        assert batch.padded is not None, "a batch of buckets"
        reason = self.capturable(batch)
        with self._recorder.ordered():
            try:
                block = self._launch(batch) if reason is None else self._once(batch, reason)
                read = self._back(block)
                launched = time.perf_counter()
            finally:
                self._recorder.wait()  # also if it broke: the next batch may not overwrite what is still being copied
        return read.block(batch.padded.requests, block.logits, block.results.path, launched, time.perf_counter())

    @torch.inference_mode()
    def prepare(self, params: Sequence[DecodingParams]) -> None:
        """Record blocks of these parameters for every bucket of rows and masks, largest first, and keep them all.

        Smaller graphs then fit into the memory that the largest made. What the caches hold stays.
        """
        if not self.records or not params:
            return
        batches: dict[Key, tuple[int, int, DecodingParams]] = {}
        for p, length in itertools.product(params, self._buckets.lengths):
            committed = length - p.drafted * p.draft_width
            for count in self._buckets.counts(self._dummy(1, 2, p).shape) if committed >= 2 else ():
                batches[Key.of(self._dummy(count, committed, p))] = count, committed, p
        self._blocks.most = max(self._blocks.most, len(self._blocks.keys() | batches))
        with self._auxiliary.engine.kept(slice(None)), self._target.engine.kept(slice(None)):
            for key in sorted(batches, key=lambda key: key.size, reverse=True):
                if key not in self._blocks:
                    self.run_block(self._dummy(*batches[key]))

    def timed(self, step: Callable[[], object]) -> Callable[[], float]:
        """A step of an engine, recorded if blocks are, that gives the seconds until it is done."""

        def work() -> None:
            step()

        launch: Work = work
        if self.records:
            with self._recorder.ordered(), contextlib.suppress(Uncapturable):
                launch = self._recorder.record(work)

        def run() -> float:
            with self._recorder.ordered():
                started = time.perf_counter()
                launch()
                self._recorder.wait()
                return time.perf_counter() - started

        return run

    def _dummy(self, rows: int, committed: int, params: DecodingParams) -> Batch:
        return self.batches.build([params] * rows, [(0, 0)] * rows, [committed] * rows, [(0, 0)] * rows)

    def _launch(self, batch: Batch) -> RecordedBlock:
        """Launch the batch's graph, recorded now if it is the first of its kind."""
        assert batch.padded is not None
        caches = [role.engine.kv for role in (self._auxiliary, self._target)]
        if any(now is not then for now, then in zip(caches, self._caches, strict=False)):
            self._blocks.clear()  # a pool has grown, and lies elsewhere now
        self._caches, key = caches, Key.of(batch)
        try:
            block, launch = self._blocks.find(key, lambda: self._record(key, batch))
        except Uncapturable as problem:
            self._refused[key] = str(problem)
            return self._once(batch, str(problem))
        block.load(batch)
        launch()
        return block

    def _record(self, key: Key, batch: Batch) -> tuple[RecordedBlock, Work]:
        """A block, and what launches it. That keeps the block, which knows nothing of it: a dropped graph is gone."""
        log.info("recording a block of %s", key)
        block = self._new(batch)
        launch = self._recorder.record(block)
        self.recorded += 1
        return block, launch

    def _once(self, batch: Batch, reason: str) -> RecordedBlock:
        """Launch a block unrecorded; its reason is logged the first time, and counted."""
        if reason not in self.unrecorded:
            log.warning("blocks run unrecorded, as separate kernels: %s", reason)
        self.unrecorded[reason] += 1
        block = self._new(batch)
        block()
        return block

    def _new(self, batch: Batch) -> RecordedBlock:
        """A block on the memory that all share, with the batch in it."""
        assert batch.padded is not None
        memory = self._in.bytes(len(batch.padded.memory))
        block = RecordedBlock(memory, batch, self._auxiliary, self._target, self._out)
        block.load(batch)
        return block

    def _back(self, block: RecordedBlock) -> Results:
        """Start the copy of a block's results to the host."""
        memory = self._read.bytes(len(block.out))
        memory.copy_(block.out, non_blocking=True)
        read: Results = views(block.results, memory)
        return read
