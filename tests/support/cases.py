"""The library on mock models: blocks of random requests, batched as the loop does."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import mtad.noise.host
import mtad.rules.accept
import mtad.rules.by_row
from mtad.block import distributions
from mtad.constrain import extend, root_paths, tree_paths
from mtad.distributions.candidates import draw as draw_tokens
from mtad.distributions.table import Distributions, Table, draw_from, draw_one, part
from mtad.draft.levels import assemble, expand, root, stack
from mtad.draft.live import Live, replay
from mtad.draft.tree import TokenTree, keep_best
from mtad.methods import METHODS
from mtad.noise.host import Noise
from mtad.params import DecodingParams
from mtad.rows import LISTED, Rows, Shape, choose_rows
from mtad.rules.accept import Accepted
from mtad.rules.by_row import possible
from mtad.rules.scored import Scored
from mtad.stacking import block_shape, places, stack_rows
from runtime.constraints.adjust import Constraints
from runtime.decoder.eager import stacked
from tests.support.mock_models import Pair, mock_pair
from tests.support.noise import draw_noise
from tests.support.reference.request import Model, Random, Request, Tokens

WINDOWS = lru_cache(maxsize=16_384)(mtad.noise.host._window.__wrapped__)
"""Keeps the noise of thousands of texts, which tests draw with the same seeds."""


@dataclass(frozen=True)
class Case:
    """One row of a block; `key` is its (seed, block index)."""

    pair: Pair
    params: DecodingParams
    context: Tokens
    key: tuple[int, int]
    beams: tuple[tuple[Tokens, float], ...] = ()

    def request(self, eos: Collection[int] = ()) -> Request:
        """The case as `tests.support.reference` defines its block."""
        return Request(self.pair.target, self.pair.auxiliary, self.context, self.params, eos)

    @property
    def drafter(self) -> Model:
        """The model that drafts."""
        return self.pair.target if self.params.spec.drafter == "target" else self.pair.auxiliary


class Run(NamedTuple):
    """What the library made of a batch of cases; `draft`, `tree` and `paths` are empty where no row drafts."""

    rows: Rows
    shape: Shape
    noise: Noise
    draft: TokenTree | None
    tree: TokenTree | None
    paths: list[list[Tokens]]
    accepted: Accepted
    bonus: Tensor

    def emitted(self, row: int) -> Tokens:
        """The row's tokens, the bonus last."""
        return tuple(self.accepted.tokens[row, : int(self.accepted.length[row]) + 1].tolist())

    def texts(self) -> list[Tokens]:
        """`emitted` of every row."""
        table = zip(self.accepted.tokens.tolist(), self.accepted.length.tolist(), strict=True)
        return [tuple(tokens[: length + 1]) for tokens, length in table]

    def random(self, row: int) -> Random:
        """The row's numbers."""
        uniform = np.array([level.uniform[row].numpy() for level in self.noise.levels])
        gumbel = np.array([level.gumbel[row].numpy() for level in self.noise.levels])
        levels = self.shape.draft_len + self.shape.live if self.shape.children or self.shape.live else 0
        nodes = self.noise.nodes[row].numpy().reshape(levels, -1 if levels else 0)
        return Random(uniform, gumbel, self.noise.accept[row].numpy(), nodes, float(self.noise.bonus[row]))


def paths_below(above: list[list[Tokens]], parents: Tensor, tokens: Tensor, drafted: Tensor) -> list[list[Tokens]]:
    """Tokens from the root to each slot of a level; slots that draft nothing have their parent's."""
    table = zip(above, parents.tolist(), tokens.tolist(), drafted.tolist(), strict=True)
    return [
        [row[parent] + ((token,) if new else ()) for parent, token, new in zip(*level, strict=True)]
        for row, *level in table
    ]


def logits_after(models: Sequence[Model], cases: Sequence[Case], paths: list[list[Tokens]]) -> Tensor:
    """Logits [R, S, V] after each path."""
    table = zip(models, cases, paths, strict=True)
    return torch.from_numpy(np.array([[model(case.context + path) for path in row] for model, case, row in table]))


def run_block(
    cases: Sequence[Case],
    vocab: int,
    eos: Sequence[int] = (),
    constraints: Constraints | None = None,
    listed: int = LISTED,
) -> Run:
    """One block of a batch of requests."""
    params = [case.params for case in cases]
    shape = block_shape(list({id(p): p for p in params}.values()), vocab, listed)
    rows = stack_rows(params, shape, vocab, eos)
    noise = draw_noise(params, [case.key for case in cases], shape, vocab)
    live = Live.of([list(case.beams) for case in cases], shape.draft_len, shape.width) if shape.live else None
    start: list[list[Tokens]] = [[()] for _ in cases]
    draft = tree = None
    q: tuple[Distributions, ...] = ()
    above: list[tuple[Distributions, ...]] = []
    paths: list[list[Tokens]] = [[] for _ in cases]
    points = root_paths(len(cases))
    if shape.draft_len:
        level, levels, first, beams = root(rows, shape), [], [], start
        for depth in range(1, shape.draft_len + 1):
            logits = logits_after([case.drafter for case in cases], cases, beams)
            adjusted = constraints.adjust(logits, *points) if constraints else logits
            found = distributions(adjusted, rows, shape.tables)
            assert not any(candidates.log_prob.isnan().any() for candidates in found[:1])
            place, before = places(rows, shape)[depth - 1], level
            drawn = [expand(before, one, noise.levels[depth - 1], rows, place, shape.forms) for one in found]
            level = choose_rows(rows.tabulated, drawn[-1], drawn[0])
            level = replay(level, before, live, depth, place, rows) if live else level
            above.append(found)
            points = extend(points, level)
            beams = paths_below(beams, level.parents, level.tokens, level.drafted)
            levels.append(level)
            first.append(tuple(part(candidates, lambda x: x[:, 0]) for candidates in found))
        q = tuple(part(each, lambda x: x.transpose(0, 1)) for each in stacked(first))
        draft = tree = assemble(stack(levels))
        if shape.selects:
            tree, _ = keep_best(draft, rows)
        trees = zip(paths, tree.parents.tolist(), tree.tokens.tolist(), tree.drafted.tolist(), strict=True)
        for known, *nodes in trees:
            for parent, token, new in zip(*nodes, strict=True):
                known.append((known[parent] if parent >= 0 else ()) + ((token,) if new else ()))
        points = tree_paths(tree)
    visited = [start[row] + paths[row] for row in range(len(cases))]
    logits = logits_after([case.pair.target for case in cases], cases, visited)
    adjusted = constraints.adjust(logits, *points) if constraints else logits
    bonus = torch.zeros(len(cases), vocab)

    def note(ids: Tensor, weights: Tensor, noise: Tensor) -> Tensor:
        bonus.scatter_add_(1, ids, weights / weights.sum(-1, keepdim=True))
        return draw_tokens(ids, weights, noise)

    own = torch.zeros(len(cases), vocab)  # of tables
    among: list[Tensor | slice] = [slice(None)]  # of which tokens the weights are

    def note_possible(scored: Scored) -> Tensor | None:
        ids = possible(scored)
        among[0] = slice(None) if ids is None else ids
        return ids

    def note_table(weights: Tensor, noise: Tensor, greedy: Tensor) -> Tensor:
        row = noise.storage_offset()  # decided row by row, or all at once
        own[row : row + len(weights), among[0]] = weights / weights.sum(-1, keepdim=True)
        return draw_from(weights, noise, greedy)

    def note_one(after: Table, at: Tensor, noise: Tensor, greedy: Tensor) -> Tensor:
        found = after.pick(at).log_prob.squeeze(1).exp()
        own.copy_(torch.where(own.sum(-1, keepdim=True) > 0, own, found))  # a rule's own weights come first
        return draw_one(after, at, noise, greedy)

    with (
        patch.multiple(mtad.rules.accept, draw=note, draw_from=note_table, draw_one=note_one),
        patch.object(mtad.rules.by_row, "possible", note_possible),
    ):
        accepted = mtad.rules.accept.accept(
            tree, adjusted, logits, q, noise, rows, shape.rules, tuple(above), live, shape.tables
        )
    bonus[rows.tabulated] = own[rows.tabulated]
    return Run(rows, shape, noise, draft, tree, paths, accepted, bonus)


def generate(
    pair: Pair,
    params: Sequence[DecodingParams],
    vocab: int,
    length: int,
    eos: Sequence[int] = (),
    listed: int = LISTED,
) -> list[Tokens]:
    """The first `length` tokens of one request per entry of `params`, block by block; seeds are the indices."""
    texts: list[Tokens] = [() for _ in params]
    beams: dict[int, tuple[tuple[Tokens, float], ...]] = {}
    for index in itertools.count():
        waiting = [row for row, text in enumerate(texts) if len(text) < length and not set(text[-1:]) & set(eos)]
        if not waiting:
            break
        cases = [Case(pair, params[row], texts[row], (row, index), beams.get(row, ())) for row in waiting]
        with patch.object(mtad.noise.host, "_window", WINDOWS):
            run = run_block(cases, vocab, eos, listed=listed)
        kept = run.accepted.live.beams() if run.accepted.live else [[]] * len(waiting)
        for row, text, live in zip(waiting, run.texts(), kept, strict=True):
            texts[row] += text
            beams[row] = tuple(live)
    return [text[:length] for text in texts]


def random_cases(seed: int, count: int, vocab: int) -> list[Case]:
    """Requests that differ in everything; every third batch has the paper's methods alone."""
    generator = np.random.default_rng(seed)
    methods = ["sample", "speculative", "mtad", "mmtad"] if seed % 3 == 0 else [*METHODS, "mtad", "mmtad"]

    def pick(*values: float) -> float:
        return float(generator.choice(values))

    cases = []
    for index in range(count):
        method = str(generator.choice(methods))
        params = DecodingParams(
            method=method,
            draft_len=int(generator.integers(1, 6)),
            beam_width=int(generator.integers(1, 6)) if seed % 2 else int(generator.integers(1, 10)),
            branching=[(4, 2, 2), (1, 3), (2, 2, 1, 2), (5,)][int(generator.integers(4))],
            replacement=bool(generator.integers(2)),
            accept_threshold=pick(0, 0.1, 0.5, 1, 3, 1e3)
            if index % 3 and method != "ensemble"
            else pick(0, 0.1, 0.3, 0.5),
            relaxed_topk=1 + index % 4,
            fly_window_size=1 + index % 3,
            draft_confidence=pick(0, 0, 0.02, 0.2, 0.5),
            temperature=pick(0, 0.5, 1, 1, 2),
            top_k=int(pick(0, 1, 2, 3, 10)),
            top_p=pick(1, 1, 0.9, 0.6, 0.2) if index % 10 else 0.0,
            min_p=0.0 if index % 4 else 0.1,
            ignore_eos=bool(generator.integers(2)),
        )
        equal = 0.1 if params.accept_threshold == 1 else 0.0  # a ratio of 1 against a threshold of 1 is a tie
        pair = mock_pair(seed * count + index, vocab, peak=pick(0.5, 2, 5), noise=pick(equal, 0.3, 1))
        context = tuple(generator.integers(vocab, size=3).tolist())
        cases.append(Case(pair, params, context, (seed * count + index, int(generator.integers(5)))))
    return cases


def every_case(batches: int, rows: int) -> Iterator[tuple[list[Case], int, tuple[int, ...]]]:
    """Mixed batches with their vocabulary and end-of-sequence tokens."""
    for seed in range(batches):
        vocab = 5 + seed % 8
        yield random_cases(seed, rows, vocab), vocab, [(), (0,), (1, 3)][seed % 3]


@cache
def mixed_runs() -> list[tuple[list[Case], int, tuple[int, ...], Run]]:
    """The library's blocks of 4,000 requests, drawn once for all tests."""
    return [(cases, vocab, eos, run_block(cases, vocab, eos)) for cases, vocab, eos in every_case(batches=80, rows=50)]
