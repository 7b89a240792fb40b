"""Distributions over a whole vocabulary: the same as the definition's, without a sort and without noise per token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch
from torch import Tensor

import mtad.rules.accept
from mtad import rows, stacking
from mtad.distributions import prefix, table
from mtad.distributions.table import Table, draw_from, log_likelihood, tabulate
from mtad.draft import from_tables
from mtad.noise import host
from mtad.params import DecodingParams
from mtad.rows import Rows
from mtad.stacking import block_shape, stack_rows
from tests.support.cases import Case, Run, every_case, random_cases, run_block
from tests.support.mock_models import mock_pair, watched
from tests.support.reference.draft import Path
from tests.support.reference.request import process
from tests.support.reference.rules import RULES

ROUNDING = 1e-5
VOCAB = 150
SETTINGS = [
    DecodingParams(method=method, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for method, temperature in (("sample", 0.3), ("sample", 1.0), ("sample", 2.5), ("mtad", 0.0))
    for top_k in (0, 1, 10, 149)
    for top_p in (1.0, 0.95, 0.5, 0.0)
    for min_p in (0.0, 0.1, 1.0)
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows, table, prefix, from_tables, host):
        monkeypatch.setattr(module, "BLOCK", 4)


def tables(logits: Tensor) -> tuple[Rows, Table]:
    shape = block_shape(SETTINGS, VOCAB, listed=0)
    given = stack_rows(SETTINGS, shape, VOCAB, ())
    return given, tabulate(logits, given)


def test_log_probabilities_have_the_same_bits_whether_the_filter_knows_the_sum_or_not() -> None:
    logits = 3 * torch.randn(len(SETTINGS), 3, VOCAB, generator=torch.Generator().manual_seed(0))
    at = torch.tensor([2, 0]).expand(len(SETTINGS), 2)
    tokens, found = torch.randint(VOCAB, at.shape, generator=torch.Generator().manual_seed(1)), tables(logits)[1]
    known = ~found.log_sum.isnan()
    unfiltered = [(one.temperature, one.top_k, one.top_p, one.min_p) == (1.0, 0, 1.0, 0.0) for one in SETTINGS]
    assert known[unfiltered].all()
    assert not known.all()
    sums = [log_likelihood(logits, at, tokens, torch.ones_like(at, dtype=torch.bool), one) for one in (found, None)]
    assert sums[0].equal(sums[1])
    expected = logits.double().log_softmax(-1)[torch.arange(len(at))[:, None], at, tokens]
    torch.testing.assert_close(sums[0].double(), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("ties", [False, True])
def test_a_table_is_the_definitions_distribution(ties: bool) -> None:
    """Also of tokens that are equal at the border, of which those with the smaller ids are kept."""
    logits = 3 * torch.randn(len(SETTINGS), 3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits = (2 * logits).round() / 2 if ties else logits
    found = tables(logits)[1]
    expected = np.zeros(logits.shape)
    skipped = np.zeros(logits.shape[:2], dtype=bool)
    for row, position in np.ndindex(*skipped.shape):
        with watched() as calls:
            kept = process(logits[row, position].numpy(), SETTINGS[row])
        skipped[row, position] = calls.closest < ROUNDING
        expected[row, position, list(kept)] = list(kept.values())
    assert skipped.mean() < 0.02
    probabilities = found.log_prob.exp().numpy()
    assert ((probabilities > 0) == (expected > 0))[~skipped].all()
    assert np.abs(probabilities - expected)[~skipped].max() < ROUNDING
    tokens = torch.randint(VOCAB, logits.shape[:2])
    assert found.at(tokens).equal(found.log_prob.gather(2, tokens[:, :, None]).squeeze(2))
    assert found.below(torch.full_like(tokens, 1), tokens).equal(found.pick(torch.ones_like(tokens)).at(tokens))


def test_a_table_made_within_inference_mode_is_that_made_outside_of_it() -> None:
    """Also where memory that was first used within is used again outside."""
    logits = torch.randn(len(SETTINGS), 2, VOCAB + 1)
    given = stack_rows(SETTINGS, block_shape(SETTINGS, VOCAB + 1, listed=0), VOCAB + 1, ())
    with torch.inference_mode():
        within = tabulate(logits, given)
    assert all(map(torch.equal, within, tabulate(logits, given)))


@pytest.mark.parametrize("fails", ["neither", "caller", "helper"])
def test_two_threads_do_each_item_once_and_an_error_of_either_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(prefix, "_HAS_CORES", True)
    here, both, done = get_ident(), Barrier(2), list[int]()

    def work(items: Iterator[int]) -> None:
        both.wait(10)  # so that each takes some
        if fails == ("caller" if get_ident() == here else "helper"):
            raise ArithmeticError(fails)
        done.extend(items)

    with nullcontext() if fails == "neither" else pytest.raises(ArithmeticError, match=fails):
        prefix.share(work, range(20))
    assert sorted(done) == list(range(20))


@pytest.mark.parametrize("ties", [False, True])
def test_a_device_and_the_host_make_the_same_table(ties: bool) -> None:
    logits = 3 * torch.randn(len(SETTINGS), 3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits = (2 * logits).round() / 2 if ties else logits
    given, host = tables(logits)
    device = table.tabulate_at_once(logits, given)
    assert ((host.log_prob > -torch.inf) == (device.log_prob > -torch.inf)).float().mean() > 0.9999
    assert torch.allclose(host.log_prob.exp(), device.log_prob.exp(), atol=ROUNDING)
    assert torch.allclose(host.blocks.exp(), device.blocks.exp(), atol=ROUNDING)


@pytest.mark.parametrize("deviation", [0.0, 0.5, 3.0, 10.0])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999])
def test_a_nucleus_is_the_shortest_prefix_of_the_sorted_tokens(deviation: float, top_p: float) -> None:
    """Of flat, common and sure distributions; also where the sample of weights leads astray."""
    size, params = 20_000, DecodingParams(method="sample", top_k=0, top_p=top_p)
    logits = deviation * torch.randn(3, 1, size, generator=torch.Generator().manual_seed(2))
    logits[1, 0, ::64] = logits.max()  # the sample is of the likeliest tokens
    logits[2, 0, ::64] = logits.min()  # or of the others
    given = stack_rows([params] * 3, block_shape([params] * 3, size, listed=0), size, ())
    kept = tabulate(logits, given).log_prob > -torch.inf
    for own, found in zip(logits.double().softmax(-1).flatten(0, 1), kept.flatten(0, 1), strict=True):
        order = own.argsort(descending=True, stable=True)
        before = own[order].cumsum(0) - own[order]
        near = (before - max(top_p, stacking.LEAST)).abs() < ROUNDING  # summed in float32, it may lie on either side
        assert ((before < max(top_p, stacking.LEAST)) == found[order])[~near].all()
        assert not near.all()
        assert found.any()


@pytest.mark.parametrize("value", ["max", "min"])
def test_the_most_likely_tokens_are_kept_where_the_sample_of_logits_leads_astray(value: str) -> None:
    size, count = 20_000, 3000
    logits = torch.randn(1, 1, size, generator=torch.Generator().manual_seed(2))
    logits[0, 0, ::64] = getattr(logits, value)()
    params = DecodingParams(method="sample", top_k=count, top_p=1.0)
    given = stack_rows([params], block_shape([params], size, listed=0), size, ())
    kept = (tabulate(logits, given).log_prob > -torch.inf).flatten().nonzero().flatten()
    expected = logits.flatten().argsort(descending=True, stable=True)[:count]
    assert kept.equal(expected.sort().values)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_low_temperature_takes_no_digits_from_large_logits(top_p: float) -> None:
    """Nor carries them out of range."""
    params = DecodingParams(method="sample", temperature=0.01, top_k=0, top_p=top_p)
    logits = torch.zeros(2, 1, 3000)
    logits[0, 0, :2] = torch.tensor([120.0, 120 - 2.0**-17])
    logits[1, 0, 5] = 1e37
    found = tabulate(logits, stack_rows([params] * 2, block_shape([params] * 2, 3000, listed=0), 3000, ()))
    expected = torch.log_softmax(logits.double() / 0.01, -1)
    kept = expected > -1
    torch.testing.assert_close(found.log_prob.double()[kept], expected[kept], rtol=0, atol=ROUNDING)
    torch.testing.assert_close(found.blocks.exp().sum(-1), torch.ones(2, 1), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("kind", ["common", "flat", "tied", "masked", "sure"])
def test_any_filters_of_a_large_vocabulary_keep_what_the_definition_keeps(kind: str) -> None:
    """Also where thousands of tokens are kept, are impossible or are equal at the border, or one has all the mass."""
    size = 6000
    logits = (0.3 if kind == "flat" else 3) * torch.randn(size, generator=torch.Generator().manual_seed(4))
    changed = {"tied": logits.round(), "masked": torch.where(torch.arange(size) % 3 == 0, -torch.inf, logits)}
    logits = changed.get(kind, logits)
    logits[77] += 40 if kind == "sure" else 0
    settings = [
        DecodingParams(method="sample", temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
        for top_k, top_p, min_p in itertools.product((0, 200, 4000, 5000), (1.0, 0.95, 0.3), (0.0, 0.02))
    ]
    given = stack_rows(settings, block_shape(settings, size, listed=0), size, ())
    found, compared = tabulate(logits.expand(len(settings), 1, size), given).log_prob.exp().squeeze(1).numpy(), 0
    for own, params in zip(found, settings, strict=True):
        with watched() as calls:
            kept = process(logits.numpy(), params)
        if calls.closest > ROUNDING:  # summed in float32, a token at the border may lie on either side
            expected = np.zeros(size)
            expected[list(kept)] = list(kept.values())
            assert ((own > 0) == (expected > 0)).all(), params
            assert np.abs(own - expected).max() < ROUNDING
            compared += 1
    assert compared > len(settings) / 2


@pytest.mark.parametrize("deviation", [3.0, 100.0, 1000.0])
def test_a_nucleus_of_nearly_all_keeps_all_that_can_be_drawn(deviation: float) -> None:
    """Also where most weights are 0, and where rounding leaves the mass of all below the bound."""
    size, params = 20_000, DecodingParams(method="sample", top_k=0, top_p=1 - 2.0**-24)
    logits = deviation * torch.randn(50, 1, size, generator=torch.Generator().manual_seed(3))
    given = stack_rows([params] * 50, block_shape([params] * 50, size, listed=0), size, ())
    dropped = (tabulate(logits, given).log_prob == -torch.inf) * logits.double().softmax(-1)
    assert float(dropped.sum(-1).max()) < 1e-6


def test_a_draw_from_weights_has_their_distribution() -> None:
    weights = torch.tensor([0.0, 3, 0, 0, 1, 0, 2, 4, 0]).expand(20000, -1)
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    tokens = draw_from(weights, uniform, torch.zeros(20000, 1, dtype=torch.bool))
    counts = torch.bincount(tokens.squeeze(1), minlength=9) / 20000
    assert torch.allclose(counts, weights[0] / 10, atol=0.012)
    assert (draw_from(weights, torch.zeros(20000), torch.ones(20000, 1, dtype=torch.bool)) == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "replacement"), [("mtad", False), ("specinfer", False), ("specinfer", True)])
def test_pairs_are_drawn_with_the_probability_of_the_definition(
    method: str, replacement: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one level: ordered pairs of tokens. One of 0.12 instead of 0.1 is noticed with a power of 0.98."""
    # what is accepted does not matter here, so that all rows may be judged at once
    monkeypatch.setattr(mtad.rules.accept, "by_row", lambda judge, scored, rows, rules: judge(scored, rows, rules))
    params = DecodingParams(
        method=method, draft_len=1, beam_width=2, branching=(2,), replacement=replacement, top_k=0, top_p=1.0
    )
    pair, count = mock_pair(0, 6, 1.0, 0.5), 10_000
    cases = [Case(pair, params, (), (seed, 0)) for seed in range(count)]
    run = run_block(cases, 6, listed=0)
    assert run.draft is not None
    found = torch.bincount(run.draft.tokens[:, 0] * 6 + run.draft.tokens[:, 1], minlength=36) / count
    q = process(pair.auxiliary(()), params)
    for first, second in itertools.product(range(6), range(6)):
        rest = 1.0 if replacement else 1 - q[first]
        expected = q[first] * q[second] / rest if replacement or first != second else 0.0
        assert float(found[first * 6 + second]) == pytest.approx(expected, abs=4 * (expected / count) ** 0.5 + 1e-9)


def mixed(batches: int) -> Iterator[tuple[list[Case], int, tuple[int, ...], int]]:
    """Batches of lists and tables, and of tables alone."""
    for seed, (cases, vocab, eos) in enumerate(every_case(batches=batches, rows=40)):
        yield cases, vocab, eos, seed % 2 * 2


def own_draft(run: Run, row: int, branches: bool) -> list[list[Path]]:
    """The row's draft as the definition has it."""
    tree = run.draft
    assert tree is not None
    levels: list[list[Path]] = []
    known: list[tuple[int, ...]] = []
    for node in range(tree.tokens.shape[1]):
        level, slot = divmod(node, tree.width)
        parent = int(tree.parents[row, node])
        above = known[parent] if parent >= 0 else ()
        known.append((*above, int(tree.tokens[row, node])) if tree.drafted[row, node] else above)
        if slot == 0:
            levels.append([])
        # a text that has ended is carried down by beams, and has no children among branches
        if tree.log_q[row, node] > -torch.inf and (tree.drafted[row, node] or not branches):
            levels[level].append(Path(known[node], float(tree.log_q[row, node]), slot))
    return levels


@pytest.mark.slow
def test_rules_accept_what_the_definition_accepts_of_the_same_draft() -> None:
    compared = skipped = accepted = 0
    for cases, vocab, eos, listed in mixed(16):
        cases = [case for case in cases if not case.params.spec.live]
        run = run_block(cases, vocab, eos, listed=listed)
        for row, case in enumerate(cases):
            if not run.rows.tabulated[row]:
                continue
            request, p = case.request(eos), case.params
            with watched() as calls:
                draft = own_draft(run, row, p.spec.form == "branches")[: p.drafted] if p.drafted else []
                text, bonus = RULES[p.spec.rule](request, draft, run.random(row)) if draft else ((), request.p())
            if calls.closest < ROUNDING:
                skipped += 1
                continue
            compared += 1
            accepted += len(text)
            assert run.emitted(row)[:-1] == text, case
            expected = np.array([bonus.get(token, 0.0) for token in range(vocab)])
            if p.spec.rule != "whole":  # which draws from one token, many times
                assert np.abs(run.bonus[row].numpy() - expected).max() < ROUNDING, case
            assert bonus[run.emitted(row)[-1]] > 0
            for paths in draft:
                for path in paths:
                    assert path.log_q == pytest.approx(request.log_q(path.tokens), abs=1e-4)
    assert skipped < 0.02 * compared
    assert accepted > 0.3 * compared


@pytest.mark.slow
def test_a_row_of_a_mixed_batch_is_bit_equal_to_the_row_alone() -> None:
    for cases, vocab, eos, listed in mixed(6):
        together = run_block(cases[:16], vocab, eos, listed=listed)
        for row, case in enumerate(cases[:16]):
            alone = run_block([case], vocab, eos, listed=listed)
            assert together.emitted(row) == alone.emitted(0), case
            count = len(alone.emitted(0))
            assert torch.equal(together.accepted.log_probs[row, :count], alone.accepted.log_probs[0, :count]), case


@pytest.mark.slow
def test_at_temperature_0_lists_and_tables_give_the_same_text() -> None:
    for seed in range(6):
        cases = [replace(c, params=replace(c.params, temperature=0.0)) for c in random_cases(seed, 40, 9)]
        cases = [case for case in cases if not case.params.spec.live]
        lists, tables = (run_block(cases, 9, (0,), listed=listed) for listed in (9, 0))
        assert [lists.emitted(row) for row in range(len(cases))] == [tables.emitted(row) for row in range(len(cases))]
