"""The estimate of what drafts gain: its parts against definitions and simulation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mtad.params import DecodingParams
from runtime.tuning.estimate import expected_passes
from runtime.tuning.measure import filtered
from tests.support import law
from tests.support.checkpoints import TEXT
from tests.support.commands import Run


def test_what_two_models_share_is_what_is_accepted() -> None:
    params = DecodingParams(method="speculative", top_k=5, top_p=0.9, temperature=0.7)
    logits = torch.randn(30, 9, generator=torch.Generator().manual_seed(0)) * 2
    for own, found in zip(logits.numpy(), filtered(logits, params), strict=True):
        ids, log_p = law.filtered(own, params)
        assert found[ids] == pytest.approx(np.exp(log_p), abs=1e-5)
        assert found.sum() == pytest.approx(1)


@pytest.mark.parametrize("draft_len", [1, 3, 8])
def test_the_expected_passes_are_those_of_a_simulation(draft_len: int) -> None:
    rng = np.random.default_rng(draft_len)
    rates, runs = rng.uniform(0.2, 1, 12), 4_000
    passes = 0
    for _ in range(runs):
        at = 0
        while at < 12:
            passes += 1
            for _ in range(draft_len):
                if at >= 12 or rng.random() >= rates[at]:
                    break
                at += 1
            at += 1
    assert expected_passes(rates, draft_len) == pytest.approx(passes / runs, rel=0.02)
    assert expected_passes(np.ones(20), 4) == 4


@pytest.mark.parametrize("answer", [None, TEXT[0][20:]])
def test_two_checkpoints_and_some_prompts_are_enough(
    checkpoints: tuple[Path, Path], tmp_path: Path, run: Run, answer: str | None
) -> None:
    """A model that drafts for itself is accepted always."""
    prompts = tmp_path / "prompts.jsonl"
    one = {"prompt": TEXT[0][:20], **({"answer": answer} if answer else {})}
    prompts.write_text((json.dumps(one) + "\n") * 2)
    target, auxiliary = map(str, checkpoints)
    for other in (target, auxiliary):
        out = run("tune", "--estimate", "--prompts", prompts, "--target", target, "--auxiliary", other).out
        assert out.startswith("2 texts, ")
        assert ("probability 1.000 ± 0.000" in out) == (other == target)
        assert [line.split()[0] for line in out.splitlines()[-8:]] == [str(length) for length in range(1, 9)]
