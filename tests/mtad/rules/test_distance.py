"""How far blocks are from the target's exact joint distribution, over every draft and every outcome."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest

from mtad.params import DecodingParams
from tests.mtad.rules.test_texts import request_of
from tests.support.law import Tokens
from tests.support.mock_models import mock_pair
from tests.support.one_row import OneRow
from tests.support.rule_laws import passing

BASE = DecodingParams(draft_len=2, beam_width=2, top_k=0, top_p=1.0)


def variation(params: DecodingParams, vocab: int = 3, noise: float = 0.8) -> float:
    """Total variation between what a block writes, the target's own samples behind it, and the target's joint."""
    found = 0.0
    for seed in range(2):
        request = request_of(mock_pair(seed, vocab, 1.2, noise), params)
        joint = {text: value for value, text in request.texts((), params.drafted + 1)}
        mine = OneRow(request, vocab).emitted()
        assert mine.keys() <= joint.keys()
        found += sum(abs(mine.get(text, 0.0) - value) for text, value in joint.items()) / 4
    return found


def test_multi_token_methods_are_as_far_from_the_joint_as_their_search_for_likely_drafts_takes_them() -> None:
    """The joint is what lossless methods write; a drawn path is nearer to it than the likeliest, one beam than two."""
    far = {
        (method, tau): variation(replace(BASE, method=method, accept_threshold=tau))
        for method, tau in (("mtad", 0.1), ("mtad", 1.0), ("mmtad", 0.1), ("mmtad_sample", 0.1))
    }
    assert variation(replace(BASE, method="speculative")) < 1e-6
    assert far["mmtad", 0.1] > far["mmtad_sample", 0.1] > 0.01
    assert far["mtad", 0.1] > far["mtad", 1.0] > 0.01
    narrow = variation(replace(BASE, method="mtad", accept_threshold=0.1, beam_width=1))
    assert far["mtad", 0.1] > narrow > 0.01


@pytest.mark.parametrize("tau", [0.0, 0.3])
def test_a_drawn_path_is_as_far_from_the_joint_as_its_draft_lacks_mass(tau: float) -> None:
    """With S the deepest paths that pass: 1 - p(S) in total variation, -log p(S) nats; over drafts at most the mean."""
    params = replace(BASE, method="mmtad_sample", accept_threshold=tau)
    request = request_of(mock_pair(3, 3, 1.2, 0.8), params)
    joint = {text: value for value, text in request.texts((), params.drafted)}
    mean, mixed = 0.0, defaultdict[Tokens, float](float)
    for drafted, draft, found in OneRow(request, 3).blocks():
        offered = {path: math.exp(request.log_p(path)) for path in passing(request, draft)}
        path_of, mass = {path: chance for chance, path, _ in found}, sum(offered.values())
        assert path_of == pytest.approx({path: p / mass for path, p in offered.items()}, abs=1e-6)
        if offered.keys() <= joint.keys():
            variation = sum(abs(path_of.get(text, 0.0) - p) for text, p in joint.items()) / 2
            entropy = sum(chance * math.log(chance / joint[path]) for path, chance in path_of.items())
            assert (variation, entropy) == pytest.approx((1 - mass, -math.log(mass)), abs=1e-6)
        mean += drafted * (1 - mass)
        for path, chance in path_of.items():
            for value, text in request.texts(path, params.drafted):
                mixed[text] += drafted * chance * value
    assert 0.01 < sum(abs(mixed[text] - p) for text, p in joint.items()) / 2 < mean


def test_a_draft_that_holds_every_path_makes_a_drawn_path_lossless() -> None:
    wide = replace(BASE, method="mmtad_sample", accept_threshold=0.0, beam_width=4)
    assert variation(wide, vocab=2) < 1e-6 < 0.01 < variation(replace(wide, beam_width=2), vocab=2)
