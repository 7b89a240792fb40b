"""A fake of the seam in TensorRT-LLM 1.4 where drafts are accepted, on a CPU.

Names, parameters, layouts and what is refused are repeated from `tensorrt_llm/_torch/speculative/interface.py`
(SpecWorkerBase, SpecMetadata) and `draft_target.py` (DraftTargetOneModelWorker) of September 2026; a kernel of the
library is a few lines of torch. `Loop` drives a worker as the library's executor does.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.tensorrt_llm import worker as ours
from tests.support.mock_engine import VOCAB, mock_logits


def spec_compute_probs_from_logits(
    advanced_sampling_mode: str, logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """`_torch/pyexecutor/sampler/ops/spec_dispatch.py`: the filtered distribution of each row."""
    values, ids = (logits.float() / temperatures[:, None]).sort(descending=True)
    values = values.masked_fill(torch.arange(values.shape[1]) >= top_ks[:, None], -torch.inf)
    p = values.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_ps[:, None], 0)
    return torch.zeros_like(p).scatter(1, ids, p / p.sum(-1, keepdim=True))


def draw(p: Tensor, seeds: Tensor, offsets: Tensor) -> Tensor:
    """One token per row, by its own seed and offset."""
    drawn = []
    for row, seed, offset in zip(p, seeds.tolist(), offsets.tolist(), strict=True):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + offset)
        drawn.append(int(torch.multinomial(row, 1, generator=generator)))
    return torch.tensor(drawn)


class SpecWorkerBase:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "forward" in cls.__dict__:
            raise TypeError(f"{cls.__name__} must not override SpecWorkerBase.forward")

    def __init__(self) -> None:
        self._d2t: Tensor | None = None

    def sample_and_accept_draft_tokens(
        self, logits: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        draft_tokens = spec_metadata.draft_tokens.reshape(batch_size - num_contexts, spec_metadata.runtime_draft_len)
        return self._accept_draft_tokens(logits, draft_tokens, num_contexts, batch_size, spec_metadata)

    def _accept_draft_tokens(
        self, logits: Tensor, draft_tokens: Tensor, num_contexts: int, batch_size: int, spec_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """Strict acceptance, `_sample_and_accept_draft_tokens_base`; the rejection kernel is not repeated."""
        spec_metadata.strict += 1
        length = draft_tokens.shape[-1]
        sampled = self._sample_tokens_for_batch(logits, spec_metadata, num_contexts, batch_size)
        tokens = torch.empty((batch_size, length + 1), dtype=torch.int)
        counts = torch.ones(batch_size, dtype=torch.int)
        tokens[:num_contexts, 0] = sampled[:num_contexts].int()
        own = sampled[num_contexts:].reshape(batch_size - num_contexts, length + 1)
        tokens[num_contexts:] = own.int()
        counts[num_contexts:] += torch.cumprod((draft_tokens == own[:, :length]).int(), dim=-1).sum(1)
        return self._commit_occurrence_counts((tokens, counts), batch_size, spec_metadata)

    def _apply_occurrence_penalties(
        self, logits: Tensor, draft_tokens: Tensor, num_contexts: int, batch_size: int, spec_metadata: Any
    ) -> Tensor:
        penalised: Tensor = torch.arange(VOCAB) == spec_metadata.penalised
        return logits.clone() - 100.0 * penalised

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
        if spec_metadata.is_all_greedy_sample:
            return logits.argmax(-1)
        meta, rows = spec_metadata, slice(0, len(logits))
        filters = meta.temperatures[rows], meta.top_ks[rows], meta.top_ps[rows], meta.min_ps[rows]
        p = spec_compute_probs_from_logits(meta.advanced_sampling_mode, logits, *filters)
        return draw(p, meta.seeds[rows], meta.offsets[rows])


class DraftTargetOneModelWorker(SpecWorkerBase):
    def __init__(self, spec_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False) -> None:
        super().__init__()
        self.spec_config, self.mapping = spec_config, mapping


@dataclass
class Request:
    """A request of the library: its slot, sampling parameters, and how often it has drawn."""

    slot: int
    tokens: list[int]
    new: int
    temperature: float = 1.0
    top_k: int = 2**31 - 1
    top_p: float = 1.0
    seed: int = 42
    draft: list[int] | None = None
    windows: int = 0
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = len(self.tokens) + self.new


class Loop:
    """Context requests first, then those that generate; drafts for all that go on; slots stay, places change."""

    def __init__(self, worker: Any, draft_len: int, slots: int, penalised: int = -1) -> None:
        self.worker, self.draft_len, self.chance = worker, draft_len, random.Random(0)
        self.draft_probs = torch.full((slots + 1, draft_len, VOCAB), torch.nan)
        self.meta = SimpleNamespace(strict=0, committed=0, penalised=penalised, use_rejection_sampling=True)

    def run(self, *requests: Request) -> None:
        waiting, running = list(requests), list[Request]()
        while waiting or running:
            begun = [waiting.pop(0) for _ in range(min(len(waiting), self.chance.choice([1, 2])))]
            self.chance.shuffle(running)
            self._step(begun, running)
            running = [request for request in [*begun, *running] if len(request.tokens) < request.end]

    def _step(self, begun: list[Request], running: list[Request]) -> None:
        batch, count, meta = [*begun, *running], 1 + self.draft_len, self.meta
        drafts = [request.draft or [] for request in running]
        rows = [mock_logits(request.tokens, 0.0) for request in begun]
        for request, draft in zip(running, drafts, strict=True):
            rows += [mock_logits([*request.tokens, *draft[:at]], 0.0) for at in range(count)]

        def column(values: list[Any], each: bool, dtype: torch.dtype = torch.float32) -> Tensor:
            many = [1] * len(begun) + [count] * len(running) if each else [1] * len(batch)
            return torch.tensor([v for v, n in zip(values, many, strict=True) for _ in range(n)], dtype=dtype)

        offsets = [request.windows * count for request in batch]
        meta.is_all_greedy_sample = all(request.temperature == 0 for request in batch)
        meta.advanced_sampling_mode, meta.runtime_draft_len = "full", self.draft_len
        meta.draft_tokens = torch.tensor(drafts, dtype=torch.int32).flatten()
        meta.temperatures = column([request.temperature or 1e-3 for request in batch], True)
        meta.top_ks, meta.top_ps = column([r.top_k for r in batch], True), column([r.top_p for r in batch], True)
        meta.min_ps = torch.zeros_like(meta.top_ps)
        meta.seeds, meta.offsets = (column(v, True, torch.int64) for v in ([r.seed for r in batch], offsets))
        meta.request_seeds = column([request.seed for request in batch], False, torch.int64)
        meta.request_offsets = column(offsets, False, torch.int64)
        meta.batch_slot_ids = column([request.slot for request in batch], False, torch.int64)
        meta.draft_probs = self.draft_probs
        state = SimpleNamespace(num_seqs=len(batch), num_contexts=len(begun))
        tokens, counts = self.worker.sample_and_accept_draft_tokens(torch.stack(rows), state, meta)
        assert tokens.dtype == counts.dtype == torch.int32
        assert tokens.shape == (len(batch), count)
        for at, request in enumerate(batch):
            kept = tokens[at, : int(counts[at])].tolist()
            assert at >= len(begun) or len(kept) == 1
            assert all(0 <= token < VOCAB for token in kept)
            assert kept[:-1] == (request.draft or [])[: len(kept) - 1], "what is kept was drafted"
            request.accepted += [] if at < len(begun) else [len(kept) - 1]
            request.tokens += kept
        self._draft(batch, offsets)

    def _draft(self, batch: list[Request], offsets: list[int]) -> None:
        """`advanced_sample_draft`: each token's distribution is kept under the request's slot."""
        for request, offset in zip(batch, offsets, strict=True):
            request.draft, request.windows = [], request.windows + 1
            for step in range(self.draft_len):
                logits = mock_logits([*request.tokens, *request.draft], 0.3)[None]
                values = request.temperature or 1e-3, request.top_k, request.top_p
                heat, top_k, top_p = (torch.tensor([value]) for value in values)
                p = spec_compute_probs_from_logits("full", logits, heat, top_k, top_p, torch.zeros(1))
                self.draft_probs[request.slot, step] = p[0]
                request.draft += draw(p, torch.tensor([request.seed]), torch.tensor([offset + 1 + step])).tolist()


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
