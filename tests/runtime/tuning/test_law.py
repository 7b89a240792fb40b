"""How far temperature and filters change a law: by hand, and at the tokens of an answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from mtad import LLM
from mtad.params import DecodingParams
from runtime.tuning.measure import law_change, variation

SQUARES = np.array([0.25, 0.09, 0.0225, 0.0025])
SHARP = float(np.abs(SQUARES / SQUARES.sum() - [0.5, 0.3, 0.15, 0.05]).sum() / 2)


@pytest.mark.parametrize("method", ["block", "mtad"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.0),
        ({"top_p": 0.7}, 0.2),
        ({"top_k": 3}, 0.05),
        ({"min_p": 0.4}, 0.2),
        ({"temperature": 0.0}, 0.5),
        ({"temperature": 0.5}, SHARP),
    ],
)
def test_the_change_of_a_law_is_its_total_variation(changes: dict[str, float], expected: float, method: str) -> None:
    """Of 0.5, 0.3, 0.15, 0.05: top-p 0.7 keeps two; temperature 0.5 squares; greedy keeps one."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    params = DecodingParams.from_dict({"method": method, **changes})
    assert variation(logits, params) == pytest.approx([expected], abs=1e-6)


def test_it_is_that_of_the_target_at_each_token_of_an_answer(plain: LLM, reference: LlamaForCausalLM) -> None:
    params = DecodingParams(temperature=0.7, top_k=9, seed=1, max_tokens=80, ignore_eos=True)
    (result,) = plain.generate("SELECT name FROM", params)
    prompt, tokens = result.prompt_token_ids, result.token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1, : plain.pair.vocab_size]
    expected = variation(logits, params)
    assert expected.min() > 0.01
    np.testing.assert_allclose(law_change(plain, prompt, tokens, params), expected, atol=1e-4)
    assert not law_change(plain, prompt, tokens, replace(params, temperature=1.0, top_k=0)).any()
    assert plain.generate("SELECT name FROM", params)[0].token_ids == tokens, "it leaves nothing behind"
