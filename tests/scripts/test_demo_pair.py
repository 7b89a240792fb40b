"""The trained pair, exported and decoded: what holds on real models."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mtad import LLM, DecodingParams
from scripts.demo import dataset
from scripts.demo.dataset import matches
from scripts.paths import DEMO

CHECKPOINTS = DEMO / "pair"
BASE = DecodingParams(top_k=10, top_p=0.9, max_tokens=96)


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
