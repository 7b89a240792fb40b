"""Constraints through the whole runtime on real engines: nothing forbidden is ever written, by any method."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from transformers import LlamaForCausalLM

from mtad import LLM, DecodingParams
from mtad.errors import InvalidInput
from runtime.constraints import grammar
from runtime.scheduler.request import RequestFailed, Result
from tests.support.constrained import Asked
from tests.support.integrity import check_loop
from tests.support.log_probabilities import assert_log_probabilities

PROMPTS = ["SELECT name FROM", "def largest(values):", "How many"]
METHODS = ("sample", "speculative", "mtad", "mmtad")
BASE = DecodingParams(max_tokens=40, seed=5, accept_threshold=0.1, draft_len=4)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["x", "yy", 3, None]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
REGEX = r"(SELECT|DELETE) [a-z]{1,5}( WHERE id = [0-9]{1,3})?;"
LANGUAGES: list[tuple[Asked, str]] = [
    ({"json_schema": SCHEMA}, ""),
    ({"regex": REGEX}, REGEX),
    ({"grammar": 'start: word ("+" start)?\nword: /[a-f]{1,3}/'}, r"[a-f]{1,3}(\+[a-f]{1,3})*"),
]
"""Each with the expression that its texts match; those of the schema are objects."""

every_method = pytest.mark.parametrize("method", METHODS)


def test_texts_of_every_method_satisfy_their_grammar(plain: LLM) -> None:
    choices = [(seed, method) for seed in range(2) for method in METHODS]
    params = [
        replace(BASE, method=method, max_tokens=150, seed=seed, **asked)
        for asked, _ in LANGUAGES
        for seed, method in choices
    ]
    results = plain.generate(PROMPTS * len(choices), params)
    for number, (_, expression) in enumerate(LANGUAGES):
        own = results[number * len(choices) : (number + 1) * len(choices)]
        texts = [result.text for result in own if result.finish_reason == "stop"]
        assert len(texts) > 4
        assert len(set(texts)) > 1
        for text in texts:
            if expression:
                assert re.fullmatch(expression, text)
            else:
                jsonschema.validate(json.loads(text), json.loads(SCHEMA))


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
    plain: LLM, reference: LlamaForCausalLM, method: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    params = replace(BASE, method=method, temperature=0.0, **{"max_tokens": 24, **ours})
    for result in plain.generate(PROMPTS, params):
        prompt = torch.tensor([result.prompt_token_ids])
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, pad_token_id=0, **theirs
        )
        assert result.token_ids == expected[0, prompt.shape[1] :].tolist()


def test_log_probabilities_are_the_unconstrained_targets(plain: LLM, reference: LlamaForCausalLM) -> None:
    """A prompt by each method."""
    base = replace(BASE, regex="[a-z ]{12,30}", top_logprobs=2, frequency_penalty=0.5)
    for result in plain.generate([*PROMPTS, PROMPTS[0]], [replace(base, method=method) for method in METHODS]):
        assert_log_probabilities(result, reference, 2)


def test_a_grammar_without_a_way_on_fails_its_own_request_and_no_other(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = plain.add(PROMPTS[0], replace(BASE, regex="[ab]{2,3}", min_tokens=6))
    fine = plain.add(PROMPTS[1], BASE)
    assert plain._constrainer.grammars._kept
    monkeypatch.setattr(grammar, "KEPT_BYTES", 0)
    while not plain.loop.scheduler.idle:
        plain.step()
    with pytest.raises(RequestFailed) as caught:
        Result.of(doomed)
    failed = caught.value.__cause__
    assert isinstance(failed, InvalidInput)
    assert (failed.field, failed.value) == ("min_tokens", 6)
    assert Result.of(fine).token_ids == plain.generate(PROMPTS[1], BASE)[0].token_ids
    check_loop(plain.loop)
    assert not plain._constrainer.grammars._kept, "what grew too large goes when a request ends"
