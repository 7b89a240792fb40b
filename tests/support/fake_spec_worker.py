"""A fake of the place in TensorRT-LLM 1.4 where drafts are accepted, on a CPU.

Names, parameters, layouts and checks are repeated from `tensorrt_llm/_torch/speculative/interface.py` (SpecWorkerBase,
SpecMetadata) of September 2026, stored file 57352998664; kernels are a few lines of torch.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.tensorrt_llm import worker as ours

STRICT = torch.empty(0), torch.empty(0)
"""What the library's own acceptance gives here."""


def rejection_sampling_one_model(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    deterministic: bool = True,
    seed: Tensor | int | None = None,
    offset: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    return STRICT


def spec_compute_probs_from_logits(
    advanced_sampling_mode: str, logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """`_torch/pyexecutor/sampler/ops/spec_dispatch.py`: the filtered distribution of each row."""
    values, ids = (logits.float() / temperatures[:, None]).sort(descending=True)
    values = values.masked_fill(torch.arange(values.shape[1]) >= top_ks[:, None], -torch.inf)
    p = values.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_ps[:, None], 0)
    return torch.zeros_like(p).scatter(1, ids, p / p.sum(-1, keepdim=True))


class SpecWorkerBase:
    def _accept_draft_tokens(
        self, logits: Tensor, draft_tokens: Tensor, num_contexts: int, batch_size: int, spec_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        gens, draft_len = batch_size - num_contexts, draft_tokens.shape[1]
        stored = spec_metadata.draft_probs_last_dim
        if gens and self._can_use_rejection_sampling(spec_metadata):
            given = draft_tokens, draft_len, stored, num_contexts, batch_size, logits, spec_metadata
            if self._rejection_buffers_valid(*given):
                slots = spec_metadata.batch_slot_ids[num_contexts:batch_size]
                draft_probs = spec_metadata.draft_probs[slots, :draft_len, :stored]
                return self._sample_and_accept_draft_tokens_rejection(
                    logits, draft_tokens, draft_probs, num_contexts, batch_size, spec_metadata
                )
        return STRICT

    def _can_use_rejection_sampling(self, spec_metadata: Any) -> bool:
        return bool(spec_metadata.use_rejection_sampling and not spec_metadata.is_all_greedy_sample)

    def _rejection_buffers_valid(
        self,
        draft_tokens: Tensor,
        draft_len: int,
        stored_vocab: int,
        num_contexts: int,
        batch_size: int,
        logits: Tensor,
        spec_metadata: Any,
    ) -> bool:
        gens, rows = batch_size - num_contexts, len(logits)
        return len(draft_tokens) == gens and rows >= num_contexts + gens * (draft_len + 1)

    def _sample_and_accept_draft_tokens_rejection(
        self,
        logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        num_contexts: int,
        batch_size: int,
        spec_metadata: Any,
    ) -> tuple[Tensor, Tensor]:
        (gens, draft_len), vocab = draft_tokens.shape, logits.shape[-1]
        tokens = torch.empty((batch_size, draft_len + 1), dtype=torch.int)
        counts = torch.ones(batch_size, dtype=torch.int)
        tokens[:num_contexts, 0] = logits[:num_contexts].argmax(-1)
        own = slice(num_contexts, num_contexts + gens * (draft_len + 1))
        meta = spec_metadata
        filters = (values[own] for values in (meta.temperatures, meta.top_ks, meta.top_ps, meta.min_ps))
        p = spec_compute_probs_from_logits(meta.advanced_sampling_mode, logits[own], *filters)
        q = torch.zeros(gens, draft_len, vocab)
        q[:, :, : draft_probs.shape[-1]] = draft_probs
        seeds, offsets = self._rng_state_per_request(meta, num_contexts, batch_size)
        tokens[num_contexts:], counts[num_contexts:] = rejection_sampling_one_model(
            draft_probs=q,
            draft_token_ids=draft_tokens.to(torch.int32).contiguous(),
            target_probs=p.reshape(gens, draft_len + 1, vocab),
            deterministic=True,
            seed=seeds,
            offset=offsets,
        )
        return tokens, counts

    def _rng_state_per_request(self, spec_metadata: Any, num_contexts: int, batch_size: int) -> tuple[Tensor, Tensor]:
        own = slice(num_contexts, batch_size)
        return spec_metadata.request_seeds[own], spec_metadata.request_offsets[own]


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules that are used, with fakes in them.

    Returns:
        `single`: whether the model is in this process; `served`: arguments of the server.
    """
    said = SimpleNamespace(single=True, served=[])
    values: dict[str, dict[str, Any]] = {
        ours.INTERFACE: {"SpecWorkerBase": SpecWorkerBase, ours.SEAM: rejection_sampling_one_model},
        ours.PROCESS: {"enable_worker_single_process_for_tp1": lambda: said.single},
    }
    for name in {parent for each in values for parent in (each.rsplit(".", n)[0] for n in range(4))} | values.keys():
        module = ModuleType(name)
        module.__dict__.update(values.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ours, "versions", lambda name: {name: "1.4.0rc1"})
    monkeypatch.setattr("runpy.run_module", lambda name, run_name: said.served.append((name, list(sys.argv))))
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    monkeypatch.setattr(sys, "argv", sys.argv)
    return said
