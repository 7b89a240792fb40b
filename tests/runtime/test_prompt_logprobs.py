"""What the target says of prompts: the checkpoint's own log-softmax, and nobody else notices."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

from mtad import LLM, DecodingParams, RuntimeConfig
from runtime.prompts import Prompt
from runtime.scheduler.request import Result

PROMPTS = ["SELECT name FROM", "S", "where do they live? " * 8, "How many singers"]
BASE = DecodingParams(max_tokens=6, ignore_eos=True, seed=5, prompt_logprobs=3)

pytestmark = pytest.mark.usefixtures("idle_afterwards")


def check(result: Result, reference: LlamaForCausalLM, count: int) -> None:
    """The scores are those of a plain forward pass of the checkpoint."""
    prompt = torch.tensor([result.prompt_token_ids])
    with torch.inference_mode():
        expected = reference(prompt).logits[0, :-1].log_softmax(-1)
    scores = result.prompt_logprobs
    assert len(scores) == prompt.shape[1] - 1
    own = expected.gather(1, prompt[0, 1:, None])
    values = torch.tensor([score.logprob for score in scores])
    torch.testing.assert_close(values, own[:, 0], rtol=0, atol=1e-4)
    assert [score.rank for score in scores] == (1 + (expected > own).sum(1)).tolist()
    likeliest = expected.topk(count)
    for score, ids, logprobs in zip(scores, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
        assert [token for token, _ in score.top_logprobs] == ids
        assert [value for _, value in score.top_logprobs] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("count", [0, 20])
def test_prompts_have_the_checkpoints_own_log_probabilities(llm: LLM, reference: LlamaForCausalLM, count: int) -> None:
    params = [
        replace(BASE, prompt_logprobs=count, method=method) for method in ("sample", "mtad", "block", "traversal")
    ]
    for again in range(2):  # the second time, all prompts are kept
        for result in llm.generate(PROMPTS, params):
            check(result, reference, count)
            assert result.statistics.reused_tokens == 0, f"kept keys and values were used, time {again}"


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_neither_chunks_nor_the_batch_change_them(llm: LLM, chunk: int) -> None:
    chunked = LLM(llm.pair, RuntimeConfig(max_prefill_tokens=chunk, prefix_tokens=0))
    alone = [llm.generate(prompt, BASE)[0] for prompt in PROMPTS]
    others = [replace(BASE, prompt_logprobs=None, method="mmtad")] * len(PROMPTS)
    mixed = chunked.generate([*PROMPTS, *PROMPTS], [*others, *[BASE] * len(PROMPTS)])[len(PROMPTS) :]
    tolerance = 0.0 if llm.pair.target.spec.format == "onnx" else 1e-5
    for ours, theirs in zip(mixed, alone, strict=True):
        values = [score.logprob for score in theirs.prompt_logprobs]
        assert [score.logprob for score in ours.prompt_logprobs] == pytest.approx(values, abs=tolerance, rel=0)
        assert ours.token_ids == theirs.token_ids


def test_a_request_that_asks_for_them_gets_the_text_it_would_get(llm: LLM) -> None:
    asked = llm.generate(PROMPTS, BASE)
    plain = llm.generate(PROMPTS, replace(BASE, prompt_logprobs=None))
    assert [(r.token_ids, r.logprobs) for r in asked] == [(r.token_ids, r.logprobs) for r in plain]
    assert not any(r.prompt_logprobs for r in plain)


def test_choices_share_the_scores_and_the_prompts_prefill(llm: LLM, reference: LlamaForCausalLM) -> None:
    results = llm.generate(PROMPTS[2], replace(BASE, n=3))
    for result in results:
        check(result, reference, 3)
    prompt = len(results[0].prompt_token_ids)
    assert [r.statistics.reused_tokens for r in results] == [0, prompt - 1, prompt - 1]


def test_no_new_tokens_score_the_prompt_alone(llm: LLM, reference: LlamaForCausalLM) -> None:
    running = llm.add(PROMPTS[0], replace(BASE, prompt_logprobs=None, max_tokens=40))
    prompts: list[Prompt] = [*PROMPTS, [7]]
    for result in llm.generate(prompts, replace(BASE, max_tokens=0)):
        check(result, reference, 3)
        assert (result.text, result.token_ids, result.finish_reason) == ("", [], "length")
        assert result.statistics.target_passes == 0
    while running.finish_reason is None:
        llm.step()
    alone = llm.generate(PROMPTS[0], replace(BASE, prompt_logprobs=None, max_tokens=40))[0]
    assert running.tokens == alone.token_ids


def test_a_prompt_that_was_given_up_halfway_is_scored_from_its_beginning(llm: LLM, reference: LlamaForCausalLM) -> None:
    """Its other choice takes over the list, whatever is in it by then."""
    chunked = LLM(llm.pair, RuntimeConfig(max_prefill_tokens=16))
    first, second = chunked.requests(PROMPTS[2], replace(BASE, n=2))
    chunked.loop.scheduler.submit(first, second)
    chunked.step()
    assert 0 < len(first.prompt_scores) < len(first.prompt) - 1
    chunked.cancel(first)
    while second.finish_reason is None:
        chunked.step()
    check(Result.of(second), reference, 3)


def test_logits_of_a_long_prompt_are_never_held_together(llm: LLM) -> None:
    with patch.object(llm.pair.target, "enqueue", wraps=llm.pair.target.enqueue) as steps:
        llm.generate([[5] * 150], replace(BASE, max_tokens=0))
    kept = [len(step.args[0].keep) for step in steps.call_args_list]
    assert (sum(kept), max(kept)) == (149, 64)
