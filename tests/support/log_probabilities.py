"""What a checkpoint gives the tokens of a result."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from runtime.scheduler.request import Result


@torch.inference_mode()
def assert_log_probabilities(result: Result, reference: LlamaForCausalLM, count: int) -> None:
    """A result's log-probabilities and its likeliest tokens are those of a plain forward pass."""
    start = len(result.prompt_token_ids)
    logits = reference(torch.tensor([result.prompt_token_ids + result.token_ids])).logits[0]
    expected = logits.log_softmax(-1)[start - 1 : -1]
    own = expected.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(result.logprobs), own, rtol=0, atol=1e-4)
    if not count:
        assert result.top_logprobs == []
        return
    values, ids = expected.topk(count)
    assert [[token for token, _ in top] for top in result.top_logprobs] == ids.tolist()
    found = torch.tensor([[value for _, value in top] for top in result.top_logprobs])
    torch.testing.assert_close(found, values, rtol=0, atol=1e-4)
