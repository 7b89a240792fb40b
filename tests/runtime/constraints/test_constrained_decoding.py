"""Constraints through the whole runtime on real engines: nothing forbidden is ever written, by any method."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from runtime import LLM, DecodingParams, RequestFailed, RuntimeConfig
from runtime.constraints.constraint import ConstraintFailed

PROMPTS = ["SELECT name FROM", "def largest(values):", "How many"]
METHODS = ("sample", "speculative", "mtad", "mmtad")
BASE = DecodingParams(max_tokens=40, seed=5, accept_threshold=0.1, speculation="fixed")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)

every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def llm(pair_folders: Callable[[str], Path]) -> LLM:
    return LLM(pair_folders("onnx"), RuntimeConfig(threads=1))


@every_method
def test_a_text_under_a_schema_is_json_of_that_schema(llm: LLM, method: str) -> None:
    params = [replace(BASE, method=method, json_schema=SCHEMA, seed=seed) for seed in range(6)]
    texts = [result.text for result in llm.generate(PROMPTS * 2, params)]
    for text in texts:
        value = json.loads(text)
        assert value.keys() == {"name", "age"}
        assert value["name"] in ("ann", "bob")
        assert isinstance(value["age"], int)
        assert value["age"] <= 99
    assert len(set(texts)) > 1
    assert all(r.finish_reason == "stop" for r in llm.generate(PROMPTS * 2, params))


@every_method
def test_tokens_biased_away_are_never_written_and_those_biased_to_always(llm: LLM, method: str) -> None:
    params = replace(BASE, method=method, ignore_eos=True, max_tokens=20)
    banned = set(llm.generate(PROMPTS[0], params)[0].token_ids)
    for result in llm.generate(PROMPTS, replace(params, logit_bias=dict.fromkeys(banned, -1e6))):
        assert not banned & set(result.token_ids)
    for result in llm.generate(PROMPTS, replace(params, logit_bias={77: 1e6})):
        assert result.token_ids == [77] * 20


@every_method
def test_a_stop_string_is_not_looked_for_before_min_tokens(llm: LLM, method: str) -> None:
    params = replace(BASE, method=method, max_tokens=30, min_tokens=20, ignore_eos=True)
    free = llm.generate(PROMPTS[2], params)[0]
    early = free.text[3:5]
    held = llm.generate(PROMPTS[2], replace(params, stop=early))[0]
    assert held.text.startswith(free.text[:8])
    assert len(held.token_ids) >= 20


@pytest.mark.parametrize("method", ["sample", "speculative"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"min_tokens": 24, "max_tokens": 24}, {"min_new_tokens": 24}),
    ],
)
def test_greedy_decoding_under_constraints_is_the_checkpoints(
    llm: LLM, reference: LlamaForCausalLM, method: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    params = replace(BASE, method=method, temperature=0.0, **{"max_tokens": 24, **ours})
    for result in llm.generate(PROMPTS, params):
        prompt = torch.tensor([result.prompt_token_ids])
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, pad_token_id=0, **theirs
        )
        assert result.token_ids == expected[0, prompt.shape[1] :].tolist()


def test_constrained_requests_do_not_depend_on_the_batch(llm: LLM) -> None:
    params = [
        replace(BASE, method="mtad", json_schema=SCHEMA),
        replace(BASE, method="sample", repetition_penalty=1.7, ignore_eos=True),
        replace(BASE, method="mmtad", presence_penalty=1.0, frequency_penalty=0.5, top_k=0),
        replace(BASE, method="speculative", min_tokens=20, logit_bias={5: 3.0}),
        replace(BASE, method="mmtad", beam_width=3, draft_len=2),
        replace(BASE, method="mtad", regex="[a-z ]{5,30}"),
    ]
    alone = [llm.generate(PROMPTS[i % 3], p)[0] for i, p in enumerate(params)]
    together = llm.generate([PROMPTS[i % 3] for i in range(len(params))], params)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.logprobs for r in together] == [r.logprobs for r in alone]


@every_method
def test_log_probabilities_are_the_unconstrained_targets(llm: LLM, reference: LlamaForCausalLM, method: str) -> None:
    params = replace(BASE, method=method, regex="[a-z ]{12,30}", top_logprobs=2, frequency_penalty=0.5)
    for result in llm.generate(PROMPTS, params):
        start = len(result.prompt_token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([result.prompt_token_ids + result.token_ids])).logits[0]
        expected = logits.log_softmax(-1)[start - 1 : -1]
        own = expected.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), own, rtol=0, atol=1e-4)
        best = torch.tensor([[value for _, value in top] for top in result.top_logprobs])
        torch.testing.assert_close(best, expected.topk(2).values, rtol=0, atol=1e-4)


def test_a_grammar_without_a_way_on_fails_its_own_request_and_no_other(llm: LLM) -> None:
    doomed = llm.add(PROMPTS[0], replace(BASE, regex="[ab]{2,3}", min_tokens=6))
    fine = llm.add(PROMPTS[1], BASE)
    while not llm.loop.scheduler.idle:
        llm.step()
    with pytest.raises(RequestFailed) as caught:
        llm.result(doomed)
    assert isinstance(caught.value.__cause__, ConstraintFailed)
    assert llm.result(fine).token_ids == llm.generate(PROMPTS[1], BASE)[0].token_ids
    llm.loop.check_integrity()
