"""Tokens per target pass of a pair: what the report of a quantised pair compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mtad.params import DecodingParams
from runtime.config import RuntimeConfig
from runtime.llm import LLM


def block_efficiency(pair: Path, prompts: Sequence[Sequence[int]], params: DecodingParams) -> dict[str, float]:
    """Tokens per target pass of a pair, and its standard error over prompts.

    The same seeds in every call: two pairs differ by their engines alone.
    """
    llm = LLM(pair, RuntimeConfig(threads=1, max_draft_len=params.drafted, max_beam_width=params.beam_width))
    assert params.max_tokens is not None
    room = llm.loop.scheduler.room_for_tokens - params.max_tokens
    seeded = [replace(params, seed=seed) for seed in range(len(prompts))]
    results = llm.generate([list(prompt[-room:]) for prompt in prompts], seeded)
    each = torch.tensor([result.statistics.block_efficiency for result in results], dtype=torch.float64)
    passes = sum(result.statistics.target_passes for result in results)
    return {
        "tokens_per_pass": sum(len(result.token_ids) for result in results) / passes,
        "standard_error": float(each.std() / len(each) ** 0.5) if len(each) > 1 else 0.0,
    }
