"""Drafts over an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines import Engine
from mtad.accept import Accepted
from mtad.block import Draft, Grown
from mtad.constrain import extend, root_paths
from mtad.distribution import Candidates
from mtad.draft import Level, root
from mtad.rows import Shape, choose_rows
from runtime.decoder.batch import Batch
from runtime.decoder.eager import Functions
from runtime.decoder.engine_role import EngineRole


class Drafter(EngineRole):
    """Drafts with an engine: one step a level, the tree's context stored once per row.

    Cache invariant: columns 0 .. committed - 3 hold the committed tokens; the last two are run, again or for the first
    time, by each draft's first step. Of rows it drafts nothing for, columns behind the committed ones are written only.
    """

    def grow(self, batch: Batch, mine: Tensor | None = None) -> list[Grown]:
        """The levels of a draft, in memory that the next draft takes.

        Args:
            batch: of the block.
            mine: bool [R], rows to draft for; None for all.

        Returns:
            `batch.shape.draft_len` levels; or fewer if no path goes on, and the batch is not `static`.
        """
        rows, shape, level, static = batch.rows, batch.shape, batch.root, batch.static
        if mine is not None:
            rows = rows._replace(draft_len=torch.where(mine[:, None], rows.draft_len, 0))
            level = root(rows, shape)
        context = self._context(batch, shape.draft_len * shape.width)
        functions = self.functions.of(len(batch.committed), shape, len(context.columns))
        begun = functions.begin(context, rows)
        logits = self._step(batch, begun.inputs, 1, 2)
        sees, levels = begun.sees, []
        paths = root_paths(len(batch.committed), self.device) if batch.constraints else None
        for depth in range(1, shape.draft_len + 1):
            if paths and batch.constraints:
                logits = batch.constraints.adjust(logits, *paths, out=self._memory("adjusted", logits.shape))
            noise, place = batch.noise.levels[depth - 1], batch.places[depth - 1]
            grown = functions.grow(depth, level, sees, logits, noise, place, begun, context, rows, batch.live)
            levels.append(grown)
            level, sees = grown.level, grown.inputs.mask
            if batch.stops:
                # `bild`: what follows a token that the target is going to choose is never looked at
                level.growing.logical_and_(grown.first.log_prob[:, :1] >= rows.log_fallback)
                if not static and not level.growing.any():
                    break
            paths = extend(paths, level) if paths else None
            if depth < shape.draft_len:
                logits = self._step(batch, grown.inputs, 0, shape.width)
        return levels


class EngineAuxiliary(Drafter):
    """The auxiliary, and for rows whose method says so the target itself, as drafters.

    Args:
        engine, vocab_size, functions, device: see `EngineRole`.
        target: the target's engine; None if no method is used in which it drafts.
    """

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        functions: Functions | None = None,
        target: Engine | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(engine, vocab_size, functions, device)
        self._target = Drafter(target, vocab_size, functions, device) if target else None

    def draft(self, batch: Batch) -> tuple[Batch, Draft]:
        if batch.by_target is None:
            levels = self.grow(batch)
        else:
            assert self._target is not None, "a batch asks the target to draft"
            levels = self._target.grow(batch, batch.by_target)
            if batch.by_auxiliary:
                other, levels = _copies(levels), self.grow(batch, ~batch.by_target)
                levels = _merged(batch.by_target, other, _copies(levels))
        if len(levels) < batch.shape.draft_len:
            levels = _copies(levels)
            batch = batch.cut(batch, len(levels))
            levels = _cropped(levels, batch.shape)
        context = self._context(batch, batch.shape.draft_len * batch.shape.width)
        functions = self.functions.of(len(batch.committed), batch.shape, len(context.columns))
        draft = functions.finish(levels, batch.rows)  # the same tuple each time, which compiled functions stay bound to
        return batch, draft if batch.live is None else draft._replace(live=batch.live)

    def commit(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """The last level was never run; its column is rewritten by the next draft."""
        if batch.shape.width > 1 and accepted.moves is not None:
            self._move(batch, accepted.moves.auxiliary, accepted.moves.to)


def _copies(levels: Sequence[Grown]) -> list[Grown]:
    """The levels in memory of their own."""

    def copy(value: Any) -> Any:
        if value is None or isinstance(value, Tensor):
            return value if value is None else value.clone()
        return type(value)(*map(copy, value))

    return [copy(grown) for grown in levels]


def _cropped(levels: Sequence[Grown], shape: Shape) -> list[Grown]:
    """The levels of a draft that was grown as one of a larger shape."""
    width, count = shape.width, shape.draft_len
    made = []
    for grown in levels:
        level = Level(*(values[:, :width] for values in grown.level))
        first = Candidates(*(values[:, : shape.candidates] for values in grown.first))
        made.append(grown._replace(level=level._replace(paths=level.paths[:, :, :count]), first=first))
    return made


def _merged(mine: Tensor, levels: Sequence[Grown], others: Sequence[Grown]) -> list[Grown]:
    """Two drafts as one: rows `mine` [R] of the first, the other rows of the second."""
    return [choose_rows(mine, one, other) for one, other in zip(levels, others, strict=True)]
