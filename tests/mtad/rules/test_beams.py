"""Speculative beam sampling emits what the target's own beam sampling would, whatever the auxiliary proposes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from mtad.params import DecodingParams
from tests.support.cases import Case, generate, run_block
from tests.support.mock_models import Pair, mock_pair, sure_pair
from tests.support.reference.request import Request, Tokens

VOCAB, LENGTH, TEXTS = 4, 3, 2_000
PAIR = mock_pair(11, VOCAB, peak=1.2, noise=0.8)
BASE = DecodingParams(method="dsbd", draft_len=4, beam_width=2, top_k=0, top_p=1.0, accept_threshold=0.0)


def beam_sampling(
    request: Request, length: int, generator: np.random.Generator | None, eos: Sequence[int] = ()
) -> Tokens:
    """One text by beam sampling on the target alone, or without a generator by beam search.

    A token is decided once all beams have it, or `draft_len // 2` tokens later, as the first beam has it.
    """
    lag = request.params.draft_len // 2
    text: Tokens = ()
    beams: list[tuple[Tokens, float]] = [((), 0.0)]
    while len(text) < length and not (text and text[-1] in eos):
        age = 1 + max(len(path) for path, _ in beams)
        pairs = []
        for path, weight in beams:
            if path and path[-1] in eos:
                pairs.append((path, weight))
                continue
            for token, probability in request.p(text + path).items():
                pairs.append(((*path, token), weight + math.log(probability)))
        weights = np.array([weight for _, weight in pairs])
        if generator is None:
            chosen = np.argsort(-weights)[: request.params.beam_width]
        else:
            p = np.exp(weights - weights.max())
            count = min(request.params.beam_width, len(pairs))
            chosen = generator.choice(len(pairs), size=count, replace=False, p=p / p.sum())
        beams = [pairs[index] for index in chosen]
        old = age - lag
        if old >= 1:
            beams = [beam for beam in beams if beam[0][old - 1 : old] == beams[0][0][old - 1 : old]]
        if all(path and path[-1] in eos for path, _ in beams):
            return (*text, *beams[0][0])[:length]
        common = 0
        while all(len(path) > common and path[common] == beams[0][0][common] for path, _ in beams):
            common += 1
        text = (*text, *beams[0][0][:common])
        beams = [(path[common:], weight) for path, weight in beams]
    return text[:length]


def drafted(pair: Pair, params: DecodingParams, texts: int, eos: Sequence[int] = ()) -> Counter[Tokens]:
    return Counter(generate(pair, [params] * texts, VOCAB, LENGTH, eos))


def sampled(pair: Pair, params: DecodingParams, texts: int, eos: Sequence[int] = ()) -> Counter[Tokens]:
    generator, request = np.random.default_rng(5), Case(pair, params, (), (0, 0)).request(eos)
    return Counter(beam_sampling(request, LENGTH, generator, eos) for _ in range(texts))


def p_value(one: Counter[Tokens], other: Counter[Tokens]) -> float:
    """Chi-square test that two samples of texts come from one distribution; rare texts count as one."""
    table = np.array([[one[text], other[text]] for text in one.keys() | other.keys()])
    rare = table.sum(1) < 10
    table = np.vstack([table[~rare], table[rare].sum(0)])
    return float(chi2_contingency(table[table.sum(1) > 0]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "eos"),
    [
        (BASE, ()),
        (replace(BASE, beam_width=3, temperature=0.7), ()),
        (replace(BASE, draft_len=6, beam_width=3, top_k=3), ()),
        (replace(BASE, draft_len=3, top_p=0.8), ()),
        (replace(BASE, draft_len=2, beam_width=4, temperature=1.5), ()),
        (replace(BASE, draft_len=1, beam_width=3, accept_threshold=0.8), ()),
        (BASE, (1,)),
        (replace(BASE, draft_len=5, beam_width=3), (0, 2)),
    ],
    ids=lambda value: f"{value.draft_len}-{value.beam_width}" if isinstance(value, DecodingParams) else f"eos{value}",
)
def test_texts_are_distributed_as_the_targets_beam_sampling(params: DecodingParams, eos: tuple[int, ...]) -> None:
    assert p_value(drafted(PAIR, params, TEXTS, eos), sampled(PAIR, params, TEXTS, eos)) > 1e-3


def test_another_beam_width_would_be_noticed() -> None:
    narrow, wide = replace(BASE, beam_width=1), replace(BASE, beam_width=4)
    assert p_value(drafted(PAIR, narrow, TEXTS), sampled(PAIR, wide, TEXTS)) < 1e-6


@pytest.mark.slow
def test_an_auxiliary_that_knows_nothing_changes_nothing() -> None:
    ignorant = Pair(PAIR.target, mock_pair(99, VOCAB, peak=2.0, noise=0.0).auxiliary)
    assert p_value(drafted(ignorant, BASE, TEXTS), sampled(PAIR, BASE, TEXTS)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gap", "params"),
    [
        (18, replace(BASE, top_k=3)),
        (24, replace(BASE, beam_width=3, top_k=2)),
        (12, replace(BASE, temperature=0.6, top_p=0.9)),
        (30, replace(BASE, temperature=0.3, top_k=3)),
        (30, replace(BASE, beam_width=3)),
    ],
)
def test_an_auxiliary_that_is_sure_changes_nothing(gap: float, params: DecodingParams) -> None:
    pair = sure_pair(23, VOCAB, gap)
    assert p_value(drafted(pair, params, TEXTS), sampled(pair, params, TEXTS)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("eos", [(), (0, 3)])
def test_without_randomness_it_is_beam_search_on_the_target(eos: tuple[int, ...]) -> None:
    differ = 0
    asked = [
        replace(BASE, temperature=0.0, draft_len=draft_len, beam_width=width, accept_threshold=threshold)
        for draft_len, width, threshold in ((1, 3, 0.0), (4, 2, 0.8), (6, 3, 0.0), (7, 4, 0.5))
    ]
    for seed in range(20):
        pair = mock_pair(seed, VOCAB, peak=1.0, noise=0.7)
        for params, text in zip(asked, generate(pair, asked, VOCAB, 8, eos), strict=True):
            wide, narrow = (Case(pair, p, (), (0, 0)).request(eos) for p in (params, replace(params, beam_width=1)))
            assert text == beam_sampling(wide, 8, None, eos)
            differ += text != beam_sampling(narrow, 8, None, eos)
    assert differ > 10


def test_an_auxiliary_equal_to_the_target_has_every_draft_accepted() -> None:
    """All levels of the draft, and one more."""
    equal = Pair(PAIR.target, PAIR.target)
    run = run_block([Case(equal, replace(BASE, beam_width=1), (), (seed, 0)) for seed in range(50)], VOCAB)
    assert (run.accepted.length == BASE.draft_len).all()


def test_a_wider_level_is_chosen_the_more_the_models_agree() -> None:
    """Of equal models the whole width is accepted; of models that never agree one beam is kept."""
    kept = {}
    for name, noise in (("equal", 0.0), ("near", 0.5), ("far", 4.0)):
        pair = mock_pair(3, 9, peak=1.5, noise=noise)
        params = replace(BASE, beam_width=4, accept_threshold=0.6, draft_len=6)
        live = run_block([Case(pair, params, (), (seed, 0)) for seed in range(100)], 9).accepted.live
        assert live is not None
        kept[name] = np.mean([max(1, len(beams)) for beams in live.beams()])
    assert kept["equal"] > kept["near"] > kept["far"]


def test_live_beams_go_on_where_they_were() -> None:
    """What is undecided after one block leads the draft of the next, and stays undecided for no longer than it may."""
    params = replace(BASE, beam_width=3, draft_len=6)
    cases = [Case(mock_pair(seed, VOCAB, 0.7, 0.5), params, (), (seed, 0)) for seed in range(60)]
    carried = 0
    for block in range(6):
        run = run_block(cases, VOCAB)
        assert run.accepted.live is not None
        kept = run.accepted.live.beams()
        for row, (case, beams) in enumerate(zip(cases, kept, strict=True)):
            text = run.emitted(row)
            if case.beams and text:
                assert any(path[: len(text)] == text[: len(path)] for path, _ in case.beams)
            assert max((len(path) for path, _ in beams), default=0) <= params.draft_len // 2
            assert len({path for path, _ in beams}) == len(beams) <= params.beam_width
            assert len({path[0] for path, _ in beams}) != 1, "a token that all beams have is text"
            carried += bool(beams)
            cases[row] = replace(case, context=case.context + text, key=(row, block + 1), beams=tuple(beams))
    assert carried > 100
