"""A fake of `tensorrt_llm.bindings.executor`, as unkind as the library: signatures and behaviour of 1.2's C++ sources.

Signatures are repeated from the nanobind sources (`cpp/tensorrt_llm/nanobind/executor/{request,executorConfig,
executor}.cpp`); `RECORDED` has them as text, and a test compares. Each behaviour names its file below
`cpp/tensorrt_llm/`, of commit b35ac1b (1.2.0rc2) or of its time. Answers come in random order, late.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.folder import write_json
from engines.prefix_cache import common_prefix
from engines.tensorrt_llm_spec import ExecutorSpec, write_executor_spec
from export.tensorrt_llm.build import ExecutorPairPlan
from tests.support.mock_engine import PRIME, VOCAB, _spread

BLOCK = 32
"""Tokens of a block of keys and values."""
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


@lru_cache(100_000)
def _mock(tokens: tuple[int, ...], noise: float) -> Tensor:
    token, position = torch.tensor(tokens), torch.arange(len(tokens))
    mixed = ((token + 1) * 7919 + (position + 1) * 104_729 + (token + 3) * (position + 5) * 31) % PRIME
    hashed, vocab = (mixed.sum() % PRIME).view(1, 1), torch.arange(VOCAB) + 1
    return (_spread(hashed, vocab, 1) + noise * _spread(hashed, vocab, 2))[0, 0]


def mock_logits(tokens: list[int], noise: float) -> Tensor:
    """The mock engine's logits after `tokens`: float32 [V]."""
    return _mock(tuple(tokens), noise)


@cache
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
    max_seq_len: int = 1024
    max_draft_len: int = 0
    max_beam_width: int = 1
    padded: int = VOCAB


ENGINES: dict[str, Limits] = {}
"""Engines that `Executor` can open, by path."""


def limits(spec: ExecutorSpec, **changes: Any) -> Limits:
    """What the fake is told of an engine: as `export.tensorrt_llm.engine_plan` has it built."""
    longest = spec.capacity + spec.max_draft_len + 1
    built = Limits(0.0, None, spec.capacity, longest, spec.max_draft_len, spec.max_beam_width, VOCAB + BEYOND)
    return replace(built, **changes)


def write_fake_pair(plan: ExecutorPairPlan, folder: Path) -> None:
    """What `build_pair` leaves, of engines that the fake runs with the checkpoints' weights."""
    for each in plan.engines.values():
        spec = each.spec
        (folder / spec.role).mkdir(parents=True)
        for name in ("config.json", "rank0.engine"):
            (folder / spec.role / name).write_text("{}")
        each.checkpoint.tokenizer().save_pretrained(folder / spec.role)
        write_executor_spec(folder / spec.role, spec)
        model = torch_model(each.checkpoint.folder)
        ENGINES[str(folder / spec.role)] = limits(spec, model=model, padded=spec.padded_vocab_size)
    write_json(folder / "pair.json", plan.description)


@dataclass
class _Active:
    """A request that waits or runs."""

    number: int
    request: Any
    prompt: list[int]
    draft: list[int]
    new: int
    logits: Tensor | None = None
    threshold: float | None = None

    @property
    def width(self) -> int:
        return int(self.request.sampling_config.beam_width)


@dataclass
class Blocks:
    """Keys and values that are kept: by token, in blocks (batch_manager/kvCacheManager.cpp, kvCacheManager.h)."""

    kept: dict[tuple[int, ...], set[tuple[int, ...]]] = field(default_factory=dict)

    def reused(self, prompt: list[int]) -> int:
        """Tokens of a prompt that need not be computed: whole blocks, then what a further one has in common."""
        at = 0
        while (inside := self.kept.get(tuple(prompt[:at]))) is not None:
            rest = prompt[at : at + BLOCK]
            if tuple(rest) in inside and len(rest) == BLOCK:
                at += BLOCK
                continue
            at += max(common_prefix(rest, kept) for kept in inside)
            break
        return min(at, len(prompt) - 1)

    def store(self, tokens: list[int]) -> None:
        for at in range(0, len(tokens), BLOCK):
            self.kept.setdefault(tuple(tokens[:at]), set()).add(tuple(tokens[at : at + BLOCK]))


class Executor:
    """Answers with the mock engine's model, one iteration per `await_responses`.

    Attributes:
        chance: when answers come.
        faults: what the next requests meet: an error, logits that are not numbers, or None for nothing.
        counts: of requests, of tokens `computed`, of drafted tokens `discarded`, of `corrupt` beams.
        iterations: requests of each iteration.
    """

    made: ClassVar[list[Executor]] = []

    def __init__(self, model_path: Path, model_type: ModelType, executor_config: Any) -> None:
        self.limits, self.config = ENGINES[str(model_path)], executor_config
        assert model_type is ModelType.DECODER_ONLY
        assert executor_config.max_beam_width <= self.limits.max_beam_width
        if self.limits.max_draft_len:
            assert executor_config.kv_cache_config.enable_block_reuse, "must be on for a speculative decoding target"
        if not executor_config.enable_chunked_context:  # microBatchScheduler.cpp: its constructor
            assert self.limits.max_input_len <= executor_config.max_num_tokens
        self.chance = random.Random(0)
        self.faults: list[str | None] = []
        self.counts: Counter[str] = Counter()
        self.iterations: list[int] = []
        self.blocks: defaultdict[int | None, Blocks] = defaultdict(Blocks)
        self._last = self._told = 0
        self._active: list[_Active] = []
        self._late: list[tuple[int, Response]] = []
        self._width, self._buffers = executor_config.max_beam_width, 0
        self._graphs: dict[int, int] = {}
        Executor.made.append(self)

    @property
    def idle(self) -> bool:
        return not self._active

    def enqueue_request(self, request: Any) -> int:
        """Checks of batch_manager/llmRequest.h: validate, and executor/executorImpl.cpp."""
        self._last += 1
        self.counts["enqueued"] += 1
        limits, sampling, output = self.limits, request.sampling_config, request.output_config
        prompt, external = list(request.input_token_ids), request.external_draft_tokens_config
        active = _Active(self._last, request, prompt, [], request.max_tokens)
        assert request.end_id == -1
        assert output.exclude_input_from_output
        problem = None
        if external is not None:
            active.draft, active.logits, active.threshold = (
                list(external.tokens),
                external.logits,
                external.acceptance_threshold,
            )
            # executor/externalDraftTokensConfig.cpp
            assert active.draft
            assert active.threshold is None or 0 < active.threshold <= 1
            assert active.logits is None or active.logits.shape[0] == len(active.draft)
            assert sampling.beam_width == 1
            if len(active.draft) > limits.max_draft_len:
                problem = "draft tokens length exceeds maximum draft tokens length"
            active.draft = active.draft[: max(0, limits.max_input_len - len(prompt))]  # a warning in its log
        if len(prompt) > limits.max_input_len:
            problem = "prompt length exceeds maximum input length"
        if sampling.beam_width > self.config.max_beam_width:
            problem = "beam width exceeds maximum"
        if output.return_generation_logits and not self.config.gather_generation_logits:
            problem = "gather_generation_logits must be enabled in ExecutorConfig"
        step = len(active.draft) or limits.max_draft_len
        active.new = min(active.new, limits.max_seq_len - len(prompt) - step)
        if problem:
            self._late.append((0, Response(self._last, None, problem)))
        else:
            self._active.append(active)
        return self._last

    def enqueue_requests(self, requests: list[Any]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def await_responses(self, timeout: timedelta | None = None) -> list[Response]:
        assert timeout is None or isinstance(timeout, timedelta)
        if batch := self._schedule():
            self._active = [active for active in self._active if active not in batch]
            self.iterations.append(len(batch))
            corrupt = self._corrupts(batch)
            # batch_manager/createNewDecoderRequests.cpp: one threshold per batch, that of its last request
            threshold = batch[-1].threshold or self.chance.random()
            for active in batch:
                self._late.append((self.chance.choice([0, 0, 1]), self._run(active, threshold, corrupt)))
        ready = [response for wait, response in self._late if wait <= 0]
        self._late = [(wait - 1, response) for wait, response in self._late if wait > 0]
        self.chance.shuffle(ready)
        return ready

    def cancel_request(self, id: int | None = None) -> None:
        assert id is not None
        self.counts["cancelled"] += 1
        if any(active.number == id for active in self._active):
            self._active = [active for active in self._active if active.number != id]
            self._late.append((0, Response(id, Result(True, [[]]))))  # it ends with what it has

    def can_enqueue_requests(self) -> bool:
        return True

    def get_num_responses_ready(self, id: int | None = None) -> int:
        return sum(wait <= 0 for wait, _ in self._late)

    def get_latest_iteration_stats(self) -> list[SimpleNamespace]:
        found, self._told = self.iterations[self._told :], len(self.iterations)
        return [SimpleNamespace(inflight_batching_stats=SimpleNamespace(num_context_requests=n)) for n in found]

    def shutdown(self) -> None:
        self._active.clear()

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits after `tokens`: float32 [V]."""
        return self.limits.model(tokens) if self.limits.model else mock_logits(tokens, self.limits.noise)

    def _schedule(self) -> list[_Active]:
        """The next iteration. Whole texts are charged, not what lies behind the part that is reused.

        Tokens: batch_manager/microBatchScheduler.cpp. Blocks: batch_manager/capacityScheduler.cpp (GUARANTEED_NO_EVICT)
        with kvCacheManager.cpp: getRemainingBlocksToCompletion.
        """
        batch: list[_Active] = []
        tokens, blocks, most = 0, 0, self.config.max_num_tokens
        free = (self.config.kv_cache_config.max_tokens or 2**30) // BLOCK
        for active in self._active:
            if len(batch) == self.config.max_batch_size:
                break
            if batch and batch[0].width != active.width:
                continue
            needed = len(active.prompt) // BLOCK
            needed += active.width * (-(-(len(active.prompt) + active.new) // BLOCK) - needed)
            cost = len(active.prompt) + len(active.draft)
            chunked = self.config.enable_chunked_context
            if blocks + needed > free or (not chunked and tokens + cost > most):
                break
            batch, tokens, blocks = [*batch, active], tokens + cost, blocks + needed
        assert batch or not self._active, "a request that is never scheduled"
        if tokens > most:  # microBatchScheduler.cpp: fitDraftTokens; only with chunked context
            for active in batch:
                room = -len(active.prompt) % BLOCK
                self.counts["discarded"] += max(0, len(active.draft) - room)
                active.draft = active.draft[:room]
        return batch

    def _corrupts(self, batch: list[_Active]) -> bool:
        """Whether generation steps replay a graph of buffers that are gone.

        batch_manager/trtGptModelInflightBatching.cpp: changeBeamWidth makes new buffers and keeps the graphs.
        """
        if batch[0].width != self._width:
            self._width, self._buffers = batch[0].width, self._buffers + 1
        knobs = self.config.extended_runtime_perf_knob_config
        if not knobs.cuda_graph_mode or all(active.new == 1 for active in batch):
            return False
        while len(self._graphs) >= max(1, knobs.cuda_graph_cache_size) and self._width not in self._graphs:
            del self._graphs[next(iter(self._graphs))]
        return self._graphs.setdefault(self._width, self._buffers) != self._buffers

    def _run(self, active: _Active, threshold: float, corrupt: bool) -> Response:
        fault = self.faults.pop() if self.faults else None
        if fault == "error":
            return Response(active.number, None, "injected")
        blocks = self.blocks[active.request.cache_salt_id]
        self.counts["computed"] += len(active.prompt) - blocks.reused(active.prompt) + len(active.draft)
        if active.draft:
            tokens, rows = self._verified(active, threshold)
            result = Result(True, [tokens], generation_logits=self._returned(rows, 1, fault))
        elif active.request.output_config.return_log_probs:
            assert not self.config.normalize_log_probs
            result = self._searched(active, corrupt)
        else:
            tokens = []
            for _ in range(active.new):  # also in place of a draft that was discarded
                tokens.append(int(self.logits([*active.prompt, *tokens]).argmax()))
            rows = [self.logits([*active.prompt, *tokens[:at]]) for at in range(active.new)]
            result = Result(True, [tokens] * active.width, generation_logits=self._returned(rows, active.width, fault))
        # kvCacheManager.cpp: storeBlocksForReuse; of several beams, whole blocks of the prompt only
        text = [*active.prompt, *result.output_token_ids[0]][:-1]
        blocks.store(text if active.width == 1 else active.prompt[: len(active.prompt) // BLOCK * BLOCK])
        return Response(active.number, result)

    def _verified(self, active: _Active, threshold: float) -> tuple[list[int], list[Tensor]]:
        """The tokens that the library accepts, its own behind them, and the logits of these.

        kernels/speculativeDecoding/externalDraftTokensKernels.cu; layers/externalDraftTokensLayer.cpp has the filter.
        Only accepted rows are returned: trtGptModelInflightBatching.cpp, updateRequests.
        """
        rows = [self.logits([*active.prompt, *active.draft[:count]]) for count in range(len(active.draft) + 1)]
        if active.logits is not None:  # runtime/bufferManager.cpp: copy
            assert active.logits.dtype == torch.float32
            assert active.logits.shape[1] == self.limits.padded
        tokens: list[int] = []
        for at, row in enumerate(rows):
            p = self._filtered(row, active.request.sampling_config)
            rest = p
            if at < len(active.draft):
                token = active.draft[at]
                if active.logits is None:
                    accepted = int(p.argmax()) == token
                else:
                    q = active.logits[at].softmax(-1)[: len(p)]
                    accepted = not bool(p[token] / q[token] < threshold)
                    rest = (p - q).clamp(min=0)
                if accepted:
                    tokens.append(token)
                    continue
            tokens.append(int(rest.argmax()))
            break
        tokens = tokens[: active.new]
        return tokens, rows[: len(tokens)]

    @staticmethod
    def _filtered(row: Tensor, sampling: Any) -> Tensor:
        """kernels/samplingTopKKernels.h: regularizeTopKTopP. Neither given keeps the likeliest token alone."""
        top_p = sampling.top_p or 0.0
        top_k = sampling.top_k or (0 if top_p else 1)
        p, order = row.softmax(-1).sort(descending=True)
        kept = p.cumsum(-1) - p < (top_p or 1.0)
        if top_k:
            kept &= torch.arange(len(p)) < top_k
        kept = torch.zeros_like(kept).scatter(0, order, kept)
        return row.masked_fill(~kept, -torch.inf).softmax(-1)

    def _searched(self, active: _Active, corrupt: bool) -> Result:
        beams: list[tuple[list[int], list[float]]] = [([], [])]
        for _ in range(active.new):
            grown = []
            for tokens, each in beams:
                log_probs = self.logits([*active.prompt, *tokens]).log_softmax(-1)
                if corrupt:
                    self.counts["corrupt"] += 1
                    log_probs = log_probs.flip(0)
                grown += [([*tokens, token], [*each, value]) for token, value in enumerate(log_probs.tolist())]
            beams = sorted(grown, key=lambda beam: -sum(beam[1]))[: active.width]
        own = [each for _, each in beams]
        return Result(True, [tokens for tokens, _ in beams], [sum(each) for each in own], own)

    def _returned(self, rows: list[Tensor], width: int, fault: str | None) -> Tensor:
        """batch_manager/handleContextLogits.cpp: the same rows for each beam; padded ids are the largest of all."""
        stacked = torch.stack(rows)
        if fault == "nan":
            stacked = torch.full_like(stacked, torch.nan)
        beyond = torch.full((len(rows), BEYOND), 99.0)
        return torch.cat([stacked, beyond], 1)[None].expand(width, -1, -1)
