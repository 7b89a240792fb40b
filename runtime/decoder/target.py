"""Scores and accepts over an engine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtad.accept import Accepted
from mtad.block import Draft
from mtad.constrain import root_paths, tree_paths
from mtad.tree import TokenTree
from runtime.decoder.batch import Batch
from runtime.decoder.engine_role import EngineRole


class EngineTarget(EngineRole):
    """Scores with an engine: root and tree in one step.

    Cache invariant: columns 0 .. committed - 2 hold the committed tokens; the last committed token is the root.
    """

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        nodes = batch.shape.scored
        context = self._context(batch, nodes)
        functions = self.functions.of(len(batch.committed), batch.shape, len(context.columns))
        inputs, mixed_up = functions.arrange(tree, context, batch.rows), batch.shape.mixed
        logits = self._step(batch, inputs, 0, 1 + nodes, keep=not mixed_up)
        if not mixed_up:
            return logits
        # nodes that were not scored have the logits of some that were
        column = pad(batch.rows.score_layout.column + 1, (1, 0)).clamp(max=nodes)
        at = column + (self._columns[: len(column)] * (1 + nodes))[:, None]
        mixed = self._memory("mixed", (*column.shape, logits.shape[2]))
        torch.index_select(logits.flatten(0, 1), 0, at.flatten(), out=mixed.flatten(0, 1))
        return mixed

    def accept(self, batch: Batch, draft: Draft | None, logits: Tensor) -> Accepted:
        """Both models are filtered under the same constraints; log-probabilities are without."""
        adjusted = logits
        if batch.constraints:
            paths = tree_paths(draft.tree) if draft else root_paths(len(batch.committed), self.device)
            adjusted = batch.constraints.adjust(logits, *paths, out=self._memory("adjusted", logits.shape))
        context = self._context(batch, batch.shape.scored)
        functions = self.functions.of(len(batch.committed), batch.shape, len(context.columns))
        return functions.decide(draft, adjusted, logits, batch.noise, batch.committed, batch.rows)

    def commit(self, batch: Batch, accepted: Accepted) -> None:
        """A chain is written where it belongs."""
        if batch.shape.score_width > 1 and accepted.moves is not None:
            self._move(batch, accepted.moves.target, accepted.moves.to)
