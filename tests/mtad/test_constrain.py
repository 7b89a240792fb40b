"""Bias, penalties and bans at every node of a token tree, against their definitions by enumeration of paths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from mtad.constrain import Floats, Ints, Terms, constrain
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


def terms(row: Row) -> Terms:
    """A row as arrays."""
    p, text = row.params, row.prompt + row.text
    return Terms(
        np.array(list(p.logit_bias), np.int64),
        np.array(list(p.logit_bias.values()), np.float32),
        np.unique(np.array(text, np.int64)),
        np.bincount(np.array(row.text, np.int64), minlength=VOCAB).astype(np.float32),
        np.array([p.repetition_penalty, p.presence_penalty, p.frequency_penalty], np.float32),
        np.array(END),
        p.min_tokens - len(row.text),
    )


def constrained(row: Row, logits: Floats, paths: Ints, lengths: Ints) -> Floats:
    """Logits [S, V] of a row under its constraints, in memory of their own."""
    out, allowed = logits.copy(), np.empty((NODES, 0), np.uint8)
    if row.allowed is not None:
        table = np.isin(np.arange(VOCAB), list(row.allowed))[None].repeat(NODES, 0)
        allowed = np.packbits(table, axis=-1, bitorder="little")
    constrain(out, paths, lengths, terms(row), allowed)
    return out


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


def random_paths(seed: int, rows: int) -> tuple[Ints, Ints]:
    """Paths and their lengths; behind them stand arbitrary tokens."""
    generator = np.random.default_rng(seed)
    return generator.integers(VOCAB, size=(rows, NODES, DEPTH)), generator.integers(0, DEPTH + 1, size=(rows, NODES))


def random_logits(seed: int, rows: int) -> Floats:
    return 4 * np.random.default_rng(seed).standard_normal((rows, NODES, VOCAB), np.float32)


@pytest.mark.parametrize("seed", range(5))
def test_logits_are_those_of_the_definitions_at_every_node(seed: int) -> None:
    most = 0
    for row, logits, paths, lengths in zip(
        random_rows(seed, 40), random_logits(seed, 40), *random_paths(seed, 40), strict=True
    ):
        found = constrained(row, logits, paths, lengths)
        for node, length in enumerate(lengths):
            path = tuple(paths[node, :length].tolist())
            most = max([most, *Counter(path).values()])
            assert np.allclose(found[node], by_definition(row, logits[node].tolist(), path), rtol=1e-5, atol=1e-5)
    assert most > 2


def test_a_row_that_asks_for_nothing_is_unchanged_to_the_bit() -> None:
    logits = random_logits(3, 1)[0]
    logits[0] = [0.0, -0.0, -0.0, 0.0, -0.0, -0.0, 0.0]
    logits[1] = [1e-45, -1e-45, 3e38, -3e38, -0.0, 1.0, -math.inf]
    (paths,), (lengths,) = random_paths(3, 1)
    for asked in (DecodingParams(), DecodingParams(logit_bias={3: 0.0})):
        found = constrained(Row((1, 2), (3, 3, 0), asked), logits, paths, lengths)
        assert (found.view(np.int32) == logits.view(np.int32)).all()


def test_a_nodes_path_is_its_drafted_ancestors_and_itself() -> None:
    generator, rows, nodes = np.random.default_rng(0), 20, 12
    parents = np.array([[generator.integers(-1, node) for node in range(nodes)] for _ in range(rows)])
    tokens, drafted = generator.integers(VOCAB, size=(rows, nodes)), generator.random((rows, nodes)) < 0.8
    asked = generator.integers(-1, nodes, size=(rows, 9))
    found, counts = np.zeros((rows, 9, nodes), np.int64), np.zeros((rows, 9), np.int64)
    node_paths(parents, tokens, drafted, asked, found, counts)
    lengths = set()
    for row, at in np.ndindex(asked.shape):
        path, node = list[int](), asked[row, at]
        while node >= 0:
            path = [int(tokens[row, node]), *path] if drafted[row, node] else path
            node = parents[row, node]
        assert found[row, at, : counts[row, at]].tolist() == path
        lengths.add(len(path))
    assert lengths >= set(range(5))


@pytest.mark.parametrize("size", [1, 8, 13, 300])
def test_tokens_without_a_bit_are_forbidden(size: int) -> None:
    allowed = np.random.default_rng(size).random((3, size)) < 0.5
    none, some = np.zeros(0, np.int64), np.zeros(0, np.float32)
    logits, bits = np.ones((3, size), np.float32), np.packbits(allowed, axis=-1, bitorder="little")
    constrain(
        logits, np.zeros((3, 0), np.int64), np.zeros(3, np.int64), Terms(none, some, none, some, some, none, 0), bits
    )
    assert (logits == np.where(allowed, 1, -np.inf)).all()
