"""Drafts have the laws of their papers: every ordered set of drafted paths has its exact probability."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtad.params import DecodingParams
from tests.support.enumeration import outcomes
from tests.support.law import Distribution, Request, Tokens
from tests.support.one_row import OneRow, mtad, path_of

VOCAB = 3
BEAMS = DecodingParams(method="mmtad", draft_len=2, beam_width=3)
Levels = tuple[tuple[Tokens | None, ...], ...]
"""The path of every slot, level by level; None for a dead one."""

TABLE: dict[Tokens, Distribution] = {
    (): {0: 0.5, 1: 0.3, 2: 0.2},
    (0,): {0: 0.25, 2: 0.75},
    (1,): {0: 0.1, 1: 0.6, 2: 0.3},
    (2,): {1: 1.0},
}


def q_after(path: Tokens) -> Distribution:
    """The auxiliary's distribution: by the last token behind the first level."""
    return TABLE[path[-1:]]


def request_of(params: DecodingParams, eos: Tokens = ()) -> Request:
    """A request whose target is not asked."""
    return Request(lambda path: {}, q_after, params, eos)


def levels_of(row: OneRow, tree: Any) -> Levels:
    """The paths of a draft."""
    return tuple(
        tuple(path_of(tree, node) if tree.log_q[node] > -math.inf else None for node in range(first, stop))
        for first, stop in row.levels
    )


def law_of(request: Request) -> dict[Levels, float]:
    """The exact law of the drafts that `mtad.draft` draws."""
    row, masses = OneRow(request, VOCAB), defaultdict[Levels, float](float)
    for chance, tree in outcomes(row.tree):
        masses[levels_of(row, tree)] += chance
    return {levels: mass for levels, mass in masses.items() if mass > 1e-8}


def in_sequence(weights: dict[Any, float], count: int) -> Iterator[tuple[float, list[Any]]]:
    """Draws in sequence from weights, without replacement; None where nothing is left."""
    total = sum(weights.values())
    if count == 0 or total == 0:
        yield 1.0, [None] * count
        return
    for key, weight in weights.items():
        rest = {other: value for other, value in weights.items() if other != key}
        for chance, others in in_sequence(rest, count - 1):
            yield weight / total * chance, [key, *others]


def likelihood(path: Tokens) -> float:
    """The auxiliary's probability of a path."""
    return math.prod(q_after(path[:at])[token] for at, token in enumerate(path))


def beams_written(request: Request, above: tuple[Tokens | None, ...] = ((),)) -> Iterator[tuple[float, Levels]]:
    """arXiv 2407.09722, section 4: paths with probability q(path), without replacement; ended ones compete as well."""
    depth = len(max((path for path in above if path is not None), key=len, default=())) + 1
    weights: dict[Tokens, float] = {}
    for path in above:
        if path is not None and request.ends(path):
            weights[path] = likelihood(path)
        elif path is not None and (not path or likelihood(path) >= request.params.draft_confidence):
            weights |= {(*path, token): likelihood((*path, token)) for token in q_after(path)}
    for chance, level in in_sequence(weights, request.params.beam_width):
        if depth == request.params.draft_len:
            yield chance, (tuple(level),)
        else:
            for other, rest in beams_written(request, tuple(level)):
                yield chance * other, (tuple(level), *rest)


def added(found: Iterator[tuple[float, Levels]]) -> dict[Levels, float]:
    """The probability of each draft."""
    masses: dict[Levels, float] = defaultdict(float)
    for chance, levels in found:
        masses[levels] += chance
    return dict(masses)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_chain_has_the_probability_of_its_path(length: int) -> None:
    found = law_of(request_of(DecodingParams(method="speculative", draft_len=length)))
    paths = [path for path in itertools.product(range(VOCAB), repeat=length) if _possible(path)]
    expected = {tuple((path[: at + 1],) for at in range(length)): likelihood(path) for path in paths}
    assert found == pytest.approx(expected, abs=1e-6)


def _possible(path: Tokens) -> bool:
    return all(token in q_after(path[:at]) for at, token in enumerate(path))


@pytest.mark.parametrize("eos", [(), (0,), (2,)])
@pytest.mark.parametrize(("width", "length"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1)])
def test_beams_are_drawn_by_their_joint_likelihood_without_replacement(width: int, length: int, eos: Tokens) -> None:
    request = request_of(DecodingParams(method="mmtad", draft_len=length, beam_width=width), eos)
    assert law_of(request) == pytest.approx(added(beams_written(request)), abs=1e-6)


@pytest.mark.parametrize("confidence", [0.25, 0.3, 0.4, 0.6])
def test_a_path_below_the_confidence_stops_and_gives_its_weight_up(confidence: float) -> None:
    """One that lies at the confidence itself goes on."""
    request = request_of(replace(BEAMS, beam_width=2, draft_confidence=confidence), (2,))
    assert law_of(request) == pytest.approx(added(beams_written(request)), abs=1e-6)


@pytest.mark.parametrize("branching", [(2,), (3,), (4,), (2, 1), (1, 2), (2, 2)])
def test_branches_have_children_of_their_own(branching: Tokens) -> None:
    request = request_of(DecodingParams(method="traversal", branching=branching), (1,))

    def written(above: tuple[Tokens | None, ...], widths: Tokens) -> Iterator[tuple[float, Levels]]:
        if not widths:
            yield 1.0, ()
            return
        each = []
        for path in above:
            alive = path is not None and not request.ends(path)
            weights = {(*(path or ()), token): value for token, value in q_after(path or ()).items()} if alive else {}
            each.append(list(in_sequence(weights, widths[0])))
        for together in itertools.product(*each):
            level = tuple(path for _, paths in together for path in paths)
            for chance, rest in written(level, widths[1:]):
                yield math.prod(one for one, _ in together) * chance, (level, *rest)

    assert law_of(request) == pytest.approx(added(written(((),), branching)), abs=1e-6)


def one_tree(params: DecodingParams, eos: Tokens = (), number: float = 0.0) -> tuple[OneRow, Any]:
    """A draft whose numbers are all the same."""
    row = OneRow(request_of(params, eos), VOCAB)
    return row, row.tree(lambda width: np.full(width, number, np.float32))


@pytest.mark.parametrize("number", [0.0, 0.999])
def test_at_temperature_0_the_likeliest_are_taken_of_equal_ones_the_first(number: float) -> None:
    beams = replace(BEAMS, temperature=0.0)
    # 0 2: .375; then 2 1: .2, 1 1: .18
    assert levels_of(*one_tree(beams, number=number)) == (((0,), (1,), (2,)), ((0, 2), (2, 1), (1, 1)))
    # an ended text keeps its weight: 0: .5; 2 1: .2; 1 1: .18
    assert levels_of(*one_tree(beams, (0,), number))[1] == ((0,), (2, 1), (1, 1))
    tied = Request(lambda _: {}, lambda _: dict.fromkeys(range(VOCAB), 0.25), beams)
    row = OneRow(tied, VOCAB)
    tree = row.tree(lambda width: np.full(width, number, np.float32))
    assert levels_of(row, tree) == (((0,), (1,), (2,)), ((0, 0), (0, 1), (0, 2)))


def test_a_number_that_equals_the_mass_of_a_beam_draws_from_the_next() -> None:
    """Numbers come from [0, 1), so a half of them is of each of two beams that are equally likely."""
    request = Request(lambda _: {}, lambda path: {2: 1.0} if path else {0: 0.5, 1: 0.5}, replace(BEAMS, beam_width=2))
    row = OneRow(request, VOCAB)
    tree = row.tree(lambda width: np.full(width, 0.5, np.float32))
    assert levels_of(row, tree) == (((1,), (0,)), ((0, 2), (1, 2)))


def test_a_slot_says_whether_its_path_has_ended_and_goes_on() -> None:
    params = replace(BEAMS, draft_len=3, temperature=0.0, draft_confidence=0.25)
    row, tree = one_tree(params, (0,))
    # level 1: 0 has ended, 1 goes on, 2 lies below the confidence; level 2: 0, and 1 1, 1 2, which lie below
    expected = {"drafted": (0, 1, 2, 4, 5), "growing": (1,), "ended": (0, 3, 6)}
    for name, nodes in expected.items():
        assert set(np.flatnonzero(getattr(tree, name))) == set(nodes), name
    assert levels_of(row, tree)[2] == ((0,), None, None)
    assert tree.log_q[[0, 3, 4, 6]] == pytest.approx(np.log([0.5, 0.5, 0.18, 0.5]))
    row, tree = one_tree(replace(BEAMS, draft_len=1, ignore_eos=True), (0,))
    assert not tree.ended.any()
    assert not tree.growing.any()
    assert tree.drafted.all()


@pytest.mark.parametrize("method", ["speculative", "mmtad", "traversal"])
def test_logits_that_are_no_distribution_are_told_and_leave_a_tree(method: str) -> None:
    """A walk from any node to the root then ends."""
    params = DecodingParams(method=method, draft_len=2, beam_width=2, branching=(2, 2))
    for bad_level in (0, 1):
        for bad_beam in range(2 if bad_level and method != "speculative" else 1):
            row = OneRow(request_of(params), VOCAB)
            tree = mtad.batch.tree_of(mtad.batch.Trees.empty(row.starts), 0)
            tree.parents[:] = np.arange(len(tree.parents))  # nothing that was there before is relied upon
            for level in range(bad_level + 1):
                width, beams = params.widths[level], 1 if level == 0 else params.widths[level - 1]
                logits = np.zeros((beams, VOCAB), np.float32)
                if level == bad_level:
                    logits[bad_beam, 1] = math.nan
                ids = np.zeros(logits.shape, np.int32)
                q = mtad.distribution.Distributions(logits, ids, np.zeros_like(logits), np.full(beams, -1))
                numbers = np.full(width, 0.5, np.float32)
                fine = mtad.draft.draft_level(row.row, level, tree, q, numbers, row.is_end)
                assert fine == (level < bad_level)
            for node in range(row.starts[0, bad_level + 1]):
                assert tree.parents[node] < node
            first, stop = row.levels[bad_level]
            assert not tree.drafted[first:stop].any()
            assert (tree.log_q[first:stop] == -math.inf).all()
