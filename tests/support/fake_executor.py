"""A fake of `tensorrt_llm.bindings.executor`: the signatures of 1.2.1's, the mock engine's model behind them.

Signatures are repeated from the nanobind sources (`cpp/tensorrt_llm/nanobind/executor/{request,executorConfig,
executor}.cpp`); `RECORDED` has them as text, and a test compares. Behaviour that matters is repeated from the C++: what
is refused, what is silently dropped, what a request with draft tokens answers. Answers come in random order, late.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.mock_engine import PRIME, VOCAB, _spread

BEYOND = 3
"""Logits behind the vocabulary's, of padding: the largest of all, so that nobody may look at them."""

RECORDED = {
    "Request": "(input_token_ids, max_tokens, *, streaming=False, sampling_config=None, output_config=None, "
    "end_id=None, pad_id=None, position_ids=None, bad_words=None, stop_words=None, embedding_bias=None, "
    "external_draft_tokens_config=None, prompt_tuning_config=None, multimodal_input=None, multimodal_embedding=None, "
    "mrope_config=None, lora_config=None, lookahead_config=None, kv_cache_retention_config=None, "
    "logits_post_processor_name=None, logits_post_processor=None, encoder_input_token_ids=None, client_id=None, "
    "return_all_generated_tokens=False, priority=0.5, type=None, context_phase_params=None, "
    "encoder_input_features=None, encoder_output_length=None, cross_attention_mask=None, num_return_sequences=1, "
    "eagle_config=None, skip_cross_attn_blocks=None, guided_decoding_params=None, language_adapter_uid=None, "
    "allotted_time_ms=None, cache_salt_id=None)",
    "SamplingConfig": "(beam_width=1, *, top_k=None, top_p=None, top_p_min=None, top_p_reset_ids=None, "
    "top_p_decay=None, seed=None, temperature=None, min_tokens=None, beam_search_diversity_rate=None, "
    "repetition_penalty=None, presence_penalty=None, frequency_penalty=None, length_penalty=None, early_stopping=None, "
    "no_repeat_ngram_size=None, num_return_sequences=None, min_p=None, beam_width_array=None)",
    "OutputConfig": "(return_log_probs=False, return_context_logits=False, return_generation_logits=False, "
    "exclude_input_from_output=False, return_encoder_output=False, return_perf_metrics=False, "
    "additional_model_outputs=None)",
    "ExternalDraftTokensConfig": "(tokens, logits=None, acceptance_threshold=None, fast_logits=None)",
    "KvCacheConfig": "(enable_block_reuse=True, max_tokens=None, max_attention_window=None, sink_token_length=None, "
    "free_gpu_memory_fraction=None, host_cache_size=None, onboard_blocks=True, cross_kv_cache_fraction=None, "
    "secondary_offload_min_priority=None, event_buffer_max_size=0, *, enable_partial_reuse=True, "
    "copy_on_partial_reuse=True, use_uvm=False, attention_dp_events_gather_period_ms=5, runtime_defaults=None, "
    "max_gpu_total_bytes=0)",
    "ParallelConfig": "(communication_type=None, communication_mode=None, device_ids=None, participant_ids=None, "
    "orchestrator_config=None)",
    "ExtendedRuntimePerfKnobConfig": "(multi_block_mode=True, enable_context_fmha_fp32_acc=False)",
    "ExecutorConfig": "(max_beam_width=1, scheduler_config=None, kv_cache_config=None, enable_chunked_context=False, "
    "normalize_log_probs=True, iter_stats_max_iterations=1000, request_stats_max_iterations=0, batching_type=None, "
    "max_batch_size=None, max_num_tokens=None, parallel_config=None, peft_cache_config=None, "
    "logits_post_processor_config=None, decoding_config=None, use_gpu_direct_storage=False, gpu_weights_percent=1.0, "
    "max_queue_size=None, extended_runtime_perf_knob_config=None, debug_config=None, recv_poll_period_ms=0, "
    "max_seq_idle_microseconds=180000000, spec_dec_config=None, guided_decoding_config=None, "
    "additional_model_outputs=None, cache_transceiver_config=None, gather_generation_logits=False, "
    "mm_embedding_offloading=False, enable_trt_overlap=False, fail_fast_on_attention_window_too_large=False)",
    "Executor": "(model_path, model_type, executor_config)",
    "Executor.enqueue_request": "(self, request)",
    "Executor.enqueue_requests": "(self, requests)",
    "Executor.await_responses": "(self, timeout=None)",
    "Executor.cancel_request": "(self, id=None)",
    "Executor.can_enqueue_requests": "(self)",
    "Executor.get_num_responses_ready": "(self, id=None)",
    "Executor.shutdown": "(self)",
}
"""By name. Defaults that are objects there are None; await_responses has further overloads, by `id` and by `ids`."""


def _record(name: str, signature: str) -> Any:
    """A class that keeps its arguments as attributes, of exactly this signature."""
    source = f"def __init__{signature.replace('(', '(self, ', 1)}:\n    keep(self, locals())"

    def keep(record: Any, values: dict[str, Any]) -> None:
        record.__dict__.update({name: value for name, value in values.items() if name != "self"})

    scope: dict[str, Any] = {"keep": keep}
    exec(source, scope)
    return type(name, (), {"__init__": scope["__init__"]})


Request, SamplingConfig, OutputConfig, ExternalDraftTokensConfig, KvCacheConfig, ParallelConfig, ExecutorConfig = (
    _record(name, RECORDED[name])
    for name in (
        "Request",
        "SamplingConfig",
        "OutputConfig",
        "ExternalDraftTokensConfig",
        "KvCacheConfig",
        "ParallelConfig",
        "ExecutorConfig",
    )
)


class ExtendedRuntimePerfKnobConfig:
    """The graph switches are properties, not arguments; nothing else may be set."""

    __slots__ = ("cuda_graph_cache_size", "cuda_graph_mode", "enable_context_fmha_fp32_acc", "multi_block_mode")

    def __init__(self, multi_block_mode: bool = True, enable_context_fmha_fp32_acc: bool = False) -> None:
        self.multi_block_mode, self.enable_context_fmha_fp32_acc = multi_block_mode, enable_context_fmha_fp32_acc
        self.cuda_graph_mode, self.cuda_graph_cache_size = False, 0


class ModelType(Enum):
    DECODER_ONLY = 0


class CommunicationMode(Enum):
    LEADER = 0
    ORCHESTRATOR = 1


class OrchestratorConfig:
    def __init__(self, is_orchestrator: bool = True, worker_executable_path: str = "") -> None:
        self.is_orchestrator, self.worker_executable_path = is_orchestrator, worker_executable_path


@dataclass
class Result:
    is_final: bool
    output_token_ids: list[list[int]]
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    generation_logits: Tensor | None = None
    sequence_index: int = 0
    is_sequence_final: bool = True


@dataclass
class Response:
    request_id: int
    result: Result | None
    error_msg: str = ""

    def has_error(self) -> bool:
        return self.result is None


def mock_logits(tokens: list[int], noise: float) -> Tensor:
    """The mock engine's logits after `tokens`: float32 [V]."""
    token, position = torch.tensor(tokens), torch.arange(len(tokens))
    mixed = ((token + 1) * 7919 + (position + 1) * 104_729 + (token + 3) * (position + 5) * 31) % PRIME
    hashed, vocab = (mixed.sum() % PRIME).view(1, 1), torch.arange(VOCAB) + 1
    return (_spread(hashed, vocab, 1) + noise * _spread(hashed, vocab, 2))[0, 0]


def torch_model(folder: Path) -> Callable[[list[int]], Tensor]:
    """Logits of a checkpoint after some tokens: float32 [V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @cache
    def run(tokens: tuple[int, ...]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([tokens])).logits[0, -1]
            return logits

    return lambda tokens: run(tuple(tokens))


@dataclass(frozen=True)
class Limits:
    """What an engine was built with; `model` takes the mock's place."""

    noise: float = 0.0
    model: Callable[[list[int]], Tensor] | None = None
    max_input_len: int = 512
    max_seq_len: int = 512
    max_draft_len: int = 0
    max_beam_width: int = 1


ENGINES: dict[str, Limits] = {}
"""Engines that `Executor` can open, by path."""


class Executor:
    """Answers with the mock engine's model.

    Attributes:
        chance: when answers come.
        faults: what the next requests meet: an error, logits that are not numbers, or None for nothing.
        slow: requests whose text begins with these tokens wait as many calls.
        enqueued, waited, cancelled: counts.
    """

    made: ClassVar[list[Executor]] = []

    def __init__(self, model_path: Path, model_type: ModelType, executor_config: Any) -> None:
        self.limits, self.config = ENGINES[str(model_path)], executor_config
        assert model_type is ModelType.DECODER_ONLY
        assert executor_config.max_beam_width <= self.limits.max_beam_width
        if self.limits.max_draft_len:
            assert executor_config.kv_cache_config.enable_block_reuse, "must be on for a speculative decoding target"
        self.chance = random.Random(0)
        self.faults: list[str | None] = []
        self.slow: tuple[tuple[int, ...], int] | None = None
        self.counts: Counter[str] = Counter()
        self.largest = 0
        self._last = 0
        self._open: dict[int, tuple[Any, int]] = {}
        Executor.made.append(self)

    def enqueue_request(self, request: Any) -> int:
        self._last += 1
        wait = self.chance.choice([0, 0, 0, 1, 3])
        if self.slow and tuple(request.input_token_ids[: len(self.slow[0])]) == self.slow[0]:
            wait = self.slow[1]
        self._open[self._last] = request, wait
        self.counts["enqueued"] += 1
        self.largest = max(self.largest, len(self._open))
        return self._last

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        assert timeout is None or isinstance(timeout, timedelta)
        self.counts["waited"] += 1
        ready = [number for number, (_, wait) in self._open.items() if wait <= 0]
        self._open = {number: (request, wait - 1) for number, (request, wait) in self._open.items()}
        self.chance.shuffle(ready)
        found: list[Response] = []
        for number in ready:
            found += self._answer(number, self._open.pop(number)[0])
        return found

    def cancel_request(self, id: int | None = None) -> None:
        assert id is not None
        request = self._open.pop(id, (None,))[0]
        if request is not None:
            self.counts["cancelled"] += 1
            # it ends with what it has
            self._open[-id] = request, 0

    def can_enqueue_requests(self) -> bool:
        return True

    def get_num_responses_ready(self, id: int | None = None) -> int:
        return sum(wait <= 0 for _, wait in self._open.values())

    def shutdown(self) -> None:
        self._open.clear()

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits after `tokens`: float32 [V]."""
        return self.limits.model(tokens) if self.limits.model else mock_logits(tokens, self.limits.noise)

    def _answer(self, number: int, request: Any) -> list[Response]:
        if number < 0:
            return [Response(-number, Result(True, [[]]))]
        fault = self.faults.pop() if self.faults else None
        limits, sampling, output = self.limits, request.sampling_config, request.output_config
        prompt, draft = list(request.input_token_ids), []
        if fault == "error":
            return [Response(number, None, "injected")]
        if len(prompt) > limits.max_input_len:
            return [Response(number, None, "prompt length exceeds maximum input length")]
        if request.external_draft_tokens_config is not None:
            draft = list(request.external_draft_tokens_config.tokens)
            assert draft, "draft tokens must not be empty"
            if len(draft) > limits.max_draft_len:
                return [Response(number, None, "draft tokens length exceeds maximum draft tokens")]
            draft = draft[: limits.max_input_len - len(prompt)]  # truncated, with a warning in a log
            assert sampling.beam_width == 1
        if sampling.beam_width > self.config.max_beam_width:
            return [Response(number, None, "beam width exceeds maximum")]
        if output.return_generation_logits and not self.config.gather_generation_logits:
            return [Response(number, None, "gather_generation_logits must be enabled in ExecutorConfig")]
        assert output.exclude_input_from_output
        assert request.end_id == -1
        if request.external_draft_tokens_config is not None:
            return [Response(number, self._verified(prompt, draft, fault))]
        if sampling.beam_width > 1 or output.return_log_probs:
            assert not self.config.normalize_log_probs
            return [Response(number, self._searched(prompt, request.max_tokens, sampling.beam_width))]
        count = sampling.num_return_sequences or 1
        made = [self._sampled(prompt, request, index, fault) for index in range(count)]
        made[-1].is_final = True
        return [Response(number, result) for result in made]

    def _verified(self, prompt: list[int], draft: list[int], fault: str | None) -> Result:
        """One pass over the draft; all its logits, and the tokens that greedy comparison would keep."""
        rows = torch.stack([self.logits([*prompt, *draft[:count]]) for count in range(len(draft) + 1)])
        tokens: list[int] = []
        for row, token in zip(rows, [*draft, -1], strict=True):
            tokens.append(int(row.argmax()))
            if tokens[-1] != token:
                break
        return Result(True, [tokens], generation_logits=self._padded(rows, fault))

    def _searched(self, prompt: list[int], steps: int, width: int) -> Result:
        beams: list[tuple[list[int], list[float]]] = [([], [])]
        for _ in range(steps):
            grown = []
            for tokens, each in beams:
                log_probs = self.logits([*prompt, *tokens]).log_softmax(-1).tolist()
                grown += [([*tokens, token], [*each, value]) for token, value in enumerate(log_probs)]
            beams = sorted(grown, key=lambda beam: -sum(beam[1]))[:width]
        log_probs = [each for _, each in beams]
        return Result(True, [tokens for tokens, _ in beams], [sum(each) for each in log_probs], log_probs)

    def _sampled(self, prompt: list[int], request: Any, index: int, fault: str | None) -> Result:
        sampling, tokens = request.sampling_config, list[int]()
        rows: list[Tensor] = []
        generator = torch.Generator().manual_seed((sampling.seed or 0) * 1000 + index)
        for _ in range(request.max_tokens):
            rows.append(self.logits([*prompt, *tokens]))
            values = rows[-1] / (sampling.temperature or 1.0)
            if sampling.top_k:
                values = values.masked_fill(
                    values < values.topk(min(sampling.top_k, len(values))).values[-1], -torch.inf
                )
            weights, order = values.softmax(-1).sort(descending=True)
            if sampling.top_p is not None:
                weights = weights.masked_fill(weights.cumsum(-1) - weights >= sampling.top_p, 0)
            tokens.append(int(order[int(torch.multinomial(weights, 1, generator=generator))]))
        return Result(False, [tokens], generation_logits=self._padded(torch.stack(rows), fault), sequence_index=index)

    @staticmethod
    def _padded(rows: Tensor, fault: str | None) -> Tensor:
        beyond = torch.full((len(rows), BEYOND), 99.0)
        if fault == "nan":
            rows = torch.full_like(rows, torch.nan)
        return torch.cat([rows, beyond], 1)[None]
