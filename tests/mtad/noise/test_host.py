"""A block's random numbers depend on its request's seed, its index and the request's own parameters only."""

from __future__ import annotations

from dataclasses import replace

import torch

from mtad.noise.host import Noise
from mtad.params import DecodingParams
from mtad.rows import Shape
from mtad.stacking import block_shape, top_k_of
from tests.support.noise import draw_noise

VOCAB = 30
BASE = DecodingParams(draft_len=3, beam_width=2, top_k=5)
WIDE = DecodingParams(method="mmtad", draft_len=6, beam_width=5, top_k=0)


def noise(params: list[DecodingParams], keys: list[tuple[int, int]], shape: Shape | None = None) -> Noise:
    return draw_noise(params, keys, shape or block_shape(params, VOCAB), VOCAB)


def flat(drawn: Noise) -> list[torch.Tensor]:
    """Gumbel noise [R, draft_len, width, K], then the uniforms."""
    uniform, gumbel, _ = (torch.stack(values, 1) for values in zip(*drawn.levels, strict=True))
    return [gumbel, uniform, drawn.accept, drawn.bonus]


def test_the_same_seed_and_block_give_the_same_noise() -> None:
    for key in [(0, 0), (5, 31), (5, 32), (2**63 - 1, 10_000)]:
        for one, other in zip(flat(noise([BASE], [key])), flat(noise([BASE], [key])), strict=True):
            assert torch.equal(one, other)


def test_blocks_and_seeds_do_not_share_noise() -> None:
    keys = [(seed, block) for seed in range(20) for block in range(70)]
    drawn = noise([BASE] * len(keys), keys)
    assert len(set(drawn.levels[0].gumbel[:, 0, 0].tolist())) == len(keys)
    assert len(set(drawn.bonus.tolist())) == len(keys)


def test_a_request_that_changes_its_draft_meets_no_number_twice() -> None:
    shapes = [(levels, beams) for levels in range(1, 7) for beams in range(1, 7)]
    for block in (0, 40):
        drawn = [noise([replace(BASE, draft_len=levels, beam_width=beams)], [(3, block)]) for levels, beams in shapes]
        numbers = torch.cat([x.flatten() for each in drawn for x in flat(each)])
        numbers = numbers[numbers != 0]  # where a row draws nothing
        assert len(set(numbers.tolist())) > len(numbers) - 3  # a few of thousands of float32 may be equal by chance


def test_noise_does_not_depend_on_the_batch() -> None:
    requests = [BASE, WIDE, replace(BASE, method="sample"), replace(BASE, method="speculative", draft_len=4)]
    keys = [(3, 9), (4, 0), (5, 2), (6, 77)]
    together = noise(requests, keys)
    gumbel, uniform = flat(together)[:2]
    for row, (p, key) in enumerate(zip(requests, keys, strict=True)):
        alone = noise([p], [key])
        levels, beams, k = p.drafted, p.draft_width, top_k_of(p, VOCAB)
        chain = p.spec.form == "chain"
        own = gumbel[row, : 0 if chain else levels, :beams, :k]
        if levels:
            assert chain or torch.equal(own, flat(alone)[0][0, :levels, :beams, :k])
            assert torch.equal(uniform[row, :levels], flat(alone)[1][0])
        assert gumbel[row].count_nonzero() == own.numel()
        assert uniform[row].count_nonzero() == (levels if chain else 0)
        assert torch.equal(together.accept[row, :levels], alone.accept[0, :levels])
        assert together.bonus[row] == alone.bonus[0]


def test_a_chain_draws_one_number_per_level_whatever_the_vocabulary() -> None:
    chain = replace(BASE, method="block", top_k=0)
    drawn = noise([chain, replace(chain, method="sample")], [(3, 1), (4, 1)])
    assert drawn.levels[0].gumbel.numel() == 0
    assert len({float(level.uniform[0]) for level in drawn.levels}) == chain.draft_len


def test_temperature_0_is_noise_0() -> None:
    drawn = noise([replace(BASE, temperature=0.0), WIDE], [(1, 1), (1, 1)])
    gumbel = flat(drawn)[0]
    assert not any(x[0].any() for x in flat(drawn))
    assert gumbel[1].all()


def test_gumbel_is_finite_and_standard_and_uniforms_are_below_1() -> None:
    drawn = noise([WIDE] * 500, [(seed, 0) for seed in range(500)])
    gumbel = flat(drawn)[0]
    assert gumbel.isfinite().all()
    assert abs(float(gumbel.mean()) - 0.5772) < 0.01
    assert abs(float(gumbel.var()) - 1.6449) < 0.03
    for uniform in (drawn.accept, drawn.bonus):
        assert uniform.min() >= 0
        assert uniform.max() < 1
