"""The two roles of the loop: an auxiliary that drafts, a target that scores. Implemented once for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from engines import Engine, Step
from engines.base import mask_length
from engines.kv import clear_row, copy_row, move_columns
from mtad.accept import Accepted
from mtad.distribution import Candidates, process
from mtad.draft import Level, assemble, expand
from mtad.noise import Noise
from mtad.rows import Layout, Rows, Shape
from mtad.tree import TokenTree, attend, depths, keep_best, tree_columns


@dataclass(frozen=True)
class Batch:
    """One block's input, rows 0 .. R-1 of the caches.

    Attributes:
        last_two: int64 [R, 2], the last two committed tokens; the last is the root of the tree.
        committed: int64 [R], committed tokens.
        longest: largest of `committed`, known to the host.
        rows: parameters.
        root: the level above the draft's first.
        shape: of the draft.
        noise: of this block.
    """

    last_two: Tensor
    committed: Tensor
    longest: int
    rows: Rows
    root: Level
    shape: Shape
    noise: Noise


class Draft(NamedTuple):
    """What the auxiliary proposes.

    Attributes:
        tree: what the target is to score.
        q: distributions that slot 0 of each level was drawn from, [R, draft_len, K]; None if no row needs them.
        origin: int64 [R, N], for each node of `tree` the node of the auxiliary's own tree that it is.
    """

    tree: TokenTree
    q: Candidates | None
    origin: Tensor


class Auxiliary(Protocol):
    """Drafts."""

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Store the keys and values of `tokens` in columns start .. start + len - 1 of `row`, in one step."""

    def draft(self, batch: Batch) -> Draft:
        """Grow a tree under each row; `batch.shape.draft_len` >= 1."""

    def commit(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """Keep the accepted nodes, drop the others."""

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Move a request's first `columns` columns to another row."""

    def clear_row(self, row: int) -> None:
        """Zero a row."""


class Target(Protocol):
    """Scores."""

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Store the keys and values of `tokens` in columns start .. start + len - 1 of `row`, in one step."""

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        """Logits after the root and after each node, [R, 1 + N, V], in one pass."""

    def commit(self, batch: Batch, accepted: Accepted) -> None:
        """Keep the accepted nodes, drop the others."""

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Move a request's first `columns` columns to another row."""

    def clear_row(self, row: int) -> None:
        """Zero a row."""


class _EngineRole:
    """What both roles share: prefill and the cache bookkeeping.

    Args:
        engine: the model.
        vocab_size: ids the pair shares; logits of padded embedding rows beyond it are cut off.
    """

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine, self.vocab_size = engine, vocab_size
        self._nothing = torch.zeros(0, dtype=torch.int64)
        self._columns = torch.arange(engine.spec.capacity)

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Store the keys and values of `tokens` in columns start .. start + len - 1 of `row`, in one step.

        Columns 0 .. start - 1 must hold what precedes them.
        """
        end = start + len(tokens)
        positions = self._columns[None, start:end]
        mask = (self._columns[: mask_length(end, self.engine.spec.capacity)] <= positions[0, :, None])[None, None]
        self.engine.step(Step(torch.tensor([tokens]), positions, positions[:, 0], mask, self._nothing, first_row=row))

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Copy the first `columns` columns of row `source` over row `to`."""
        copy_row(self.engine.kv, source, to, columns)

    def clear_row(self, row: int) -> None:
        """Zero a row: after a failure it may hold what is not a number, and that would poison its next request."""
        clear_row(self.engine.kv, row)

    def _length(self, batch: Batch, nodes: int) -> int:
        return mask_length(batch.longest + nodes, self.engine.spec.capacity)

    def _step(self, step: Step) -> Tensor:
        logits = self.engine.step(step)
        return logits if logits.shape[2] == self.vocab_size else logits[..., : self.vocab_size]

    def _keep(self, batch: Batch, path: Tensor, length: Tensor, layout: Layout | None) -> None:
        """Move the accepted nodes' columns right behind the committed ones."""
        levels = self._columns[: path.shape[1]]
        columns = path if layout is None else layout.column.gather(1, path)
        accepted = torch.where(levels < length[:, None], columns, levels)
        move_columns(self.engine.kv, batch.committed[:, None] + accepted, batch.committed[:, None] + levels)


class EngineAuxiliary(_EngineRole):
    """Drafts with an engine: one step a level, the tree's context stored once per row.

    Cache invariant: columns 0 .. committed - 3 hold the committed tokens. The two last committed tokens are run (again)
    by each draft's first step: after a fully accepted block the last drafted token has never been run, and a fixed
    step of two tokens costs less than a branch on how much was accepted.
    """

    def draft(self, batch: Batch) -> Draft:
        """See `Auxiliary.draft`."""
        rows, shape = batch.rows, batch.shape
        nodes = shape.draft_len * shape.width
        length = self._length(batch, nodes)
        tail = (batch.committed[:, None] + self._columns[:2] - 2).clamp(min=0)
        write_at = tail[:, 0]
        mask = (self._columns[:length] <= (write_at[:, None] + self._columns[:2])[:, :, None])[:, None]
        logits = self._step(Step(batch.last_two, tail, write_at, mask, self._columns[1:2]))
        level, levels, drawn_from = batch.root, [], []
        columns = tree_columns(batch.committed, nodes, length, rows.draft_layout)
        gumbel = batch.noise.gumbel.unbind(1)
        for depth in range(1, shape.draft_len + 1):
            candidates = process(logits, rows)
            level = expand(level, candidates, gumbel[depth - 1], rows, depth, shape.width)
            levels.append(level)
            drawn_from.append(candidates)
            if depth < shape.draft_len:
                at = batch.committed + (depth - 1)
                positions = at[:, None].expand(-1, shape.width)
                write_at = batch.committed + (depth - 1) * rows.width
                mask = attend(level.ancestors, columns)
                logits = self._step(Step(level.tokens, positions, write_at, mask, self._columns[: shape.width]))
        q = None
        if "lossless" in shape.rules:
            pairs = [(candidates.ids[:, 0], candidates.log_prob[:, 0]) for candidates in drawn_from]
            q = Candidates(*(torch.stack(column, 1) for column in zip(*pairs, strict=True)))
        tree, origin = assemble(levels), self._columns[:nodes].expand(len(batch.committed), nodes)
        if shape.selects:
            tree, origin = keep_best(tree, rows.tree, shape.score_width)
        return Draft(tree, q, origin)

    def commit(self, batch: Batch, draft: Draft, accepted: Accepted) -> None:
        """See `Auxiliary.commit`. The last level was never run; its column is rewritten by the next draft."""
        if batch.shape.width > 1:
            path = draft.origin.gather(1, accepted.path)
            self._keep(batch, path, accepted.length, batch.rows.draft_layout)


class EngineTarget(_EngineRole):
    """Scores with an engine: root and tree in one step.

    Cache invariant: columns 0 .. committed - 2 hold the committed tokens; the last committed token is the root.
    """

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        """See `Target.score`."""
        root_at = batch.committed - 1
        if tree is None:
            length = self._length(batch, 0)
            mask = (self._columns[:length] <= root_at[:, None])[:, None, None]
            step = Step(batch.last_two[:, 1:], root_at[:, None], root_at, mask, self._columns[:1])
            return self._step(step)
        nodes, layout = tree.tokens.shape[1], batch.rows.score_layout
        length = self._length(batch, nodes)
        tokens, sees, depth = tree.tokens, tree.ancestors, depths(tree.levels, tree.width, tree.tokens.device)
        if layout is not None:
            tokens = tokens.gather(1, layout.node_at)
            depth = pad(depth[layout.node_at + 1], (1, 0))
            sees = sees.gather(1, layout.node_at[:, :, None].expand_as(sees))
        tokens = torch.cat([batch.last_two[:, 1:], tokens], 1)
        mask = attend(pad(sees, (0, 0, 1, 0)), tree_columns(batch.committed, nodes, length, layout))
        positions = root_at[:, None] + depth
        logits = self._step(Step(tokens, positions, root_at, mask, self._columns[: nodes + 1]))
        if layout is not None:
            back = pad(layout.column + 1, (1, 0))
            logits = logits.gather(1, back[:, :, None].expand_as(logits))
        return logits

    def commit(self, batch: Batch, accepted: Accepted) -> None:
        """See `Target.commit`. A chain is written where it belongs."""
        if batch.shape.score_width > 1:
            self._keep(batch, accepted.path, accepted.length, batch.rows.score_layout)
