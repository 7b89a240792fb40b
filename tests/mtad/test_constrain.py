"""Bias, penalties and bans at every node of a token tree, against their definitions by enumeration of paths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mtad.constrain import Paths, Penalties, Terms, barrier, constrain, extend, root_paths, tree_paths
from mtad.distributions.candidates import process
from mtad.draft.levels import expand, root
from mtad.params import DecodingParams
from mtad.stacking import block_shape, places, stack_rows
from tests.support.cases import mixed_runs
from tests.support.noise import draw_noise
from tests.support.reference.request import Tokens

VOCAB, END = 7, (0, 5)
NODES, DEPTH = 12, 5


@dataclass(frozen=True)
class Row:
    """One request's wishes and what it has committed."""

    prompt: Tokens
    text: Tokens
    params: DecodingParams
    allowed: frozenset[int] | None = None


def by_definition(row: Row, logits: Sequence[float], path: Tokens) -> list[float]:
    """The logits after `path`, in float64, token by token."""
    p, text = row.params, row.text + path
    values = []
    for token, logit in enumerate(logits):
        logit = float(logit) + p.logit_bias.get(token, 0.0)
        if token in row.prompt + text:
            logit = logit / p.repetition_penalty if logit > 0 else logit * p.repetition_penalty
        if token in text:
            logit -= p.presence_penalty + p.frequency_penalty * text.count(token)
        if token in END and len(text) < p.min_tokens:
            logit = -math.inf
        if row.allowed is not None and token not in row.allowed:
            logit = -math.inf
        values.append(logit)
    return values


def terms(rows: Sequence[Row]) -> Terms:
    """The rows as tensors."""
    counts = torch.zeros(len(rows), VOCAB)
    seen = torch.zeros(len(rows), VOCAB, dtype=torch.bool)
    tokens = torch.full((len(rows), 16), 3)
    bias = torch.zeros(len(rows), VOCAB)
    for at, row in enumerate(rows):
        for token, times in Counter(row.text).items():
            counts[at, token] = times
        seen[at, list(row.prompt + row.text)] = True
        tokens[at, : len(row.prompt + row.text)] = torch.tensor(row.prompt + row.text)
        for token, value in row.params.logit_bias.items():
            bias[at, token] = value
    p = [row.params for row in rows]
    numbers = [(x.repetition_penalty, x.presence_penalty, x.frequency_penalty) for x in p]
    left = [row.params.min_tokens - len(row.text) for row in rows]
    repetition, presence, frequency = torch.tensor(numbers).unbind(1)
    penalties = Penalties(repetition, presence, frequency, counts, seen, tokens)
    return Terms(bias, penalties, torch.tensor(END), torch.tensor(left))


def walls(rows: Sequence[Row]) -> Tensor:
    """What each row forbids, at each of the nodes."""
    table = [
        [0.0 if row.allowed is None or token in row.allowed else math.inf for token in range(VOCAB)] for row in rows
    ]
    return torch.tensor(table)[:, None].expand(-1, NODES, -1)


def random_rows(seed: int, count: int) -> list[Row]:
    """Requests that ask for anything or nothing; few tokens, so that paths repeat them."""
    generator = np.random.default_rng(seed)

    def some(high: int) -> Tokens:
        return tuple(generator.integers(VOCAB, size=generator.integers(0, high)).tolist())

    def number(off: float, low: float, high: float) -> float:
        return off if generator.random() < 0.4 else float(generator.uniform(low, high))

    rows = []
    for _ in range(count):
        params = DecodingParams(
            logit_bias={token: float(generator.normal(scale=5)) for token in some(4)},
            repetition_penalty=number(1, 0.3, 3),
            presence_penalty=number(0, -2, 2),
            frequency_penalty=number(0, -2, 2),
            min_tokens=int(generator.integers(0, 9)) if generator.random() < 0.5 else 0,
        )
        allow = frozenset(some(6)) | {3} if generator.random() < 0.3 else None
        rows.append(Row(some(6), some(8), params, allow))
    return rows


def random_paths(seed: int, rows: int) -> tuple[Paths, list[list[Tokens]]]:
    """Paths as tensors, their places that hold nothing filled with arbitrary tokens, and as tuples."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(VOCAB, size=(rows, NODES, DEPTH))
    lengths = generator.integers(0, DEPTH + 1, size=(rows, NODES))
    valid = np.arange(DEPTH) < lengths[:, :, None]
    known = [
        [tuple(path[:n].tolist()) for path, n in zip(*row, strict=True)] for row in zip(tokens, lengths, strict=True)
    ]
    return Paths(torch.from_numpy(tokens), torch.from_numpy(valid)), known


def random_logits(seed: int, rows: int) -> Tensor:
    return 4 * torch.randn(rows, NODES, VOCAB, generator=torch.Generator().manual_seed(seed))


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("seed", range(5))
def test_logits_are_those_of_the_definitions_at_every_node(seed: int) -> None:
    rows, logits = random_rows(seed, 40), random_logits(seed, 40)
    paths, known = random_paths(seed, 40)
    found = constrain(logits, paths, terms(rows), walls(rows))
    expected = [
        [by_definition(row, node, path) for node, path in zip(nodes, of_row, strict=True)]
        for row, nodes, of_row in zip(rows, logits.tolist(), known, strict=True)
    ]
    assert torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert any(max(Counter(path).values()) > 2 for of_row in known for path in of_row if path)


def test_a_row_is_bit_equal_alone_and_in_any_batch() -> None:
    rows, logits = random_rows(7, 30), random_logits(7, 30)
    paths, _ = random_paths(7, 30)
    together = constrain(logits, paths, terms(rows), walls(rows))
    for row, one in enumerate(rows):
        at = slice(row, row + 1)
        only = terms([one])
        p = one.params
        asked = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)
        only = Terms(
            only.bias if p.logit_bias else None,
            only.penalties if asked else None,
            only.end,
            only.min_left if p.min_tokens else None,
        )
        alone = constrain(logits[at], Paths(*(x[at] for x in paths)), only, walls([one]) if one.allowed else None)
        assert torch.equal(bits(alone), bits(together[at]))


def test_a_row_that_asks_for_nothing_is_unchanged_to_the_bit() -> None:
    rows = [*random_rows(3, 9), Row((1, 2), (3, 3, 0), DecodingParams())]
    logits = random_logits(3, 10)
    logits[-1, 0] = torch.tensor([0.0, -0.0, -0.0, 0.0, -0.0, -0.0, 0.0])
    logits[-1, 1] = torch.tensor([1e-45, -1e-45, 3e38, -3e38, -0.0, 1.0, -math.inf])
    paths, _ = random_paths(3, 10)
    found = constrain(logits, paths, terms(rows), walls(rows))
    assert torch.equal(bits(found[-1]), bits(logits[-1]))
    assert not torch.equal(found[:-1], logits[:-1])


def test_what_lies_in_unused_places_of_a_path_does_not_matter() -> None:
    rows, logits = random_rows(5, 30), random_logits(5, 30)
    paths, _ = random_paths(5, 30)
    found = constrain(logits, paths, terms(rows))
    for token in range(VOCAB):
        other = Paths(torch.where(paths.valid, paths.tokens, token), paths.valid)
        assert torch.equal(bits(constrain(logits, other, terms(rows))), bits(found))


@pytest.mark.slow
def test_paths_of_a_draft_and_of_a_scored_tree_are_those_of_the_parents() -> None:
    lengths = Counter[int]()
    for cases, vocab, eos, run in mixed_runs()[:12]:
        params = [case.params for case in cases]
        rows = stack_rows(params, run.shape, vocab, eos)
        noise = draw_noise(params, [case.key for case in cases], run.shape, vocab)
        level, paths = root(rows, run.shape), root_paths(len(cases))
        known: list[list[Tokens]] = [[()] for _ in cases]
        generator = torch.Generator().manual_seed(0)
        for depth in range(1, run.shape.draft_len + 1):
            logits = 3 * torch.randn(len(cases), len(known[0]), vocab, generator=generator)
            place = places(rows, run.shape)[depth - 1]
            level = expand(level, process(logits, rows), noise.levels[depth - 1], rows, place, run.shape.forms)
            paths = extend(paths, level)
            table = zip(known, level.parents.tolist(), level.tokens.tolist(), level.drafted.tolist(), strict=True)
            known = [
                [above[up] + ((token,) if new else ()) for up, token, new in zip(*slots, strict=True)]
                for above, *slots in table
            ]
            assert as_tuples(paths) == known
        assert run.tree is not None
        found = as_tuples(tree_paths(run.tree))
        assert [row[0] for row in found] == [()] * len(cases)
        for row, drafted in enumerate(run.tree.drafted.tolist()):
            for node, new in enumerate(drafted):
                if new:
                    assert found[row][node + 1] == run.paths[row][node]
                    lengths[len(run.paths[row][node])] += 1
    assert min(lengths[depth] for depth in range(1, 6)) > 50


def as_tuples(paths: Paths) -> list[list[Tokens]]:
    """Paths as token tuples; checks that the valid places come first."""
    assert bool((paths.valid[:, :, 1:] <= paths.valid[:, :, :-1]).all())
    table = zip(paths.tokens.tolist(), paths.valid.tolist(), strict=True)
    return [
        [tuple(t for t, real in zip(*node, strict=True) if real) for node in zip(*row, strict=True)] for row in table
    ]


@pytest.mark.parametrize("size", [1, 8, 13, 300])
def test_a_barrier_stands_where_a_bit_is_not_set(size: int) -> None:
    table = np.random.default_rng(size).random((3, 2, size)) < 0.5
    packed = torch.from_numpy(np.packbits(table, axis=-1, bitorder="little"))
    assert torch.equal(barrier(packed, size), torch.from_numpy(np.where(table, 0, np.inf)).float())


@pytest.mark.parametrize("vocab", [40, 128 * 300])
@pytest.mark.parametrize("left", [1, 2, 9])
def test_a_distribution_with_few_tokens_left_is_theirs_alone(vocab: int, left: int) -> None:
    params = [
        DecodingParams(top_k=k, top_p=p, temperature=t)
        for k in ((0, 1, 10) if vocab < 100 else (1, 10, 60))
        for p in (0.9, 1.0)
        for t in (0.01, 1.0)
    ]
    generator = torch.Generator().manual_seed(left)
    logits = 5 * torch.randn(len(params), 5, vocab, generator=generator)
    kept = torch.zeros_like(logits, dtype=torch.bool)
    kept.scatter_(2, torch.rand(logits.shape, generator=generator).topk(left, dim=-1).indices, True)
    left_over = logits.masked_fill(~kept, -math.inf)
    rows = stack_rows(params, block_shape(params, vocab), vocab, ())
    found = process(left_over, rows)
    assert not found.log_prob.isnan().any()
    assert torch.allclose(found.log_prob.exp().sum(-1), torch.ones(()), atol=1e-5)
    chosen = found.log_prob > -math.inf
    assert bool(kept.gather(2, found.ids)[chosen].all())
    if left == 1:
        assert bool((chosen.sum(-1) == 1).all())


def test_an_end_is_banned_until_the_path_makes_the_text_long_enough() -> None:
    row = Row((1,), (2, 2), replace(DecodingParams(), min_tokens=4))
    paths = Paths(torch.zeros(1, DEPTH, DEPTH, dtype=torch.int64), torch.ones(DEPTH, DEPTH).tril(-1).bool()[None])
    found = constrain(torch.zeros(1, DEPTH, VOCAB), paths, terms([row]))
    banned = found.isneginf()[0]
    assert banned[:, list(END)].all(-1).tolist() == [True, True, False, False, False]
    assert int(banned.sum()) == 2 * len(END)
