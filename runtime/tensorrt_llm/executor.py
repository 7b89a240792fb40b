"""One executor of TensorRT-LLM, and what is asked of it. Not executed with the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engines.tensorrt_llm_spec import ExecutorSpec

NO_END = -1
"""End id of a request that no token ends: ends are the runtime's own affair."""


@dataclass(frozen=True)
class Logits:
    """Logits after `tokens` and after each of `draft`, in one forward pass: `Answer.logits` [1, 1 + len(draft), V]."""

    tokens: Sequence[int]
    draft: Sequence[int] = ()


@dataclass(frozen=True)
class Search:
    """Deterministic beam search behind `tokens`: `steps` tokens of `width` beams, likeliest first."""

    tokens: Sequence[int]
    steps: int
    width: int


@dataclass(frozen=True)
class Samples:
    """`count` independent continuations of `tokens`, `steps` tokens each, by the executor's own sampler.

    `temperature` > 0; `top_k` 0 and `top_p` 1 filter nothing.
    """

    tokens: Sequence[int]
    steps: int
    count: int
    temperature: float
    top_k: int
    top_p: float
    seed: int


Ask = Logits | Search | Samples


class Answer(NamedTuple):
    """What an executor answers.

    Attributes:
        tokens: of each sequence, the new ones.
        log_probs: of `Search`: of each of them, the log-probability after those before it, unfiltered; else ().
        logits: float32 [sequences, positions, V], unprocessed; of `Search`: [0, 0, V].
    """

    tokens: list[list[int]]
    log_probs: list[list[float]]
    logits: Tensor


class ExecutorFailed(RuntimeError):
    """An executor could not answer a request."""


class Client:
    """An executor and what it has not answered yet. Owns the numbers of its requests.

    Args:
        executor: a `tensorrt_llm.bindings.executor.Executor`.
        bindings: that module.
        spec: of its engine.
        vocab_size: ids the pair shares; logits beyond, of padded rows, are cut off.
    """

    def __init__(self, executor: Any, bindings: Any, spec: ExecutorSpec, vocab_size: int) -> None:
        self.spec, self.vocab_size = spec, vocab_size
        self._executor, self._bindings = executor, bindings
        self._asked: dict[int, Ask] = {}
        self._parts: dict[int, dict[int, Any]] = {}

    @classmethod
    def open(
        cls,
        folder: Path,
        bindings: Any,
        spec: ExecutorSpec,
        vocab_size: int,
        *,
        memory_fraction: float,
        cuda_graphs: bool = True,
        devices: Sequence[int] | None = None,
        worker: Path | None = None,
    ) -> Client:
        """Load an engine.

        Args:
            folder: the engine folder.
            bindings: `tensorrt_llm.bindings.executor`.
            spec, vocab_size: see `Client`.
            memory_fraction: of the free GPU memory, for keys and values; the two executors share a GPU.
            cuda_graphs: replay generation steps. A target has none (it scores drafts in the context phase).
            devices: GPUs it runs on; None for the first ones.
            worker: the library's worker program: the executor then has processes of its own, one a GPU, so that two
                executors do not meet in one (and a tensor parallel engine needs no mpirun); None runs it in this one.
        """
        parallel = bindings.ParallelConfig(device_ids=list(devices) if devices is not None else None)
        if worker is not None:
            parallel.communication_mode = bindings.CommunicationMode.ORCHESTRATOR
            parallel.orchestrator_config = bindings.OrchestratorConfig(True, str(worker))
        knobs = bindings.ExtendedRuntimePerfKnobConfig()
        knobs.cuda_graph_mode = cuda_graphs and spec.role == "auxiliary"
        config = bindings.ExecutorConfig(
            max_beam_width=spec.max_beam_width,
            # rejected drafts go, and the text of the last block comes back, through reuse alone
            kv_cache_config=bindings.KvCacheConfig(
                enable_block_reuse=True,
                free_gpu_memory_fraction=memory_fraction,
                enable_partial_reuse=True,
                copy_on_partial_reuse=True,
            ),
            enable_chunked_context=True,
            normalize_log_probs=False,
            max_batch_size=spec.max_batch_size,
            max_num_tokens=spec.max_num_tokens,
            parallel_config=parallel,
            extended_runtime_perf_knob_config=knobs,
            gather_generation_logits=True,
        )
        executor = bindings.Executor(
            model_path=folder, model_type=bindings.ModelType.DECODER_ONLY, executor_config=config
        )
        return cls(executor, bindings, spec, vocab_size)

    @property
    def pending(self) -> int:
        """Requests without an answer."""
        return len(self._asked)

    def submit(self, asks: Sequence[Ask]) -> list[int]:
        """Hand requests to the executor, all at once; returns their numbers.

        Raises:
            ExecutorFailed: one is beyond the engine's limits, which the library would answer by dropping tokens.
        """
        for ask in asks:
            self._check(ask)
        numbers = [int(n) for n in self._executor.enqueue_requests(requests=[self._request(ask) for ask in asks])]
        self._asked.update(zip(numbers, asks, strict=True))
        return numbers

    def take(self, seconds: float) -> list[tuple[int, Answer | ExecutorFailed]]:
        """Wait for answers, `seconds` at most; those that came, by number. Those to cancelled requests are dropped."""
        found: list[tuple[int, Answer | ExecutorFailed]] = []
        for response in self._executor.await_responses(timeout=timedelta(seconds=seconds)):
            number = int(response.request_id)
            ask = self._asked.get(number)
            if ask is None:
                continue
            if response.has_error():
                self._forget(number)
                found.append((number, ExecutorFailed(f"the {self.spec.role}: {response.error_msg}")))
                continue
            result = response.result
            parts = self._parts.setdefault(number, {})
            if result.is_sequence_final:
                parts[int(result.sequence_index)] = result
            if len(parts) == (ask.count if isinstance(ask, Samples) else 1):
                self._forget(number)
                found.append((number, self._answer(ask, [parts[index] for index in sorted(parts)])))
        return found

    def cancel(self, numbers: Sequence[int]) -> None:
        """Give up on requests; those answered already stay as they are."""
        for number in numbers:
            if number in self._asked:
                self._forget(number)
                self._executor.cancel_request(id=number)

    def close(self) -> None:
        """Release the GPU."""
        self._executor.shutdown()

    def _forget(self, number: int) -> None:
        del self._asked[number]
        self._parts.pop(number, None)

    def _check(self, ask: Ask) -> None:
        spec, length = self.spec, len(ask.tokens)
        drafted = len(ask.draft) if isinstance(ask, Logits) else 0
        new = 1 if isinstance(ask, Logits) else ask.steps
        width = ask.width if isinstance(ask, Search) else 1
        for name, value, most in (
            ("max_input_len", length + drafted, spec.max_input_len),
            ("max_draft_len", drafted, spec.max_draft_len),
            ("max_seq_len", length + drafted + new, spec.max_seq_len),
            ("max_beam_width", width, spec.max_beam_width),
        ):
            if value > most:
                raise ExecutorFailed(f"the {spec.role}: a request of {value}, its engine's {name} is {most}")

    def _request(self, ask: Ask) -> Any:
        of = self._bindings
        draft, logits, log_probs = None, True, False
        if isinstance(ask, Logits):
            # one pass answers, whatever the executor itself would accept
            new, sampling = 1 + len(ask.draft), of.SamplingConfig(beam_width=1, top_k=1)
            draft = of.ExternalDraftTokensConfig(tokens=list(ask.draft)) if ask.draft else None
        elif isinstance(ask, Search):
            new, sampling, logits, log_probs = ask.steps, of.SamplingConfig(beam_width=ask.width), False, True
        else:
            new = ask.steps
            sampling = of.SamplingConfig(
                beam_width=1,
                top_k=ask.top_k or None,
                top_p=ask.top_p,
                seed=ask.seed,
                temperature=ask.temperature,
                num_return_sequences=ask.count,
            )
        output = of.OutputConfig(
            return_log_probs=log_probs, return_generation_logits=logits, exclude_input_from_output=True
        )
        return of.Request(
            input_token_ids=list(ask.tokens),
            max_tokens=new,
            sampling_config=sampling,
            output_config=output,
            end_id=NO_END,
            external_draft_tokens_config=draft,
        )

    def _answer(self, ask: Ask, results: Sequence[Any]) -> Answer | ExecutorFailed:
        """The answer, checked to have the shape that was asked for."""
        tokens = [list(sequence) for result in results for sequence in result.output_token_ids]
        none = torch.zeros(0, 0, self.vocab_size)
        if isinstance(ask, Search):
            log_probs = [list(beam) for beam in results[0].log_probs]
            shapes = [len(row) for row in (*tokens, *log_probs)]
            if shapes != [ask.steps] * 2 * ask.width:
                return self._odd(f"beams of {shapes} tokens for {ask.width} of {ask.steps}")
            return Answer(tokens, log_probs, none)
        positions = 1 + len(ask.draft) if isinstance(ask, Logits) else ask.steps
        found = []
        for result in results:
            logits = result.generation_logits
            if logits is None or tuple(logits.shape[:2]) != (1, positions) or logits.shape[2] < self.vocab_size:
                shape = None if logits is None else tuple(logits.shape)
                return self._odd(f"logits of shape {shape} for {positions} positions")
            # the buffer is the executor's own, pinned
            found.append(logits[0, :, : self.vocab_size].to("cpu", torch.float32, copy=True))
        if isinstance(ask, Samples) and any(len(row) != ask.steps for row in tokens):
            return self._odd(f"samples of {[len(row) for row in tokens]} tokens for {ask.steps}")
        return Answer(tokens, [], torch.stack(found))

    def _odd(self, what: str) -> ExecutorFailed:
        return ExecutorFailed(f"the {self.spec.role} answered {what}; see docs/tensorrt-llm.md")
