"""The estimate of what drafts gain: its parts against definitions and simulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mtad.params import DecodingParams
from runtime.commands import tune as tune_command
from runtime.tuning.estimate import WIDTHS, Costs, acceptance, expected_passes
from tests.support.checkpoints import TEXT


def after_filters(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Temperature 0.7, the 5 most likely tokens, and of those the fewest that have 0.9 of their mass."""
    order = np.argsort(-logits)[:5]
    weights = np.exp(logits[order] / 0.7)
    weights[np.cumsum(weights) - weights >= 0.9 * weights.sum()] = 0.0
    found = np.zeros(len(logits))
    found[order] = weights / weights.sum()
    return found


def test_the_acceptance_of_children_is_that_of_their_rounds() -> None:
    """Drawn with replacement, each against what the ones before have left."""
    params = DecodingParams(method="speculative", top_k=5, top_p=0.9, temperature=0.7)
    target, auxiliary = torch.randn(2, 30, 9, generator=torch.Generator().manual_seed(0)) * 2
    found = acceptance(target, auxiliary, params)
    assert found.shape == (len(WIDTHS), 30)
    for at in range(30):
        left, q = after_filters(target[at].numpy()), after_filters(auxiliary[at].numpy())
        rejected, expected = 1.0, dict[int, float]()
        for child in range(1, max(WIDTHS) + 1):
            rejected *= 1 - np.minimum(left, q).sum()
            rest = np.maximum(left - q, 0)
            left, expected[child] = rest / rest.sum(), 1 - rejected
        assert found[:, at] == pytest.approx([expected[width] for width in WIDTHS], abs=1e-5)


@pytest.mark.parametrize("draft_len", [1, 3, 8])
def test_the_expected_passes_are_those_of_a_simulation(draft_len: int) -> None:
    rng = np.random.default_rng(draft_len)
    others = rng.uniform(0.2, 1, 12)
    first, runs = others**0.5, 4_000
    passes = 0
    for _ in range(runs):
        at = 0
        while at < 12:
            passes += 1
            for step in range(draft_len):
                if at >= 12 or rng.random() >= (first[at] if step == 0 else others[at]):
                    break
                at += 1
            at += 1
    assert expected_passes(first, others, draft_len) == pytest.approx(passes / runs, rel=0.02)


def test_equal_models_accept_everything_and_unequal_ones_cost_what_is_said() -> None:
    assert expected_passes(np.ones(20), np.ones(20), 4) == 4
    assert Costs(auxiliary=0.2, token=0.01).block(4, 2) == pytest.approx(1 + 0.8 + 0.08)


@pytest.mark.parametrize("answer", [None, TEXT[0][20:]])
def test_two_checkpoints_and_some_prompts_are_enough(
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str | None,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    one = {"prompt": TEXT[0][:20], **({"answer": answer} if answer else {})}
    prompts.write_text((json.dumps(one) + "\n") * 2)
    target, auxiliary = map(str, checkpoints)
    same = ["--target", target, "--auxiliary", target, "--auxiliary-cost", "0.25", "--token-cost", "0"]
    monkeypatch.setattr(sys, "argv", ["mtad tune", "--estimate", "--prompts", str(prompts), "--json", *same])
    tune_command.main()
    report = json.loads(capsys.readouterr().out)
    assert report["acceptance"] == pytest.approx(1.0, abs=1e-4)
    longest = max(report["estimates"], key=lambda one: one["tokens_per_pass"])
    assert longest["speed"] == pytest.approx(longest["tokens_per_pass"] / (1 + 0.25 * longest["draft_len"]))
    monkeypatch.setattr(
        sys,
        "argv",
        ["mtad tune", "--estimate", "--prompts", str(prompts), "--target", target, "--auxiliary", auxiliary],
    )
    tune_command.main()
    out = capsys.readouterr().out
    assert "2 texts" in out
    assert out.count("<- fastest") == 1
