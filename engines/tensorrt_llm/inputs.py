"""What a plan of TensorRT-LLM 1.2 is given at each launch, under the library's names."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.base import KV_PAGE
from engines.tensorrt_llm.cache import BlockPool
from engines.tensorrt_plan import TensorRtPlan
from mtad.errors import InvalidInput

CONTEXT, GENERATION = 0, 1
"""Phases, as `host_request_types` has them."""


PlanInputs = dict[str, Tensor]
"""The inputs of a plan of one GPU, paged and packed, over R rows of S tokens; int32 where nothing else is said.

Those that begin with `host_`, and `spec_decoding_use`, are read on the host when a step is launched. In the context
phase the `spec_decoding_` ones have no rows.

    input_ids, position_ids: [R x S]. Rotary positions are those of `spec_decoding_position_offsets`.
    last_token_ids: [M], tokens whose logits are wanted, counted from 1.
    sequence_length: [R], columns of each row with this step's.
    context_lengths, host_context_lengths: [R], in the context phase tokens of the step.
    host_request_types: [R], `CONTEXT` or `GENERATION`.
    host_past_key_value_lengths: [R], columns with this step's, of which the largest counts, or more.
    host_max_attention_window_sizes: [layers], and host_sink_token_length: [1]: all columns are attended to.
    cache_indirection: [R, 1, columns] for beams of the library, all 0.
    kv_cache_block_offsets, host_kv_cache_block_offsets: [1, R, 2, blocks], see `BlockPool`.
    host_kv_cache_pool_pointers: int64 [1, 2]. host_kv_cache_pool_mapping: [layers, 2], pool and layer in it.
    host_runtime_perf_knobs: int64 [16], -1 for what is left alone; the first, 1, lets blocks of threads share a row's
        columns. host_context_progress: int64 [1], 0.
    spec_decoding_generation_lengths: [R], tokens of each row.
    spec_decoding_position_offsets: [R, S], positions behind the columns before the step.
    spec_decoding_packed_mask: [R x S, words], bit j of a token's words: it sees the row's token j of this step.
    spec_decoding_use: [1], whether there are tokens beside the roots.
"""


def new_inputs(cache: BlockPool, pool: int, phase: int, rows: int, tokens: int, kept: int, most: int) -> PlanInputs:
    """Memory for a launch, filled where nothing depends on the step.

    Args:
        pool: address of the cache's pool.
        kept: M, at least 1.
        most: tokens per row that the plan's masks have room for.
    """
    host = partial(torch.zeros, dtype=torch.int32)
    device = partial(host, device=cache.device)
    layers, blocks, trees = cache.layers, cache.blocks, rows if phase == GENERATION else 0
    columns = blocks * KV_PAGE
    return {
        "input_ids": device(rows * tokens),
        "position_ids": device(rows * tokens),
        "last_token_ids": device(kept),
        "sequence_length": device(rows),
        "context_lengths": device(rows),
        "host_context_lengths": host(rows).fill_(tokens),
        "host_request_types": host(rows).fill_(phase),
        "host_past_key_value_lengths": host(rows),
        "host_max_attention_window_sizes": host(layers).fill_(columns),
        "host_sink_token_length": host(1),
        "cache_indirection": device(rows, 1, columns),
        "kv_cache_block_offsets": device(1, rows, 2, blocks),
        "host_kv_cache_block_offsets": host(1, rows, 2, blocks),
        "host_kv_cache_pool_pointers": torch.tensor([[pool, 0]]),
        "host_kv_cache_pool_mapping": torch.stack([host(layers), torch.arange(layers, dtype=torch.int32)], 1),
        "host_runtime_perf_knobs": torch.tensor([1, *[-1] * 15]),
        "host_context_progress": torch.zeros(1, dtype=torch.int64),
        "spec_decoding_generation_lengths": device(trees).fill_(tokens),
        "spec_decoding_position_offsets": device(trees, tokens if trees else 1),
        "spec_decoding_packed_mask": device(trees * tokens, mask_words(most)),
        "spec_decoding_use": host(1).fill_(int(trees > 0 and tokens > 1)),
    }


def mask_words(most: int) -> int:
    """Words of a token's mask: those of the plan's widest step, however many tokens this one has."""
    return -(-most // 32)


def packed(sees: Tensor, most: int) -> Tensor:
    """Masks as the library reads them, int32 [R x S, words], of bool [R, S, S]; every token sees itself."""
    count, words = sees.shape[1], mask_words(most)
    sees = sees | torch.eye(count, dtype=torch.bool, device=sees.device)
    bits = torch.nn.functional.pad(sees, (0, 32 * words - count)).view(-1, words, 32).int()
    return (bits << torch.arange(32, dtype=torch.int32, device=sees.device)).sum(-1, dtype=torch.int32)


def check_inputs(engine: Any, plan: TensorRtPlan, cache: BlockPool) -> None:
    """Make sure that a plan has the inputs that are given to it, and room for its description's sizes."""
    ours = new_inputs(cache, 0, GENERATION, plan.decode_rows, plan.decode_tokens, 1, plan.decode_tokens)
    theirs = {engine.get_tensor_name(at) for at in range(engine.num_io_tensors)} - {"logits"}
    wrong = sorted(theirs ^ ours.keys())
    for name in theirs & ours.keys():
        kind, largest = engine.get_tensor_dtype(name).name, engine.get_tensor_profile_shape(name, 0)[2]
        fits = all(own <= most for own, most in zip(ours[name].shape, largest, strict=True))
        if not fits or kind != str(ours[name].dtype).removeprefix("torch.").upper():
            wrong.append(f"{name} ({kind}, at most {'x'.join(map(str, largest))})")
    if wrong:
        raise InvalidInput("plan", ", ".join(wrong), "not inputs as mtad export builds them; export again")
