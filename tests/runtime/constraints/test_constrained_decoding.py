"""Constraints through the whole runtime on real engines: nothing forbidden is ever written, by any method."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from mtad.errors import InvalidInput
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
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_under_a_regular_expression_matches_it(llm: LLM, method: str, temperature: float) -> None:
    expression = "(SELECT|DELETE) [a-z]{3,6}( WHERE [a-z] > [0-9]{2})?;"
    params = replace(BASE, method=method, regex=expression, temperature=temperature)
    for result in llm.generate(PROMPTS, params):
        assert re.fullmatch(expression, result.text), result.text


@every_method
def test_a_text_under_a_grammar_follows_it(llm: LLM, method: str) -> None:
    grammar = 'start: "(" (start | WORD) ")"\nWORD: /[a-c]{1,3}/'
    params = [replace(BASE, method=method, grammar=grammar, seed=seed, max_tokens=64) for seed in range(3)]
    for result in llm.generate(PROMPTS, params):
        if result.finish_reason == "stop":
            assert re.fullmatch(r"(\(+)([a-c]{1,3})(\)+)", result.text), result.text
            assert result.text.count("(") == result.text.count(")")
        else:
            assert re.fullmatch(r"\(+([a-c]{0,3}\)*)?", result.text), result.text


@every_method
def test_tokens_biased_away_are_never_written_and_those_biased_to_always(llm: LLM, method: str) -> None:
    params = replace(BASE, method=method, ignore_eos=True, max_tokens=20)
    banned = set(llm.generate(PROMPTS[0], params)[0].token_ids)
    for result in llm.generate(PROMPTS, replace(params, logit_bias=dict.fromkeys(banned, -1e6))):
        assert not banned & set(result.token_ids)
    for result in llm.generate(PROMPTS, replace(params, logit_bias={77: 1e6})):
        assert result.token_ids == [77] * 20


@every_method
def test_no_end_of_sequence_comes_before_min_tokens(llm: LLM, method: str) -> None:
    for token in dict.fromkeys(llm.generate(PROMPTS[0], replace(BASE, method=method))[0].token_ids[:4]):
        ending = LLM(replace(llm.pair, eos=(token,)))
        for least in (1, 6, 11):
            params = replace(BASE, method=method, min_tokens=least)
            for result in ending.generate(PROMPTS, params):
                assert token not in result.token_ids[: least - 1]
                assert len(result.token_ids) >= least


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


@every_method
def test_a_frequency_penalty_ends_repetition(llm: LLM, method: str) -> None:
    params = replace(BASE, method=method, ignore_eos=True, temperature=0.0, logit_bias={77: 15.0, 78: 14.0})
    plain = llm.generate(PROMPTS[0], params)[0].token_ids
    fewer = llm.generate(PROMPTS[0], replace(params, frequency_penalty=2.0))[0].token_ids
    assert plain.count(77) + plain.count(78) == len(plain)
    assert max(fewer.count(77), fewer.count(78)) <= 10
    assert len(set(fewer)) > 5


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


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("json_schema", {"json_schema": "{"}),
        ("json_schema", {"json_schema": '{"type": "unheard of"}'}),
        ("regex", {"regex": "(unclosed"}),
        ("grammar", {"grammar": "start: missing"}),
        ("logit_bias", {"logit_bias": {100_000: 1.0}}),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused_by_field_before_anything_runs(
    llm: LLM, field: str, values: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput) as caught:
        llm.generate(PROMPTS[:2], [BASE, replace(BASE, **values)])
    assert caught.value.field == field
    assert llm.loop.scheduler.idle


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
