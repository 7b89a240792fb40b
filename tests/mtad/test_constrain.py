"""Bias, penalties and bans at every node of a token tree, against their definitions by enumeration of paths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from mtad.constrain import Paths, Penalties, Terms, barrier, constrain
from mtad.params import DecodingParams
from mtad.step_inputs import node_paths

Tokens = tuple[int, ...]

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
    found = constrain(logits.clone(), paths, terms(rows), walls(rows))
    expected = [
        [by_definition(row, node, path) for node, path in zip(nodes, of_row, strict=True)]
        for row, nodes, of_row in zip(rows, logits.tolist(), known, strict=True)
    ]
    assert torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert any(max(Counter(path).values()) > 2 for of_row in known for path in of_row if path)


def test_a_row_is_bit_equal_alone_and_in_any_batch() -> None:
    rows, logits = random_rows(7, 30), random_logits(7, 30)
    paths, _ = random_paths(7, 30)
    together = constrain(logits.clone(), paths, terms(rows), walls(rows))
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
        alone = constrain(
            logits[at].clone(), Paths(*(x[at] for x in paths)), only, walls([one]) if one.allowed else None
        )
        assert torch.equal(bits(alone), bits(together[at]))


def test_a_row_that_asks_for_nothing_is_unchanged_to_the_bit() -> None:
    rows = [*random_rows(3, 9), Row((1, 2), (3, 3, 0), DecodingParams())]
    logits = random_logits(3, 10)
    logits[-1, 0] = torch.tensor([0.0, -0.0, -0.0, 0.0, -0.0, -0.0, 0.0])
    logits[-1, 1] = torch.tensor([1e-45, -1e-45, 3e38, -3e38, -0.0, 1.0, -math.inf])
    paths, _ = random_paths(3, 10)
    found = constrain(logits.clone(), paths, terms(rows), walls(rows))
    assert torch.equal(bits(found[-1]), bits(logits[-1]))
    assert not torch.equal(found[:-1], logits[:-1])


def test_what_lies_in_unused_places_of_a_path_does_not_matter() -> None:
    rows, logits = random_rows(5, 30), random_logits(5, 30)
    paths, _ = random_paths(5, 30)
    found = constrain(logits.clone(), paths, terms(rows))
    for token in range(VOCAB):
        other = Paths(torch.where(paths.valid, paths.tokens, token), paths.valid)
        assert torch.equal(bits(constrain(logits.clone(), other, terms(rows))), bits(found))


def test_a_nodes_path_is_its_drafted_ancestors_and_itself() -> None:
    generator, rows, nodes = np.random.default_rng(0), 20, 12
    parents = np.array([[generator.integers(-1, node) for node in range(nodes)] for _ in range(rows)])
    tokens, drafted = generator.integers(VOCAB, size=(rows, nodes)), generator.random((rows, nodes)) < 0.8
    asked = generator.integers(-1, nodes, size=(rows, 9))
    found, valid = np.zeros((rows, 9, nodes), np.int64), np.zeros((rows, 9, nodes), np.bool_)
    node_paths(parents, tokens, drafted, asked, found, valid)
    lengths = set()
    for row, at in np.ndindex(asked.shape):
        path, node = list[int](), asked[row, at]
        while node >= 0:
            path = [int(tokens[row, node]), *path] if drafted[row, node] else path
            node = parents[row, node]
        assert found[row, at, : len(path)].tolist() == path
        assert valid[row, at].tolist() == [place < len(path) for place in range(nodes)]
        lengths.add(len(path))
    assert lengths >= set(range(5))


@pytest.mark.parametrize("size", [1, 8, 13, 300])
def test_a_barrier_stands_where_a_bit_is_not_set(size: int) -> None:
    table = np.random.default_rng(size).random((3, 2, size)) < 0.5
    packed = torch.from_numpy(np.packbits(table, axis=-1, bitorder="little"))
    assert torch.equal(barrier(packed, size), torch.from_numpy(np.where(table, 0, np.inf)).float())
