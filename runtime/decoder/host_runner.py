"""Blocks whose functions run on the host, with engines anywhere."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from filelock import FileLock
from numba import NumbaExperimentalFeatureWarning

from engines.placement import cores
from mtad import block, lookup, step_inputs
from mtad.batch import ScoredTrees, Trees
from mtad.compiled import cache_folder, entry_of
from mtad.constrain import Floats, Ints, Terms, constrain
from mtad.params import DecodingParams
from mtad.random import fill_noise
from runtime.constraints.constraint import Asks, asks_of, constrained
from runtime.decoder.batch_arrays import BatchArrays
from runtime.decoder.block import Block, BlockInput
from runtime.decoder.draft_details import TokenDetails, details_of
from runtime.decoder.engine_role import EngineRole

log = logging.getLogger(__name__)

WORTH_THREADS = 2**19
"""Logits of a step from which its rows are shared out among threads: waking one takes as long as filtering 30,000."""


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
        self._call = compile_rules()
        self._arrays: BatchArrays | None = None
        self._threads = min(cores(), 8)
        self._pool: ThreadPoolExecutor | None = None

    def run(self, given: BlockInput) -> Block:
        """Draft, score, accept, commit: one block of rows 0 .. R - 1."""
        began = time.perf_counter()
        if self._arrays is None or not self._arrays.is_of(given.params):
            self._arrays = BatchArrays(given.params, self.target.vocab_size)
        arrays, committed, last_two = self._arrays, np.array(given.committed), np.array(given.last_two)
        decisions, noise = arrays.decisions, arrays.noise
        decisions.finite.fill(True)
        self._call.fill_noise(np.array(given.keys, np.uint64), noise)
        asks, longest = asks_of(given.constraints), max(given.committed)
        levels = self._draft_looked_up(arrays, given.drafts) if arrays.looks_up else 0
        if arrays.level_starts[-1]:
            levels = max(levels, self._draft(arrays, last_two, committed, longest, asks))
        drafted = time.perf_counter()
        nodes = self._call.select_nodes(arrays.rows, levels, arrays.trees, self._is_end, scored := arrays.scored)
        inputs = self.target.inputs(len(committed), 1 + nodes, longest + nodes)
        self._call.target_inputs(scored, last_two[:, 1], committed, *inputs.arrays)
        logits = self.target.run(inputs)
        scored_at = time.perf_counter()
        adjusted = logits
        if asks:
            after = np.arange(-1, nodes)[None].repeat(len(committed), 0)
            after[after >= scored.counts[:, None]] = -1
            adjusted = constrained(logits, asks, *_paths(scored, after, arrays.draft_len))
        own = arrays.rows, arrays.trees, scored, adjusted, logits, arrays.q, noise.accept, noise.bonus, decisions
        self._share(self._call.decide, adjusted, *own)
        moves = self._call.kept_columns(arrays.drawn_rows, committed, scored, decisions, *arrays.columns)
        if moves[0]:
            self.target.keep(arrays.columns[0], arrays.columns[2])
        if moves[1]:  # the draft's last level was never run, and is run by the next
            self.auxiliary.keep(arrays.columns[1], arrays.columns[2])
        return _outcome(given, arrays, logits, (began, drafted, scored_at))

    def _draft_looked_up(self, arrays: BatchArrays, drafts: Sequence[Sequence[Sequence[int]]]) -> int:
        """Let what was looked up be the drafts of its rows; returns the length of the longest one."""
        tokens = np.full((len(arrays.rows), arrays.width, arrays.draft_len), -1)
        for row, draft in enumerate(drafts):
            if arrays.looked_up[row] and draft:
                tokens[row, : len(draft), : len(draft[0])] = draft
        given = arrays.rows, arrays.looked_up, tokens, arrays.trees, arrays.q, self._is_end
        return int(self._call.draft_looked_up(*given))

    def _draft(self, arrays: BatchArrays, last_two: Ints, committed: Ints, longest: int, asks: Asks) -> int:
        """Draft level by level, until no path goes on; returns how many levels there are."""
        rows, trees, count = arrays.drawn_rows, arrays.drawn_trees, len(committed)
        others = arrays.q, arrays.noise.draft, self._is_end, arrays.decisions.finite
        end = longest + arrays.draft_len * arrays.width
        inputs = self.auxiliary.inputs(count, 2, end, 1)
        self._call.first_inputs(rows, last_two, committed, *inputs.arrays)
        for level in range(arrays.draft_len):
            logits = self.auxiliary.run(inputs, arrays.level_starts[max(level - 1, 0)])
            if asks:
                first = trees.starts[:, max(level - 1, 0)] if level else np.full(count, -1)
                after = first[:, None] + np.arange(logits.shape[1])
                after[after >= trees.starts[:, level, None]] = -1
                logits = constrained(logits, asks, *_paths(trees, after, level))
            if not self._share(self._call.draft_levels, logits, rows, level, trees, logits, *others):
                break
            if level == 0:
                inputs = self.auxiliary.inputs(count, arrays.width, end)
            self._call.level_inputs(level, trees, committed, *inputs.arrays)
        return level + 1

    def _share(self, work: Callable[..., Any], logits: Floats, *arguments: Any) -> bool:
        """Whether work(first, last, ...) says so of some rows: on several threads where the step has many logits."""
        rows = len(logits)
        if logits.size < WORTH_THREADS or 1 in (rows, self._threads):
            return bool(work(0, rows, *arguments))
        parts = min(self._threads, rows)
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "rules")
        edges = [rows * part // parts for part in range(parts + 1)]
        futures = [self._pool.submit(work, low, high, *arguments) for low, high in itertools.pairwise(edges[1:])]
        found = [work(0, edges[1], *arguments), *(future.result() for future in futures)]
        return any(found)


@lru_cache(maxsize=1)
def compile_rules() -> SimpleNamespace:
    """Compile all functions now, or load them from the cache, so that nothing is compiled while requests run.

    One process compiles at a time; those that wait for it load what it has compiled, and later ones wait for nobody.
    """
    compiled = cache_folder() / "compiled"
    with nullcontext() if compiled.exists() else FileLock(cache_folder() / "compiling.lock"), warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)  # calling a row's rule by its number
        if not compiled.exists():
            log.warning("compiling the decoding rules, once for this version: about a minute")
        calls = _call_all()
        if any(cache_folder().rglob("*.nbi")):  # as NUMBA_DISABLE_JIT leaves none
            compiled.touch()
        return calls


def _call_all() -> SimpleNamespace:
    """What a block calls of `mtad`, as machine code for the types that it gives."""
    vocab, given = 4, [DecodingParams(method="traversal", top_k=2, branching=(2, 1)), DecodingParams(top_k=0)]
    arrays = BatchArrays(given, vocab)
    rows, trees, q, scored, decisions = arrays.rows, arrays.trees, arrays.q, arrays.scored, arrays.decisions
    tokens, positions = np.zeros((2, 2, 5), np.int64)
    inputs = tokens, positions, np.zeros(2, np.int64), np.zeros((2, 1, 5, 64), np.bool_)
    end, committed, noise = np.zeros(vocab, np.bool_), np.array([3, 3]), arrays.noise
    logits, last_two, columns = np.zeros((2, 6, vocab), np.float32), np.zeros((2, 2), np.int64), arrays.columns
    step_inputs.move_columns(np.zeros((2, 8, 2, 1, 1), np.int64)[:, ::2], *columns[:2])  # of any layout
    step_inputs.lay_out(np.zeros((2, 4), np.uint8), 1, 1, 2, 4, 2)
    paths, lengths = _paths(scored, np.full((2, 2), -1), 2)
    none, some = np.zeros(0, np.int64), np.zeros(0, np.float32)
    terms = Terms(none, some, none, some, some, none, 0)
    constrain(logits[0, :2], paths[0], lengths[0], terms, np.zeros((2, 0), np.uint8))
    drafts = np.zeros((2, 1, 1), np.int64)
    lookup.look_up(tokens[0], 5, drafts[0])
    judged = trees, scored, logits, logits, q, noise.accept, noise.bonus, decisions
    return SimpleNamespace(
        fill_noise=entry_of(fill_noise, np.zeros((2, 2), np.uint64), noise),
        first_inputs=entry_of(step_inputs.first_inputs, rows, last_two, committed, *inputs),
        draft_looked_up=entry_of(lookup.draft_looked_up, rows, end[:2], drafts, trees, q, end),
        draft_levels=entry_of(block.draft_levels, 0, 2, rows, 0, trees, logits, q, noise.draft, end, decisions.finite),
        level_inputs=entry_of(step_inputs.level_inputs, 0, trees, committed, *inputs),
        select_nodes=entry_of(block.select_nodes, rows, 1, trees, end, scored),
        target_inputs=entry_of(step_inputs.target_inputs, scored, last_two[:, 1], committed, *inputs),
        decide=entry_of(block.decide, 0, 2, rows, *judged),
        kept_columns=entry_of(step_inputs.kept_columns, rows, committed, scored, decisions, *columns),
    )


def _paths(of: Trees | ScoredTrees, nodes: Ints, length: int) -> tuple[Ints, Ints]:
    """The drafted tokens from the root to each of some nodes [R, S], and how many: int64 [R, S, D] and [R, S]."""
    tokens, lengths = np.zeros((*nodes.shape, length), np.int64), np.zeros(nodes.shape, np.int64)
    step_inputs.node_paths(of.parents, of.tokens, of.drafted, nodes, tokens, lengths)
    return tokens, lengths


def _outcome(given: BlockInput, arrays: BatchArrays, logits: Floats, times: tuple[float, float, float]) -> Block:
    scored, decisions, lengths = arrays.scored, arrays.decisions, arrays.decisions.lengths.tolist()
    tokens = [own[: count + 1] for own, count in zip(decisions.tokens.tolist(), lengths, strict=True)]
    log_probs = [own[: count + 1] for own, count in zip(decisions.log_probs.tolist(), lengths, strict=True)]

    def logits_of(row: int) -> Floats:
        at = [0, *(decisions.paths[row, : lengths[row]] + 1).tolist()]
        return logits[row, at]

    details: list[list[TokenDetails]] = [[] for _ in tokens]
    for row, params in enumerate(given.params):
        if params.draft_details and decisions.finite[row]:
            path = decisions.paths[row, : lengths[row]].tolist()
            details[row] = details_of(row, arrays.trees, scored, path, logits[row])
    longest, spent, finite = scored.longest.tolist(), decisions.spent.tolist(), decisions.finite.tolist()
    return Block(given, tokens, log_probs, longest, spent, finite, logits_of, details, *times)
