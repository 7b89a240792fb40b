"""Processing of logits against Hugging Face's warpers, and the draw from a distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mtad.distributions.candidates import Candidates, draw, invert, process
from mtad.distributions.table import draw_from
from mtad.params import DecodingParams
from mtad.stacking import block_shape, stack_rows

VOCAB = 400
SETTINGS = [
    DecodingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.3, 1.0, 2.5)
    for top_k in (0, 1, 10, 399)
    for top_p in (1.0, 0.95, 0.5, 0.01)
    for min_p in (0.0, 0.1, 1.0)
]


def processed(params: list[DecodingParams], logits: Tensor) -> Candidates:
    return process(logits, stack_rows(params, block_shape(params, VOCAB, listed=VOCAB), VOCAB, ()))


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(len(SETTINGS), 5, VOCAB, generator=torch.Generator().manual_seed(0))


def test_processing_equals_hugging_faces_warpers(logits: Tensor) -> None:
    found = processed(SETTINGS, logits)
    dense = torch.zeros_like(logits).scatter(2, found.ids, found.log_prob.exp())
    for row, p in enumerate(SETTINGS):
        scores = TemperatureLogitsWarper(p.temperature)(None, logits[row].double())
        if p.top_k:
            scores = TopKLogitsWarper(p.top_k)(None, scores)
        if p.top_p < 1:
            scores = TopPLogitsWarper(p.top_p)(None, scores)
        if p.min_p:
            scores = MinPLogitsWarper(p.min_p)(None, scores)
        expected = scores.softmax(-1)
        assert torch.equal(dense[row] > 0, expected > 0)
        assert torch.allclose(dense[row].double(), expected, atol=1e-6)


def test_top_p_0_keeps_the_most_likely_token(logits: Tensor) -> None:
    found = processed([DecodingParams(top_k=0, top_p=0)] * len(SETTINGS), logits)
    assert found.ids[..., 0].equal(logits.argmax(-1))
    assert (found.log_prob[..., 0] == 0).all()
    assert (found.log_prob[..., 1:] == -torch.inf).all()


def test_top_k_0_top_p_1_and_min_p_0_mean_no_filter(logits: Tensor) -> None:
    free = [replace(p, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for p in SETTINGS]
    found = processed(free, logits)
    expected = logits.log_softmax(-1).gather(2, found.ids)
    assert found.ids.sort(-1).values.equal(torch.arange(VOCAB).expand(logits.shape))
    assert torch.allclose(found.log_prob, expected, atol=1e-5)


def test_a_rows_distribution_is_bit_equal_whatever_the_batch_looks_at(logits: Tensor) -> None:
    together = processed(SETTINGS, logits)
    for row, p in enumerate(SETTINGS):
        alone = processed([p], logits[row : row + 1])
        count = alone.ids.shape[2]
        assert torch.equal(together.ids[row, :, :count], alone.ids[0])
        assert torch.equal(together.log_prob[row, :, :count], alone.log_prob[0])
        assert together.log_prob[row, :, count:].isneginf().all()


def test_likelihood_of_a_filtered_token_is_zero(logits: Tensor) -> None:
    found = processed([DecodingParams(top_k=3, top_p=1.0)] * len(SETTINGS), logits)
    tokens = logits.argsort(-1, descending=True)
    assert found.at(tokens[..., 2]).isfinite().all()
    assert found.at(tokens[..., 3]).isneginf().all()


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    generator = np.random.default_rng(0)
    weights = torch.from_numpy(generator.random((500, 9), dtype=np.float32) * (generator.random((500, 9)) < 0.5))
    weights[:, 4] += 0.1
    ids = torch.from_numpy(generator.permuted(np.tile(np.arange(9), (500, 1)), axis=1))
    smallest, largest = torch.zeros(500), torch.full((500,), 1 - 2.0**-24)
    possible = weights > 0
    first, last = possible.int().argmax(-1, keepdim=True), 8 - possible.flip(-1).int().argmax(-1, keepdim=True)
    assert torch.equal(draw(ids, weights, smallest), ids.gather(1, first)[:, 0])
    assert torch.equal(draw(ids, weights, largest), ids.gather(1, last)[:, 0])
    middle = torch.from_numpy(generator.random(500, dtype=np.float32))
    mass = weights.double().cumsum(-1)
    index = torch.searchsorted(mass, (middle.double() * mass[:, -1])[:, None], right=True)
    assert torch.equal(draw(ids, weights, middle), ids.gather(1, index)[:, 0])


@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_weights_that_are_not_numbers_give_an_entry_all_the_same(weight: float) -> None:
    """A device gathers it before the host sees that something is wrong; one out of range would break a GPU."""
    weights, noise = torch.full((2, 300), weight), torch.tensor([0.0, 0.9])
    assert (invert(weights, noise) < 300).all()
    assert (draw_from(weights, noise, torch.tensor([[False], [False]])) < 300).all()
