"""Blocks on a device: one copy in, the whole block as one CUDA graph, one copy out, one wait."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.buffers import LruCache
from engines.capture import MAX_GRAPHS, Recorder, Uncapturable, Work
from mtad.device import launches
from mtad.device.tables import Results
from mtad.params import DecodingParams
from runtime.decoder.block import Block, BlockInput
from runtime.decoder.buckets import Buckets
from runtime.decoder.cuda_graph.captured_block import Arenas, CapturedBlock, Key
from runtime.decoder.host_runner import HostRunner

log = logging.getLogger(__name__)


class CudaGraphRunner:
    """Runs blocks as CUDA graphs. The only owner of the graphs and of the memory those work on.

    A batch's bytes are copied into memory that a graph was captured on, the graph is launched, and what the host needs
    comes back in one copy, which it waits for: once per block. A block that cannot be captured runs on the host, and is
    counted.

    Args:
        host: runs what is not captured; of its engines, which are on one device.
        eos: tokens that end a text.
        most: graphs kept, or as many as are prepared.

    Attributes:
        unrecorded: blocks that ran on the host, by reason.
        recorded: graphs captured so far.
    """

    def __init__(self, host: HostRunner, eos: Sequence[int], recorder: Recorder, most: int = MAX_GRAPHS) -> None:
        self._host, self._recorder, self._vocab_size = host, recorder, host.target.vocab_size
        target = host.target.engine
        self._engines = host.auxiliary.engine, target
        reads = any(engine.reads_mask for engine in self._engines)
        self._buckets = Buckets(target.spec.rows, target.spec.capacity, reads)
        device = target.device
        self._is_end = torch.from_numpy(np.isin(np.arange(self._vocab_size), list(eos))).to(device)
        self._arenas = Arenas.on(device)
        self._blocks: LruCache[Key, tuple[CapturedBlock, Work]] = LruCache(most)
        self._captured_on: list[object] = []
        self._refused: dict[Key, str] = {}
        self.unrecorded: Counter[str] = Counter()

    @property
    def problem(self) -> str | None:
        """Why no block is captured, whatever its requests; None where blocks are."""
        if not self._recorder.captures:
            return "graphs are switched off"
        for engine in self._engines:
            if not engine.capturable:
                return f"steps of {type(engine).__name__} cannot be part of a recording"
        return launches.problem()

    def eager_reason(self, given: BlockInput) -> str | None:
        """Why a batch's block runs on the host; None if it is captured."""
        if any(given.constraints):
            return "constraints are followed on the host"
        for p in given.params:
            if p.drafts and not p.uses_model:
                return "drafts are looked up on the host"
            if not p.spec.captured:
                return f"{p.method} runs on the host"
            if p.draft_details:
                return "details of drafts are read on the host"
        return self.problem or self._refused.get(Key.of(given, self._buckets))

    @torch.inference_mode()
    def run(self, given: BlockInput) -> Block:
        """Run a block: by its graph, captured now if it is the first of its kind, or on the host."""
        began, reason = time.perf_counter(), self.eager_reason(given)
        if reason is None:
            key = Key.of(given, self._buckets)
            with self._recorder.ordered():
                try:
                    block = self._launch(key, given)
                    read = block.receive()
                    launched = time.perf_counter()
                except Uncapturable as problem:
                    reason = self._refused[key] = str(problem)
                finally:
                    self._recorder.wait()  # also if it broke: the next batch may not overwrite what is being copied
        if reason is not None:
            if reason not in self.unrecorded:
                log.warning("blocks run on the host, not as CUDA graphs: %s", reason)
            self.unrecorded[reason] += 1
            return self._host.run(given)
        return _outcome(read, given, block.logits, (began, launched, time.perf_counter()))

    def prepare(self, params: Sequence[DecodingParams]) -> None:
        """Capture blocks of these parameters for every bucket of rows and masks, largest first, and keep them all.

        Smaller graphs then fit into the memory that the largest made. No row may hold anything.
        """
        batches: dict[Key, BlockInput] = {}
        for p, length in itertools.product(params, self._buckets.lengths):
            committed = length - p.drafted * p.draft_width
            if committed < 2 or self.eager_reason(_dummy(1, 2, p)):
                continue
            nodes = p.drafted * (p.draft_width if p.spec.tree else 1)
            for count in self._buckets.counts(max(1 + nodes, p.draft_width)):
                given = _dummy(count, committed, p)
                batches[Key.of(given, self._buckets)] = given
        if not batches:
            return
        self._blocks.max_size = max(self._blocks.max_size, len(self._blocks.keys() | batches))
        for engine in self._engines:
            engine.cache.discard_writes()
        try:
            for key in sorted(batches, key=lambda key: key.size, reverse=True):
                if key not in self._blocks:
                    self.run(batches[key])
        finally:
            for engine in self._engines:
                engine.cache.reset()

    def _launch(self, key: Key, given: BlockInput) -> CapturedBlock:
        now = [engine.captured_on for engine in self._engines]
        if any(ours is not theirs for ours, theirs in zip(now, self._captured_on, strict=False)):
            self._blocks.clear()  # a pool has grown, and lies elsewhere now
        self._captured_on = now
        block, launch = self._blocks.find(key, lambda: self._capture(key, given))
        block.send(given)
        launch()
        return block

    def _capture(self, key: Key, given: BlockInput) -> tuple[CapturedBlock, Work]:
        """A block, and what launches it. That keeps the block, which knows nothing of it: a dropped graph is gone."""
        log.info("capturing a block of %s", key)
        block = CapturedBlock(key, *self._engines, self._is_end, self._arenas)
        block.send(given)
        return block, self._recorder.record(block)


def _dummy(rows: int, committed: int, params: DecodingParams) -> BlockInput:
    pairs = [(0, 0)] * rows
    return BlockInput([params] * rows, pairs, [committed] * rows, pairs, [None] * rows, [True] * rows)


def _outcome(read: Results, given: BlockInput, logits: Tensor, times: tuple[float, float, float]) -> Block:
    """The block of its rows; its results are on the host, its logits on the device."""
    rows = len(given.params)
    tokens, log_probs, lengths, paths, longest, spent, finite = (values[:rows].tolist() for values in read)

    def logits_of(row: int) -> npt.NDArray[np.float32]:
        at = [0, *(1 + node for node in paths[row][: lengths[row]])]
        return logits[row].cpu().numpy()[at]

    tokens = [own[: count + 1] for own, count in zip(tokens, lengths, strict=True)]
    log_probs = [own[: count + 1] for own, count in zip(log_probs, lengths, strict=True)]
    return Block(given, tokens, log_probs, longest, spent, finite, logits_of, [[] for _ in tokens], *times)
