"""Decoding a few prompts together, timed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mtad.params import DecodingParams
from runtime.llm import LLM, Prompt
from runtime.request import Result


def answer(llm: LLM, prompts: Sequence[Prompt], params: Sequence[DecodingParams]) -> tuple[list[Result], float]:
    """Decode prompts at once, as far as the engines have rows.

    Args:
        llm: an idle pair; nobody else uses it meanwhile.
        prompts: text or token ids.
        params: one each.

    Returns:
        results in the prompts' order, and seconds of decoding: neither storing the prompts nor tokenising is in them.

    Raises:
        InvalidInput: a prompt or parameter is unusable; nothing was run.
        RequestFailed: something broke under one of them.
    """
    made = [request for prompt, own in zip(prompts, params, strict=True) for request in llm.requests(prompt, own)]
    started = time.perf_counter()
    llm.submit(*made)
    while any(request.finish_reason is None for request in made):
        llm.step()
    seconds = time.perf_counter() - started - sum(request.statistics.prefill_seconds for request in made)
    return [llm.result(request) for request in made], seconds
