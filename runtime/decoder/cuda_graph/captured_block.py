"""One block as work that can be recorded: what it is recorded for, the memory it runs on, what the host reads of it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from engines.buffers import Slab, leaves, size_of, views
from mtad.rows import Shape
from runtime.decoder.batch import Batch
from runtime.decoder.block import Results, run_block
from runtime.decoder.cuda_graph.device_roles import DeviceAuxiliary, DeviceTarget


class Key(NamedTuple):
    """What a block is recorded for.

    Attributes:
        stops: whether rows may stop before the last level.
    """

    rows: int
    length: int
    shape: Shape
    stops: bool

    @classmethod
    def of(cls, batch: Batch) -> Key:
        """That of a batch."""
        assert batch.padded is not None, "a batch of buckets"
        return cls(len(batch.committed), batch.padded.length, batch.shape, batch.stops)

    @property
    def size(self) -> tuple[int, ...]:
        """Larger ones need more memory."""
        return self.rows * (1 + self.shape.scored), self.length, self.shape.candidates


class RecordedBlock:
    """One block on static memory: called, it launches its work.

    Attributes:
        results: of the latest launch, views of that.
    """

    out: Tensor
    results: Results
    logits: Tensor

    def __init__(
        self, memory: Tensor, batch: Batch, auxiliary: DeviceAuxiliary, target: DeviceTarget, out: Slab
    ) -> None:
        self._memory, self._batch, self._roles = memory, batch, (auxiliary, target)
        self._slab: Slab | None = out

    def load(self, batch: Batch) -> None:
        """Copy a batch of this kind into the memory."""
        assert batch.padded is not None
        self._memory.copy_(batch.padded.memory, non_blocking=True)

    def __call__(self) -> None:
        """Run the block; its results go to the memory of all blocks' results, of which the first run takes a view."""
        batch = self._batch
        assert batch.padded is not None
        static = replace(batch.padded.over(self._memory), constraints=batch.constraints)
        ran = run_block(*self._roles, static)
        results = ran.results(batch.stops)
        if self._slab is not None:
            self.out, self._slab = self._slab.bytes(size_of(results)), None
            self.results = views(results, self.out)
        for ours, given in zip(leaves(self.results), leaves(results), strict=True):
            ours.copy_(given)
        self.logits = ran.logits
