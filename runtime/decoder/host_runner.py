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


class BatchArrays:
    """What follows from the parameters of a batch's rows, and the memory of its blocks.

    Attributes:
        rows: records, `mtad.rows.ROW` [R].
        draft_len, width: D and W, of the largest draft.
        starts: int64 [R, D + 1], see `mtad.draft.Tree`.
        kept: tokens that a filter of a row whose rule reads the draft keeps at most; 0 where no rule does.
        scored_nodes: the most nodes that the target scores of a row, by the number of levels that were drafted.
        trees, q, decisions: of the block that runs.
        scored: the same, by the number of levels that were drafted.
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
        self.trees, self.q = Trees.empty(self.starts), _distributions(self)
        self.scored = [ScoredTrees.empty(len(params), most, self.draft_len) for most in self.scored_nodes]
        self.decisions = Decisions.empty(len(params), self.draft_len)

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
        self._arrays: BatchArrays | None = None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = min(cores, 8)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, given: BlockInput) -> Block:
        """Draft, score, accept, commit: one block of rows 0 .. R - 1."""
        began = time.perf_counter()
        if self._arrays is None or not self._arrays.is_of(given.params):
            self._arrays = BatchArrays(given.params, self.target.vocab_size)
        arrays, committed, last_two = self._arrays, np.array(given.committed), np.array(given.last_two)
        trees, decisions = arrays.trees, arrays.decisions
        decisions.finite[:] = True
        noise = draw_noise(given.keys, arrays.draft_len, arrays.width)
        constraints = Constraints.of(given.constraints)
        levels = self._draft(arrays, last_two, committed, noise, constraints) if arrays.draft_len else 0
        drafted = time.perf_counter()
        nodes, scored = arrays.scored_nodes[levels], arrays.scored[levels]
        block.select_nodes(arrays.rows, levels, trees, self._is_end, scored)
        inputs = self.target.inputs(len(committed), 1 + nodes, max(given.committed) + nodes)
        step_inputs.target_inputs(scored, last_two[:, 1], committed, *inputs[:4])
        logits = self.target.run(inputs)
        scored_at = time.perf_counter()
        adjusted = logits
        if constraints:
            after = np.arange(-1, nodes)[None].repeat(len(committed), 0)
            after[after >= scored.counts[:, None]] = -1
            adjusted = constraints.adjust(logits, *_paths(scored, after, arrays.draft_len))
        own = arrays.rows, trees, scored, adjusted, logits, arrays.q, noise.accept, noise.bonus, decisions
        self._share(block.decide, adjusted, *own)
        self._commit(committed, scored, arrays)
        return _outcome(given, scored, decisions, logits, (began, drafted, scored_at))

    def _draft(
        self,
        arrays: BatchArrays,
        last_two: npt.NDArray[np.int64],
        committed: npt.NDArray[np.int64],
        noise: Noise,
        constraints: Constraints | None,
    ) -> int:
        """Draft level by level, until no path goes on; returns how many levels there are."""
        trees, finite = arrays.trees, arrays.decisions.finite
        count, longest = len(committed), int(committed.max()) + arrays.draft_len * arrays.width
        inputs = self.auxiliary.inputs(count, 2, longest, 1)
        step_inputs.first_inputs(arrays.rows, last_two, committed, *inputs[:4])
        logits = self.auxiliary.run(inputs)
        for level in range(arrays.draft_len):
            if constraints:
                first = trees.starts[:, max(level - 1, 0)] if level else np.full(count, -1)
                after = first[:, None] + np.arange(logits.shape[1])
                after[after >= trees.starts[:, level, None]] = -1
                logits = constraints.adjust(logits, *_paths(trees, after, level))
            own = arrays.rows, level, trees, logits, arrays.q, noise.draft, self._is_end, finite
            self._share(block.draft_levels, logits, *own)
            if level + 1 == arrays.draft_len or not batch.any_growing(trees, level):
                return level + 1
            inputs = self.auxiliary.inputs(count, arrays.width, longest)
            step_inputs.level_inputs(level, trees, committed, *inputs[:4])
            logits = self.auxiliary.run(inputs)
        raise AssertionError("a draft has a level")

    def _commit(self, committed: npt.NDArray[np.int64], scored: ScoredTrees, arrays: BatchArrays) -> None:
        """Keep the accepted tokens' columns; the last level of the draft was never run, and is run by the next."""
        if arrays.width > 1:
            target, auxiliary, to = np.empty((3, len(committed), arrays.draft_len), dtype=np.int64)
            step_inputs.kept_columns(committed, scored, arrays.decisions, target, auxiliary, to)
            self.target.keep(target, to)
            self.auxiliary.keep(auxiliary, to)

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
    vocab, given = 4, [DecodingParams(method="specinfer", top_k=2, branching=(2, 1)), DecodingParams(top_k=0)]
    arrays = BatchArrays(given, vocab)
    rows, trees, q, scored, decisions = arrays.rows, arrays.trees, arrays.q, arrays.scored[-1], arrays.decisions
    noise, committed = draw_noise([(0, 0), (0, 1)], arrays.draft_len, arrays.width), np.array([3, 3])
    tokens, positions = np.zeros((2, 2, 5), np.int64)
    inputs = tokens, positions, np.zeros(2, np.int64), np.zeros((2, 1, 5, 64), np.bool_)
    end = np.zeros(vocab, np.bool_)
    logits, last_two = np.zeros((2, 6, vocab), np.float32), np.zeros((2, 2), np.int64)
    step_inputs.first_inputs(rows, last_two, committed, *inputs)
    block.draft_levels(0, 2, rows, 0, trees, logits, q, noise.draft, end, decisions.finite)
    batch.any_growing(trees, 0)
    step_inputs.level_inputs(0, trees, committed, *inputs)
    block.select_nodes(rows, 1, trees, end, scored)
    step_inputs.target_inputs(scored, last_two[:, 1], committed, *inputs)
    block.decide(0, 2, rows, trees, scored, logits, logits, q, noise.accept, noise.bonus, decisions)
    step_inputs.kept_columns(committed, scored, decisions, *np.empty((3, 2, arrays.draft_len), np.int64))
    step_inputs.move_columns(np.zeros((2, 8, 2, 2, 1, 1), np.int64), *np.zeros((2, 2, arrays.draft_len), np.int64))
    _paths(scored, np.zeros((2, 2), np.int64), 2)


def _distributions(arrays: BatchArrays) -> Distributions:
    """Memory for what rows were drafted from, where their rules read it."""
    shape = len(arrays.rows), 1 + (int(arrays.starts.max()) if arrays.kept else 0), max(arrays.kept, 1)
    logits = np.empty((0, 0, 0), np.float32)
    ids, log_p = np.empty(shape, np.int32), np.empty(shape, np.float32)
    return Distributions(logits, ids, log_p, np.full(shape[:2], -1))


def _paths(of: Trees | ScoredTrees, nodes: npt.NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    """The drafted tokens from the root to each of some nodes [R, S], `mtad.constrain.Paths`."""
    tokens, valid = np.zeros((*nodes.shape, length), np.int64), np.zeros((*nodes.shape, length), np.bool_)
    step_inputs.node_paths(of.parents, of.tokens, of.drafted, nodes, tokens, valid)
    return torch.from_numpy(tokens), torch.from_numpy(valid)


def _outcome(
    given: BlockInput,
    scored: ScoredTrees,
    decisions: Decisions,
    logits: Floats,
    times: tuple[float, float, float],
) -> Block:
    lengths, tokens, log_probs = decisions.lengths.tolist(), decisions.tokens.tolist(), decisions.log_probs.tolist()

    def logits_of(row: int) -> Floats:
        at = [0, *(decisions.paths[row, : lengths[row]] + 1).tolist()]
        return logits[row, at]

    return Block(
        given=given,
        tokens=[own[: length + 1] for own, length in zip(tokens, lengths, strict=True)],
        log_probs=[own[: length + 1] for own, length in zip(log_probs, lengths, strict=True)],
        drafted_levels=scored.longest.tolist(),
        spent=[own[: length + 1] for own, length in zip(decisions.spent.tolist(), lengths, strict=True)],
        finite=decisions.finite.tolist(),
        logits_of=logits_of,
        began=times[0],
        drafted=times[1],
        scored=times[2],
    )
