"""Lossless methods emit the target's own distribution; without randomness, its most likely tokens."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import chisquare
from torch import Tensor

import mtad.noise.host
import mtad.rows
import mtad.rules.accept
from mtad.distributions import prefix, table
from mtad.draft import from_tables
from mtad.methods import METHODS, Rule
from mtad.params import DecodingParams
from mtad.rows import LISTED, Rows
from mtad.rules.by_row import Decided
from mtad.rules.scored import Scored
from tests.support.cases import Case, generate, run_block
from tests.support.mock_models import Pair, mock_pair, sure_pair
from tests.support.reference.request import Tokens

VOCAB, LENGTH, TEXTS = 4, 3, 4_000
PAIR = mock_pair(11, VOCAB, peak=1.2, noise=0.8)
FREE = DecodingParams(method="speculative", draft_len=2, top_k=0, top_p=1.0)

Judge = Callable[[Scored, Rows, Sequence[Rule]], Decided]

pytestmark = pytest.mark.slow


def p_value(params: DecodingParams, pair: Pair = PAIR, listed: int = LISTED) -> float:
    """Chi-square of the first tokens of many texts against the target's enumerated joint."""
    request = Case(pair, params, (), (0, 0)).request()
    joint = {text: math.exp(request.log_p(text)) for text in itertools.product(range(VOCAB), repeat=LENGTH)}
    assert sum(joint.values()) == pytest.approx(1)
    seen = Counter(generate(pair, [params] * TEXTS, VOCAB, LENGTH, listed=listed))
    possible = {text for text, probability in joint.items() if probability > 0}
    assert seen.keys() <= possible
    common = [text for text in possible if joint[text] * TEXTS >= 5]
    observed, expected = [seen[text] for text in common], [joint[text] * TEXTS for text in common]
    rest = TEXTS - sum(expected)
    if rest > 5:
        observed, expected = [*observed, TEXTS - sum(observed)], [*expected, rest]
    else:
        expected = [value * sum(observed) / sum(expected) for value in expected]
    return float(chisquare(observed, expected).pvalue)


@pytest.mark.parametrize(
    "params",
    [
        FREE,
        replace(FREE, temperature=0.6, draft_len=1),
        replace(FREE, top_k=3, draft_len=4),
        replace(FREE, top_p=0.8),
        replace(FREE, temperature=1.7, top_k=3, top_p=0.9, draft_len=3),
        replace(FREE, method="sample"),
        *(
            replace(base, method=method, draft_confidence=(number + place) % 2 * 0.4)
            for number, method in enumerate(("speculative", "block", "gbv", "traversal", "specinfer"))
            for place, base in enumerate(
                (
                    replace(FREE, draft_len=3, branching=(2, 2, 1)),
                    replace(FREE, temperature=0.6, branching=(3, 1)),
                    replace(FREE, top_k=3, top_p=0.9, branching=(3, 2)),
                )
            )
        ),
        *(
            replace(base, method=method, replacement=True)
            for method in ("traversal", "specinfer")
            for base in (
                replace(FREE, draft_len=3, branching=(2, 2, 1)),
                replace(FREE, top_k=3, top_p=0.9, branching=(3, 2)),
            )
        ),
    ],
    ids=lambda p: f"{p.method}-{p.draft_len}-{p.temperature}-{p.top_k}-{p.top_p}-{p.confidence}-{p.replacement}",
)
def test_texts_are_distributed_as_the_targets(params: DecodingParams) -> None:
    assert p_value(params) > 1e-3


LOSSLESS: tuple[dict[str, Any], ...] = (
    {"method": "speculative"},
    {"method": "block"},
    {"method": "gbv", "beam_width": 3},
    {"method": "traversal", "branching": (3, 1)},
    {"method": "traversal", "branching": (2, 2), "replacement": True},
    {"method": "specinfer", "branching": (3, 1)},
    {"method": "specinfer", "branching": (2, 2), "replacement": True},
)
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 3}, {"top_p": 0.9})
SURE = [
    (gap, replace(FREE, temperature=temperature, **FILTERS[(row + number) % 3], **method))
    for row, (gap, temperature) in enumerate(((12, 1.0), (30, 1.0), (24, 0.6), (30, 0.3)))
    for number, method in enumerate(LOSSLESS)
]
"""Auxiliaries that are sure, and often wrong: every lossless method with every gap, and both with every filter.

Gaps in logits over temperatures of 12 to 100: what float32 and float64 can express as 1 - q ends at 17 and 37, what
float32 can express at all at 103.
"""


def described(value: object) -> str:
    p = value
    return f"{p.method}-{p.temperature}-{p.top_k}-{p.top_p}" if isinstance(p, DecodingParams) else f"gap{value}"


@pytest.mark.parametrize(("gap", "params"), SURE, ids=described)
def test_a_sure_auxiliary_changes_nothing(gap: float, params: DecodingParams) -> None:
    assert p_value(params, sure_pair(23, VOCAB, gap)) > 1e-4


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of 2 tokens per block, which a device makes and decides at once: the host's are compared with those."""
    for module in (mtad.rows, table, from_tables, mtad.noise.host, prefix):
        monkeypatch.setattr(module, "BLOCK", 2)

    def made(logits: Tensor, rows: Rows, wanted: Tensor) -> tuple[Tensor, ...]:
        return table.tabulate_at_once(logits, rows)[2:]

    def judged(judge: Judge, scored: Scored, rows: Rows, rules: Sequence[Rule]) -> Decided:
        return judge(scored, rows, rules)

    monkeypatch.setattr(table, "filter_on_host", made)
    monkeypatch.setattr(mtad.rules.accept, "by_row", judged)
    monkeypatch.setattr(table.Table, "log_prob", property(lambda own: own._value(own.logits, own.ids)))


@pytest.mark.parametrize(
    "params",
    [
        *(replace(FREE, temperature=0.6, top_p=0.8, **method) for method in ({"method": "sample"}, *LOSSLESS)),
        *(replace(FREE, **method) for method in ({"method": "sample"}, *LOSSLESS[3:4])),
        *(replace(FREE, top_k=3, min_p=0.2, **method) for method in ({"method": "sample"}, *LOSSLESS[-1:])),
    ],
    ids=lambda p: f"{p.method}-{p.temperature}-{p.top_k}-{p.top_p}-{p.replacement}",
)
def test_texts_from_tables_are_distributed_as_the_targets(params: DecodingParams, at_once: None) -> None:
    assert p_value(params, listed=0) > 1e-3


@pytest.mark.parametrize(
    "params",
    [replace(FREE, temperature=0.3, **filters, **method) for method in LOSSLESS for filters in FILTERS[::2]],
    ids=described,
)
def test_a_sure_auxiliary_changes_nothing_of_tables(params: DecodingParams, at_once: None) -> None:
    assert p_value(params, sure_pair(23, VOCAB, 30), listed=0) > 1e-4


@pytest.mark.parametrize(
    "method", ["mtad", "mmtad_sample", "modal", "typical", "threshold", "ensemble", "relaxed", "bild"]
)
def test_a_lossy_rule_is_noticed(method: str) -> None:
    assert p_value(replace(FREE, method=method, beam_width=1)) < 1e-6


def test_mtjd_draws_from_the_targets_joint_if_its_beams_hold_it_all() -> None:
    """Wide enough, three tokens at once are one draw from the enumerated joint; of two beams they are not."""
    wide = replace(FREE, method="mtjd", draft_len=LENGTH, beam_width=VOCAB ** (LENGTH - 1))
    assert p_value(wide) > 1e-3
    assert p_value(replace(wide, beam_width=2)) < 1e-6


def test_beam_without_randomness_is_beam_search() -> None:
    """Wide enough, the likeliest text of all; of one beam, the greedy one."""
    base = DecodingParams(method="beam", temperature=0.0, draft_len=LENGTH, top_k=0, top_p=1.0)
    differ = 0
    for seed in range(40):
        pair = mock_pair(seed, VOCAB, peak=1.0, noise=0.7)
        texts = itertools.product(range(VOCAB), repeat=LENGTH)
        best = max(texts, key=Case(pair, base, (), (0, 0)).request().log_p)
        greedy: Tokens = ()
        while len(greedy) < LENGTH:
            greedy += (int(pair.target(greedy).argmax()),)
        wide, narrow = replace(base, beam_width=VOCAB**2), replace(base, beam_width=1)
        assert generate(pair, [wide, narrow], VOCAB, LENGTH) == [best, greedy]
        differ += best != greedy
    assert differ > 5


def test_modal_at_threshold_0_is_greedy_decoding() -> None:
    for seed in range(20):
        pair = mock_pair(seed, 9, peak=1.0, noise=0.7)
        params = [
            DecodingParams(method="modal", accept_threshold=0, beam_width=b, top_k=k) for b in (1, 4) for k in (0, 5)
        ]
        greedy: Tokens = ()
        while len(greedy) < 12:
            greedy += (int(pair.target(greedy).argmax()),)
        assert generate(pair, params, 9, 12) == [greedy] * len(params)


@pytest.mark.parametrize("threshold", [0.5, 2.0])
def test_a_modal_block_stays_within_its_threshold_of_the_targets_mode(threshold: float) -> None:
    """Bonus token included, under the target alone, with an auxiliary that knows nothing of it."""
    params = DecodingParams(method="modal", accept_threshold=threshold, top_k=0, top_p=1.0)
    near = 0
    for seed in range(300):
        pair = mock_pair(seed, 9, peak=1.0, noise=3.0)
        distance = 0.0
        text = run_block([Case(pair, params, (), (seed, 0))], 9).emitted(0)
        for at, token in enumerate(text):
            logits = pair.target(text[:at])
            distance += float(logits.max() - logits[token])
        assert distance <= threshold + 1e-5
        near += distance > threshold / 2
    assert near > 20


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.lossless])
def test_temperature_0_gives_the_greedy_tokens(method: str) -> None:
    length = 12
    params = [
        DecodingParams(method=method, temperature=0.0, draft_len=gamma, top_k=k) for gamma in (1, 3, 6) for k in (0, 5)
    ]
    for seed in range(20):
        pair = mock_pair(seed, 9, peak=1.0, noise=0.7)
        greedy: Tokens = ()
        while len(greedy) < length:
            greedy += (int(pair.target(greedy).argmax()),)
        assert generate(pair, params, 9, length) == [greedy] * len(params)


@pytest.mark.parametrize("method", METHODS)
def test_temperature_0_does_not_depend_on_the_seed(method: str) -> None:
    params = [DecodingParams(method=method, temperature=0.0, draft_len=3, beam_width=3)] * 5
    for seed in range(8):
        assert len(set(generate(mock_pair(seed, 9, peak=1.0, noise=0.7), params, 9, 12))) == 1
