"""Blocks whose functions run on the host, with engines anywhere."""

from __future__ import annotations

import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import is_not
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock
from numba import NumbaExperimentalFeatureWarning
from torch import Tensor

from mtad import batch, block, step_inputs
from mtad.batch import Decisions, ScoredTrees, Trees
from mtad.compiled import cache_folder
from mtad.distribution import Distributions
from mtad.params import DecodingParams
from mtad.random import Noise, draw_noise
from mtad.rows import stack_rows
from runtime.constraints.adjust import Constraints
from runtime.decoder.block import Block, BlockInput
from runtime.decoder.engine_role import EngineRole

log = logging.getLogger(__name__)

WORTH_THREADS = 2**19
"""Logits of a step from which its rows are shared out among threads: waking one takes as long as filtering 30,000."""

Floats = npt.NDArray[np.float32]

ENTRIES = (
    *(step_inputs.first_inputs, block.draft_levels, batch.any_growing, step_inputs.level_inputs, block.select_nodes),
    *(step_inputs.target_inputs, block.decide, step_inputs.kept_columns, step_inputs.node_paths),
)
"""The functions that a block calls."""


class Layout:
    """What follows from the parameters of a batch's rows.

    Attributes:
        rows: records, `mtad.rows.ROW` [R].
        draft_len, width: D and W, of the largest draft.
        starts: int64 [R, D + 1], see `mtad.draft.Tree`.
        kept: tokens that a filter of a row whose rule reads the draft keeps at most; 0 where no rule does.
        scored_nodes: the most nodes that the target scores of a row, by the number of levels that were drafted.
    """

    def __init__(self, params: Sequence[DecodingParams], vocab_size: int) -> None:
        self.params = list(params)
        self.rows = stack_rows(params, vocab_size)
        self.draft_len, self.width = int(self.rows["draft_len"].max()), int(self.rows["width"].max())
        widths = np.zeros((len(params), self.draft_len), dtype=np.int64)
        for own, p in zip(widths, params, strict=True):
            own[: p.drafted] = p.widths
        self.starts = np.zeros((len(params), self.draft_len + 1), dtype=np.int64)
        np.cumsum(widths, axis=1, out=self.starts[:, 1:])
        readers = self.rows["top_k"][self.rows["reads_draft"]]
        self.kept = int(readers.max()) if len(readers) else 0
        ends = [np.minimum(self.rows["draft_len"], levels) for levels in range(self.draft_len + 1)]
        nodes = [np.where(self.rows["tree"], self.starts[np.arange(len(x)), x], x) for x in ends]
        self.scored_nodes = [int(each.max()) for each in nodes]

    def is_of(self, params: Sequence[DecodingParams]) -> bool:
        """Whether these are the parameters, the same objects."""
        return len(params) == len(self.params) and not any(map(is_not, params, self.params))


class HostRunner:
    """Runs blocks by the compiled functions of `mtad.block` and `mtad.step_inputs`.

    The auxiliary's cache holds columns 0 .. committed - 3 of the text, because the draft's first step runs the last two
    tokens again; the target's holds all but the last token, which is the root.

    Args:
        auxiliary, target: the engines.
        eos: tokens that end a text.
    """

    def __init__(self, auxiliary: EngineRole, target: EngineRole, eos: Sequence[int]) -> None:
        self.auxiliary, self.target = auxiliary, target
        self._is_end = np.isin(np.arange(target.vocab_size), list(eos))
        self._layout: Layout | None = None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = min(cores, 8)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, given: BlockInput) -> Block:
        """Draft, score, accept, commit: one block of rows 0 .. R - 1."""
        if self._layout is None or not self._layout.is_of(given.params):
            self._layout = Layout(given.params, self.target.vocab_size)
        layout = self._layout
        committed, finite = np.array(given.committed), np.ones(len(given.params), np.bool_)
        last_two = np.array(given.last_two)
        noise = draw_noise(given.keys, layout.draft_len, layout.width)
        constraints = Constraints.of(given.constraints)
        trees, q = Trees.empty(layout.starts), _distributions(layout)
        levels = 0
        if layout.draft_len:
            levels = self._draft(layout, last_two, committed, noise, constraints, trees, q, finite)
        drafted = time.perf_counter()
        nodes = layout.scored_nodes[levels]
        scored = ScoredTrees.empty(len(committed), nodes, layout.draft_len)
        block.select_nodes(layout.rows, levels, trees, self._is_end, scored)
        inputs = self.target.inputs(len(committed), 1 + nodes, max(given.committed) + nodes)
        step_inputs.target_inputs(scored, last_two[:, 1], committed, *inputs[:4])
        logits = self.target.run(inputs)
        scored_at = time.perf_counter()
        adjusted = logits
        if constraints:
            after = np.arange(-1, nodes)[None].repeat(len(committed), 0)
            after[after >= scored.counts[:, None]] = -1
            adjusted = constraints.adjust(logits, *_paths(scored, after, layout.draft_len))
        decisions = Decisions.empty(len(committed), layout.draft_len)
        decisions.finite[:] = finite
        self._share(
            block.decide,
            adjusted,
            layout.rows,
            trees,
            scored,
            adjusted,
            logits,
            q,
            noise.accept,
            noise.bonus,
            decisions,
        )
        self._commit(committed, scored, decisions, layout)
        return _outcome(scored, decisions, logits, drafted, scored_at)

    def _draft(
        self,
        layout: Layout,
        last_two: npt.NDArray[np.int64],
        committed: npt.NDArray[np.int64],
        noise: Noise,
        constraints: Constraints | None,
        trees: Trees,
        q: Distributions,
        finite: npt.NDArray[np.bool_],
    ) -> int:
        """Draft level by level, until no path goes on; returns how many levels there are."""
        count, longest = len(committed), int(committed.max()) + layout.draft_len * layout.width
        inputs = self.auxiliary.inputs(count, 2, longest, 1)
        step_inputs.first_inputs(layout.rows, last_two, committed, *inputs[:4])
        logits = self.auxiliary.run(inputs)
        for level in range(layout.draft_len):
            if constraints:
                first = trees.starts[:, max(level - 1, 0)] if level else np.full(count, -1)
                after = first[:, None] + np.arange(logits.shape[1])
                after[after >= trees.starts[:, level, None]] = -1
                logits = constraints.adjust(logits, *_paths(trees, after, level))
            self._share(
                block.draft_levels, logits, layout.rows, level, trees, logits, q, noise.draft, self._is_end, finite
            )
            if level + 1 == layout.draft_len or not batch.any_growing(trees, level):
                return level + 1
            inputs = self.auxiliary.inputs(count, layout.width, longest)
            step_inputs.level_inputs(level, trees, committed, *inputs[:4])
            logits = self.auxiliary.run(inputs)
        raise AssertionError("a draft has a level")

    def _commit(
        self, committed: npt.NDArray[np.int64], scored: ScoredTrees, decisions: Decisions, layout: Layout
    ) -> None:
        """Keep the accepted tokens' columns; the last level of the draft was never run, and is run by the next."""
        if layout.width > 1:
            target, auxiliary, to = np.empty((3, len(committed), layout.draft_len), dtype=np.int64)
            step_inputs.kept_columns(committed, scored, decisions, target, auxiliary, to)
            self.target.move_columns(target, to)
            self.auxiliary.move_columns(auxiliary, to)

    def _share(self, work: Callable[..., Any], logits: Floats, *arguments: Any) -> None:
        """Do work(first, last, ...) for all rows: on several threads where the step has many logits."""
        rows = len(logits)
        parts = min(self._threads, rows) if logits.size >= WORTH_THREADS else 1
        if parts == 1:
            work(0, rows, *arguments)
            return
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "rules")
        edges = [rows * part // parts for part in range(parts + 1)]
        futures = [self._pool.submit(work, low, high, *arguments) for low, high in itertools.pairwise(edges[1:])]
        work(0, edges[1], *arguments)
        for future in futures:
            future.result()


def compile_rules() -> None:
    """Compile all functions now, or load them from the cache, so that nothing is compiled while requests run.

    One process compiles at a time; those that wait for it load what it has compiled.
    """
    with FileLock(cache_folder() / "compiling.lock"), warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)  # calling a row's rule by its number
        if not any(cache_folder().rglob("*.nbi")):
            log.warning("compiling the decoding rules, once for this version: about a minute")
        _call_all()
    for function in ENTRIES:
        if hasattr(function, "disable_compile"):
            function.disable_compile()


def _call_all() -> None:
    """Call each of `ENTRIES`, with arguments of the types that they have in a block."""
    vocab, given = 4, [DecodingParams(method="specinfer", top_k=2, branching=(2, 1)), DecodingParams(top_k=0)]
    layout = Layout(given, vocab)
    trees, q, finite = Trees.empty(layout.starts), _distributions(layout), np.ones(2, np.bool_)
    noise, committed = draw_noise([(0, 0), (0, 1)], layout.draft_len, layout.width), np.array([3, 3])
    tokens, positions = np.zeros((2, 2, 5), np.int64)
    inputs = tokens, positions, np.zeros(2, np.int64), np.zeros((2, 1, 5, 64), np.bool_)
    end = np.zeros(vocab, np.bool_)
    logits, last_two = np.zeros((2, 6, vocab), np.float32), np.zeros((2, 2), np.int64)
    step_inputs.first_inputs(layout.rows, last_two, committed, *inputs)
    block.draft_levels(0, 2, layout.rows, 0, trees, logits, q, noise.draft, end, finite)
    batch.any_growing(trees, 0)
    step_inputs.level_inputs(0, trees, committed, *inputs)
    scored = ScoredTrees.empty(2, 4, layout.draft_len)
    block.select_nodes(layout.rows, 1, trees, end, scored)
    step_inputs.target_inputs(scored, last_two[:, 1], committed, *inputs)
    decisions = Decisions.empty(2, layout.draft_len)
    block.decide(0, 2, layout.rows, trees, scored, logits, logits, q, noise.accept, noise.bonus, decisions)
    step_inputs.kept_columns(committed, scored, decisions, *np.empty((3, 2, layout.draft_len), np.int64))
    _paths(scored, np.zeros((2, 2), np.int64), 2)


def _distributions(layout: Layout) -> Distributions:
    """Memory for what rows were drafted from, where their rules read it."""
    shape = len(layout.rows), 1 + (int(layout.starts.max()) if layout.kept else 0), max(layout.kept, 1)
    logits = np.empty((0, 0, 0), np.float32)
    ids, log_p = np.empty(shape, np.int32), np.empty(shape, np.float32)
    return Distributions(logits, ids, log_p, np.full(shape[:2], -1))


def _paths(of: Trees | ScoredTrees, nodes: npt.NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    """The drafted tokens from the root to each of some nodes [R, S], `mtad.constrain.Paths`."""
    tokens, valid = np.zeros((*nodes.shape, length), np.int64), np.zeros((*nodes.shape, length), np.bool_)
    step_inputs.node_paths(of.parents, of.tokens, of.drafted, nodes, tokens, valid)
    return torch.from_numpy(tokens), torch.from_numpy(valid)


def _outcome(scored: ScoredTrees, decisions: Decisions, logits: Floats, drafted: float, scored_at: float) -> Block:
    lengths, tokens, log_probs = decisions.lengths.tolist(), decisions.tokens.tolist(), decisions.log_probs.tolist()

    def logits_of(row: int) -> Floats:
        at = [0, *(decisions.paths[row, : lengths[row]] + 1).tolist()]
        return logits[row, at]

    return Block(
        tokens=[own[: length + 1] for own, length in zip(tokens, lengths, strict=True)],
        log_probs=[own[: length + 1] for own, length in zip(log_probs, lengths, strict=True)],
        drafted_levels=scored.longest.tolist(),
        finite=decisions.finite.tolist(),
        logits_of=logits_of,
        drafted=drafted,
        scored=scored_at,
    )
