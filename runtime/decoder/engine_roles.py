"""The two roles over engines: what both share, the auxiliary's drafts, the target's scores and decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from engines import Engine, Step
from engines.base import mask_length
from engines.buffers import Slab, sent
from mtad.block import Context, Draft, Grown, Inputs
from mtad.constrain import extend, root_paths, tree_paths
from mtad.distributions.table import Table, part
from mtad.draft.levels import Level, root
from mtad.draft.tree import TokenTree
from mtad.ops import largest
from mtad.rows import Shape, choose_rows
from mtad.rules.accept import Accepted
from runtime.decoder.batch import Batch
from runtime.decoder.eager import TorchFunctions
from runtime.scheduler.request import TokenScore

PIECE = 64
"""Tokens of a prompt that are scored at once: their logits take no more memory than those of a wide tree."""

STEPS = 64
"""Steps kept for inputs that come again in the same memory."""


class EngineRole:
    """What both roles share: prefill and the cache bookkeeping.

    Args:
        vocab_size: ids the pair shares; logits of padded embedding rows beyond it are cut off.
        device: where the tensors of batches are, which may not be where the engine runs; default: the CPU.
    """

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        functions: TorchFunctions | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.engine, self.vocab_size, self.functions = engine, vocab_size, functions or TorchFunctions()
        self._contexts: dict[int, Context] = {}
        self._steps: dict[int, tuple[Inputs, Step, Tensor]] = {}
        self.device = torch.device("cpu") if device is None else device
        self._slabs = {what: Slab(self.device) for what in ("engine", "plain", "adjusted", "mixed", "kept")}
        self._logits: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._columns = torch.arange(engine.spec.capacity, device=self.device)

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Store the keys and values of `tokens` in columns start .. start + len - 1 of `row`, in one step.

        Columns 0 .. start - 1 must hold what precedes them.
        """
        self._store(row, tokens, start, self._nothing)

    def _store(self, row: int, tokens: Sequence[int], start: int, keep: Tensor) -> Tensor:
        """The step of `prefill`; its logits [1, N, V] after the tokens `keep`, V the engine's."""
        end = start + len(tokens)
        positions = self._columns[None, start:end]
        mask = (self._columns[: mask_length(end, self.engine.spec.capacity)] <= positions[0, :, None])[None, None]
        given = sent([tokens], self.device)
        self.engine.reserve([(start, end)], row)
        return self.engine.launch(Step(given, positions, positions[:, 0], mask, keep, first_row=row))

    def move_row(self, source: int, to: int, columns: int) -> None:
        self.engine.copy_row(source, to, columns)

    def clear_row(self, row: int, start: int = 0) -> None:
        """Zero a row's columns from `start` on: after a failure they may hold what is not a number, and poison it."""
        self.engine.clear_row(row, start)

    def _move(self, batch: Batch, source: Tensor, to: Tensor) -> None:
        """Move columns within the rows of a batch, see `engines.base.move_columns`."""
        self.engine.move_columns(source, to)

    def _length(self, batch: Batch, nodes: int) -> int:
        """Columns of a mask that reaches `nodes` columns beyond the longest row."""
        return mask_length(batch.longest + nodes, self.engine.spec.capacity)

    def _context(self, batch: Batch, nodes: int) -> Context:
        """Where the rows stand, for a mask that reaches `nodes` columns beyond the longest row."""
        length = self._length(batch, nodes)
        context = self._contexts.get(length)
        if context is None or context.committed is not batch.committed or context.last_two is not batch.last_two:
            context = Context(batch.last_two, batch.committed, self._columns[:length])
            self._contexts[length] = context
        return context

    def _step(self, batch: Batch, inputs: Inputs, first: int, end: int) -> Tensor:
        """Launch a step; float32 logits [R, end - first, V] after its positions first .. end - 1."""
        known = self._steps.get(id(inputs))
        if known is None or known[0] is not inputs:
            spec, shape = self.engine.spec, (inputs.tokens.shape[0], end - first)
            out = plain = self._memory("engine", (*shape, spec.vocab_size), spec.torch_dtype)
            if (spec.vocab_size, spec.torch_dtype) != (self.vocab_size, torch.float32):
                plain = self._memory("plain", (*shape, self.vocab_size))
            if len(self._steps) >= STEPS:
                self._steps.clear()
            known = self._steps[id(inputs)] = inputs, Step(*inputs, self._columns[first:end], out=out), plain
        _, step, plain = known
        logits = self.engine.launch(step)
        return (
            logits
            if logits.shape == plain.shape and logits.dtype == plain.dtype
            else plain.copy_(logits[..., : self.vocab_size])
        )

    def _memory(self, what: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for logits, one for each `what`; the same tensor for the same shape.

        What a compiled function is given its bindings keep alive, so it must not be new each time.
        """
        found = self._logits.get((what, shape))
        if found is None:
            found = self._slabs[what].like(torch.empty(shape, dtype=dtype, device="meta"))
            self._logits[what, shape] = found
        return found


class Drafter(EngineRole):
    """Drafts with an engine: one step a level, the tree's context stored once per row.

    Cache invariant: columns 0 .. committed - 3 hold the committed tokens; the last two are run, again or for the first
    time, by each draft's first step. Of rows it drafts nothing for, columns behind the committed ones are written only.
    """

    def grow(self, batch: Batch, mine: Tensor | None = None) -> list[Grown]:
        """The levels of a draft, in memory that the next draft takes.

        Args:
            mine: bool [R], rows to draft for; None for all.

        Returns:
            `batch.shape.draft_len` levels; or fewer if no path goes on, as far as the host knows.
        """
        rows, shape, level = batch.rows, batch.shape, batch.root
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
            if shape.keeps_logits:  # the next step takes the memory that they lie in
                logits = self._memory("kept", (shape.draft_len, *logits.shape))[depth - 1].copy_(logits)
            noise, place = batch.noise.levels[depth - 1], batch.places[depth - 1]
            grown = functions.grow(depth, (level, sees, logits, noise, place, begun.holds, context, rows), batch.live)
            levels.append(grown)
            level, sees = grown.level, grown.inputs.mask
            if batch.stops:
                functions.hold_back(grown, rows)
                if self._has_stopped(level):
                    break
            paths = extend(paths, level) if paths else None
            if depth < shape.draft_len:
                logits = self._step(batch, grown.inputs, 0, shape.width)
        return levels

    def _has_stopped(self, level: Level) -> bool:
        """Whether no path goes on behind a level, as far as the host knows."""
        return not level.growing.any()


class EngineAuxiliary(Drafter):
    """The auxiliary, and for rows whose method says so the target itself, as drafters.

    Args:
        target: the target's engine; None if no method is used in which it drafts.
    """

    drafter = Drafter

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        functions: TorchFunctions | None = None,
        target: Engine | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(engine, vocab_size, functions, device)
        self._target = self.drafter(target, vocab_size, functions, device) if target else None

    def draft(self, batch: Batch) -> tuple[Batch, Draft]:
        if batch.by_target is None:
            levels = self.grow(batch)
        else:
            assert self._target is not None, "a batch asks the target to draft"
            levels = self._target.grow(batch, batch.by_target)
            if batch.by_auxiliary:
                other, levels = _copies(levels), self.grow(batch, ~batch.by_target)
                both = zip(other, _copies(levels), strict=True)
                levels = [choose_rows(batch.by_target, theirs, ours) for theirs, ours in both]
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
        if batch.by_auxiliary and batch.shape.width > 1 and accepted.moves is not None:
            self._move(batch, accepted.moves.auxiliary, accepted.moves.to)


class EngineTarget(EngineRole):
    """Scores with an engine: root and tree in one step.

    Cache invariant: columns 0 .. committed - 2 hold the committed tokens; the last committed token is the root.
    """

    def score_prompt(self, row: int, tokens: Sequence[int], start: int, count: int) -> list[TokenScore]:
        """Log-probabilities of a prompt's tokens, as `runtime.decoder.roles.Target` has them, in pieces of `PIECE`.

        Raises:
            ArithmeticError: a log-probability is not a finite number.
        """
        found: list[TokenScore] = []
        for at in range(0, len(tokens) - 1, PIECE):
            piece = tokens[at : at + PIECE + 1]
            logits = self._store(row, piece[:-1], start + at, self._columns[: len(piece) - 1])
            log_p = logits[0, :, : self.vocab_size].float().log_softmax(-1)
            own = log_p.gather(1, torch.tensor(piece[1:], device=log_p.device)[:, None])
            likely, ids = largest(log_p, min(count, self.vocab_size))
            columns = own[:, 0], (log_p > own).sum(1) + 1, ids, likely
            for value, rank, top, values in zip(*map(Tensor.tolist, columns), strict=True):
                found.append(TokenScore(value, rank, list(zip(top, values, strict=True))))
        if not all(math.isfinite(score.logprob) for score in found):
            raise ArithmeticError("logits of the target are not finite numbers")
        return found

    def score(self, batch: Batch, tree: TokenTree | None) -> Tensor:
        nodes = batch.shape.scored
        context = self._context(batch, nodes)
        functions = self.functions.of(len(batch.committed), batch.shape, len(context.columns))
        inputs, mixed_up = functions.arrange(tree, context, batch.rows), batch.shape.mixed
        logits = self._step(batch, inputs, 0, 1 + nodes)
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


def _copies(levels: Sequence[Grown]) -> list[Grown]:
    copies: list[Grown] = tree_map_only(Tensor, Tensor.clone, list(levels))
    return copies


def _cropped(levels: Sequence[Grown], shape: Shape) -> list[Grown]:
    """The levels of a draft that was grown as one of a larger shape."""
    width, count = shape.width, shape.draft_len
    made = []
    for grown in levels:
        level = Level(*(values[:, :width] for values in grown.level))
        first = tuple(x if isinstance(x, Table) else part(x, lambda y: y[:, : shape.candidates]) for x in grown.first)
        made.append(grown._replace(level=level._replace(paths=level.paths[:, :, :count]), first=first))
    return made
