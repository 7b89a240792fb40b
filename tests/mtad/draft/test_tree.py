"""What holds of every drafted tree."""

from __future__ import annotations

import math

import pytest

from mtad.params import DecodingParams
from tests.support.cases import Case, Run, mixed_runs, run_block
from tests.support.mock_models import mock_pair
from tests.support.reference.request import Tokens


def beams(run: Run, row: int, level: int) -> dict[int, float]:
    """Slots of a level that are not dead, and their joint log-likelihoods."""
    assert run.draft is not None
    width = run.draft.width
    log_q = run.draft.log_q[row, level * width : (level + 1) * width].tolist()
    return {level * width + slot: value for slot, value in enumerate(log_q) if value > -math.inf}


def draft_paths(run: Run, row: int) -> list[Tokens]:
    """Tokens from the root to each node of the auxiliary's tree, by its ancestors."""
    assert run.draft is not None
    tokens, drafted = run.draft.tokens[row].tolist(), run.draft.drafted[row].tolist()
    return [
        tuple(token for token, on, new in zip(tokens, path, drafted, strict=True) if on and new)
        for path in run.draft.ancestors[row].tolist()
    ]


@pytest.mark.slow
def test_beams_of_a_level_are_distinct_and_no_more_than_asked_for() -> None:
    for cases, _, _, run in mixed_runs()[:12]:
        for row, case in enumerate(cases):
            paths = draft_paths(run, row)
            for level in range(run.shape.draft_len):
                found = [paths[node] for node in beams(run, row, level)]
                assert len(found) <= case.params.draft_width
                assert len(found) == len(set(found)) or (case.params.spec.form == "branches" and case.params.replaces)


def test_log_q_is_the_sum_of_the_conditionals_along_the_ancestors() -> None:
    for cases, _, eos, run in mixed_runs()[:8]:
        for row, case in enumerate(cases):
            paths = draft_paths(run, row)
            for level in range(run.shape.draft_len):
                for node, log_q in beams(run, row, level).items():
                    expected = case.request(eos).log_q(paths[node])
                    assert log_q == pytest.approx(expected, abs=1e-5)


def test_an_ended_beam_and_no_other_is_carried_down_with_its_weight() -> None:
    carried = 0
    for cases, _, eos, run in mixed_runs()[:12]:
        assert run.draft is not None
        for row, case in enumerate(cases):
            paths = draft_paths(run, row)
            ends = () if case.params.ignore_eos else eos
            for level in range(1, run.shape.draft_len):
                for node, log_q in beams(run, row, level).items():
                    parent = int(run.draft.parents[row, node])
                    complete = paths[parent][-1] in ends
                    assert bool(run.draft.drafted[row, node]) != complete
                    if complete:
                        carried += 1
                        assert paths[node] == paths[parent]
                        assert log_q == run.draft.log_q[row, parent]
    assert carried > 200


def test_parents_and_ancestors_agree_in_the_scored_tree() -> None:
    for cases, _, _, run in mixed_runs()[:12]:
        assert run.tree is not None
        for row in range(len(cases)):
            parents, drafted = run.tree.parents[row].tolist(), run.tree.drafted[row].tolist()
            for node in range(len(parents)):
                if not drafted[node]:
                    continue
                path, at = [], node
                while at >= 0:
                    path.append(at)
                    at = parents[at]
                assert run.tree.ancestors[row, node].nonzero().flatten().tolist() == path[::-1]


@pytest.mark.parametrize(("top_k", "sizes"), [(1, [1, 1, 1]), (2, [2, 4, 5]), (0, [5, 5, 5])])
def test_the_width_is_clipped_to_the_support(top_k: int, sizes: list[int]) -> None:
    params = DecodingParams(method="mmtad", draft_len=3, beam_width=5, top_k=top_k, top_p=1.0)
    run = run_block([Case(mock_pair(0, 6, 1.0, 0.3), params, (), (seed, 0)) for seed in range(50)], 6)
    for row in range(50):
        assert [len(beams(run, row, level)) for level in range(3)] == sizes


@pytest.mark.parametrize("method", ["mtad", "mmtad", "speculative"])
@pytest.mark.parametrize("draft_len", [1, 2, 7])
@pytest.mark.parametrize("beam_width", [1, 2, 9])
def test_any_length_and_width_can_be_drafted(method: str, draft_len: int, beam_width: int) -> None:
    params = DecodingParams(method=method, draft_len=draft_len, beam_width=beam_width, accept_threshold=0.0, top_k=0)
    pair = mock_pair(1, 5, 1.0, 0.0)
    run = run_block([Case(pair, params, (), (seed, 0)) for seed in range(20)], 5)
    assert (run.accepted.length == draft_len).all()
