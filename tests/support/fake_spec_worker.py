"""A fake of the seam in TensorRT-LLM 1.4 where drafts are accepted, on a CPU.

Names, parameters and layouts are repeated from `tensorrt_llm/_torch/speculative/interface.py` (SpecWorkerBase,
SpecMetadata) and `draft_target.py` (DraftTargetOneModelWorker) of September 2026; kernels are a few lines
of torch.
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
    _d2t: Tensor | None = None

    def _accept_draft_tokens(
        self, logits: Tensor, draft_tokens: Tensor, num_contexts: int, batch_size: int, spec_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        return STRICT

    def _apply_occurrence_penalties(
        self, logits: Tensor, draft_tokens: Tensor, num_contexts: int, batch_size: int, spec_metadata: Any
    ) -> Tensor:
        penalised: Tensor = torch.arange(logits.shape[1]) == spec_metadata.penalised
        return logits - 100.0 * penalised

    def _commit_occurrence_counts(
        self, accepted: tuple[Tensor, Tensor], batch_size: int, spec_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        spec_metadata.committed += int(accepted[1].sum())
        return accepted

    def _can_use_rejection_sampling(self, spec_metadata: Any) -> bool:
        return bool(spec_metadata.use_rejection_sampling and not spec_metadata.is_all_greedy_sample)

    def _sample_tokens_for_batch(
        self, logits: Tensor, spec_metadata: Any, num_contexts: int, batch_size: int
    ) -> Tensor:
        return logits.argmax(-1)


class DraftTargetOneModelWorker(SpecWorkerBase):
    def __init__(self, spec_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False) -> None:
        self.spec_config, self.mapping = spec_config, mapping


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules that are used, with fakes in them."""
    built = SimpleNamespace(single=True)

    class Config:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

    class LLM(Config):
        def __init__(self, speculative_config: Any, **values: Any) -> None:
            super().__init__(speculative_config=speculative_config, **values)
            self.worker = sys.modules[ours.UTILS].get_spec_worker(speculative_config, None)

    def get_spec_worker(spec_config: Any, mapping: Any) -> Any:
        return sys.modules[ours.UTILS].DraftTargetOneModelWorker(spec_config, mapping)

    values: dict[str, dict[str, Any]] = {
        ours.INTERFACE: globals(),
        ours.UTILS: {
            "get_spec_worker": get_spec_worker,
            "DraftTargetOneModelWorker": DraftTargetOneModelWorker,
        },
        ours.API: {"LLM": LLM, "DraftTargetDecodingConfig": Config},
        ours.PROCESS: {"enable_worker_single_process_for_tp1": lambda: built.single},
    }
    for name in {parent for each in values for parent in (each.rsplit(".", n)[0] for n in range(4))} | values.keys():
        module = ModuleType(name)
        module.__dict__.update({key: value for key, value in values.get(name, {}).items() if key[:2] != "__"})
        monkeypatch.setitem(sys.modules, name, module)
    return built
