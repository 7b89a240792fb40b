"""The two roles where blocks are padded and launched whole: what differs from `runtime.decoder.engine_roles`."""

from __future__ import annotations

import torch
from torch import Tensor

from engines import Step
from mtad.block import Inputs
from mtad.draft.levels import Level
from mtad.draft.tree import TokenTree
from runtime.decoder.batch import Batch
from runtime.decoder.engine_roles import Drafter, EngineAuxiliary, EngineRole, EngineTarget


class DeviceRole(EngineRole):
    """Steps and moves of a batch with padded rows, whose content the host does not know.

    Whatever lies in the columns of a padded row belongs to a request that is being stored.
    """

    def _move(self, batch: Batch, source: Tensor, to: Tensor) -> None:
        assert batch.padded is not None
        self.engine.move_columns(torch.where(batch.padded.real[:, None], source, to), to)

    def _length(self, batch: Batch, nodes: int) -> int:
        assert batch.padded is not None
        return batch.padded.length

    def _step(self, batch: Batch, inputs: Inputs, first: int, end: int) -> Tensor:
        """Run a step inside a graph: logits that need no conversion stay in the graph's own memory."""
        assert batch.padded is not None
        behind = torch.where(batch.padded.real, inputs.write_at, self.engine.spec.capacity)
        inputs = inputs._replace(write_at=behind)
        if not self.engine.capturable:
            return super()._step(batch, inputs, first, end)
        logits = self.engine.launch(Step(*inputs, self._columns[first:end]))
        if logits.shape[2] == self.vocab_size and logits.dtype == torch.float32:
            return logits
        return self._memory("plain", (*logits.shape[:2], self.vocab_size)).copy_(logits[..., : self.vocab_size])

    def _has_stopped(self, level: Level) -> bool:
        return False


class DeviceDrafter(DeviceRole, Drafter):
    """A drafter whose steps a CUDA graph can hold."""


class DeviceAuxiliary(DeviceRole, EngineAuxiliary):
    """An auxiliary whose steps a CUDA graph can hold."""

    drafter = DeviceDrafter


class DeviceTarget(DeviceRole, EngineTarget):
    """A target whose steps a CUDA graph can hold."""

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        """Score in memory that all blocks share, because logits are looked at after the block."""
        logits = super().score(batch, tree)
        if not self.engine.capturable or any(logits is shared for shared in self._logits.values()):
            return logits
        return self._memory("plain", tuple(logits.shape)).copy_(logits)
