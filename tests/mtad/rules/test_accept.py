"""Blocks against the slow reference, over random mock models in mixed, padded batches; what acceptance guarantees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mtad.block import distributions
from mtad.distributions.table import part
from mtad.draft.levels import assemble, expand, root, stack
from mtad.draft.tree import keep_best
from mtad.methods import METHODS
from mtad.params import DecodingParams
from mtad.rows import LISTED, choose_rows
from mtad.rules.accept import accept
from mtad.stacking import block_shape, places, stack_rows
from runtime.decoder.eager import stacked
from tests.support import reference
from tests.support.cases import Case, every_case, mixed_runs, run_block
from tests.support.mock_models import Pair, mock_pair, watched
from tests.support.noise import draw_noise
from tests.support.reference.beams import beams
from tests.support.reference.draft import Path
from tests.support.reference.request import Model, Tokens, log

ROUNDING = 1e-5


def test_blocks_equal_the_references() -> None:
    compared = skipped = drafted = 0
    for cases, vocab, eos, run in mixed_runs():
        for row, case in enumerate(cases):
            if case.params.spec.live:  # see below
                continue
            with watched() as ties:
                expected = reference.run_block(case.request(eos), run.random(row))
            if ties.closest < ROUNDING:
                skipped += 1
                continue
            compared += 1
            drafted += bool(expected.accepted)
            assert run.emitted(row) == (*expected.accepted, expected.drawn), case
            distribution = np.array([expected.bonus.get(token, 0.0) for token in range(vocab)])
            assert np.abs(run.bonus[row].numpy() - distribution).max() < ROUNDING, case
    assert skipped < 0.01 * compared
    assert drafted > 0.3 * compared


@pytest.mark.slow
def test_blocks_of_live_beams_equal_the_references() -> None:
    """Block after block."""
    compared = skipped = carried = 0
    for cases, vocab, eos in every_case(batches=12, rows=30):
        cases = [replace(case, params=replace(case.params, method="dsbd")) for case in cases]
        for index in range(3):
            run = run_block(cases, vocab, eos)
            assert run.accepted.live is not None
            for row, (case, kept) in enumerate(zip(cases, run.accepted.live.beams(), strict=True)):
                live = [Path(tokens, weight) for tokens, weight in case.beams]
                request, random = case.request(eos), run.random(row)
                with watched() as ties:
                    text, after = beams(request, reference.draft(request, random, live), live, random)
                if ties.closest < ROUNDING:
                    skipped += 1
                else:
                    compared += 1
                    carried += bool(live)
                    assert run.emitted(row) == text, case
                    undecided = [path for path in after if path.tokens]
                    assert [tokens for tokens, _ in kept] == [path.tokens for path in undecided], case
                    weights = [path.log_q for path in undecided]
                    assert [weight for _, weight in kept] == pytest.approx(weights, abs=ROUNDING)
                context, key = case.context + run.emitted(row), (case.key[0], index + 1)
                cases[row] = replace(case, context=context, key=key, beams=tuple(kept))
    assert skipped < 0.02 * compared
    assert carried > 100


@pytest.mark.parametrize("method", ["mmtad", "mmtad_sample", "typical"])
def test_texts_end_as_often_as_by_the_definition(method: str) -> None:
    """Within a block, where a text that ends must win against longer paths."""
    params = DecodingParams(method=method, accept_threshold=0.05, top_k=0, top_p=1.0)
    cases = [Case(mock_pair(seed, 9, 2.0, 0.5), params, (), (seed, 0)) for seed in range(300)]
    run = run_block(cases, 9, (0,))
    expected = [reference.run_block(case.request((0,)), run.random(row)) for row, case in enumerate(cases)]
    ended = sum(0 in run.emitted(row) for row in range(len(cases)))
    assert ended == pytest.approx(sum(0 in (*block.accepted, block.drawn) for block in expected), abs=2)
    assert ended > 50


def test_a_path_that_stops_early_does_not_win_against_the_continuation_of_a_likelier_one() -> None:
    auxiliary = fixed({(): [0.6, 0.4], (0,): [0.55, 0.45]}, 2)
    target = fixed({(): [0.6, 0.4]}, 2)
    unsure: dict[str, Any] = {"beam_width": 2, "draft_confidence": 0.5, "accept_threshold": 0.0}
    for method in ("mtad", "mmtad"):
        assert accepted_tokens(target, auxiliary, method=method, **unsure) == (0, 0)


def test_a_row_that_drafts_nothing_is_left_alone_by_every_rule() -> None:
    """Rules run on all rows of a batch, and must not make anything of an empty tree."""
    idle = DecodingParams(method="sample", top_k=3)
    for method, spec in METHODS.items():
        if spec.drafter is None:
            continue
        pair, drafting = mock_pair(4, 9, 1.0, 0.5), DecodingParams(method=method, top_k=3)
        cases = [Case(pair, p, (), (seed, 0)) for seed, p in enumerate([drafting, idle] * 4)]
        run, alone = run_block(cases, 9), run_block(cases[1::2], 9)
        for row in range(4):
            assert run.emitted(2 * row + 1) == alone.emitted(row)
            assert torch.equal(run.bonus[2 * row + 1], alone.bonus[row])


def test_a_row_of_a_mixed_batch_is_bit_equal_to_the_row_alone() -> None:
    for cases, vocab, eos in every_case(batches=9, rows=16):
        together = run_block(cases, vocab, eos)
        for row, case in enumerate(cases):
            alone = run_block([case], vocab, eos)
            assert together.emitted(row) == alone.emitted(0), case
            count = len(alone.emitted(0))
            assert torch.equal(together.accepted.log_probs[row, :count], alone.accepted.log_probs[0, :count]), case


def test_a_chain_is_a_tree_of_width_1() -> None:
    for cases, vocab, eos in every_case(batches=9, rows=16):
        chains = [replace(case, params=replace(case.params, method="mtad", beam_width=1)) for case in cases]
        trees = [replace(case, params=replace(case.params, method="mmtad", beam_width=1)) for case in cases]
        chain, tree = run_block(chains, vocab, eos), run_block(trees, vocab, eos)
        for one, other in zip(chain.accepted[:4], tree.accepted[:4], strict=True):
            assert torch.equal(one, other)
        assert torch.equal(chain.bonus, tree.bonus)


def test_every_accepted_prefix_meets_the_bound() -> None:
    """`log p > log q + log tau`: on a chain for the accepted prefix itself."""
    for cases, _, eos, run in mixed_runs()[:20]:
        for row, case in enumerate(cases):
            path = run.emitted(row)[:-1]
            if case.params.method != "mtad" or not path:
                continue
            request = case.request(eos)
            assert request.log_p(path) > request.log_q(path) + log(case.params.threshold) - ROUNDING


def test_only_drafted_tokens_are_accepted_and_none_after_eos() -> None:
    for cases, _, eos, run in mixed_runs()[:20]:
        assert run.tree is not None
        for row, case in enumerate(cases):
            length = max(0, int(run.accepted.length[row]))
            nodes = run.accepted.path[row, :length]
            assert length <= case.params.drafted
            assert run.tree.drafted[row, nodes].all()
            path = run.emitted(row)[:-1]
            assert length == 0 or path == run.paths[row][int(nodes[-1])]
            if not case.params.ignore_eos:
                assert not set(path[:-1]) & set(eos)


def test_log_probs_are_those_of_the_unprocessed_target() -> None:
    for cases, _, _, run in mixed_runs()[:6]:
        for row, case in enumerate(cases):
            text = case.context
            for token, log_prob in zip(run.emitted(row), run.accepted.log_probs[row].tolist(), strict=False):
                expected = torch.from_numpy(case.pair.target(text)).double().log_softmax(-1)[token]
                assert log_prob == pytest.approx(float(expected), abs=ROUNDING)
                text = (*text, token)


def fixed(table: dict[Tokens, list[float]], vocab: int) -> Model:
    """A model given by probabilities; even where the table is silent."""

    def logits(tokens: Tokens) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.log(np.array(table.get(tokens, [1 / vocab] * vocab), dtype=np.float32))

    return logits


def accepted_tokens(target: Model, auxiliary: Model, eos: tuple[int, ...] = (), **changes: Any) -> Tokens:
    """Tokens one deterministic block accepts over two tokens' vocabulary."""
    base = DecodingParams(draft_len=2, beam_width=1, temperature=0.0, top_k=0, top_p=1.0)
    case = Case(Pair(target, auxiliary), DecodingParams.from_dict(changes, base), (), (0, 0))
    return run_block([case], 2, eos).emitted(0)[:-1]


def test_a_longer_prefix_can_pass_after_a_shorter_one_failed() -> None:
    target = fixed({(): [0.3, 0.7], (0,): [0.9, 0.1]}, 2)
    auxiliary = fixed({(): [0.9, 0.1], (0,): [0.51, 0.49]}, 2)
    assert accepted_tokens(target, auxiliary, draft_len=1) == ()
    assert accepted_tokens(target, auxiliary) == (0, 0)


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 0.6}])
def test_a_token_outside_the_targets_filter_rejects_every_longer_prefix(changes: dict[str, Any]) -> None:
    target = fixed({(): [0.3, 0.7], (0,): [0.9, 0.1]}, 2)
    auxiliary = fixed({(): [0.9, 0.1], (0,): [0.51, 0.49]}, 2)
    assert accepted_tokens(target, auxiliary, accept_threshold=0.0, **changes) == ()
    assert accepted_tokens(target, auxiliary, accept_threshold=0.0) == (0, 0)


@pytest.mark.parametrize(("threshold", "accepted"), [(0.0, (0, 0)), (0.99, (0, 0)), (1.0, ()), (1.01, ())])
def test_an_auxiliary_equal_to_the_target_is_accepted_below_threshold_1_only(
    threshold: float, accepted: Tokens
) -> None:
    model = fixed({(): [0.9, 0.1], (0,): [0.7, 0.3]}, 2)
    assert accepted_tokens(model, model, accept_threshold=threshold) == accepted


def test_at_threshold_1_equal_models_are_rejected_at_any_depth() -> None:
    base = DecodingParams(method="mtad", draft_len=8, accept_threshold=1.0, top_k=0, top_p=1.0)
    cases = [Case(mock_pair(seed, 7, 1.0, 0.0), base, (), (seed, 0)) for seed in range(200)]
    assert run_block(cases, 7).accepted.length.max() == 0


def test_above_threshold_1_the_target_must_find_the_draft_likelier() -> None:
    target, auxiliary = fixed({(): [0.9, 0.1]}, 2), fixed({(): [0.6, 0.4]}, 2)
    assert accepted_tokens(target, auxiliary, draft_len=1, accept_threshold=1.49) == (0,)
    assert accepted_tokens(target, auxiliary, draft_len=1, accept_threshold=1.51) == ()


def test_a_draft_that_ends_is_accepted_with_its_eos_and_no_further() -> None:
    model = fixed({(): [0.9, 0.1]}, 2)
    for method in ("mtad", "mmtad", "speculative"):
        assert accepted_tokens(model, model, eos=(0,), draft_len=4, method=method) == (0,)
        assert len(accepted_tokens(model, model, draft_len=4, method=method)) == 4


@pytest.mark.parametrize("listed", [LISTED, 2])
def test_a_block_has_static_shapes_and_no_branch_on_data(listed: int) -> None:
    """Tensors without data carry it through, lists and tables."""
    params = [case.params for case in next(every_case(1, 20))[0]]
    vocab = 11
    shape = block_shape(params, vocab, listed)
    rows = stack_rows(params, shape, vocab, (0,), device="meta")
    noise = draw_noise(params, [(0, 0)] * len(params), shape, vocab, device="meta")
    level, levels = root(rows, shape), []
    first, above = [], []
    for depth in range(1, shape.draft_len + 1):
        logits = torch.empty(len(params), level.tokens.shape[1], vocab, device="meta")
        found = distributions(logits, rows, shape.tables)
        place, number = places(rows, shape)[depth - 1], noise.levels[depth - 1]
        drawn = [expand(level, one, number, rows, place, shape.forms) for one in found]
        level = choose_rows(rows.tabulated, drawn[-1], drawn[0])
        levels.append(level)
        first.append(tuple(part(one, lambda x: x[:, 0]) for one in found))
        above.append(found)
    q = [part(each, lambda x: x.transpose(0, 1)) for each in stacked(first)]
    tree, _ = keep_best(assemble(stack(levels)), rows)
    logits = torch.empty(len(params), 1 + tree.tokens.shape[1], vocab, device="meta")
    rules = [rule for rule in shape.rules if rule != "beams"]  # which begins with live beams
    accepted = accept(tree, logits, logits, q, noise, rows, rules, above, tables=shape.tables)
    assert accepted.tokens.shape == (len(params), shape.draft_len + 1)
