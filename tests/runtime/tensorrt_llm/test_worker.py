"""Our rule in the library's own worker, on a fake of the place where that decides."""

from __future__ import annotations

import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.tensorrt_llm import compat
from runtime.tensorrt_llm import worker as ours
from tests.support import fake_spec_worker as fake
from tests.support.fake_spec_worker import Loop, Request
from tests.support.mock_engine import VOCAB

PARAMS = DecodingParams(method="mtad", beam_width=1, draft_len=3, accept_threshold=0.3)


def make_worker(threshold: float = 0.3) -> Any:
    return ours.make_worker(fake.DraftTargetOneModelWorker, fake, threshold)(None, None)


def make_requests(count: int) -> list[Request]:
    chance = random.Random(7)
    return [
        Request(
            slot=at,
            tokens=[1 + at % 7, 5, 2],
            new=chance.randint(1, 14),
            temperature=chance.choice([0.0, 0.7, 1.0]),
            top_k=chance.choice([3, 2**31 - 1]),
            top_p=chance.choice([0.8, 1.0]),
            seed=at,
        )
        for at in range(count)
    ]


def test_chains_are_decided_as_the_paper_has_it() -> None:
    """The longest prefix whose joint ratio exceeds the threshold, though shorter ones may fail; then p behind it."""
    torch.manual_seed(1)
    rows, levels, kept = 300, 4, set()
    for threshold in (0.0, 0.3, 0.9):
        p, q = (torch.randn(rows, levels + more, VOCAB).mul(2).softmax(-1) for more in (1, 0))
        p = p.masked_fill(p < 0.02, 0)
        drafted, uniform = torch.multinomial(q.view(-1, VOCAB), 1).view(rows, levels), torch.rand(rows)
        log_threshold = math.log(threshold) if threshold else -math.inf
        tokens, counts = ours.decide(drafted, p, q, uniform, log_threshold)
        for row in range(rows):
            length, ratio = 0, 1.0
            for at, token in enumerate(drafted[row].tolist()):
                ratio *= float(p[row, at, token]) / float(q[row, at, token])
                length = at + 1 if ratio > threshold else length
            behind = p[row, length].cumsum(0)
            bonus = int((behind <= uniform[row] * behind[-1]).sum())
            assert tokens[row, : int(counts[row])].tolist() == [*drafted[row, :length].tolist(), bonus]
            kept.add(length)
    assert kept == set(range(levels + 1))


@pytest.mark.parametrize("penalised", [-1, 4])
def test_a_requests_text_is_its_own_whoever_else_is_in_the_batch(penalised: int) -> None:
    """Requests come and go, their places in the batch change; each has its own temperature, filter and seed."""
    together, worker = make_requests(9), make_worker()
    loop = Loop(worker, 3, 9, penalised)
    loop.run(*together)
    for request, again in zip(together, make_requests(9), strict=True):
        Loop(make_worker(), 3, 9, penalised).run(again)
        if again.temperature:  # a greedy request alone is the library's own affair
            assert request.tokens == again.tokens
        assert penalised not in request.tokens[4:]
    assert sum(sum(request.accepted) for request in together) > 15
    assert loop.meta.committed == sum(len(request.tokens) - 3 for request in together)


def test_a_batch_in_which_nobody_samples_is_the_librarys_own() -> None:
    loop, request = Loop(make_worker(), 3, 1), Request(0, [3, 1], 12, temperature=0.0)
    loop.run(request)
    strict, other = Loop(fake.DraftTargetOneModelWorker(None, None), 3, 1), Request(0, [3, 1], 12, temperature=0.0)
    strict.run(other)
    assert request.tokens == other.tokens
    assert loop.meta.strict == strict.meta.strict == 1 + len(request.accepted)


def test_nothing_is_read_back_to_the_host() -> None:
    """On tensors without content: whatever asks for a value raises, as it does while a CUDA graph is captured."""
    drafted = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    p, q = (torch.zeros(2, 3 + more, VOCAB, device="meta") for more in (1, 0))
    seeds = torch.zeros(2, dtype=torch.int64, device="meta")
    tokens, counts = ours.decide(drafted, p, q, ours.uniforms(seeds, seeds), -1.0)
    assert (tokens.shape, counts.shape) == ((2, 4), (2,))


def test_random_numbers_are_uniform_and_differ_by_seed_and_progress() -> None:
    numbers = ours.uniforms(torch.arange(200).repeat(200) - 100, torch.arange(200).repeat_interleave(200))
    assert (float(numbers.min()), float(numbers.max())) == pytest.approx((0, 1), abs=1e-3)
    assert float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert len(set(numbers.tolist())) > 39_500
    assert torch.histc(numbers, 20, 0, 1).sub(2000).abs().max() < 250


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return fake.install(monkeypatch)


def test_the_worker_is_in_its_place_while_the_model_is_built(library: SimpleNamespace) -> None:
    llm = ours.open_llm("target", "auxiliary", PARAMS, max_batch_size=8)
    assert isinstance(llm.worker, fake.DraftTargetOneModelWorker)
    assert type(llm.worker) is not fake.DraftTargetOneModelWorker
    assert sys.modules[ours.UTILS].DraftTargetOneModelWorker is fake.DraftTargetOneModelWorker
    config = llm.speculative_config
    assert (config.max_draft_len, config.speculative_model, config.use_rejection_sampling) == (3, "auxiliary", True)
    assert llm.max_batch_size == 8
    library.single = False
    with pytest.raises(InvalidInput, match="start Python with it set to 1"):
        ours.open_llm("target", "auxiliary", PARAMS)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("values", "options", "field"),
    [
        ({"beam_width": 4}, {}, "beam_width"),
        ({"method": "mmtad"}, {}, "method"),
        ({"method": "speculative"}, {}, "method"),
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size"),
    ],
)
def test_what_that_place_cannot_do_is_refused(values: dict[str, Any], options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ours.open_llm("target", "auxiliary", DecodingParams.from_dict(values, PARAMS), **options)
    assert caught.value.field == field


@pytest.mark.usefixtures("library")
def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed", lambda: "1.4.0")
    with pytest.raises(InvalidInput, match=r"1\.4\.0.*another release.*tensorrt-llm==1\.4\.0rc1"):
        ours.open_llm("target", "auxiliary", PARAMS)


def test_without_the_library_there_is_one_clear_error() -> None:
    with pytest.raises(InvalidInput, match="NVIDIA's package index"):
        ours.open_llm("target", "auxiliary", PARAMS)
