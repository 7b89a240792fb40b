"""The two roles of the loop: an auxiliary that drafts, a target that scores. Implemented once for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engines import Engine, Step
from engines.base import mask_length
from engines.kv import copy_row, move_columns
from mtad.distribution import Candidates, process
from mtad.draft import assemble, expand, root
from mtad.noise import Noise
from mtad.rows import Rows, Shape
from mtad.tree import TokenTree, attend


@dataclass(frozen=True)
class Batch:
    """One block's input, rows 0 .. R-1 of the caches.

    Attributes:
        last_two: int64 [R, 2], the last two committed tokens; the last is the root of the tree.
        committed: int64 [R], committed tokens.
        longest: largest of `committed`, known to the host.
        rows: parameters.
        shape: of the draft.
        noise: of this block.
    """

    last_two: Tensor
    committed: Tensor
    longest: int
    rows: Rows
    shape: Shape
    noise: Noise


class Draft(NamedTuple):
    """What the auxiliary proposes.

    Attributes:
        tree: all beams of all levels.
        q: distributions that slot 0 of each level was drawn from, [R, draft_len, K].
    """

    tree: TokenTree
    q: Candidates


class Auxiliary(Protocol):
    """Drafts."""

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Store the keys and values of a prompt's tokens in `row`."""

    def draft(self, batch: Batch) -> Draft:
        """Grow a tree under each row; `batch.shape.draft_len` >= 1."""

    def commit(self, batch: Batch, path: Tensor, length: Tensor) -> None:
        """Keep the draft nodes `path` [R, draft_len] up to `length` [R]."""

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Move a request to another row."""


class Target(Protocol):
    """Scores."""

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Store the keys and values of a prompt's tokens in `row`."""

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        """Logits after the root and after each node, [R, 1 + N, V], in one pass."""

    def commit(self, batch: Batch, path: Tensor, length: Tensor) -> None:
        """Keep the scored nodes `path` [R, draft_len] up to `length` [R]."""

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Move a request to another row."""


class _EngineRole:
    """What both roles share: chunked prefill and the cache bookkeeping.

    Args:
        engine: the model.
        vocab_size: ids the pair shares; logits of padded embedding rows beyond it are cut off.
        prefill_chunk: prompt tokens a step.
    """

    def __init__(self, engine: Engine, vocab_size: int, prefill_chunk: int) -> None:
        self.engine, self.vocab_size, self.prefill_chunk = engine, vocab_size, prefill_chunk
        self._nothing = torch.zeros(0, dtype=torch.int64)
        self._columns = torch.arange(engine.spec.capacity)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Store the keys and values of `tokens` in columns 0 .. len - 1 of `row`, chunk by chunk."""
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = torch.tensor([tokens[start : start + self.prefill_chunk]])
            positions = self._columns[None, start : start + chunk.shape[1]]
            length = mask_length(start + chunk.shape[1], self.engine.spec.capacity)
            mask = (self._columns[:length] <= positions[0, :, None])[None, None]
            self.engine.step(Step(chunk, positions, positions[:, 0], mask, self._nothing, first_row=row))

    def move_row(self, source: int, to: int, columns: int) -> None:
        """Copy the first `columns` columns of row `source` over row `to`."""
        copy_row(self.engine.kv, source, to, columns)

    def _length(self, batch: Batch, nodes: int) -> int:
        return mask_length(batch.longest + nodes, self.engine.spec.capacity)

    def _step(self, step: Step) -> Tensor:
        return self.engine.step(step)[..., : self.vocab_size]

    def _keep(self, batch: Batch, path: Tensor, length: Tensor) -> None:
        """Move the accepted nodes' columns right behind the committed ones."""
        levels = self._columns[: path.shape[1]]
        accepted = torch.where(levels < length[:, None], path, levels)
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
        tail = batch.committed[:, None] + torch.arange(-2, 0)
        write_at = tail[:, 0].clamp(min=0)
        mask = (self._columns[:length] <= (write_at[:, None] + torch.arange(2))[:, :, None])[:, None]
        logits = self._step(Step(batch.last_two, tail.clamp(min=0), write_at, mask, torch.ones(1, dtype=torch.int64)))
        level, levels, q = root(rows, nodes), [], []
        for depth in range(1, shape.draft_len + 1):
            candidates = process(logits, rows, shape.candidates)
            noise = batch.noise.gumbel[:, depth - 1, : candidates.ids.shape[1]]
            level = expand(level, candidates, noise, rows, depth, shape.width)
            levels.append(level)
            q.append(candidates)
            if depth < shape.draft_len:
                at = batch.committed + (depth - 1)
                positions = at[:, None].expand(-1, shape.width)
                write_at = batch.committed + (depth - 1) * shape.width
                mask = attend(level.ancestors, batch.committed, length)
                logits = self._step(Step(level.tokens, positions, write_at, mask, self._columns[: shape.width]))
        ids, log_prob = (torch.stack([getattr(c, name)[:, 0] for c in q], 1) for name in ("ids", "log_prob"))
        return Draft(assemble(levels), Candidates(ids, log_prob))

    def commit(self, batch: Batch, path: Tensor, length: Tensor) -> None:
        """See `Auxiliary.commit`. The last level was never run; its column is rewritten by the next draft."""
        if batch.shape.width > 1:
            self._keep(batch, path, length)


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
        nodes = tree.tokens.shape[1]
        length = self._length(batch, nodes)
        tokens = torch.cat([batch.last_two[:, 1:], tree.tokens], 1)
        depth = torch.arange(tree.levels).repeat_interleave(tree.width)
        positions = root_at[:, None] + torch.cat([torch.zeros(1, dtype=torch.int64), depth + 1])
        sees = torch.nn.functional.pad(tree.ancestors, (0, 0, 1, 0))
        mask = attend(sees, batch.committed, length)
        return self._step(Step(tokens, positions, root_at, mask, self._columns[: nodes + 1]))

    def commit(self, batch: Batch, path: Tensor, length: Tensor) -> None:
        """See `Target.commit`. A chain is written where it belongs."""
        if batch.shape.score_width > 1:
            self._keep(batch, path, length)
