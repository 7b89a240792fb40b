"""Numbers that a device draws: uniform, independent of each other and of the batch, the same every time."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from mtad.methods import METHODS
from mtad.noise.device import begin, draw, scale
from mtad.noise.host import Noise
from mtad.params import DecodingParams
from mtad.stacking import block_shape

BEAMS = DecodingParams(method="mmtad", draft_len=4, beam_width=4)
V = 40


def drawn(params: list[DecodingParams], keys: list[tuple[int, int]], vocab_size: int = V) -> Noise:
    states = torch.tensor([begin(*key) for key in keys])
    return draw(
        states, torch.tensor([scale(p.temperature) for p in params]), block_shape(params, vocab_size, listed=vocab_size)
    )


def uniforms(noise: Noise) -> Tensor:
    """All numbers of a block before anything is made of them: [R, ..]."""
    parts = [noise.accept, noise.bonus[:, None], noise.nodes]
    for level in noise.levels:
        parts += [level.uniform[:, None], torch.exp(-torch.exp(-level.gumbel)).flatten(1)]
    return torch.cat(parts, 1)


def is_even(values: Tensor, bins: int) -> bool:
    """Whether numbers 0 .. bins - 1 come equally often."""
    return bool(chisquare(torch.bincount(values.long().flatten(), minlength=bins).numpy()).pvalue > 1e-4)


@pytest.mark.parametrize("keys", [[(seed, 0) for seed in range(400)], [(7, block) for block in range(400)]])
def test_numbers_are_uniform_within_a_block_and_from_key_to_key(keys: list[tuple[int, int]]) -> None:
    numbers = uniforms(drawn([BEAMS] * len(keys), keys))
    assert is_even(numbers * 256, 256)
    assert all(is_even(column * 8, 8) for column in numbers.T[::37])
    cells = (numbers * 16).floor()
    assert is_even(cells[1:] * 16 + cells[:-1], 256), "neighbouring seeds, or blocks"
    assert is_even(cells[:, 1:] * 16 + cells[:, :-1], 256), "neighbouring places"
    assert is_even(cells[1:, :-1] * 16 + cells[:-1, 1:], 256), "both"


def test_the_largest_of_gumbel_noise_and_log_p_is_drawn_from_p() -> None:
    p = torch.tensor([0.5, 0.25, 0.2, 0.04, 0.01])
    noise = drawn([BEAMS] * 2000, [(seed, 3) for seed in range(2000)], vocab_size=5)
    gumbel = torch.cat([level.gumbel for level in noise.levels], 1)
    found = torch.bincount((p.log() + gumbel).argmax(-1).flatten(), minlength=5).double()
    assert chisquare(found.numpy(), (p.double() / p.double().sum() * found.sum()).numpy()).pvalue > 1e-4


def test_a_row_draws_in_any_batch_what_it_draws_alone() -> None:
    for method in METHODS:
        params = DecodingParams(method=method, draft_len=2, beam_width=2, branching=(2, 1), top_k=8)
        alone = drawn([params], [(5, 2)])
        mixed = drawn([BEAMS, params, DecodingParams(method="sample")], [(1, 1), (5, 2), (9, 9)])
        assert mixed.bonus[1] == alone.bonus[0]
        for ours, theirs in zip(alone.levels, mixed.levels, strict=False):
            assert theirs.uniform[1] == ours.uniform[0]
            width, k = ours.gumbel.shape[1:]
            assert torch.equal(theirs.gumbel[1, :width, :k], ours.gumbel[0])
        assert torch.equal(mixed.accept[1, : alone.accept.shape[1]], alone.accept[0])


def test_the_level_behind_a_row_is_the_same_in_deeper_batches() -> None:
    live = next((m for m, spec in METHODS.items() if spec.live), None)
    assert live is not None
    short = DecodingParams(method=live, draft_len=2, beam_width=4)
    long = DecodingParams(method=live, draft_len=4, beam_width=4)
    alone, mixed = (drawn(params, [(5, 2)] * len(params)).nodes[0].view(-1, 4) for params in ([short], [short, long]))
    assert torch.equal(alone[-1], mixed[-1])
    assert torch.equal(alone[:2], mixed[:2])


def test_at_temperature_0_all_noise_is_0() -> None:
    noise = drawn([BEAMS, DecodingParams(method="mmtad", temperature=0.0)], [(1, 1), (1, 1)])
    every = [noise.accept, noise.bonus, noise.nodes, *(part for level in noise.levels for part in level)]
    assert not any(values[1].any() for values in every)
    assert all(values[0].any() for values in every if values.numel())


def test_the_generator_is_splitmix64() -> None:
    """Begun at 0, its first number is the published one."""
    noise = draw(torch.zeros(1, dtype=torch.int64), torch.tensor([scale(1.0)]), block_shape([BEAMS], V, listed=V))
    assert int(noise.levels[0].uniform[0] * 2**24) == 0xE220A8397B1DCDAF >> 40
    assert begin(2**63 - 1, 10**9) != begin(2**63 - 1, 10**9 + 1)
    assert -(2**63) <= begin(3, 4) < 2**63
