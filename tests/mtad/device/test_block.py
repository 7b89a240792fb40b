"""The device form gives what the host form gives, row by row: drafts, decisions, log-probabilities."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtad.device import launches
from mtad.device.tables import by_block
from mtad.filters import filter_logits
from mtad.methods import METHODS
from mtad.params import DecodingParams
from mtad.rows import stack_rows
from tests.support.device_rows import block_on_device, block_on_host, given_of

VOCAB = 300
SHAPES = ("flat", "peaked", "impossible", "equal")
CAPTURED = [name for name, method in METHODS.items() if method.captured]
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 0, "top_p": 1.0},
    {"top_k": 5, "top_p": 0.9},
    {"top_k": 0, "top_p": 0.7},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
)


def pick(chance: random.Random, method: str) -> DecodingParams:
    return DecodingParams(
        method=method,
        draft_len=chance.randint(1, 4),
        beam_width=chance.randint(1, 4),
        divergence=chance.choice([0.0, 0.1, 0.6]),
        plausible=chance.choice([0.0, 0.2]),
        accept_threshold=chance.choice([0.0, 0.3, 0.8]) if METHODS[method].threshold is not None else None,
        draft_confidence=chance.choice([0.0, 0.0, 0.05]),
        temperature=chance.choice([0.0, 0.7, 1.0]),
        ignore_eos=chance.random() < 0.5,
        seed=chance.randrange(1, 1000),
        **chance.choice(FILTERS),
    )


def models(shape: str, seed: int) -> tuple[Tensor, Tensor]:
    """Auxiliary and target, by depth and last token: flat, peaked, with impossible tokens, or nearly equal."""
    chance = torch.Generator().manual_seed(seed)
    auxiliary, more = torch.randn(2, 5, VOCAB, VOCAB, generator=chance).unbind()
    target = auxiliary + 0.5 * more
    if shape == "equal":
        return auxiliary, auxiliary + 0.3
    if shape == "peaked":
        return auxiliary * 6, target * 6
    if shape == "impossible":
        for logits in (auxiliary, target):
            logits[torch.rand(logits.shape, generator=chance) < 0.99] = -torch.inf
            logits[:, :, 7] = 0.0
    return auxiliary, target


def compare(params: Sequence[DecodingParams], auxiliary: Tensor, target: Tensor) -> int:
    """Compare all rows; returns how many tokens were accepted."""
    is_end = torch.arange(VOCAB) % 5 == 0
    key, given = given_of(params, VOCAB, padded=1)
    tree, _, found = block_on_device(key, given, auxiliary, target, is_end)
    trees, _, expected = block_on_host(params, auxiliary, target, is_end)
    assert found.finite[:-1].tolist() == expected.finite.tolist()
    for row, p in enumerate(params):
        for level, width in enumerate(p.widths):
            assert tree is not None
            at = slice(trees.starts[row, level], trees.starts[row, level + 1])
            alive = trees.log_q[row, at] > -np.inf
            for name in ("drafted", "growing", "ended"):
                if p.spec.form == "beams" or name != "ended":
                    assert getattr(tree, name)[row, level, :width].tolist() == getattr(trees, name)[row, at].tolist()
            if p.spec.form == "beams":
                assert (tree.log_q[row, level, :width] > -np.inf).tolist() == alive.tolist()
            shown = trees.drafted[row, at]
            assert tree.tokens[row, level, :width][shown].tolist() == trees.tokens[row, at][shown].tolist(), p
            likely = torch.from_numpy(trees.log_q[row, at][shown])
            torch.testing.assert_close(tree.log_q[row, level, :width][shown], likely, atol=1e-4, rtol=1e-5)
            assert not tree.drafted[row, level, width:].any()
        if not expected.finite[row]:
            continue
        length = int(expected.lengths[row])
        assert int(found.lengths[row]) == length, p
        assert found.tokens[row, : length + 1].tolist() == expected.tokens[row, : length + 1].tolist(), p
        assert found.log_probs[row, : length + 1].tolist() == pytest.approx(
            expected.log_probs[row, : length + 1].tolist(), abs=1e-4
        )
        spent = expected.spent[row, : length + 1].tolist()
        assert found.spent[row, : length + 1].tolist() == pytest.approx(spent, abs=1e-5), p
    return int(expected.lengths.sum())


@pytest.mark.parametrize(("seed", "shape"), enumerate(SHAPES))
def test_mixed_rows_are_drafted_and_decided_as_on_the_host(seed: int, shape: str) -> None:
    """Each method in two shapes."""
    chance, methods = random.Random(seed), itertools.cycle(CAPTURED)
    compare([pick(chance, name) for name in itertools.islice(methods, 4 * seed, 4 * seed + 4)], *models(shape, seed))


@pytest.mark.parametrize("candidates", [4096, 64])
def test_filters_of_many_chunks_keep_what_the_hosts_keep(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "CHUNK", 256)
    monkeypatch.setattr(launches, "CANDIDATES", candidates)  # with few, a settling program reads all logits
    kinds = (*FILTERS, {"top_k": 40, "top_p": 1.0, "min_p": 0.2}, {"top_k": 300, "top_p": 0.99}, {"top_p": 0.5})
    params = [DecodingParams(method="sample", temperature=t, **kind) for kind in kinds for t in (0.7, 2.0)]
    logits = 2 * torch.randn(len(params), 1, 1500, generator=torch.Generator().manual_seed(1)) - 90
    logits[:, :, 512:768] = -torch.inf  # a chunk of impossible tokens, below a largest logit that is negative
    logits[:, :, 800:900] = logits[:, :, 900:1000]  # equal ones
    _, given = given_of(params, 1500)
    found = launches.filtered(logits, given)
    rows, ids, log_p = stack_rows(params, 1500), np.empty(1500, np.int32), np.empty(1500, np.float32)
    for row in range(len(params)):
        count = filter_logits(logits[row, 0].numpy(), rows[row], ids, log_p)
        kept = torch.full((1500,), -torch.inf).index_put(
            (torch.from_numpy(ids[:count]),), torch.from_numpy(log_p[:count])
        )
        ours = found.log_prob(
            torch.zeros(len(params), 1500, dtype=torch.long), torch.arange(1500).expand(len(params), -1)
        )
        torch.testing.assert_close(ours[row].float(), kept, atol=1e-4, rtol=0, msg=str(params[row]))
        masses = by_block(kept.exp()[None])[0].sum(1)
        torch.testing.assert_close(found.blocks[row, 0], masses, atol=1e-5, rtol=0)


def test_rows_whose_logits_are_no_numbers_are_told_from_the_others() -> None:
    params = [DecodingParams(method=method, draft_len=2, beam_width=2, seed=3) for method in CAPTURED[::3]]
    for number, spoiled in enumerate(("auxiliary", "target")):
        auxiliary, target = models("flat", 5)
        (auxiliary, target)[number][0, 5] = torch.nan  # after the root of row 2
        compare(params, auxiliary, target)
        finite = block_on_host(params, auxiliary, target, torch.arange(VOCAB) % 5 == 0)[2].finite.tolist()
        assert finite == [row != 2 for row in range(len(params))], spoiled
