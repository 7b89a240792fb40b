"""The trained pair, exported and decoded: what holds on real models."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mtad import LLM, DecodingParams
from scripts.demo import dataset
from scripts.demo.dataset import matches
from scripts.paths import DEMO
from tests.support.chi_square import p_value
from tests.support.law import filtered

CHECKPOINTS = DEMO / "pair"
BASE = DecodingParams(top_k=10, top_p=0.9, max_tokens=96)


def first_tokens(prompt: list[int], params: DecodingParams, vocab_size: int) -> dict[tuple[int, ...], float]:
    """Probability of each pair of first tokens under the target checkpoint, filtered as `params` asks."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "target", dtype=torch.float32)

    def after(tokens: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1:, :vocab_size]
        ids, log_p = filtered(logits[0].numpy(), params)
        return dict(zip(ids.tolist(), np.exp(log_p).tolist(), strict=True))

    return {(a, b): pa * pb for a, pa in after(prompt).items() for b, pb in after([*prompt, a]).items()}


def test_speculative_gives_the_targets_own_distribution_and_mtad_does_not(demo: LLM) -> None:
    example = dataset.load("development", "code")[0]
    prompt = list(demo.pair.tokenizer(example.prompt).input_ids)[-48:]
    params = replace(BASE, method="speculative", max_tokens=2, ignore_eos=True)
    expected = first_tokens(prompt, params, demo.pair.vocab_size)
    assert len(expected) > 10, "the prompt leaves nothing to decide"

    def pairs(p: DecodingParams) -> list[tuple[int, ...]]:
        results = demo.generate([prompt] * 1200, [replace(p, seed=seed) for seed in range(1200)])
        return [tuple(result.token_ids) for result in results]

    assert p_value(pairs(params), expected) > 1e-3
    assert p_value(pairs(replace(params, method="mtad", accept_threshold=0.1)), expected) < 1e-6


@pytest.mark.parametrize("method", ["speculative", "mtad"])
def test_answers_are_right_far_more_often_than_chance(demo: LLM, method: str) -> None:
    examples = dataset.load("development", "sql")[:40]
    params = [replace(BASE, method=method, seed=seed) for seed in range(len(examples))]
    results = demo.generate([example.prompt for example in examples], params)
    assert sum(matches(e, r.text) for e, r in zip(examples, results, strict=True)) >= 20
    assert all(r.finish_reason == "stop" for r in results[:5])


def test_drafting_gives_more_tokens_per_pass_and_mtad_likelier_text(demo: LLM) -> None:
    examples = dataset.load("development", "code")[:16]
    nll, efficiency = dict[str, float](), dict[str, float]()
    for method in ("sample", "speculative", "mtad", "mmtad"):
        params = [replace(BASE, method=method, seed=seed) for seed in range(len(examples))]
        results = demo.generate([example.prompt for example in examples], params)
        nll[method] = -float(np.mean([np.mean(r.logprobs) for r in results]))
        tokens, passes = sum(len(r.token_ids) for r in results), sum(r.statistics.target_passes for r in results)
        efficiency[method] = tokens / passes
    assert efficiency["sample"] == 1
    assert min(efficiency["speculative"], efficiency["mtad"], efficiency["mmtad"]) > 1.5
    assert max(nll["mtad"], nll["mmtad"]) < nll["sample"] + math.log(0.9)
