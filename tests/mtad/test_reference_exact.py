"""What the definitions preserve, without drawing: every draft, and every outcome of every comparison, is enumerated."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from mtad.params import DecodingParams
from tests.support.mock_models import Pair, mock_pair, sure_pair
from tests.support.reference import rules
from tests.support.reference.draft import Draft, Path
from tests.support.reference.request import Distribution, Random, Request, Tokens

VOCAB = 3
NONE = np.full((9, 9), math.nan, dtype=np.float32)
COIN = Random(NONE, NONE, NONE[0], NONE, 0.0)
"""Numbers that are not drawn: what is compared with one has every outcome, with its probability."""
BASE = DecodingParams(draft_len=2, beam_width=2, top_k=0, top_p=1.0)


def asked(pair: Pair, params: DecodingParams, eos: Tokens = ()) -> Request:
    """A request of two models."""
    return Request(pair.target, pair.auxiliary, (), params, eos)


def drafts(
    request: Request, level: int = 0, above: tuple[Path, ...] = (Path((), 0.0),)
) -> Iterator[tuple[float, Draft]]:
    """Every draft of a chain or of branches, and its probability."""
    if level == request.params.drafted:
        yield 1.0, []
        return
    count = request.params.children[level] if request.params.children else 1
    families = []
    for path in above:
        one: list[tuple[float, tuple[Path, ...]]] = [(1.0, ())]
        for child in range(0 if request.ends(path.tokens) else count):
            longer = []
            for chance, drawn in one:
                q = request.q(path.tokens)
                if request.params.children and not request.params.replaces:
                    q = {t: value for t, value in q.items() if all(t != p.tokens[-1] for p in drawn)}
                for token, value in q.items():
                    new = Path((*path.tokens, token), path.log_q + math.log(value), path.slot * count + child)
                    longer.append((chance * value / sum(q.values()), (*drawn, new)))
            one = longer
        families.append(one)
    for family in itertools.product(*families):
        here = tuple(itertools.chain.from_iterable(drawn for _, drawn in family))
        chance = math.prod(part for part, _ in family)
        for rest, draft in drafts(request, level + 1, here):
            yield chance * rest, [list(here), *draft]


class Coins:
    """Comparisons with a number that is not drawn, each with one of its outcomes; the others are left for later."""

    def __init__(self, given: list[bool], later: list[list[bool]]) -> None:
        self.given, self.later, self.chance = given, later, 1.0
        self.made: list[bool] = []

    def exceeds(self, left: float, right: float) -> bool:
        """Whether left > right; of a coin, one outcome of several."""
        if not math.isnan(right):
            return left > right
        yes, at = min(max(left, 0.0), 1.0), len(self.made)
        if at >= len(self.given) and 0 < yes < 1:
            self.later.append([*self.made, False])
        self.made.append(self.given[at] if at < len(self.given) else yes > 0)
        self.chance *= yes if self.made[-1] else 1 - yes
        return self.made[-1]


def outcomes(request: Request, draft: Draft) -> Iterator[tuple[float, Tokens, Distribution]]:
    """Every outcome of the rule for a draft: its probability, what is accepted, and the bonus token's distribution."""
    waiting: list[list[bool]] = [[]]
    while waiting:
        coins = Coins(waiting.pop(), waiting)
        with (
            patch("tests.support.reference.rules.exceeds", coins.exceeds),
            patch("tests.support.reference.lossless.exceeds", coins.exceeds),
        ):
            accepted, bonus = rules.RULES[request.params.spec.rule](request, draft, COIN)
        yield coins.chance, accepted, bonus


def texts(
    request: Request, start: Tokens, length: int, p: Distribution | None = None
) -> Iterator[tuple[float, Tokens]]:
    """The target's continuations of a text up to a length; the first token is drawn from `p`, where it is given."""
    if len(start) >= length or request.ends(start):
        yield 1.0, start
        return
    for token, value in (p or request.p(start)).items():
        for rest, text in texts(request, (*start, token), length):
            yield value * rest, text


def written(request: Request) -> tuple[dict[Tokens, float], float]:
    """The distribution of the first tokens, those behind the block being the target's own; and tokens per block."""
    found: dict[Tokens, float] = defaultdict(float)
    tokens = 0.0
    for drafted, draft in drafts(request):
        for chance, accepted, bonus in outcomes(request, draft):
            tokens += drafted * chance * (len(accepted) + 1 - request.ends(accepted))
            after = None if request.ends(accepted) else bonus
            for value, text in texts(request, accepted, request.params.drafted + 1, after):
                found[text] += drafted * chance * value
    return found, tokens


PAIRS = [mock_pair(seed, VOCAB, 1.2, noise) for seed in range(3) for noise in (0.0, 0.8, 3.0)] + [
    sure_pair(5, VOCAB, 9)
]


@pytest.mark.parametrize(
    "params",
    [
        replace(BASE, method="speculative"),
        replace(BASE, method="block"),
        replace(BASE, method="gbv"),
        replace(BASE, method="gbv", beam_width=3),
        replace(BASE, method="gbv", top_k=2, temperature=0.6),
        *(
            replace(BASE, method=method, branching=branching, replacement=replacement)
            for method in ("traversal", "specinfer")
            for branching in ((2, 2), (3, 1), (1, 2))
            for replacement in (False, True)
        ),
    ],
    ids=lambda p: f"{p.method}-{p.beam_width}-{p.branching}-{p.replacement}",
)
@pytest.mark.slow
def test_a_lossless_rule_writes_the_targets_distribution(params: DecodingParams) -> None:
    for pair, eos in zip(PAIRS, itertools.cycle([(), (1,)]), strict=False):
        request = asked(pair, params, eos)
        found, _ = written(request)
        expected = {text: value for value, text in texts(request, (), params.drafted + 1)}
        assert sum(found.values()) == pytest.approx(1)
        assert {text: found[text] for text in expected} == pytest.approx(expected, abs=1e-12)


def test_on_a_chain_the_tree_rules_are_block_verification() -> None:
    for pair in PAIRS:
        block, chains, tree = (
            written(asked(pair, replace(BASE, method=method, beam_width=1, branching=(1, 1))))[1]
            for method in ("block", "gbv", "traversal")
        )
        assert block == pytest.approx(chains) == pytest.approx(tree)


def test_an_ensemble_writes_the_mixture_where_it_drafts() -> None:
    """The first token is always drafted, so it has exactly w p + (1 - w) q."""
    for pair, w in zip(PAIRS, itertools.cycle([0.0, 0.3, 1.0]), strict=False):
        request = asked(pair, replace(BASE, method="ensemble", accept_threshold=w))
        first: dict[int, float] = defaultdict(float)
        for text, value in written(request)[0].items():
            first[text[0]] += value
        p, q = request.p(), request.q()
        assert first == pytest.approx({token: w * p[token] + (1 - w) * q[token] for token in p}, abs=1e-12)
